"""What the tests of all frameworks share.

One test of each promise where its code runs; a framework has more only where it does something of its own. PEFT's
resumption is in tests/examples.

| promise | tested with |
|---|---|
| the loop by hand | Lightning, Trainer, Accelerate, timm, torchvision, skorch, ignite, fastai, DeepSpeed |
| a resumed run is the uninterrupted one | Lightning, Trainer, Accelerate, timm, Schedule-Free, DeepSpeed |
| half precision | Accelerate, timm's scaler, DeepSpeed |
| two processes are one | Lightning, DeepSpeed |
| schedulers drive both networks | Lightning |
| the term with mixed labels | timm |
| logging | TensorBoard, Weights and Biases, Lightning, Trainer |
"""

import pytest
import torch

from dcl_optim import DCLOptimizer, DCPOptimizer

METHODS = ("dcl", "dcp")
EACH_METHOD = pytest.mark.parametrize("method", METHODS)


def wrap(method, base, model, **settings):
    """The line that is new in a script; without it the method is "plain"."""
    if method == "dcl":
        return DCLOptimizer(base, model, **{"weight": 1.0} | settings, companion_fraction=1)
    if method == "dcp":
        return DCPOptimizer(base, model, **{"weight": 1.0, "alpha": 0.6} | settings)
    return base


def differ(first, second):
    """Whether any weight differs."""
    return any(not torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def in_training_mode(optimizer):
    """Schedule-Free optimizers have modes."""
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer
