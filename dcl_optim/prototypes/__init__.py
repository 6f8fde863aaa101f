"""The class prototypes of Deep Companion Prototype."""

from dcl_optim.prototypes.prototypes import Prototypes

__all__ = ["Prototypes"]
