"""Arguments and bases that are refused: differential privacy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, backward, batches, mlp, one, sgd, wrap


def marked(model):
    """Mark the parameters as opacus' GradSampleModule does."""
    for parameter in model.parameters():
        parameter.grad_sample = None
    return model


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_private_training_is_refused_before_and_after_wrapping(variant):
    make = wrap if variant == "dcl" else lambda m: DCPOptimizer(sgd(m), m, CLASSES)
    with pytest.raises(ValueError, match=r"per-sample gradients .* opacus.*privacy accounting would not hold"):
        make(marked(mlp()))
    model, (x, y) = mlp(), one()
    optimizer = make(model)
    marked(model)
    with pytest.raises(ValueError, match=r"per-sample gradients .* opacus.*privacy accounting would not hold"):
        model(x)
    optimizer.detach()
    backward(model, x, y)


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["hooks", "ew", "ghost"])
@pytest.mark.parametrize("wrapped_first", [False, True])
@pytest.mark.filterwarnings("ignore")  # opacus' own
def test_opacus_is_refused(wrapped_first, mode):
    import opacus

    model, criterion = mlp(dtype=torch.float32), nn.CrossEntropyLoss()
    data = torch.utils.data.TensorDataset(*next(iter(batches(1, dtype=torch.float32))))
    base = wrap(model) if wrapped_first else sgd(model)
    private, optimizer, *_ = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=base,
        data_loader=torch.utils.data.DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=criterion,
        grad_sample_mode=mode,
    )
    if wrapped_first:
        with pytest.raises(ValueError, match="opacus"):
            private(data.tensors[0])
    else:
        for inner in (private, model):
            with pytest.raises(ValueError, match="opacus"):
                DCLOptimizer(optimizer, inner)
            with pytest.raises(ValueError, match="opacus"):
                DCLOptimizer(base, inner)
