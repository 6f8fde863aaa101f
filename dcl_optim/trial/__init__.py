"""What DCP and DCL cost in a script of yours, and what they gain there."""

from dcl_optim.trial.costs import overhead

__all__ = ["overhead"]
