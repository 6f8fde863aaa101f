"""The class prototypes of Deep Companion Prototype."""

from dcl_optim.prototypes.prototypes import UPDATES, Prototypes

__all__ = ["UPDATES", "Prototypes"]
