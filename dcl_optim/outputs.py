"""Where the logits of an output are: the documented place of dcl_optim/pytorch/outputs.py."""

from dcl_optim.pytorch.outputs import find_logits

__all__ = ["find_logits"]
