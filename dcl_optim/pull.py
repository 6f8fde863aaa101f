"""The penalty with its gradient: the documented place of dcl_optim/penalty/pull.py."""

from dcl_optim.penalty.pull import Pull, Scale, pull_of

__all__ = ["Pull", "Scale", "pull_of"]
