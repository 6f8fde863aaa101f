"""What a script does to the model's structure after wrapping: the base optimizer trains other parameters."""

import pytest
import torch
from torch import nn

from dcl_optim import DCPOptimizer
from tests.helpers import CLASSES, batches, fit, mlp, sgd, train, wrap

COPIED_AGAIN = "trains other parameters than before.*the companion is copied from the model again"


def linear(inputs):
    torch.manual_seed(5)
    return nn.Linear(inputs, CLASSES).double()


def new_head(model):
    model[2] = linear(12)
    return model[2].parameters()


def one_layer_more(model):
    model.append(linear(CLASSES))
    return model[3].parameters()


def new_weight(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    return iter([model[0].weight])


def body_of_another_optimizer(model):
    return model[0].parameters()


def none_of_the_models(model):
    return iter([nn.Parameter(torch.ones((), dtype=torch.float64))])


CHANGES = [new_head, one_layer_more, new_weight, body_of_another_optimizer, none_of_the_models]


@pytest.mark.parametrize(
    ("change", "replaces"), [*((change, False) for change in CHANGES), (body_of_another_optimizer, True)]
)
def test_the_companion_is_copied_again_where_a_group_is_added_or_in_the_place_of_others(change, replaces):
    """As in layer-wise training. The error about an engine's parameters is for those that the model does not have."""
    model, data = mlp(), list(batches(4))
    optimizer = wrap(model, sgd(model[2]))
    fit(optimizer, data[:2])
    if replaces:
        optimizer.param_groups.clear()
    optimizer.add_param_group({"params": change(model), "lr": 0.05})
    with pytest.warns(UserWarning, match=COPIED_AGAIN):
        fit(optimizer, data[2:3])
    assert optimizer.logs()["penalty"] == 0
    fit(optimizer, data[3:])
    assert optimizer.logs()["penalty"] > 0
    assert [p.shape for p in optimizer.companion.parameters()] == [p.shape for p in model.parameters()]
    assert [group["lr"] for group in optimizer.companion_optimizer.param_groups] == (
        [0.05] if replaces else [0.1, 0.05]
    )


@pytest.mark.parametrize("wrapper", ["DCL, given companion", "DCP"])
def test_new_layers_are_trained_where_nothing_is_copied(wrapper):
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model) if wrapper == "DCP" else wrap(model, companion=mlp(seed=1))
    train(model, optimizer, batches(1))
    optimizer.add_param_group({"params": one_layer_more(model)})
    before = model[3].weight.detach().clone()
    train(model, optimizer, batches(2))
    assert not torch.equal(model[3].weight, before)
