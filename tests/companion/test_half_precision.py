"""A companion in half precision: it computes in it, and learns in weights of float32 that its own are rounded from."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_same,
    assert_same_networks,
    batches,
    fit,
    mlp,
    through_a_file,
    through_pickle,
    two_processes,
    wrap,
)

HALF = torch.bfloat16


def half_batches(steps, seed=1):
    return list(batches(steps, seed=seed, dtype=HALF))


def narrow(**options):
    return wrap(mlp(dtype=HALF), **options)


def weights_of(optimizer):
    """What the companion's optimizer steps."""
    return [parameter for group in optimizer.companion_optimizer.param_groups for parameter in group["params"]]


def assert_rounded(optimizer):
    """The network has the rounding of weights in float32, which are not in half precision themselves."""
    for weight, half in zip(weights_of(optimizer), optimizer.companion.parameters(), strict=True):
        assert (weight.dtype, half.dtype) == (torch.float32, HALF)
        assert torch.equal(weight.to(HALF), half)
    assert any(not torch.equal(weight, weight.to(HALF).float()) for weight in weights_of(optimizer))


def assert_same_state(first, second):
    assert_same_networks(first, second)
    assert_same(first.state_dict(), second.state_dict())


# ---- it learns as in float32 -----------------------------------------------------------------------------------------


def test_parameters_in_float32_are_stepped_themselves_and_those_in_half_precision_by_others():
    class Mixed(nn.Sequential):
        def forward(self, x):
            return self[1](torch.tanh(self[0](x)).float())

    torch.manual_seed(0)
    model = Mixed(nn.Linear(FEATURES, 12, dtype=HALF), nn.Linear(12, CLASSES))
    groups = [{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 0.01}]
    optimizer = wrap(model, torch.optim.SGD(groups, lr=0.1))
    body, head = optimizer.companion
    before = weights_of(optimizer)
    fit(optimizer, half_batches(3))
    assert [id(weight) for weight in before] == [id(weight) for weight in weights_of(optimizer)]
    are_own = [weight is own for weight, own in zip(before, [*head.parameters(), *body.parameters()], strict=True)]
    assert are_own == [True, True, False, False]
    for weight, half in zip(before[2:], body.parameters(), strict=True):
        assert torch.equal(weight.to(HALF), half)


def test_rows_of_an_embedding_without_a_gradient_are_left():
    model = nn.Sequential(nn.EmbeddingBag(10, FEATURES, sparse=True), nn.Linear(FEATURES, CLASSES)).to(HALF)
    companion = copy.deepcopy(model)
    companion[0].weight.data += 1.0
    optimizer = wrap(model, companion=companion, alpha=0.0)
    before = copy.deepcopy(optimizer.companion[0].weight.detach())
    fit(optimizer, [(torch.tensor([[1, 2], [1, 4]]), torch.tensor([0, 1]))])
    changed = (optimizer.companion[0].weight != before).any(1)
    assert changed.tolist() == [row in (1, 2, 4) for row in range(10)]


def test_weights_of_frozen_layers_stay_also_where_ranks_fill_gradients():
    """With the momentum of earlier steps."""
    with two_processes():
        optimizer = narrow(process_group=dist.group.WORLD)
        fit(optimizer, half_batches(4))
        optimizer.model[0].requires_grad_(False)
        before = copy.deepcopy(weights_of(optimizer))
        fit(optimizer, half_batches(4, seed=9))
        changed = [not torch.equal(weight, then) for weight, then in zip(weights_of(optimizer), before, strict=True)]
        assert changed == [False, False, True, True]


# ---- what else changes the weights -----------------------------------------------------------------------------------


def load(companion, source):
    companion.load_state_dict(source.state_dict())


def write_in_place(companion, source):
    with torch.no_grad():
        for ours, theirs in zip(companion.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs)


def assign(companion, source):
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(source.parameters()), companion.parameters())


def step(optimizer):
    optimizer.param_groups[0]["lr"] = 0.0
    fit(optimizer, half_batches(1))
    return optimizer


def resume(optimizer):
    again = narrow(companion=mlp(3, dtype=HALF))
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    return again


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("after", [step, resume, copy.deepcopy])
@pytest.mark.parametrize("write", [load, write_in_place, assign])
def test_what_a_script_writes_into_the_network_stays(write, after, steps):
    optimizer, other = narrow(companion=mlp(3, dtype=HALF)), mlp(7, dtype=HALF)
    fit(optimizer, half_batches(steps))
    write(optimizer.companion, other)
    found = after(optimizer)
    assert_same(list(found.companion.parameters()), list(other.parameters()))
    found.state_dict()  # as a step, it reads what the script has written
    for weight, half in zip(weights_of(found), other.parameters(), strict=True):
        assert torch.equal(weight, half.float())


# ---- copies and states -----------------------------------------------------------------------------------------------

BASES = {
    "SGD": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), {}),
    "AdamW": (partial(torch.optim.AdamW, lr=0.01), {}),
    "given network and optimizer": (
        partial(torch.optim.SGD, lr=0.1),
        {"companion": lambda: mlp(3, dtype=HALF), "companion_optimizer": lambda: partial(torch.optim.Adam, lr=1e-4)},
    ),
}


def build(base):
    make, options = BASES[base]
    model = mlp(dtype=HALF)
    return wrap(model, make(model.parameters()), **{name: give() for name, give in options.items()})


def resumed(optimizer, base):
    again = build(base)
    again.model.load_state_dict(through_a_file(optimizer.model.state_dict()))
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    return again


def copied(optimizer, base):
    return copy.deepcopy(optimizer)


def pickled(optimizer, base):
    return through_pickle(optimizer)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("again", [resumed, copied, pickled])
def test_a_run_goes_on_bit_for_bit(again, base):
    whole = build(base)
    fit(whole, half_batches(8))
    state = whole.state_dict()["dcl_optim.DCLOptimizer"]["forecaster"]
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}
    moments = [tensor for one in state["optimizer"]["state"].values() for tensor in one.values()]
    assert {tensor.dtype for tensor in moments} == {torch.float32}
    other = again(whole, base)
    for each in (whole, other):
        fit(each, half_batches(8, seed=5))
    assert_rounded(other)
    assert_same_state(whole, other)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_the_state_of_the_companions_optimizer_is_not_rounded_when_it_is_loaded(kind):
    """Torch rounds that of the base, whose parameters are in half precision, to their dtype."""
    models = mlp(dtype=HALF), mlp(seed=4, dtype=HALF)
    first, second = (wrap(model, kind(model.parameters(), lr=0.01)) for model in models)
    fit(first, half_batches(5))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert_same(first.companion_optimizer.state_dict(), second.companion_optimizer.state_dict())
    assert_same(first.companion, second.companion)
