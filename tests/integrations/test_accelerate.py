"""Hugging Face Accelerate: prepare, accumulate, mixed precision, save_state and load_state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, assert_same, batches, cells, dropout_net, mlp

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::DeprecationWarning:torch")
SIZE, STEPS = 16, 6


def distance(first: nn.Module, second: nn.Module) -> float:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return float(sum((a - b).detach().square().sum() for a, b in pairs) ** 0.5)


def wrap(variant: str, model: nn.Module, **options):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if variant == "plain":
        return base
    return (
        DCLOptimizer(base, model, **{"weight": 1.0} | options)
        if variant == "dcl"
        else DCPOptimizer(base, model, **{"weight": 1.0, "alpha": 0.6} | options)
    )


def loader(steps: int = STEPS, dtype: torch.dtype = torch.float64) -> DataLoader:
    x, y = (torch.cat(parts) for parts in zip(*batches(steps, SIZE, dtype=dtype), strict=True))
    return DataLoader(TensorDataset(x, y), SIZE)


class Script:
    """A script that Accelerate's documentation would recognise."""

    def __init__(self, variant, build=mlp, wrapped_after=False, dtype=torch.float64, weight=1.0, **options) -> None:
        self.accelerator = Accelerator(cpu=True, **options)
        torch.manual_seed(0)
        model, self.criterion = build().to(dtype), nn.CrossEntropyLoss()
        data = loader(dtype=dtype)
        if wrapped_after:
            self.model, self.loader = self.accelerator.prepare(model, data)
            optimizer = self.accelerator.prepare(wrap(variant, self.model, weight=weight))
        else:
            self.model, optimizer, self.loader = self.accelerator.prepare(
                model, wrap(variant, model, weight=weight), data
            )
        self.optimizer = optimizer
        self.scheduler = self.accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))

    def train(self, clip: float | None = None) -> Script:
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.criterion(self.model(x), y))
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self

    @property
    def ours(self):
        return self.optimizer.optimizer

    def own(self, variant):
        return self.ours.companion.state_dict() if variant == "dcl" else {"prototypes": self.ours.prototypes}


def by_hand(variant, parts=1, clip=None):
    """The labels that DCP reads are given here."""
    torch.manual_seed(0)
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = wrap(variant, model, **{"num_classes": CLASSES} if variant == "dcp" else {})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for index, (x, y) in enumerate(loader(), start=1):
        if variant == "dcp":
            optimizer.set_targets(y)
        (criterion(model(x), y) / parts).backward()
        if index % parts:
            continue
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("variant", "parts", "clip", "wrapped_after"),
    cells(
        [
            (variant, *loop, after)
            for variant in ("dcl", "dcp")
            for loop in ((1, None), (3, None), (2, 0.05))
            for after in (False, True)
        ],
        ("dcl", 3, None, False),
        ("dcl", 2, 0.05, True),
        ("dcp", 1, None, True),
        ("dcp", 2, 0.05, False),
    ),
)
def test_equals_the_loop_by_hand_bit_for_bit(variant, parts, clip, wrapped_after):
    script = Script(variant, wrapped_after=wrapped_after, gradient_accumulation_steps=parts).train(clip)
    model, optimizer = by_hand(variant, parts, clip)
    assert_same(script.model, model)
    own = optimizer.companion.state_dict() if variant == "dcl" else {"prototypes": optimizer.prototypes}
    assert_same(dict(script.own(variant)), dict(own))
    plain, _ = by_hand("plain", parts, clip)
    assert not torch.equal(plain[0].weight, model[0].weight)


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_state_saved_in_the_middle_resumes_bit_for_bit(variant, tmp_path):
    """Dropout too: Accelerate saves the random state."""
    script = Script(variant, dropout_net).train()
    script.accelerator.save_state(tmp_path)
    script.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    again = Script(variant, dropout_net)
    torch.manual_seed(99)
    again.accelerator.load_state(tmp_path)
    assert again.ours.logs()["step"] == STEPS
    again.train()
    assert_same(again.model, script.model)
    assert_same(dict(again.own(variant)), dict(script.own(variant)))


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_bfloat16_follows_float32(variant):
    """Accelerate hands logits out as a float32 copy; the loss is the script's, on that copy."""
    runs = {}
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state(reset_partial_state=True)
        script = Script(variant, mixed_precision=precision, dtype=torch.float32, weight=20.0).train()
        assert script.ours.logs()["loss_scale"] == pytest.approx(1.0, rel=5e-3)
        runs[precision] = script
    AcceleratorState._reset_state(reset_partial_state=True)
    plain = Script("plain", dtype=torch.float32).train()
    rounding, penalty = (distance(other.model, runs["no"].model) for other in (runs["bf16"], plain))
    assert rounding < 0.1 * penalty
    assert_same(dict(runs["bf16"].own(variant)), dict(runs["no"].own(variant)), atol=2e-2)


def test_cross_entropy_of_the_functional_kind_and_gathered_evaluation():
    script = Script("dcl")
    for x, y in script.loader:
        script.accelerator.backward(F.cross_entropy(script.model(x), y))
        script.optimizer.step()
        script.optimizer.zero_grad()
    steps = script.ours.logs()["step"]
    script.model.eval()
    with torch.no_grad():
        x, y = next(iter(script.loader))
        gathered, _ = script.accelerator.gather_for_metrics((script.model(x), y))
    assert gathered.shape == (SIZE, CLASSES)
    assert script.ours.logs()["step"] == steps == STEPS
    assert script.accelerator.unwrap_model(script.model) is script.model
