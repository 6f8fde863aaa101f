"""The repository itself: pages, docstrings, imports, public names, packages, deliberate faults, and the demo."""
