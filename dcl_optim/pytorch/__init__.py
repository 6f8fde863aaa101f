"""The contract with torch: hooks, the optimizer interface, outputs, ranks, checks of arguments."""
