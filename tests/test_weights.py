"""The automatic weight: the rule, what is counted, and that it is a state like any other."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dcl_optim import AutoWeight, DCLOptimizer, DCPOptimizer
from dcl_optim.distances import mse
from dcl_optim.reference import dcp_step
from tests.helpers import assert_same, on_two_ranks, sgd

CLASSES, FEATURES, ROWS = 4, 6, 12
KEY = "dcl_optim.DCPOptimizer"
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
READ = (3, 4, 6, 10, 18, 34, 66, 102, 202)  # the steps at whose end the accuracy is read
RULE = AutoWeight(floor=0.05, power=2.0, classes=CLASSES)  # which moves in the first steps already


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


def batches(steps: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Rows that can be learned: the label is the highest of the first features."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return list(zip(x, x[..., :CLASSES].argmax(-1), strict=True))


def wrap(model: nn.Module, **options: Any) -> DCPOptimizer:
    return DCPOptimizer(sgd(model), model, CLASSES, **{"weight": RULE} | options)


def trained(steps: int, accumulate: int = 1, **options: Any) -> tuple[nn.Module, DCPOptimizer]:
    model = network()
    optimizer = wrap(model, **options)
    for x, y in batches(steps):
        step(model, optimizer, x, y, accumulate)
    return model, optimizer


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, accumulate: int = 1) -> None:
    optimizer.zero_grad()
    for part, labels in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
        (F.cross_entropy(model(part), labels) / accumulate).backward()
    optimizer.step()


def right_of(model: nn.Module, x: Tensor, y: Tensor) -> int:
    return int((model(x).argmax(1) == y).sum())


def weights(optimizer: DCPOptimizer) -> dict[str, Any]:
    return optimizer.state_dict()[KEY]["weight"]


# ---- the rule --------------------------------------------------------------------------------------------------------


def test_the_weight_by_hand():
    assert [AutoWeight().at(a, 100) for a in (0.0, 0.68, 1.0)] == [0.1, 0.1, 1.0]
    assert AutoWeight().at(0.9, 1_000) == pytest.approx(0.531441)
    assert AutoWeight(0.0, 2).at(0.5, 100) == 0.25


def test_with_fewer_than_100_classes_it_grows_to_their_number_over_100():
    assert [AutoWeight().at(1.0, k) for k in (2, 10, 40, 99, 100, 101)] == [0.1, 0.1, 0.4, 0.99, 1.0, 1.0]
    assert AutoWeight().at(0.9, 50) == pytest.approx(0.2657205)
    assert AutoWeight(0.0, 1, classes=4).at(0.5, 2) == 0.25
    _, optimizer = trained(20, weight=AutoWeight(floor=0.0, power=1.0, classes=10 * CLASSES))
    assert optimizer.logs()["weight"] == pytest.approx(optimizer.logs()["train_accuracy"] / 10)


@pytest.mark.parametrize("update", ["rows", "batch"])
def test_training_equals_a_loop_by_hand(update):
    """120 steps, so that the accuracy is read eight times, the last time over nine steps."""
    model, optimizer = trained(120, update=update)
    theirs, prototypes, numbers = network(), {}, {}
    plain = sgd(theirs)
    accuracy, right, rows = 0.0, 0, 0
    for t, (x, y) in enumerate(batches(120), 1):
        if t <= 64 or t % 4 == 0:
            right, rows = right + right_of(theirs, x, y), rows + len(y)
        weight = max(0.05, accuracy**2)
        counted = numbers if update == "rows" else None
        dcp_step(theirs, prototypes, plain, x, y, F.cross_entropy, mse, weight=weight, alpha=0.97, numbers=counted)
        if t in READ:
            accuracy, right, rows = right / rows, 0, 0
    assert accuracy > 0.8
    assert_same(model, theirs, **CLOSE)
    assert_same(optimizer.prototypes, torch.stack([prototypes[k] for k in range(CLASSES)]), **CLOSE)
    assert optimizer.logs()["train_accuracy"] == accuracy
    assert optimizer.logs()["weight"] == pytest.approx(accuracy**2)
    assert weights(optimizer) == {"accuracy": accuracy, "right": right, "labelled": rows, "classes": CLASSES}


def test_auto_is_the_default_rule_and_reads_the_labels_itself():
    _, optimizer = trained(10, weight="auto")
    assert optimizer.weight == AutoWeight(floor=0.1, power=6.0, classes=100.0)
    assert "weight=auto" in repr(optimizer)
    _, given = trained(10, weight=AutoWeight())
    assert_same(optimizer.state_dict(), given.state_dict())


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_micro_batches_count_by_rows():
    whole, parts = trained(10)[1], trained(10, accumulate=3)[1]
    assert weights(whole) == weights(parts)
    assert weights(whole)["accuracy"] > 0


def counted(labels: Tensor, z: Tensor, steps: int = 3, **options: Any) -> float:
    """The accuracy after three steps on given labels; ``z`` are the logits."""
    model = nn.Linear(1, 1).double()
    optimizer = DCPOptimizer(sgd(model, lr=0.0), model, z.shape[1], weight=RULE, logits=lambda out: out, **options)
    model.forward = lambda x: x + 0 * model.weight.sum()
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.set_targets(labels)
        F.cross_entropy(model(z), labels).backward()
        optimizer.step()
    return optimizer.logs()["train_accuracy"]


def test_rows_without_a_label_do_not_count():
    z = 2 * torch.eye(4, dtype=torch.float64)
    assert counted(torch.tensor([0, 1, 3, -100]), z) == pytest.approx(2 / 3)


def test_of_soft_labels_the_largest_share_is_the_label():
    z = torch.eye(4, dtype=torch.float64)
    shares = torch.tensor([[0.7, 0.3, 0, 0], [0.6, 0.4, 0, 0], [0.0, 0, 1, 0], [0.1, 0.2, 0.3, 0.4]]).double()
    assert counted(shares, z) == 0.75


def test_a_step_that_was_skipped_does_not_count():
    model = network()
    optimizer = wrap(model)
    for t, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if t != 4:  # as a gradient scaler does
            optimizer.step()
    assert weights(optimizer)["labelled"] == ROWS  # that of step 5: the accuracy was read after step 4


def test_a_step_that_a_gradient_scaler_skips_does_not_count():
    model = network()
    optimizer, scaler = wrap(model), torch.amp.GradScaler("cpu", init_scale=16.0)
    for t, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if t == 4:
            model[0].weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0
    assert weights(optimizer)["labelled"] == ROWS


def test_a_batch_that_is_not_finite_does_not_count():
    model = network()
    optimizer = wrap(model)
    for t, (x, y) in enumerate(batches(2)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss * math.nan if t else loss).backward()
        with pytest.warns(UserWarning, match="non-finite") if t else torch.enable_grad():
            optimizer.step()
    assert weights(optimizer)["labelled"] == ROWS


# ---- the state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_after", [1, 2, 3, 5, 25, 67])
def test_a_resumed_run_is_the_uninterrupted_one(saved_after):
    data = batches(saved_after + 40)
    model, optimizer = network(), None
    optimizer = wrap(model)
    for t, (x, y) in enumerate(data):
        if t == saved_after:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
            resumed = network(seed=7)
            again = wrap(resumed)
            resumed.load_state_dict(state["model"])
            again.load_state_dict(state["optimizer"])
        if t >= saved_after:
            step(resumed, again, x, y)
        step(model, optimizer, x, y)
    assert_same(resumed, model)
    assert_same(again.state_dict(), optimizer.state_dict())
    assert again.logs() == optimizer.logs()


def test_a_copy_goes_on_alone():
    _, optimizer = trained(5)
    before = weights(optimizer)
    other = copy.deepcopy(optimizer)
    step(other.model, other, *batches(1)[0])
    assert weights(optimizer) == before != weights(other)


@pytest.mark.parametrize(
    "state",
    [
        {"accuracy": 2.0, "right": 0, "labelled": 0},
        {"accuracy": 0.5, "right": 3, "labelled": 2},
        {"accuracy": None, "right": 0, "labelled": 0},
        {"accuracy": 0.5},
        [],
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state):
    _, optimizer = trained(5)
    wrong = optimizer.state_dict()
    wrong[KEY] = wrong[KEY] | {"weight": state}
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="state of the weight does not fit"):
        optimizer.load_state_dict(wrong)
    assert_same(optimizer.state_dict(), before)


def test_a_state_of_a_fixed_weight_and_one_of_auto_load_into_each_other():
    _, fixed = trained(5, weight=0.5)
    _, auto = trained(5)
    assert weights(fixed) is None
    before = weights(auto)
    auto.load_state_dict(fixed.state_dict())
    assert weights(auto) == before
    fixed.load_state_dict(auto.state_dict())
    assert fixed.weight == 0.5


def test_it_may_be_set_in_the_middle_of_a_run():
    model, optimizer = trained(5, weight=0.0)
    assert "train_accuracy" not in optimizer.logs()
    optimizer.weight = "auto"
    for x, y in batches(15):
        step(model, optimizer, x, y)
    assert optimizer.logs()["train_accuracy"] > 0.3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"floor": -0.1}, ValueError, r"floor=-0.1 must be finite and >= 0"),
        ({"floor": math.inf}, ValueError, r"floor=inf must be finite and >= 0"),
        ({"floor": "0"}, TypeError, r"floor='0' must be a number"),
        ({"power": 0}, ValueError, r"power=0 must be a positive finite number"),
        ({"classes": 0}, ValueError, r"classes=0 must be a positive finite number"),
    ],
)
def test_what_cannot_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        AutoWeight(**options)


def test_an_optimizer_that_reads_no_labels_has_no_automatic_weight():
    model = network()
    for weight in ("auto", AutoWeight()):
        with pytest.raises(ValueError, match="reads no labels; pass a number or a callable of the step"):
            DCLOptimizer(sgd(model), model, weight=weight)
    optimizer = DCLOptimizer(sgd(model), model)
    with pytest.raises(ValueError, match="reads no labels"):
        optimizer.weight = "auto"
    assert optimizer.weight == 0.1


# ---- two ranks -------------------------------------------------------------------------------------------------------


def worker(rank: int, folder: Path) -> None:
    model = network()
    optimizer = wrap(model)
    parallel = DistributedDataParallel(model)
    for x, y in batches(20):
        half = torch.argsort(y, stable=True).chunk(2)[rank]
        step(parallel, optimizer, x[half], y[half])
    torch.save({"model": model.state_dict(), "weight": weights(optimizer)}, folder / f"{rank}.pt")


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_two_ranks_count_as_one_process_on_the_joint_batch(tmp_path):
    on_two_ranks(worker, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first, second)
    model, optimizer = trained(20)
    assert first["weight"] == weights(optimizer)
    assert_same(first["model"], model.state_dict(), **CLOSE)
