"""Logits as rows: the documented place of dcl_optim/penalty/layout.py."""

from dcl_optim.penalty.layout import from_rows, to_rows, wide

__all__ = ["from_rows", "to_rows", "wide"]
