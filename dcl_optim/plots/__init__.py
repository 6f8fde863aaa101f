"""The curves of training runs. The functions return a matplotlib ``Figure`` and need the extra ``plots``."""

from dcl_optim.plots.curves import seed_gains, training_curves

__all__ = ["seed_gains", "training_curves"]
