"""Bases that are refused: differential privacy."""

import pytest
import torch
from torch import nn

from tests.helpers import batches, mlp, sgd
from tests.reference import EACH, wrap


@EACH
def test_private_training_is_refused(variant):
    model = mlp()
    for parameter in model.parameters():
        parameter.grad_sample = None  # as opacus' GradSampleModule marks them
    with pytest.raises(ValueError, match=r"per-sample gradients .* opacus.*privacy accounting would not hold"):
        wrap(variant, model)


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["hooks", "ew", "ghost"])
@pytest.mark.filterwarnings("ignore")  # opacus' own
def test_opacus_is_refused(mode):
    import opacus

    model = mlp(dtype=torch.float32)
    data = torch.utils.data.TensorDataset(*next(iter(batches(1, dtype=torch.float32))))
    base = sgd(model)
    private, optimizer, *_ = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=base,
        data_loader=torch.utils.data.DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=nn.CrossEntropyLoss(),
        grad_sample_mode=mode,
    )
    for inner in (private, model):
        for outer in (optimizer, base):
            with pytest.raises(ValueError, match="opacus"):
                wrap("dcl", inner, outer)
