"""Masked classes: an entry of the logits that is masked neither pulls nor is averaged."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import Logits, assert_same, assert_same_networks, every, sgd
from tests.reference import DISTANCES, NEAR, dcp_step

CLASSES, FEATURES, ROWS, STEPS = 6, 5, 16, 18
INF = float("inf")
LOWEST = torch.finfo(torch.float64).min


def opened_later(step, x):
    """Half of the classes are closed up to step 12, and have labels in no step."""
    return (torch.arange(CLASSES) >= 3) & torch.tensor(step < 12)


def drawn_for_each_batch(step, x):
    return (torch.arange(CLASSES) >= 3) & (torch.arange(CLASSES) % 3 != step % 3)


def other_ones_in_each_row(step, x):
    return F.one_hot(3 + x[:, 0].abs().mul(10).long() % 3, CLASSES).bool()


def from_the_third_step_on(step, x):
    return other_ones_in_each_row(step, x) & torch.tensor(step >= 2)


MASKS = (opened_later, drawn_for_each_batch, other_ones_in_each_row, from_the_third_step_on)


class Masked(nn.Module):
    """The logits of the classes that are closed are a number, minus infinity by default; or it is added to them."""

    def __init__(self, mask, number=-INF, adds=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, CLASSES)).double()
        self.net[2].bias.data[3:] = -8.0
        self.step, self.mask, self.number, self.adds = 0, mask, number, adds

    def forward(self, x):
        mask = self.mask(self.step, x)
        z = self.net(x)
        return z + mask * self.number if self.adds else z.masked_fill(mask, self.number)


def wrap(model, **options):
    base = sgd(model)
    return DCPOptimizer(base, model, **{"num_classes": CLASSES, "weight": 0.7, "alpha": 0.6} | options)


def batches(steps=STEPS):
    """Class 2 comes first in step 4."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(steps):
        x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
        found.append((x, torch.randint(2 if step < 3 else 3, (ROWS,), generator=generator)))
    return found


def take_step(optimizer, x, y, way="line"):
    optimizer.zero_grad()
    z = optimizer.model(x)
    loss = F.cross_entropy(z, y)
    if way == "term":
        loss = loss + optimizer.penalty(z, y)
    elif way == "soft labels":
        loss = loss + optimizer.penalty(z, F.one_hot(y, CLASSES).double())
    loss.backward()
    optimizer.step()
    optimizer.model.step += 1


CASES = [
    *((mask, number, way, {}) for mask in MASKS for number in (-INF, -1000.0) for way in ("line", "term")),
    *((mask, -INF, "soft labels", {}) for mask in MASKS),
    *((other_ones_in_each_row, number, "term", {}) for number in (-1e4, LOWEST)),
    *((drawn_for_each_batch, -INF, "term", {"distance": name}) for name in ("squared", "l1", "kl", "infonce")),
    *((mask, -INF, "line", {"update": "batch"}) for mask in MASKS),
    *((mask, number, way, {"adds": True}) for mask in MASKS for number in (-1e3, -1e4) for way in ("line", "term")),
]


def train_both(case):
    """The optimizer, and what the reference has trained and learned."""
    mask, number, way, options = case
    options = dict(options)
    model, theirs = Masked(mask, number, options.pop("adds", False)), Masked(mask)
    optimizer, plain = wrap(model, **options), sgd(theirs)
    distance = DISTANCES[options.get("distance", "mse")]
    known = {}
    settings = {"weight": 0.7, "alpha": 0.6, "numbers": None if "update" in options else {}}
    for x, y in batches():
        take_step(optimizer, x, y, way)
        dcp_step(theirs, known, plain, x, y, F.cross_entropy, distance, **settings)
        theirs.step += 1
    return optimizer, theirs, known


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join([case[0].__name__, *map(str, case[1:])]))
def test_training_equals_the_reference(case):
    optimizer, theirs, known = train_both(case)
    assert_same(optimizer.model, theirs, **NEAR)
    for k, prototype in known.items():
        assert_same(optimizer.prototypes[k], prototype, **NEAR)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def of_two_classes(**options):
    model = Logits()
    base = sgd(model, lr=0.0)
    return DCPOptimizer(base, model, **{"num_classes": 2, "weight": 1.0, "alpha": 1.0, "distance": "squared"} | options)


def learn(optimizer, rows, labels):
    """One step by the term alone; give its value."""
    optimizer.zero_grad()
    penalty = optimizer.penalty(optimizer.model(torch.tensor(rows, dtype=torch.float64)), labels)
    penalty.backward()
    optimizer.step()
    return penalty.item()


@pytest.mark.parametrize("number", [-INF, -1000, -1e30])
def test_hard_labels_by_hand(number):
    optimizer, first = of_two_classes(), torch.zeros(2, dtype=torch.long)
    assert learn(optimizer, [[1.0, number], [3.0, number]], first) == 0.0
    # Of class 0 is known (2, 0): (4 - 2)², (7 - 0)² and (0 - 2)², over two rows and two classes.
    assert learn(optimizer, [[4.0, 7.0], [0.0, number]], first) == 14.25
    # Four rows of class 0, of which one shows 7.
    assert_same(optimizer.prototypes, torch.tensor([[2.0, 1.75], [0.0, 0.0]], dtype=torch.float64), atol=1e-12)


def test_soft_labels_by_hand():
    """Half of class 0, which is (2, 0), and half of class 1, (0, 4): the mixture is (1, 2)."""
    optimizer = of_two_classes()
    learn(optimizer, [[2.0, -INF], [0.0, 4.0]], torch.tensor([0, 1]))
    assert learn(optimizer, [[4.0, -INF]], torch.tensor([[0.5, 0.5]]).double()) == 4.5  # (4 - 1)² over two classes
    # By its share of a half: 2 + (4 - 2) / 2 / 1.5 and 0 + 4 / 2 / 1.5.
    expected = torch.tensor([[8 / 3, 0.0], [4 / 3, 4.0]], dtype=torch.float64)
    assert_same(optimizer.prototypes, expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [-1000.0, torch.finfo(torch.float16).min, -INF])
def test_a_mask_in_half_precision(dtype, number):
    """By hand as above: of class 0 is known (2, 0)."""
    optimizer, first = of_two_classes(), torch.zeros(1, dtype=torch.long)
    values = []
    for rows in ([[2.0, number]], [[4.0, number]]):
        z = optimizer.model(torch.tensor(rows, dtype=torch.float64)).to(dtype)
        values.append(optimizer.penalty(z, first))
        values[-1].backward()
        optimizer.step()
    assert [value.item() for value in values] == [0.0, 2.0]


def test_logits_that_are_low_as_a_whole_are_not_masked():
    """As squared distances in many dimensions."""
    optimizer, first = of_two_classes(), torch.zeros(1, dtype=torch.long)
    learn(optimizer, [[-2000.0, -2400.0]], first)
    assert_same(optimizer.prototypes[0], torch.tensor([-2000.0, -2400.0]).double())


# ---- the companion ---------------------------------------------------------------------------------------------------

OPENED = pytest.mark.filterwarnings("ignore:the companion's logits are masked")


def only_in_later_batches(step, x):
    """In rows that the first batches have none of."""
    return opened_later(step, x) & (x[:, :1] > 1.8)


def with_a_companion(number, adds=False, mask=opened_later, **options):
    model = Masked(mask, number, adds)
    base = sgd(model)
    return DCLOptimizer(base, model, **{"weight": 0.7, "alpha": 0.6} | options, companion_fraction=1)


def train_on(optimizer, data, way):
    """Give the penalties; labels are of all classes from step 12 on. The companion's own mask stays closed."""
    penalties = []
    for x, y in data:
        y = y + 3 if optimizer.model.step >= 12 else y
        optimizer.zero_grad()
        z = optimizer.model(x)
        loss = F.cross_entropy(z, y)
        (loss + optimizer.penalty(z) if way == "term" else loss).backward()
        optimizer.step()
        optimizer.model.step += 1
        penalties.append(optimizer.logs()["penalty"])
    return penalties


@OPENED
@pytest.mark.parametrize(
    ("mask", "number", "adds", "name", "way"),
    every(
        7,
        product(
            [opened_later, only_in_later_batches],
            [-1e3, -1e4],
            [False, True],
            ["mse", "squared", "l1", "kl"],
            ["line", "term"],
        ),
    ),
)
def test_a_class_that_the_companion_masks_is_left_out_as_with_minus_infinity(mask, number, adds, name, way):
    found = []
    for options in ((-INF,), (number, adds)):
        optimizer = with_a_companion(*options, mask=mask, distance=name)
        penalties = train_on(optimizer, batches(), way)
        found.append((penalties, optimizer.model, optimizer.companion))
    assert max(found[0][0]) < 20
    for first, second in zip(*found, strict=True):
        assert_same(first, second, **NEAR)


def test_other_masks_in_the_companion_are_said_once_with_the_fix_which_works():
    optimizer, right = with_a_companion(-1e4), with_a_companion(-1e4)
    with pytest.warns(UserWarning, match=r"are masked .*\n  Fix: call optimizer.reset_companion\(\)") as caught:
        train_on(optimizer, batches(), "line")
    assert len(caught) == 1
    train_on(right, batches(12), "line")
    right.reset_companion()
    penalties = train_on(right, batches()[12:], "line")
    assert penalties[0] == 0.0
    assert penalties[-1] > 0.0


@OPENED
def test_a_resumed_companion_masks_what_it_did():
    whole, first = with_a_companion(-1e4), with_a_companion(-1e4)
    data = batches()
    train_on(whole, data, "line")
    train_on(first, data[:15], "line")
    second = with_a_companion(-1e4)
    second.model.load_state_dict(first.model.state_dict())
    second.model.step = 15
    second.load_state_dict(first.state_dict())
    second.companion.step = 0
    train_on(second, data[15:], "line")
    assert_same_networks(second, whole)


# ---- what the line reads ---------------------------------------------------------------------------------------------


def two_of_six(step, x):
    return torch.arange(CLASSES) >= 2


@pytest.mark.parametrize("number", [-INF, -1e3])
def test_two_open_classes_are_read_from_the_first_batch_on(number):
    """As two classes are: split digits, tasks of two."""
    model, theirs = Masked(two_of_six, number), Masked(two_of_six)
    optimizer, plain = wrap(model), sgd(theirs)
    known = {}
    settings = {"weight": 0.7, "alpha": 0.6, "numbers": {}}
    for x, y in batches():
        take_step(optimizer, x, y % 2)
        dcp_step(theirs, known, plain, x, y % 2, F.cross_entropy, DISTANCES["mse"], **settings)
    assert optimizer.logs()["skipped"] == 0
    assert_same(optimizer.model, theirs, **NEAR)
