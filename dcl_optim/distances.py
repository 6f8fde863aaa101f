"""The distances between logits: the documented place of dcl_optim/penalty/distances.py."""

from dcl_optim.penalty.distances import DISTANCES as DISTANCES
from dcl_optim.penalty.distances import infonce, kl, l1, mse, squared

__all__ = ["infonce", "kl", "l1", "mse", "squared"]
