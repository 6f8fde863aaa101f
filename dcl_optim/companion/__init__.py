"""The companion network of Deep Companion Learning."""

from dcl_optim.companion.companion import Companion

__all__ = ["Companion"]
