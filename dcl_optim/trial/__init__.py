"""A trial in a script of yours: what DCP gains there, and what DCP and DCL cost.

From a shell: ``python -m dcl_optim compare my_script.py:train``, ``python -m dcl_optim overhead my_script.py:make``.
"""

from dcl_optim.trial.comparison import compare
from dcl_optim.trial.costs import overhead
from dcl_optim.trial.evaluation import accuracy

__all__ = ["accuracy", "compare", "overhead"]
