"""The prototypes: penalty and update against the reference, soft labels, labels to rows, figures, state, two ranks."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcl_optim import AutoWeight, DCPOptimizer
from dcl_optim.prototypes.labels import labels_of
from dcl_optim.pytorch import synchronization
from tests.helpers import Logits, assert_same, fit, huber, needs_gloo, resume, same_on_both, seen, sgd, train
from tests.reference import DISTANCES, NEAR, dcp_step, prototypes_learn, prototypes_penalty
from tests.reference import train as train_by

CLASSES, FEATURES, ROWS = 12, 5, 8  # fewer rows than classes
KEY = "dcl_optim.DCPOptimizer"
NAN, INF = float("nan"), float("inf")


def network(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, CLASSES)).to(dtype)


def wrap(model, lr=0.1, **options):
    base = sgd(model, lr=lr)
    return DCPOptimizer(base, model, **{"num_classes": CLASSES, "weight": 1.0, "alpha": 0.6} | options)


def batches(steps, size=ROWS, seed=1):
    """Small enough for classes to be absent, and to come for the first time late."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        known = 4 + step % (CLASSES - 3)
        x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        yield x, torch.randint(known, (size,), generator=generator)


def one_hot(y, classes=CLASSES):
    return F.one_hot(y, classes).double()


def step_on(optimizer, z, labels):
    """One step of :class:`Logits` by the term alone."""
    optimizer.zero_grad()
    optimizer.penalty(optimizer.model(z), labels).backward()
    optimizer.step()


def know(optimizer, values, seen):
    state = optimizer.state_dict()
    state[KEY]["forecaster"] = {"values": values, "numbers": seen.to(values), "fit": torch.zeros(2)}
    optimizer.load_state_dict(state)


# ---- penalty and update ----------------------------------------------------------------------------------------------


FUNCTIONS = DISTANCES | {huber: huber}


@pytest.mark.parametrize(
    ("reads", "distance", "update", "alpha"),
    [
        *((True, distance, "rows", 0.4) for distance in FUNCTIONS),
        (True, "squared", "batch", 0.4),
        *((True, "mse", update, alpha) for update in ("rows", "batch") for alpha in (0.0, 1.0)),
        *((False, "mse", update, 0.4) for update in ("rows", "batch")),
    ],
)
def test_thirty_steps_equal_the_reference(reads, distance, update, alpha, monkeypatch):
    """At the ends of alpha prototypes are the last means, or those of all rows alike, or the first ones for good."""
    if not reads:  # values after the first step
        monkeypatch.setattr(synchronization, "may_sync", lambda step, tensor: step == 1)
    model, theirs = network(), network()
    optimizer = wrap(model, weight=0.7, alpha=alpha, update=update, distance=distance)
    plain, known = sgd(theirs), {}
    settings = {"weight": 0.7, "alpha": alpha, "numbers": {} if update == "rows" else None}
    for x, y in batches(30):
        fit(optimizer, [(x, y)])
        dcp_step(theirs, known, plain, x, y, F.cross_entropy, FUNCTIONS[distance], **settings)
        assert seen(optimizer).nonzero().flatten().tolist() == sorted(known)
    assert_same((model, optimizer.prototypes), (theirs, torch.stack([known[k] for k in range(CLASSES)])), **NEAR)


# ---- steps that learn from no row ------------------------------------------------------------------------------------

SOME = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 1, 5])
CLASS_WEIGHTS = torch.arange(1.0, CLASSES + 1).double()


def unread(optimizer, z, y):
    return F.cross_entropy(optimizer.model(z), y, weight=CLASS_WEIGHTS)


def not_finite(optimizer, z, y):
    return NAN * F.cross_entropy(optimizer.model(z), y)


def no_label(optimizer, z, y):
    return F.cross_entropy(optimizer.model(z), y - 100 - y, reduction="sum")


def no_label_of_the_term(optimizer, z, y):
    return optimizer.penalty(optimizer.model(z), y - 100 - y)


@pytest.mark.filterwarnings("ignore:a batch gets no penalty", "ignore:non-finite logits")
@pytest.mark.parametrize(("update", "alpha"), [("rows", 0.5), ("batch", 0.5), ("rows", 0.0), ("batch", 0.0)])
@pytest.mark.parametrize("loss_of", [unread, not_finite, no_label, no_label_of_the_term])
@pytest.mark.parametrize("reads", [True, False])
def test_a_step_that_learns_from_no_row_ages_all_prototypes(reads, loss_of, update, alpha, monkeypatch):
    """By hand: n ← α n in each, the next batch has the penalty min(1, n), and its rows count for the more."""
    monkeypatch.setattr(synchronization, "may_sync", lambda step, tensor: reads or step == 1)
    optimizer = wrap(Logits(), lr=0.0, alpha=alpha, update=update, distance="squared")
    by_term = loss_of is no_label_of_the_term
    numbers, means = torch.zeros(CLASSES).double(), torch.zeros(CLASSES, CLASSES).double()
    torch.manual_seed(0)
    for y, num_aging in zip((*SOME, SOME[0]), (0, 4, 1), strict=True):
        for _ in range(num_aging):
            optimizer.zero_grad()
            loss_of(optimizer, torch.randn(4, CLASSES).double(), SOME[1]).backward()
            optimizer.model.zero.grad.zero_()
            optimizer.step()
            assert_same(optimizer.prototypes, means, **NEAR)
            numbers *= alpha
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        z = torch.randn(len(y), CLASSES).double()
        penalty = (numbers.clamp(max=1)[y] * (z - means[y]).square().mean(1)).mean()
        optimizer.zero_grad()
        (optimizer.penalty if by_term else F.cross_entropy)(optimizer.model(z), y).backward()
        assert optimizer.logs()["penalty"] == pytest.approx(float(penalty), rel=1e-9)
        optimizer.step()
        for k in y.unique().tolist():
            mine = z[y == k]
            count = len(mine) if update == "rows" else 1 - alpha * float(numbers[k])
            numbers[k] = alpha * numbers[k] + count
            means[k] += count / numbers[k] * (mine.mean(0) - means[k])
        assert_same(optimizer.prototypes, means, **NEAR)
        assert_same(optimizer.state_dict()[KEY]["forecaster"]["numbers"], numbers, **NEAR)


# ---- ignored rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distance", "ignored", "by_term"),
    [("mse", -100, False), ("kl", 3, False), ("l1", -100, True), ("infonce", 3, True)],
)
def test_rows_that_the_loss_ignores_count_for_nothing(distance, ignored, by_term):
    results = []
    for padding in (0, 3):
        model = network()
        optimizer, penalties = wrap(model, distance=distance), []
        for x, y in batches(8):
            x = torch.cat([x, 9 * x[:padding]])
            y = torch.cat([y.where(y != ignored, 5), y.new_full((padding,), ignored)])
            optimizer.zero_grad()
            z = model(x)
            loss = F.cross_entropy(z, y, ignore_index=ignored)
            (loss + optimizer.penalty(z, y, ignore_index=ignored) if by_term else loss).backward()
            optimizer.step()
            penalties.append(optimizer.logs()["penalty"])
        results.append((model.state_dict(), optimizer.prototypes, seen(optimizer), torch.tensor(penalties)))
        if by_term:
            assert optimizer.penalty(model(x), torch.full_like(y, -100)) == 0
    assert_same(*results, **NEAR)
    assert results[0][3][-1] > 0


@pytest.mark.parametrize("distance", ["mse", "kl", "infonce"])
def test_ignored_rows_that_are_masked_altogether_leave_no_trace(distance):
    optimizer = wrap(Logits(), lr=0.0, distance=distance)
    z = torch.zeros(3, CLASSES, dtype=torch.float64).index_fill_(0, torch.tensor([1]), -INF)
    for _ in range(2):
        optimizer.zero_grad()
        penalty = optimizer.penalty(optimizer.model(z), torch.tensor([0, -100, 2]))
        penalty.backward()
        optimizer.step()
        assert penalty.isfinite()
    assert torch.equal(optimizer.prototypes, torch.zeros(CLASSES, CLASSES, dtype=torch.float64))


# ---- soft labels -----------------------------------------------------------------------------------------------------


def mixtures(steps):
    """Mixup of two labels a row: few columns have a share, and other ones in each batch."""
    for (x, y), (_, other) in zip(batches(steps), batches(steps, seed=9), strict=True):
        yield x, 0.75 * one_hot(y) + 0.25 * one_hot(other)


@pytest.mark.parametrize(("distance", "reads"), [("mse", True), ("kl", True), ("mse", False)])
def test_soft_labels_by_the_formula(distance, reads, monkeypatch):
    monkeypatch.setattr(synchronization, "may_sync", lambda step, tensor: reads)
    model, theirs = network(), network()
    optimizer, plain = wrap(model, distance=distance), sgd(theirs)
    known = {}
    numbers = {}
    for x, shares in mixtures(30):
        train_by(optimizer, [(x, shares)], loss=F.cross_entropy)
        z = theirs(x)
        plain.zero_grad()
        (F.cross_entropy(z, shares) + prototypes_penalty(z, shares, known, FUNCTIONS[distance])).backward()
        plain.step()
        prototypes_learn(z.detach(), shares, known, 0.6, numbers)
        assert seen(optimizer).nonzero().flatten().tolist() == sorted(known)
    assert_same((model, optimizer.prototypes), (theirs, torch.stack([known[k] for k in range(CLASSES)])), **NEAR)


def test_soft_labels_by_hand():
    """t = (3/4, 1/4): the prediction is a mixture of prototypes, and each class's mean weighs the row by its share."""
    optimizer = wrap(Logits(), lr=0.0, num_classes=2, alpha=0.5, distance="squared", update="batch")
    know(optimizer, torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([True, True]))
    z = torch.tensor([[4.0, 0.0], [8.0, 0.0]], dtype=torch.float64)
    step_on(optimizer, z, torch.tensor([[0.75, 0.25], [0.0, 1.0]], dtype=torch.float64))
    # predictions (1.5, 1), (0, 4): squares 6.25 + 1 + 64 + 16 over 4
    assert optimizer.logs()["penalty"] == pytest.approx(87.25 / 4)
    mean_1 = (0.25 * 4 + 1.0 * 8) / 1.25
    assert_same(optimizer.prototypes, torch.tensor([[3.0, 0.0], [mean_1 / 2, 2.0]], dtype=torch.float64), atol=1e-12)


# ---- labels to rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.ones(3, CLASSES), r"(?s)not distributions over 12 classes.*sum to 12.*DCLOptimizer"),
        (torch.eye(3, CLASSES) - torch.eye(3).repeat(1, 4) / 9, r"the least share is -0.11"),
        (torch.eye(3, CLASSES).tril(-1), r"rows sum to 0 up to 0"),  # one label or none: binary outputs
    ],
)
def test_soft_labels_that_are_no_distributions_are_refused_each_time(labels, message):
    optimizer = wrap(network())
    z = optimizer.model(torch.randn(3, FEATURES).double())
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            optimizer.penalty(z, labels)


def test_a_width_of_logits_that_is_not_num_classes_is_refused():
    optimizer = wrap(nn.Linear(FEATURES, 6), num_classes=4)
    loss = F.cross_entropy(optimizer.model(torch.randn(8, FEATURES)), torch.arange(8) % 4)
    with pytest.raises(ValueError, match=r"^num_classes=4 but there are 6 logits a row; pass num_classes=6"):
        loss.backward()


def smoothed(classes):
    soft = 0.9 * one_hot(torch.arange(ROWS) % classes, classes) + 0.1 / classes
    soft[:, -1] -= 1e-5  # a rest that was subtracted and rounded
    return soft


@pytest.mark.parametrize(
    "soft",
    [
        (0.92 * one_hot(torch.arange(ROWS), 8) + 0.08 * one_hot(torch.arange(ROWS).flip(0), 8)).bfloat16(),
        torch.softmax(one_hot(torch.arange(ROWS)), 1).half(),
        *(smoothed(classes).to(dtype) for classes in (2, 20_000) for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=["CutMix in bfloat16", "a teacher's in float16", *(f"smoothed, {number}" for number in range(4))],
)
def test_what_rounding_leaves_of_soft_labels_is_accepted(soft):
    assert_same(labels_of(soft, torch.zeros(soft.shape), may_read=True, ignore_index=-100).rows, soft.float())


def trained(steps=5):
    model = network()
    optimizer = wrap(model)
    fit(optimizer, batches(steps))
    return model, optimizer


@pytest.mark.parametrize(
    ("classes", "dtype", "size"),
    [
        (16_385, torch.bfloat16, "1.0 GiB"),  # whose prototypes are float32
        (11_586, torch.float64, "1.0 GiB"),
        (100_000, torch.float32, "37.3 GiB"),
    ],
)
def test_so_many_classes_that_their_prototypes_would_take_more_than_a_gibibyte_are_refused(classes, dtype, size):
    optimizer = wrap(nn.Linear(1, classes, dtype=dtype), num_classes=None)
    with pytest.raises(ValueError, match=rf"num_classes={classes}.*would need {size}(?s:.*)use DCLOptimizer"):
        optimizer.penalty(optimizer.model(torch.ones(1, 1, dtype=dtype)), torch.tensor([0]))


# ---- states ----------------------------------------------------------------------------------------------------------


def test_prototypes_and_a_state_that_are_held_or_were_loaded_are_not_written_to():
    model, optimizer = trained(2)
    held = optimizer.prototypes, optimizer.state_dict()[KEY]
    before, number = copy.deepcopy(held), seen(optimizer).sum()
    train(model, optimizer, batches(9, seed=2))
    assert seen(optimizer).sum() > number
    assert_same(held, before)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state | {KEY: held[1]})
    train(model, optimizer, batches(3, seed=2))
    assert_same(held, before)


def test_a_state_of_another_number_of_classes_is_refused_where_it_is_given_else_at_the_first_batch():
    state, model = trained(2)[1].state_dict(), network()
    model[2] = nn.Linear(9, 9).double()
    with pytest.raises(ValueError, match=r"prototypes has shape \(12, 12\) of .* for 'values', expected \(9, 9\)"):
        wrap(model, num_classes=9).load_state_dict(copy.deepcopy(state))
    optimizer = wrap(model, num_classes=None)
    optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"row varies: .* state, had 12 logits a row, this one has 9.* Positions"):
        fit(optimizer, [(x, y % 9) for x, y in batches(1)])


@pytest.mark.parametrize("batch_without_step", [False, True])
def test_an_earlier_state_takes_back_what_came_after_it(batch_without_step):
    model, optimizer = trained(2)
    state, before = copy.deepcopy(optimizer.state_dict()), optimizer.prototypes
    train(model, optimizer, batches(9, seed=2))
    assert seen(optimizer).sum() > 8
    if batch_without_step:
        ((x, y),) = batches(1, seed=6)
        F.cross_entropy(model(x), y).backward()
    optimizer.load_state_dict(state)
    assert_same(optimizer.prototypes, before)
    assert seen(optimizer).sum() == 5
    ((x, y),) = batches(1, seed=2)
    train(model, optimizer, [(x, y)])
    assert seen(optimizer).sum() < 8


# ---- many classes ----------------------------------------------------------------------------------------------------


class NoPassOverAll(TorchDispatchMode):
    """Refuses operations on tensors of a size or more, but for reading, adding to and setting some of their rows."""

    def __init__(self, size):
        super().__init__()
        self._size = size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        rows_only = function.is_view or function.overloadpacket.__name__.startswith("index")
        whole = [] if rows_only else [args, kwargs]
        if function.overloadpacket.__name__ not in ("index_add_", "index_copy_", "index_put_"):
            whole.append(() if function.is_view else result)
        large = [t for t in tree_leaves(whole) if isinstance(t, Tensor) and t.numel() >= self._size]
        assert not large, f"{function} on {[tuple(t.shape) for t in large]}"
        return result


def test_a_step_passes_over_the_prototypes_of_its_own_classes_only():
    classes, size = 1000, 6
    model = nn.Linear(2, classes)
    optimizer = wrap(model, num_classes=classes)
    labels = torch.randint(classes, (3, size)).index_fill_(1, torch.tensor([0]), 7)
    optimizer.penalty(model(torch.randn(1, 2)), labels[0, :1])  # creates them
    with NoPassOverAll(classes * classes):
        for y in labels.repeat(2, 1):
            optimizer.zero_grad()
            for rows in torch.arange(size).split([4, 2]):
                optimizer.penalty(model(torch.randn(len(rows), 2)), y[rows], ignore_index=7).backward()
            optimizer.step()
    assert seen(optimizer).sum() == 3 * (size - 1)
    assert optimizer.logs()["penalty"] > 0


# ---- two ranks -------------------------------------------------------------------------------------------------------


def part_of(rank, x, y, cut=ROWS // 2):
    """By label, so that most classes are absent on one rank."""
    order = torch.argsort(y, stable=True)
    rows = order if rank is None else (order[:cut], order[cut:])[rank]
    return x[rows], y[rows]


def snapshot(model, optimizer):
    return {"model": model.state_dict(), "own": optimizer.prototypes, "seen": seen(optimizer)}


def trained_unevenly(rank=None):
    """A quarter of the rows and the rest: the mean of the penalty in each rank weighs them otherwise than the batch."""
    model = network()
    called = model if rank is None else DistributedDataParallel(model)
    optimizer = wrap(model, weight=0.0)
    for x, y in batches(12):
        optimizer.zero_grad()
        inputs, labels = part_of(rank, x, y, ROWS // 4)
        factor = (1.0 if rank is None else 2.0) / ROWS  # DDP takes the mean over the ranks
        (factor * F.cross_entropy(called(inputs), labels, reduction="sum", ignore_index=2)).backward()
        optimizer.step()
    return snapshot(model, optimizer)


def trained_in_parts(rank=None):
    """One rank has its rows in two forwards, the other in one, of soft labels; in two steps one or both have none."""
    model = network()
    group = None if rank is None else dist.group.WORLD  # no DistributedDataParallel
    optimizer = wrap(model, lr=0.0, process_group=group)
    for step, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        inputs, labels = part_of(rank, x, y)
        if step in (2, 4):
            without = ROWS // 2 if step == 2 else ROWS
            labels = labels.clone()
            labels[: max(without - ROWS // 2 * (rank or 0), 0)] = -100
        for rows in torch.arange(len(labels)).split(2 if rank == 0 else ROWS):
            is_soft = rank == 1 and step not in (2, 4)
            given = one_hot(labels[rows]) if is_soft else labels[rows]
            optimizer.penalty(model(inputs[rows]), given).backward()
        optimizer.step()
    return snapshot(model, optimizer)


def trained_by_the_automatic_weight(rank=None):
    """It follows the accuracy on the joint batch."""
    model = network()
    called = model if rank is None else DistributedDataParallel(model)
    optimizer = wrap(model, weight=AutoWeight(floor=0.0, power=1.0, classes=CLASSES))
    train(called, optimizer, [part_of(rank, x, y) for x, y in batches(20)])
    return snapshot(model, optimizer) | {"fit": optimizer.state_dict()[KEY]["forecaster"]["fit"]}


def trained_where_one_rank_meets_nan(rank):
    model = network(dtype=torch.float32)
    parallel = DistributedDataParallel(model)
    optimizer = wrap(model)
    for step, (x, _) in enumerate(batches(14)):
        y = torch.arange(ROWS) + 4 * (step % 2)  # all classes are known after two steps
        inputs, labels = part_of(rank, x.float(), y)
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(inputs), labels)
        if step in (2, 6):
            (loss * (NAN if rank == 0 else 1.0)).backward()
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        else:
            loss.backward()
        optimizer.step()
    return snapshot(model, optimizer)


JOINT = [trained_unevenly, trained_in_parts, trained_by_the_automatic_weight]


def worker(rank, folder):
    for case in JOINT:
        torch.save(case(rank), folder / f"{case.__name__} {rank}.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(trained_where_one_rank_meets_nan(rank), folder / f"nan {rank}.pt")


@needs_gloo
@pytest.mark.parametrize("case", JOINT)
def test_both_ranks_hold_the_same_bits_and_what_one_process_has_on_the_joint_batch(case, ranks):
    found = same_on_both(ranks, case.__name__)
    assert_same(found, case(), **NEAR)
    assert found["seen"].sum() > CLASSES // 2


@needs_gloo
def test_a_rank_whose_batch_is_not_finite_leaves_the_other_in_step(ranks):
    found = same_on_both(ranks, "nan")
    assert found["own"].isfinite().all()
    assert found["seen"].all()


@pytest.mark.parametrize("first_parameter", [torch.float32, torch.complex64])
def test_prototypes_have_the_dtype_of_the_logits_also_after_resuming(first_parameter):
    """Not that of the first parameter, which may be narrower or complex."""

    class Widening(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.ones(FEATURES, dtype=first_parameter))
            self.head = nn.Linear(FEATURES, CLASSES).double()

        def forward(self, x):
            return self.head((x * self.first).real.double())

    def build():
        torch.manual_seed(0)
        model = Widening()
        return model, wrap(model, num_classes=None)

    model, optimizer = build()
    train(model, optimizer, batches(3))
    again, second = build()
    resume(second, optimizer)
    assert second.prototypes.dtype == torch.float64
    for network_, stepped in ((model, optimizer), (again, second)):
        train(network_, stepped, batches(3, seed=2))
    assert torch.equal(optimizer.prototypes, second.prototypes)
    assert_same(model, again, rtol=0, atol=0)


def test_prototypes_of_soft_labels_are_not_rounded_if_the_backward_pass_runs_under_autocast():
    found = []
    for is_half in (False, True):
        model = network(dtype=torch.float32)
        optimizer = wrap(model)
        x, y = next(batches(1))
        shares = 0.7 * one_hot(y).float() + 0.3 / CLASSES
        optimizer.zero_grad()
        z = model(x.float())
        loss = F.cross_entropy(z, shares) + optimizer.penalty(z, shares)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            loss.backward()
        optimizer.step()
        found.append(optimizer.prototypes)
    assert found[0].any()
    assert_same(*found, rtol=0, atol=0)
