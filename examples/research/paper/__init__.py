"""The paper's tables, row by row: what ``python -m examples.paper`` trains, checks and compares."""
