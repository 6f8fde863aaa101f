"""Runnable examples; a package, so that another one of this name in the environment does not hide it."""
