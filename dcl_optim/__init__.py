"""Deep Companion Learning for any PyTorch training script: wrap the optimizer, keep the rest."""

from dcl_optim.dcl import DCLOptimizer
from dcl_optim.dcp import DCPOptimizer
from dcl_optim.penalty.weights import AutoWeight

__version__ = "0.1.0"
__all__ = ["AutoWeight", "DCLOptimizer", "DCPOptimizer", "__version__"]
