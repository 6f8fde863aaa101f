"""What protects users: it reads, warns and raises, and changes nothing in a right script.

The method calls :class:`Guards` at a few places and asks it nothing.
"""

from dcl_optim.guards.guards import Guards

__all__ = ["Guards"]
