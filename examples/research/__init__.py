"""The paper's tables and figures on data at hand: ``python -m examples.research``."""
