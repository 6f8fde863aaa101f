"""Batches that are not finite: neither the companion nor the prototypes take them in, and training goes on."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.forecaster import LOOK_EVERY
from dcl_optim.regularizer import Regularizer
from tests.helpers import CLASSES, assert_same, batches, cells, mlp, sgd, train

NAN, INF = float("nan"), float("inf")
STEPPED = "ignore:non-finite logits or loss"
PRECISIONS = {
    "float32": (torch.float32, None),
    "float64": (torch.float64, None),
    "bfloat16": (torch.bfloat16, None),
    "float16 autocast": (torch.float32, torch.float16),
}


class Script:
    """A training script, as it skips a bad batch or does not."""

    def __init__(self, variant: str, precision: str = "float32", device: str = "cpu", **options: Any) -> None:
        dtype, self.autocast = PRECISIONS[precision]
        self.model, self.criterion, self.device = mlp(dtype=dtype).to(device), nn.CrossEntropyLoss(), device
        base = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        options = {"weight": 0.7, "alpha": 0.4} | options
        self.optimizer: Any
        if variant == "dcl":
            self.optimizer = DCLOptimizer(base, self.model, **options)
        else:
            self.optimizer = DCPOptimizer(base, self.model, CLASSES, **options)
        self.dtype = dtype

    def backward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
        x, y = x.to(self.device, self.dtype), y.to(self.device)
        if isinstance(self.optimizer, DCPOptimizer):
            self.optimizer.set_targets(y)
        with torch.autocast(self.device, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            loss = factor * self.criterion(self.model(x), y)
        loss.backward()
        return loss

    def train(self, data: Any) -> None:
        for x, y in data:
            self.optimizer.zero_grad()
            self.backward(x, y)
            self.optimizer.step()

    def state(self) -> Any:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    def forecasts(self) -> list[Tensor]:
        if isinstance(self.optimizer, DCPOptimizer):
            return [self.optimizer.prototypes]
        return [*self.optimizer.companion.parameters()]

    def require_finite(self) -> None:
        assert all(bool(tensor.isfinite().all()) for tensor in [*self.model.parameters(), *self.forecasts()])


def nan_in_the_input(script: Script, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[1, 2] = NAN
    return script.backward(x, y)


def inf_in_the_input(script: Script, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[1, 2] = INF
    return script.backward(x, y) * NAN  # tanh(inf) is 1: the script skips it for another reason


def nan_in_the_loss(script: Script, x: Tensor, y: Tensor) -> Tensor:
    return script.backward(x, y, NAN)


def inf_in_the_loss(script: Script, x: Tensor, y: Tensor) -> Tensor:
    return script.backward(x, y, INF)


BAD: dict[str, Callable[..., Tensor]] = {
    "nan in the input": nan_in_the_input,
    "inf in the input": inf_in_the_input,
    "nan in the loss": nan_in_the_loss,
    "inf in the loss": inf_in_the_loss,
}


def skip_by_zero_grad(script: Script, bad: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    script.optimizer.zero_grad()
    if not bool(bad(script, x, y).isfinite()):
        script.optimizer.zero_grad()


def skip_by_zeros(script: Script, bad: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    script.optimizer.zero_grad()
    bad(script, x, y)
    for parameter in script.model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()


def skip_as_a_scaler_does(script: Script, bad: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    """It does not step, and the next batch begins with zero_grad."""
    script.optimizer.zero_grad()
    bad(script, x, y)


SKIPS = {"zero_grad": skip_by_zero_grad, "zeros": skip_by_zeros, "scaler": skip_as_a_scaler_does}


VARIANTS = ["dcl", "dcp"]
# Each variant, precision, kind of batch and way of skipping it, at the start and later.
SKIPPED = [
    ("dcl", "float32", "nan in the input", "zero_grad", 0),
    ("dcl", "float64", "inf in the loss", "zeros", 0),
    ("dcl", "float64", "nan in the loss", "zero_grad", 2),
    ("dcl", "bfloat16", "inf in the input", "scaler", 2),
    ("dcl", "float16 autocast", "nan in the input", "scaler", 0),
    ("dcl", "float16 autocast", "inf in the loss", "zeros", 2),
    ("dcp", "float32", "inf in the loss", "scaler", 0),
    ("dcp", "float32", "nan in the input", "zeros", 2),
    ("dcp", "float64", "inf in the input", "zero_grad", 2),
    ("dcp", "bfloat16", "nan in the loss", "zero_grad", 0),
    ("dcp", "float16 autocast", "nan in the input", "zeros", 0),
    ("dcp", "float16 autocast", "inf in the loss", "zero_grad", 2),
]


@pytest.mark.parametrize(
    ("variant", "precision", "bad", "skip", "start"),
    cells(itertools.product(VARIANTS, PRECISIONS, BAD, SKIPS, [0, 2]), *SKIPPED),
)
def test_a_skipped_batch_leaves_no_trace(variant, precision, bad, skip, start):
    found = []
    for meets_it in (True, False):
        script = Script(variant, precision)
        data = list(batches(start + 6))
        script.train(data[:start])
        if meets_it:
            SKIPS[skip](script, BAD[bad], *data[start])
        script.train(data[start + 1 :])
        found.append(script.state())
        script.require_finite()
    assert_same(*found)


def zeros(gradient: Tensor) -> None:
    gradient.zero_()


def no_nan(gradient: Tensor) -> None:
    torch.nan_to_num_(gradient, nan=0.0, posinf=0.0, neginf=0.0)


STEPPED_ON = [
    ("dcl", "float32", "nan in the input", zeros, 0),
    ("dcl", "float64", "inf in the loss", no_nan, 4),
    ("dcl", "bfloat16", "nan in the loss", zeros, 4),
    ("dcl", "float16 autocast", "inf in the input", no_nan, 0),
    ("dcp", "float32", "inf in the loss", zeros, 4),
    ("dcp", "float64", "nan in the input", no_nan, 0),
    ("dcp", "bfloat16", "inf in the input", zeros, 0),
    ("dcp", "float16 autocast", "nan in the input", no_nan, 4),
]


@pytest.mark.parametrize(
    ("variant", "precision", "bad", "clean", "start"),
    cells(itertools.product(VARIANTS, PRECISIONS, BAD, [zeros, no_nan], [0, 4]), *STEPPED_ON),
)
@pytest.mark.filterwarnings(STEPPED)
def test_a_batch_whose_gradients_were_cleaned_and_stepped_on_is_not_taken_in(variant, precision, bad, clean, start):
    script = Script(variant, precision)
    data = list(batches(start + 6))
    script.train(data[:start])
    script.optimizer.zero_grad()
    BAD[bad](script, *data[start])
    for parameter in script.model.parameters():
        assert parameter.grad is not None
        clean(parameter.grad)
    script.optimizer.step()
    script.require_finite()
    script.train(data[start + 1 :])
    script.require_finite()
    assert 0 < script.optimizer.penalty < INF


def step_with_zeros(script: Script, run: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    script.optimizer.zero_grad()
    run(script, x, y)
    for parameter in script.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    script.optimizer.step()


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_step_on_such_a_batch_is_said_once(variant):
    script = Script(variant)
    script.train(batches(6))
    *data, last = batches(3, seed=2)
    with pytest.warns(UserWarning, match="non-finite logits or loss"):
        step_with_zeros(script, nan_in_the_input, *last)
    for batch in data:  # an error if it warned again
        step_with_zeros(script, nan_in_the_input, *batch)


@pytest.mark.filterwarnings(STEPPED)
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_the_other_forwards_of_the_step_are_learned_from(variant):
    """As if the bad one, from which the base gets a gradient of zero, had not been there."""
    found = []
    for meets_it in (True, False):
        script = Script(variant, "float64")
        data = list(batches(9))
        script.train(data[:4])
        script.optimizer.zero_grad()
        script.backward(*data[4])
        if meets_it:
            good = [parameter.grad.clone() for parameter in script.model.parameters()]
            nan_in_the_input(script, *data[5])
            for parameter, gradient in zip(script.model.parameters(), good, strict=True):
                parameter.grad.copy_(gradient)
        script.backward(*data[6])
        script.optimizer.step()
        script.train(data[7:])
        found.append(script.state())
    assert_same(*found)


# ---- a companion and prototypes that are not finite ------------------------------------------------------------------


def lose(script: Script, where: str) -> None:
    if where == "weights":
        script.optimizer.companion[0].weight.data[0, 0] = NAN
    elif where == "overflow":
        script.optimizer.companion[2].bias.data.fill_(INF)
    else:
        state = script.optimizer.state_dict()
        state["dcl_optim.DCLOptimizer"]["forecaster"]["model"]["0.weight"][0] = NAN
        script.optimizer.load_state_dict(state)


BASES = [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD]
PLACES = ["weights", "overflow", "loaded"]


@pytest.mark.filterwarnings(STEPPED)
@pytest.mark.parametrize(("base", "where"), cells(itertools.product(BASES, PLACES), *zip(BASES, PLACES, strict=True)))
def test_a_companion_that_is_not_finite_is_copied_anew(where, base):
    script = Script("dcl")
    script.optimizer = DCLOptimizer(base(script.model.parameters(), lr=1e-2), script.model, weight=0.7, alpha=0.4)
    *data, last = batches(6)
    script.train(data[:3])
    lose(script, where)
    with pytest.warns(UserWarning, match="it is copied from the model"):
        script.train(data[3:4])
    assert_same(script.optimizer.companion.state_dict(), script.model.state_dict())
    script.train([*data[4:], last])
    script.require_finite()
    assert 0 < script.optimizer.penalty < INF


@pytest.mark.filterwarnings(STEPPED)
def test_a_companion_of_the_scripts_own_is_left_to_the_script():
    script = Script("dcl", companion=mlp(seed=1, dtype=torch.float32))
    lose(script, "weights")
    with pytest.warns(UserWarning, match="load weights into optimizer.companion"):
        script.train(batches(1))
    assert all(bool(p.isfinite().all()) for p in script.model.parameters())


def test_prototypes_of_a_state_that_are_not_finite_start_anew():
    script = Script("dcp")
    script.train(batches(4))
    state = script.optimizer.state_dict()
    state["dcl_optim.DCPOptimizer"]["forecaster"]["values"][2, 1] = NAN
    with pytest.warns(UserWarning, match=r"prototypes of classes \[2\] are not finite in this state"):
        script.optimizer.load_state_dict(state)
    assert script.optimizer.forecaster.seen.tolist() == [True, True, False, True, True]
    script.train(batches(3, seed=2))
    script.require_finite()
    assert bool(script.optimizer.forecaster.seen.all())


# ---- a device, which is not looked at --------------------------------------------------------------------------------


def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a batch is finite stays in a tensor."""

    def are_finite(self: Regularizer, value: Tensor, scale: Any) -> Tensor:
        return value * 0.0 * scale == 0.0

    monkeypatch.setattr(Regularizer, "_are_finite", are_finite)


@pytest.mark.parametrize(
    ("variant", "precision", "bad", "start"),
    cells(
        itertools.product(VARIANTS, PRECISIONS, BAD, [0, 4]),
        ("dcl", "float32", "nan in the input", 4),
        ("dcl", "float64", "nan in the loss", 0),
        ("dcl", "bfloat16", "inf in the loss", 0),
        ("dcl", "float16 autocast", "inf in the loss", 4),
        ("dcp", "float32", "inf in the loss", 0),
        ("dcp", "float64", "inf in the input", 4),
        ("dcp", "bfloat16", "nan in the input", 0),
        ("dcp", "float16 autocast", "nan in the loss", 4),
    ),
)
def test_without_a_look_it_is_not_taken_in_either(variant, precision, bad, start, monkeypatch):
    as_on_a_device(monkeypatch)
    script = Script(variant, precision)
    data = list(batches(start + 6))
    script.train(data[:start])
    step_with_zeros(script, BAD[bad], *data[start])
    script.require_finite()
    script.train(data[start + 1 :])
    script.require_finite()
    assert 0 < script.optimizer.penalty < INF


@pytest.mark.parametrize("loss_scale", ["auto", 0.3])
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_without_a_look_finite_batches_are_trained_on_as_with_one(variant, loss_scale, monkeypatch):
    found = []
    for looks in (True, False):
        if not looks:
            as_on_a_device(monkeypatch)
        script = Script(variant, "float64", loss_scale=loss_scale)
        script.train(batches(6))
        found.append(script.state())
    assert_same(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_on_a_gpu_it_is_not_taken_in_either(variant, bad, precision):
    script = Script(variant, precision, "cuda")
    data = list(batches(10))
    script.train(data[:4])
    step_with_zeros(script, BAD[bad], *data[4])
    script.train(data[5:])
    script.require_finite()
    assert 0 < script.optimizer.penalty < INF


@pytest.mark.gpu
@pytest.mark.filterwarnings(STEPPED)
def test_on_a_gpu_a_companion_that_is_not_finite_is_found_once_in_a_hundred_steps():
    script = Script("dcl", "float32", "cuda")
    script.train(batches(3))
    lose(script, "weights")
    data = list(batches(LOOK_EVERY - 3))
    script.train(data[:-1])
    assert all(bool(p.isfinite().all()) for p in script.model.parameters())
    with pytest.warns(UserWarning, match="it is copied from the model"):
        script.train(data[-1:])
    script.require_finite()


# ---- ranks -----------------------------------------------------------------------------------------------------------


MEETINGS = [("dcl", "input"), ("dcp", "input"), ("dcl", "weights")]


def worker(rank: int, folder: Path) -> None:
    for variant, where in MEETINGS:
        torch.save(one_rank_meets_it(rank, variant, where), folder / f"{variant} {where} {rank}.pt")


def one_rank_meets_it(rank: int, variant: str, where: str) -> list[Tensor]:
    script = Script(variant, "float64")
    wrapped = nn.parallel.DistributedDataParallel(script.model)
    script.model = wrapped
    data = list(batches(8))
    script.train(data[rank : rank + 4])
    if where == "weights":
        with torch.no_grad():
            script.optimizer.companion[0].weight[0, 0] = NAN
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step_with_zeros(script, nan_in_the_input if (where, rank) == ("input", 0) else Script.backward, *data[4])
    script.train(data[5 + rank : 7 + rank])
    script.require_finite()
    return script.forecasts()


@pytest.mark.parametrize(("variant", "where"), MEETINGS)
def test_a_rank_that_meets_it_leaves_the_others_in_step(variant, where, ranks: Path):
    assert_same(*(torch.load(ranks / f"{variant} {where} {rank}.pt") for rank in (0, 1)))


# ---- classes that are masked -----------------------------------------------------------------------------------------


class MaskedByRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        mask = F.one_hot(x[:, 0].abs().mul(10).long() % 2, CLASSES).bool()
        return self.net(x).masked_fill(mask, -INF)


def test_masks_that_differ_by_row_are_said_to_have_no_prototypes():
    """They held minus infinity for one row, and nan from then on."""
    model, criterion = MaskedByRow(), nn.CrossEntropyLoss()
    optimizer = DCPOptimizer(sgd(model), model, CLASSES)
    data = [(x, 2 + torch.arange(len(x)) % (CLASSES - 2)) for x, _ in batches(4)]
    with pytest.warns(UserWarning, match="masked alike in all rows"):
        train(model, optimizer, data, criterion)
    assert not optimizer.prototypes.isnan().any()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
