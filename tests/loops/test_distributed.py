"""Two processes over gloo: ranks stay bit-identical and equal one process on the joint batch."""

import contextlib
import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import (
    CLASSES,
    all_warnings,
    assert_same,
    batch_norm_net,
    batches,
    fit,
    mlp,
    needs_gloo,
    same_on_both,
    through_pickle,
)
from tests.reference import EACH, NEAR, VARIANTS, by_hand, learned, loss_of, term_of, wrap
from tests.reference import train as train_by_term

pytestmark = needs_gloo
STEPS = 8


def snapshot(model, optimizer):
    """The model and what the forecaster has learned; each rank reads the loss scale of its own rows, with rounding."""
    own = optimizer.state_dict()[optimizer._key]
    return copy.deepcopy({"model": model.state_dict(), "steps": own["steps"], "forecaster": own["forecaster"]})


def halves(x, y, rank):
    """A class is absent on one rank: the reduction has to be one and the same collective on both."""
    half = torch.argsort(y, stable=True).chunk(2)[rank]
    return x[half], y[half]


def train_rank(rank, parallel, optimizer, data, accumulate=1, way="line"):
    """The last micro-batch synchronizes, those before it do not, as DDP's documentation has it."""
    term = term_of(optimizer, way)
    for x, y in data:
        optimizer.zero_grad()
        parts = list(zip(*(t.chunk(accumulate) for t in halves(x, y, rank)), strict=True))
        for index, (part, labels) in enumerate(parts):
            last = index == accumulate - 1
            with contextlib.nullcontext() if last else parallel.no_sync():
                z = parallel(part)
                ((F.cross_entropy(z, labels) + term(z, labels)) / accumulate).backward()
            part.fill_(1000.0)  # as a loader does that fills its buffers again
        optimizer.step()


# Of a model that was wrapped before, the script gets a copy of the logits.
CASES = [
    ("dcl", "wrapped before", 1, "line"),
    ("dcl", "wrapped after", 2, "line"),
    ("dcp", "wrapped before", 2, "line"),
    ("dcp", "wrapped after", 1, "line"),
    *((variant, order, 1, "term") for variant in VARIANTS for order in ("wrapped before", "wrapped after")),
]


def worker(rank, folder):
    for case in CASES:
        torch.save(trained_on_rank(rank, *case), folder / f"{case} {rank}.pt")
    torch.save(branch_trained_on_rank(rank), folder / f"branch {rank}.pt")
    torch.save(trained_after_an_empty_batch_on_rank_1(rank), folder / f"empty {rank}.pt")
    train_in_groups(rank, folder)
    for variant in VARIANTS:
        trained_with_a_copy_on_rank(rank, variant)
        torch.save(trained_with_a_batch_without_a_term(rank, variant), folder / f"some batches {variant} {rank}.pt")
        with_zero_redundancy(rank, folder, variant)
    for variant, dtype in (("dcl", torch.float64), ("dcl", torch.bfloat16), ("dcp", torch.float64)):
        resume_on_rank(rank, folder / f"{variant} {dtype}.pt", variant, dtype)
    torch.save(companion_of_other_buffers(rank), folder / f"buffers {rank}.pt")
    copy_synchronized_batch_norm()


def trained_on_rank(rank, variant, order, accumulate, way):
    model = mlp(seed=10 * rank)  # seeded differently: rank 0's weights have to win
    if order == "wrapped before":
        optimizer = wrap(variant, model)
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        parallel = DistributedDataParallel(model)
        optimizer = wrap(variant, parallel)
    train_rank(rank, parallel, optimizer, batches(STEPS), accumulate, way)
    step_without_a_batch(optimizer)
    return snapshot(model, optimizer)


def step_without_a_batch(optimizer):
    optimizer.zero_grad()
    optimizer.step()


def trained_with_a_copy_on_rank(rank, variant):
    """A copy trains on the ranks of its own module, as its original does."""
    parallel = DistributedDataParallel(mlp())
    optimizer = wrap(variant, parallel)
    train_rank(rank, parallel, optimizer, batches(3))
    for copied in (copy.deepcopy, through_pickle):
        again, second = copied((parallel, optimizer))
        train_rank(rank, again, second, batches(3, seed=5))
        assert second.forecaster._group.size == 2
        assert_same(*gathered(learned(second)))


def gathered(tensors):
    found = [None, None]
    dist.all_gather_object(found, tensors)
    return found


def trained_alone(variant):
    model = mlp(seed=0)
    optimizer = wrap(variant, model)
    fit(optimizer, batches(STEPS))
    step_without_a_batch(optimizer)
    return snapshot(model, optimizer)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_equal_one_process_on_the_joint_batch(case, ranks):
    first = same_on_both(ranks, case)
    assert_same(first, trained_alone(case[0]), **NEAR)


class Branches(nn.Module):
    """Each call uses one of two layers, so that the other one has no gradient."""

    def __init__(self, seed=0):
        super().__init__()
        self.layers = nn.ModuleList(mlp(seed=seed + i) for i in range(2))

    def forward(self, x, which):
        return self.layers[which](x)


def branch_trained_on_rank(rank):
    model = Branches(seed=10 * rank)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = wrap("dcl", parallel)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(parallel(x.chunk(2)[rank], rank), y.chunk(2)[rank]).backward()
        optimizer.step()
    return snapshot(model, optimizer)


def test_ranks_that_use_other_layers_have_one_companion(ranks):
    model = Branches()
    optimizer = wrap("dcl", model)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        for which, (part, labels) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            (F.cross_entropy(model(part, which), labels) / 2).backward()
        optimizer.step()
    for rank in (0, 1):
        trained = torch.load(ranks / f"branch {rank}.pt", weights_only=True)
        assert_same(trained, snapshot(model, optimizer), **NEAR)


def trained_after_an_empty_batch_on_rank_1(rank):
    """Rank 1 reads nothing in the first step, so it does not know the number of classes by itself."""
    model = mlp()
    parallel = DistributedDataParallel(model)
    optimizer = wrap("dcp", parallel)
    for step, (x, y) in enumerate(batches(STEPS)):
        number = 0 if step == 0 and rank == 1 else len(x)
        optimizer.zero_grad()
        F.cross_entropy(parallel(x[:number]), y[:number], reduction="sum").div(len(x)).backward()
        optimizer.step()
    return snapshot(model, optimizer)


def test_a_rank_that_reads_no_label_in_the_first_step_learns_the_number_of_classes(ranks):
    first = same_on_both(ranks, "empty")
    assert first["forecaster"]["values"].shape == (CLASSES, CLASSES)


def trained_with_a_batch_without_a_term(rank, variant):
    """A batch without labels has no term: the other rank must not wait for its share."""
    parallel = DistributedDataParallel(mlp())
    optimizer = wrap(variant, parallel)
    for number, batch in enumerate(batches(STEPS)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which says that a step had no term
            train_rank(rank, parallel, optimizer, [batch], way="line" if (rank, number) == (1, 2) else "term")
    return snapshot(parallel.module, optimizer), optimizer.logs()["skipped"]


@EACH
def test_a_rank_without_a_term_in_a_step_ends_where_the_other_does(variant, ranks):
    first, second = (torch.load(ranks / f"some batches {variant} {rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first[0], second[0])
    assert (first[1], second[1]) == (0, 1)


# ---- process groups --------------------------------------------------------------------------------------------------

PARTS = 2


def rows_of(rank):
    """A rank's rows of each batch."""
    return [(x.chunk(PARTS)[rank], y.chunk(PARTS)[rank]) for x, y in batches(STEPS)]


def independent(variant, rank, own):
    """Another start on each rank, and nothing in common: a search over seeds, say."""
    model = mlp(seed=rank)
    return model, wrap(variant, model)


def averaged_by_hand(variant, rank, own):
    model = mlp()
    return model, wrap(variant, model, process_group=dist.group.WORLD)


def averaged_by_hand_in_no_group(variant, rank, own):
    model = mlp()
    return model, wrap(variant, model)


def parallel_without_a_group(variant, rank, own):
    parallel = DistributedDataParallel(mlp())
    return parallel, wrap(variant, parallel, process_group=None)


def wrapped_before(variant, rank, own):
    """The model's own group holds this rank alone."""
    parallel = DistributedDataParallel(mlp(seed=rank), process_group=own)
    return parallel, wrap(variant, parallel)


def wrapped_after(variant, rank, own):
    model = mlp(seed=rank)
    optimizer = wrap(variant, model)
    return DistributedDataParallel(model, process_group=own), optimizer


# For each cell whether the ranks' models are one, and whether their forecasters are.
GROUPS = {
    independent: (False, False),
    averaged_by_hand: (True, True),
    averaged_by_hand_in_no_group: (True, False),
    parallel_without_a_group: (True, False),
    wrapped_before: (False, False),
    wrapped_after: (False, False),
}
UNKNOWN = (independent, averaged_by_hand_in_no_group)  # the ranks of one model
IN_GROUPS = list(itertools.product(GROUPS, VARIANTS))


def train_in_groups(rank, folder):
    """Where no DistributedDataParallel does, some scripts average the gradients themselves."""
    groups = [dist.new_group([index]) for index in range(PARTS)]
    for cell, variant in IN_GROUPS:
        called, optimizer = cell(variant, rank, groups[rank])
        with all_warnings() as caught:
            for x, y in rows_of(rank):
                optimizer.zero_grad()
                F.cross_entropy(called(x), y).backward()
                for parameter in called.parameters() if "by_hand" in cell.__name__ else ():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= PARTS
                optimizer.step()
        said = [str(warning.message) for warning in caught if warning.filename == __file__]
        found = getattr(called, "module", called).state_dict(), learned(optimizer), said
        torch.save(found, folder / f"{cell.__name__} {variant} {rank}.pt")


def trained_by_hand(variant, one_model, one_forecaster):
    """Both ranks in one process; what they have in common is that of the joint batch."""
    if one_forecaster:
        hand = train_by_term(by_hand(variant, mlp()), batches(STEPS), loss=F.cross_entropy)
        return [(hand.model.state_dict(), learned(hand))] * PARTS
    hands = [by_hand(variant, mlp(seed=0 if one_model else rank)) for rank in range(PARTS)]
    for rows in zip(*map(rows_of, range(PARTS)), strict=True):
        for hand, (x, y) in zip(hands, rows, strict=True):
            hand.zero_grad()
            loss_of(hand, x, y).backward()
        for parameters in zip(*(hand.model.parameters() for hand in hands), strict=True) if one_model else ():
            mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
            for parameter in parameters:
                parameter.grad = mean.clone()
        for hand in hands:
            hand.step()
    return [(hand.model.state_dict(), learned(hand)) for hand in hands]


@pytest.mark.parametrize(("cell", "variant"), IN_GROUPS)
def test_forecasters_are_averaged_over_the_models_own_group_or_the_given_one(cell, variant, ranks):
    found = [torch.load(ranks / f"{cell.__name__} {variant} {rank}.pt", weights_only=True) for rank in range(PARTS)]
    one_model, one_forecaster = GROUPS[cell]
    for (*part, said), hand in zip(found, trained_by_hand(variant, one_model, one_forecaster), strict=True):
        assert_same(part, [*hand], **NEAR)
        assert len(said) == (cell in UNKNOWN), "said once, at the first forward pass"
        assert all("has 2 ranks" in text and "process_group=torch.distributed.group.WORLD" in text for text in said)
    if one_forecaster:
        assert_same(found[0], found[1])
    else:
        with pytest.raises(AssertionError):
            assert_same(found[0][1], found[1][1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("given", [3, "world", [0, 1], torch.zeros(1)], ids=str)
@EACH
def test_what_is_no_process_group_is_refused_before_anything_changes(variant, given):
    model = mlp()
    with pytest.raises(TypeError, match=r"(?s)process_group.*ProcessGroup"):
        wrap(variant, model, process_group=given)
    assert not model._forward_hooks


# ---- checkpoints and sharded optimizers ------------------------------------------------------------------------------


def from_rank_0(rank, file, state):
    if rank == 0:
        torch.save(state, file)
    dist.barrier()
    return torch.load(file, weights_only=True)


def resume_on_rank(rank, file, variant, dtype):
    """A checkpoint of rank 0 resumes all ranks bit for bit."""

    def build():
        model = mlp(seed=rank, dtype=dtype)
        parallel = DistributedDataParallel(model)
        options = {"companion": mlp(seed=10 + rank, dtype=dtype)} if variant == "dcl" else {}
        return model, parallel, wrap(variant, parallel, **options)

    further = list(batches(3, seed=5, dtype=dtype))
    model, parallel, optimizer = build()
    parallel(further[0][0])
    if variant == "dcl":
        assert_same(learned(optimizer), from_rank_0(rank, file.with_suffix(".first"), learned(optimizer)))
    train_rank(rank, parallel, optimizer, batches(3, dtype=dtype))
    before = snapshot(model, optimizer)
    assert_same(before, from_rank_0(rank, file.with_suffix(".same"), before))
    from_rank_0(rank, file, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train_rank(rank, parallel, optimizer, further)
    expected = snapshot(model, optimizer)

    model, parallel, optimizer = build()
    checkpoint = torch.load(file, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    train_rank(rank, parallel, optimizer, further)
    assert_same(snapshot(model, optimizer), expected)


def with_zero_redundancy(rank, folder, variant):
    model = mlp(seed=0)
    parallel = DistributedDataParallel(model)
    base = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = wrap(variant, parallel, base)
    train_rank(rank, parallel, optimizer, batches(STEPS))
    step_without_a_batch(optimizer)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()
    base.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save(snapshot(model, optimizer), folder / f"zero {variant}.pt")


def test_zero_redundancy_optimizer_as_base(ranks):
    runs = {name: torch.load(ranks / f"zero {name}.pt", weights_only=True) for name in VARIANTS}
    assert_same(runs["dcp"], trained_alone("dcp"), **NEAR)
    joint = trained_alone("dcl")
    assert_same(runs["dcl"]["model"], joint["model"], **NEAR)
    assert_same(runs["dcl"]["forecaster"]["model"], joint["forecaster"]["model"], **NEAR)  # its optimizer is sharded


def companion_of_other_buffers(rank):
    model = batch_norm_net(seed=rank)
    model[1].running_mean.fill_(rank + 1.0)  # as ranks have it that loaded different statistics
    optimizer = wrap("dcl", model, None)
    companion = optimizer.companion  # made now, while each rank has its own model
    parallel = DistributedDataParallel(model)
    model[1].eval()  # nothing but the start moves them
    train_rank(rank, parallel, optimizer, batches(2))
    return companion.state_dict()


def test_the_companions_start_from_rank_0s_weights_and_buffers(ranks):
    first = same_on_both(ranks, "buffers")
    assert_same(first["1.running_mean"], torch.ones(12, dtype=torch.float64))


def copy_synchronized_batch_norm():
    """The companion keeps it and its group. Its structure alone: torch runs it on accelerators."""
    group = dist.new_group([0, 1])
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(body, process_group=group)
    optimizer = wrap("dcl", model)
    twin = optimizer.companion[1]
    assert isinstance(twin, nn.SyncBatchNorm)
    assert twin is not model[1]
    assert twin.process_group is group
