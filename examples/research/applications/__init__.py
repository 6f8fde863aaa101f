"""The paper's applications beyond classification from scratch; each module is a command."""
