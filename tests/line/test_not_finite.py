"""A batch whose gradient is not finite where no value may be read: training goes on without it."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import batches, mlp, read_values_as_on_a_device
from tests.reference import learned, train, wrap

INF = float("inf")


def are_finite(tensors):
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@pytest.mark.filterwarnings("ignore:the companion's weights are not finite")
@pytest.mark.parametrize(("value", "factor"), [(float("nan"), 1.0), (0.0, INF)], ids=["input", "loss"])
@pytest.mark.parametrize(
    ("variant", "distance"),
    [("dcl", "mse"), ("dcl", "kl"), ("dcl", "infonce"), ("dcp", "mse"), ("dcp", "kl")],
)
def test_where_it_is_not_found_out_training_goes_on_too(variant, distance, value, factor, monkeypatch):
    """The companion itself may be spoiled by its own backward pass; it is copied from the model by step 9."""
    read_values_as_on_a_device(monkeypatch)
    model, data = mlp(), list(batches(12))
    optimizer = wrap(variant, model, torch.optim.AdamW(model.parameters(), lr=1e-2), distance=distance)
    train(optimizer, data[:4], "line", F.cross_entropy)
    x, y = data[4]
    x[1, 2] += value
    optimizer.zero_grad()
    (factor * F.cross_entropy(model(x), y)).backward()
    for parameter in model.parameters():  # as a script that cleans its gradients and steps all the same
        parameter.grad.zero_()
    optimizer.step()
    for batch in data[5:]:
        train(optimizer, [batch], "line", F.cross_entropy)
        assert are_finite(model.parameters())
    assert are_finite(learned(optimizer).values())
    assert 0 < optimizer.logs()["penalty"] < INF
