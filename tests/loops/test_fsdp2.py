"""FSDP2 and torch.distributed.checkpoint, on two processes over gloo."""

import copy
from itertools import product

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcl_optim import DCPOptimizer
from tests.helpers import CLASSES, assert_same, batches, fit, mlp, needs_fsdp2, needs_gloo, sgd, train, whole
from tests.helpers import wrap as wrap_dcl
from tests.reference import EACH, learned, result
from tests.reference import train as train_by

pytestmark = [
    needs_gloo,
    needs_fsdp2,
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
STEPS = 5


def sharded(seed=0, dtype=torch.float64):
    model = mlp(seed, dtype=dtype)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap(variant, model, num_classes=None):
    base = torch.optim.AdamW(model.parameters(), lr=0.01)
    if variant == "dcp":
        return DCPOptimizer(base, model, num_classes=num_classes, weight=1.0, alpha=0.6)
    if not isinstance(next(model.parameters()), DTensor):
        return wrap_dcl(model, base)

    companion = sharded(seed=7)
    companion.load_state_dict(model.state_dict())
    return wrap_dcl(model, base, companion=companion)


def train_rank(rank, model, optimizer, data, way="line"):
    halves = [(x.chunk(2)[rank], y.chunk(2)[rank]) for x, y in data]
    train_by(optimizer, halves, way, nn.functional.cross_entropy)


def save(optimizer, rank, file):
    found = result(optimizer)
    if rank == 0:
        torch.save(found, file)


def assert_saved(optimizer, file):
    assert_same(torch.load(file, weights_only=True), result(optimizer), rtol=1e-7, atol=1e-9)


CASES = list(product(["dcl", "dcp"], ["line", "term"]))


def worker(rank, folder):
    for variant, way in CASES:
        train_sharded(rank, folder / f"{variant} {way}.pt", variant, way)
    for variant in ("dcl", "dcp"):
        accumulate(rank, variant)
        for way in RESUMED:
            resume_sharded(rank, folder / f"{variant} {way}", variant, way)
    train_in_bfloat16(rank, folder)
    pass_over(rank, folder)
    refuse_a_copy()


def train_sharded(rank, file, variant, way):
    model = sharded()
    optimizer = wrap(variant, model)
    train_rank(rank, model, optimizer, batches(STEPS), way)
    if variant == "dcl":
        for theirs, ours in zip(model.parameters(), optimizer.companion.parameters(), strict=True):
            assert ours.placements == theirs.placements
            assert ours.to_local().shape == theirs.to_local().shape
    save(optimizer, rank, file)


@pytest.mark.parametrize(("variant", "way"), CASES)
def test_sharded_training_equals_one_process_on_the_joint_batch(variant, way, ranks):
    optimizer = wrap(variant, mlp())
    fit(optimizer, batches(STEPS))
    assert_saved(optimizer, ranks / f"{variant} {way}.pt")


def pass_over(rank, folder):
    """A rank without a gradient runs the companion's collectives all the same."""
    model = sharded()
    optimizer = wrap("dcl", model)
    for number, (x, y) in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        loss = 64.0 * nn.functional.cross_entropy(model(x.chunk(2)[rank]), y.chunk(2)[rank])
        (loss * 0.0 if number % 2 and rank else loss).backward()
        optimizer.step()
    save(optimizer, rank, folder / "pass_over.pt")


def test_a_companion_learns_from_the_ranks_that_have_a_gradient(ranks):
    model = mlp()
    optimizer = wrap("dcl", model)
    for number, (x, y) in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        if number % 2:
            x, y = x.chunk(2)[0], y.chunk(2)[0]
        loss = 64.0 * nn.functional.cross_entropy(model(x), y)
        (loss / 2 if number % 2 else loss).backward()
        optimizer.step()
    assert_saved(optimizer, ranks / "pass_over.pt")


# ---- what the ranks compare themselves -------------------------------------------------------------------------------


def accumulate(rank, variant):
    """Gradients are communicated with the last micro-batch only; until then no parameter has one."""
    results = []
    for saves_communication in (False, True):
        model = sharded()
        optimizer = wrap(variant, model)
        for micro_batches in zip(batches(STEPS), batches(STEPS, seed=8), strict=True):
            optimizer.zero_grad()
            for number, (x, y) in enumerate(micro_batches):
                model.set_requires_gradient_sync(number == 1 or not saves_communication)
                z = model(x.chunk(2)[rank])
                (nn.functional.cross_entropy(z, y.chunk(2)[rank]) / 2).backward()
            optimizer.step()
        results.append(result(optimizer))
    assert_same(*results, rtol=1e-7, atol=1e-9)


def train_in_bfloat16(rank, folder):
    """The companion's weights are float32, sharded as those that they are rounded into."""

    def build(make):
        model, companion = make(0, dtype=torch.bfloat16), make(7, dtype=torch.bfloat16)
        base = sgd(model)
        return model, wrap_dcl(model, base, companion=companion)

    def weights_of(optimizer):
        (group,) = optimizer.companion_optimizer.param_groups
        return [whole({"": weight.detach()})[""] for weight in group["params"]]

    data = list(batches(20, dtype=torch.bfloat16))
    model, optimizer = build(sharded)
    alone, one_process = build(mlp)
    start = weights_of(optimizer)
    train_rank(rank, model, optimizer, data)
    train(alone, one_process, data)
    for found, expected, before in zip(*map(weights_of, (optimizer, one_process)), start, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 0.1 * (expected - before).norm()
    for weight, half in zip(weights_of(optimizer), whole(optimizer.companion.state_dict()).values(), strict=True):
        assert torch.equal(weight.bfloat16(), half)
    for way in (resumed_by_files, resumed_by_full_states):
        again, second = way(rank, folder, lambda: build(sharded), model, optimizer)
        for pair in ((model, optimizer), (again, second)):
            train_rank(rank, *pair, batches(3, seed=5, dtype=torch.bfloat16))
        assert_same(weights_of(second), weights_of(optimizer))


def refuse_a_copy():
    """Of a sharded model; the error says what to do."""
    model = sharded()
    optimizer = wrap_dcl(model)
    with pytest.raises(RuntimeError, match=r"shard it in the same way.*companion="):
        fit(optimizer, batches(1))
    optimizer.detach()
    train(model, sgd(model), batches(1))


def resumed_by_files(rank, folder, build, model, optimizer):
    """As torch's tutorial has it: saved and loaded shard by shard."""
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder / "checkpoint")
    model, optimizer = build()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return model, optimizer


def resumed_by_full_states(rank, folder, build, model, optimizer):
    options = StateDictOptions(full_state_dict=True)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=options))  # torch hands out its own tensors
    assert not any(isinstance(tensor, DTensor) for tensor in states[0].values())
    model, optimizer = build()
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    return model, optimizer


RESUMED = {"files": resumed_by_files, "full": resumed_by_full_states}


def resume_sharded(rank, folder, variant, way):
    """Distributed checkpoints resume bit for bit."""

    def build(seed=3):
        model = sharded(seed)
        return model, wrap(variant, model, CLASSES)

    model, optimizer = build(seed=0)
    train_rank(rank, model, optimizer, batches(3))
    again, second = RESUMED[way](rank, folder, build, model, optimizer)
    assert second.logs()["step"] == 3
    for pair in ((model, optimizer), (again, second)):
        train_rank(rank, *pair, batches(3, seed=5))
    assert_same(result(second), result(optimizer))


@EACH
def test_distributed_checkpoints_in_one_process_and_what_they_refuse(variant):
    model = mlp()
    optimizer = wrap(variant, model, CLASSES)
    before = copy.deepcopy(model)
    began = copy.deepcopy(learned(optimizer)) if variant == "dcl" else torch.zeros(CLASSES, CLASSES).double()
    state = get_optimizer_state_dict(model, optimizer)  # takes a dry step to create the state
    assert_same(model, before)
    assert_same(learned(optimizer) if variant == "dcl" else optimizer.prototypes, began)
    assert optimizer.logs()["step"] == 0
    fit(optimizer, batches(3))
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    expected = copy.deepcopy(learned(optimizer))
    fit(optimizer, batches(2, seed=5))
    set_optimizer_state_dict(model, optimizer, state)
    assert_same(learned(optimizer), expected)
    assert optimizer.logs()["step"] == 3

    state = optimizer.state_dict()
    state["param_groups"][0][optimizer._key] = state.pop(optimizer._key)
    for _ in range(2):  # which leaves the given one as it is
        optimizer.load_state_dict(state)

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict"):
        set_optimizer_state_dict(
            model, optimizer, get_optimizer_state_dict(model, optimizer, options=flat), options=flat
        )
