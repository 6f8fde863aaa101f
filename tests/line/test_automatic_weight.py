"""The automatic weight: the rule, the running mean that it follows, and its state; ranks are in test_prototypes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import AutoWeight, DCLOptimizer, DCPOptimizer
from dcl_optim.distances import mse
from tests.helpers import assert_same, sgd
from tests.reference import NEAR, dcp_step

CLASSES, FEATURES, ROWS = 4, 6, 12
KEY = "dcl_optim.DCPOptimizer"
RULE = AutoWeight(floor=0.05, power=2.0, classes=CLASSES)  # which moves in the first steps already


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


def batches(steps, seed=1):
    """Rows that can be learned: the label is the highest of the first features."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return list(zip(x, x[..., :CLASSES].argmax(-1), strict=True))


def wrap(model, **options):
    return DCPOptimizer(sgd(model), model, **{"num_classes": CLASSES, "weight": RULE} | options)


def trained(steps, accumulate=1, **options):
    model = network()
    optimizer = wrap(model, **options)
    for x, y in batches(steps):
        step(model, optimizer, x, y, accumulate)
    return model, optimizer


def step(model, optimizer, x, y, accumulate=1):
    optimizer.zero_grad()
    for part, labels in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
        (F.cross_entropy(model(part), labels) / accumulate).backward()
    optimizer.step()


def fit_of(optimizer):
    """The decayed numbers of rows that were predicted right, and that have a label."""
    return optimizer.state_dict()[KEY]["forecaster"]["fit"]


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "accuracy", "classes", "weight"),
    [
        (AutoWeight(), 0.0, 100, 0.1),
        (AutoWeight(), 0.68, 100, 0.1),
        (AutoWeight(), 1.0, 100, 1.0),
        (AutoWeight(), 0.9, 1_000, 0.531441),
        (AutoWeight(), 1.0, 10, 0.1),
        (AutoWeight(), 1.0, 99, 0.99),
        (AutoWeight(), 0.9, 50, 0.2657205),
        (AutoWeight(0.0, 2), 0.5, 100, 0.25),
        (AutoWeight(0.0, 1, classes=4), 0.5, 2, 0.25),
    ],
)
def test_the_weight_by_hand(rule, accuracy, classes, weight):
    assert float(rule.at(torch.tensor(accuracy, dtype=torch.float64), classes)) == pytest.approx(weight, rel=1e-15)


@pytest.mark.parametrize(
    ("accumulate", "update", "rule"),
    [(1, "rows", RULE), (3, "rows", RULE), (1, "batch", RULE), (1, "rows", AutoWeight(0.0, 1.5, 6 * CLASSES))],
)
def test_training_equals_a_loop_by_hand(accumulate, update, rule):
    """The accuracy of a step is that of the steps before it; micro-batches count by their rows."""
    model, optimizer = trained(150, accumulate, update=update, weight=rule)
    theirs, prototypes, numbers = network(), {}, {}
    plain = sgd(theirs)
    right = labelled = 0.0
    for x, y in batches(150):
        accuracy = right / labelled if labelled else 0.0
        weight = max(rule.floor, min(1.0, CLASSES / rule.classes) * accuracy**rule.power)
        right = 0.98 * right + int((theirs(x).argmax(1) == y).sum())
        labelled = 0.98 * labelled + len(y)
        counted = numbers if update == "rows" else None
        dcp_step(theirs, prototypes, plain, x, y, F.cross_entropy, mse, weight=weight, alpha=0.97, numbers=counted)
    assert accuracy > 0.8
    assert_same(model, theirs, **NEAR)
    assert_same(optimizer.prototypes, torch.stack([prototypes[k] for k in range(CLASSES)]), **NEAR)
    assert_same(fit_of(optimizer), torch.tensor([right, labelled], dtype=torch.float64), rtol=1e-12)
    logs = optimizer.logs()
    assert logs["train_accuracy"] == pytest.approx(right / labelled, rel=1e-12)
    assert logs["weight"] == pytest.approx(weight, rel=1e-12)


def test_auto_is_the_default_rule():
    _, optimizer = trained(10, weight="auto")
    assert optimizer.weight == AutoWeight(floor=0.1, power=6.0, classes=100.0)
    assert "weight=auto" in repr(optimizer)
    _, given = trained(10, weight=AutoWeight())
    assert_same(optimizer.state_dict(), given.state_dict())


# ---- what is counted -------------------------------------------------------------------------------------------------


SOFT = [[0.7, 0.3, 0, 0], [0.6, 0.4, 0, 0], [0, 0, 1, 0], [0.1, 0.2, 0.3, 0.4]]


@pytest.mark.parametrize(
    ("labels", "by_term", "right", "labelled"),
    [
        (torch.tensor([0, 1, 3, -100]), False, 2, 3),
        (torch.tensor([0, 1, 3, -100]), True, 2, 3),
        (torch.tensor([-100] * 4), False, 0, 0),
        (torch.tensor(SOFT, dtype=torch.float64), True, 3, 4),
    ],
    ids=["rows with a label, read", "rows with a label, given", "no labels", "of soft labels the largest share"],
)
def test_what_counts_as_right(labels, by_term, right, labelled):
    """Row i predicts class i. A second step, of which all rows are right, counts beside 0.98 of the first one."""
    model = nn.Linear(4, 4, bias=False).double()
    nn.init.eye_(model.weight)
    optimizer = DCPOptimizer(sgd(model, lr=0.0), model, num_classes=4, weight=RULE)
    for these in (labels, torch.arange(4)):
        optimizer.zero_grad()
        z = model(2 * torch.eye(4, dtype=torch.float64))
        loss = F.cross_entropy(z, these, reduction="sum")
        penalty = optimizer.penalty(z, these) if by_term else 0.0
        (loss + penalty).backward()
        optimizer.step()
    expected = torch.tensor([0.98 * right + 4, 0.98 * labelled + 4], dtype=torch.float64)
    assert_same(fit_of(optimizer), expected, rtol=1e-12)


def leave_out(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()


def skip_by_scaler(model, optimizer, x, y):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    model[0].weight.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


def step_on_nan(model, optimizer, x, y):
    (F.cross_entropy(model(x), y) * math.nan).backward()
    for parameter in model.parameters():
        parameter.grad = None
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    optimizer.step()


@pytest.mark.filterwarnings("ignore:non-finite")
@pytest.mark.parametrize("skip", [leave_out, skip_by_scaler, step_on_nan])
def test_a_batch_that_is_not_learned_from_does_not_count(skip):
    model, optimizer = trained(3)
    before = optimizer.logs()["train_accuracy"]
    optimizer.zero_grad()
    skip(model, optimizer, *batches(1, seed=5)[0])
    assert optimizer.logs()["train_accuracy"] == pytest.approx(before, rel=1e-12)


# ---- the state -------------------------------------------------------------------------------------------------------


def test_it_may_be_set_in_the_middle_of_a_run():
    """What it counts begins then, also where a state of a run with another weight is loaded."""
    model, optimizer = trained(5, weight=0.0)
    assert "train_accuracy" not in optimizer.logs()
    optimizer.weight = RULE
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.logs()["train_accuracy"] == 0.0
    for x, y in batches(3):
        step(model, optimizer, x, y)
    assert fit_of(optimizer)[1] == pytest.approx(ROWS * (1 + 0.98 + 0.98**2))
    optimizer.weight = 0.5
    assert optimizer.weight == 0.5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"floor": -0.1}, ValueError, r"floor=-0.1 must be in \[0, inf\)"),
        ({"floor": math.inf}, ValueError, r"floor=inf must be in \[0, inf\)"),
        ({"floor": "0"}, TypeError, r"floor='0' must be a number"),
        ({"power": 0}, ValueError, r"power=0 must be in \(0, inf\)"),
        ({"classes": 0}, ValueError, r"classes=0 must be in \(0, inf\)"),
    ],
)
def test_what_cannot_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        AutoWeight(**options)


def test_an_optimizer_that_reads_no_labels_has_no_automatic_weight():
    model = network()
    with pytest.raises(ValueError, match=r"weight=AutoWeight\(.* is not known here; pass a number"):
        DCLOptimizer(sgd(model), model, weight=AutoWeight(), companion_fraction=1)
    optimizer = DCLOptimizer(sgd(model), model, companion_fraction=1)
    with pytest.raises(ValueError, match=r"weight='auto' is not known here; pass a number or a callable of the step"):
        optimizer.weight = "auto"
    assert optimizer.weight == 0.1
