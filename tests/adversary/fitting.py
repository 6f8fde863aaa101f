"""Trainings of plain cross-entropies until the model fits, whose labels and loss scale are known.

``python -m tests.adversary fitting SEED`` prints what was read in each setting.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.layout import to_rows
from dcl_optim.loss.reader import LossReader

COUNTS = ("trainings", "ended", "batches", "unread", "rows", "wrong", "off")
HALF = (torch.bfloat16, torch.float16)


@dataclass
class Training:
    """One training.

    Attributes:
        layout: "rows", "flattened" or "transposed" tokens (B, T, K), or "images" (N, K, H, W).
        place: of the loss: "inside" autocast, "outside" of it, or a "pure" model in half precision.
        smoothing: the label smoothing; ``spread`` over the other classes alone.
        factor: what the loss of a step is multiplied by.
        before: steps without the wrapper, after which the model fits.
    """

    seed: int
    classes: int
    dtype: torch.dtype = torch.float32
    layout: str = "rows"
    place: str = "outside"
    smoothing: float = 0.0
    is_spread: bool = False
    reduction: str = "mean"
    ignored: float = 0.0
    noise: float = 0.0
    steps: int = 150
    before: int = 0
    lr: float = 5e-3
    size: int = 48
    growth: int = 0
    dcp: bool = True
    factor: Callable[[int], float] = field(default=lambda step: 1.0)

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        if z.ndim == 3 and self.layout == "flattened":
            z, y = z.flatten(0, 1), y.flatten()
        elif z.ndim == 3:
            z = z.transpose(1, 2)
        smoothing = self.smoothing
        if self.is_spread:  # as in speech and translation: the label's own share is 1 - smoothing
            smoothing *= self.classes / (self.classes - 1)
        return F.cross_entropy(z, y, label_smoothing=smoothing, reduction=self.reduction)  # type: ignore[arg-type]


def run(training: Training) -> Counter[str]:
    """Train, and count what was read."""
    counts: Counter[str] = Counter(trainings=1)
    truth: list[Any] = []
    read = LossReader.read

    def spy(reader: LossReader, forward: Any, gradient: Tensor) -> Any:
        reading = read(reader, forward, gradient)
        _compare(counts, reading, gradient, forward, *truth)
        return reading

    LossReader.read = spy  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _train(training, truth, counts)
    except RuntimeError as error:
        if "cannot read" not in str(error):
            raise
        counts["ended"] += 1
    finally:
        LossReader.read = read  # type: ignore[method-assign]
    return counts


def _model(training: Training) -> tuple[nn.Module, Tensor, Tensor]:
    t, count = training, 64
    if t.classes >= 300:  # tokens
        model: nn.Module = nn.Sequential(nn.Embedding(count, 32), nn.Linear(32, t.classes))
        x = torch.arange(count)
    elif t.layout == "images":
        model = nn.Sequential(nn.Conv2d(16, 64, 1), nn.ReLU(), nn.Conv2d(64, t.classes, 1))
        x = torch.randn(count, 16, 2, 2)
    else:
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, t.classes))
        x = torch.randn(count, 16) if t.layout == "rows" else torch.randn(count, 4, 16)
    y = torch.randint(t.classes, (count, *x.shape[2:]) if t.layout == "images" else x.shape[: x.ndim - (x.ndim > 1)])
    if t.place == "pure":
        model = model.to(t.dtype)
        x = x.to(t.dtype) if x.is_floating_point() else x
    return model, x, y


def _train(training: Training, truth: list[Any], counts: Counter[str]) -> None:
    t = training
    torch.manual_seed(t.seed)
    model, x, y = _model(t)
    base = torch.optim.AdamW(model.parameters(), t.lr, weight_decay=0.0, eps=1e-8 if t.place != "pure" else 1e-4)
    enabled = t.dtype == torch.float16 and t.place != "pure"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=t.growth or 2000, enabled=enabled)
    optimizer: Any = base
    for step in range(t.before + t.steps):
        if step == t.before:
            optimizer = (DCPOptimizer if t.dcp else DCLOptimizer)(base, model, weight=0.1 if t.dcp else 0.01)
            y = torch.where(torch.rand(y.shape) < t.noise, torch.randint_like(y, t.classes), y)
        q = torch.randint(len(x), (t.size if x.ndim < 3 and t.layout == "rows" else t.size // 4,))
        if t.classes >= 300 and t.layout != "rows":
            q = torch.randint(len(x), (t.size // 8, 8))
        labels = y[q].clone()
        if t.ignored:
            labels[torch.rand(labels.shape) < t.ignored * torch.rand(())] = -100
            labels.view(-1)[0] = y[q].view(-1)[0]
        optimizer.zero_grad()
        with torch.autocast("cpu", t.dtype, enabled=t.dtype in HALF and t.place != "pure"):
            z = model(x[q])
            loss = t.loss(z, labels) if t.place == "inside" else None
        loss = t.loss(z, labels) if loss is None else loss
        factor = t.factor(step - t.before)
        num_rows = int((labels >= 0).sum()) if t.reduction == "mean" else 1
        truth[:] = labels, factor * scaler.get_scale() / num_rows
        scaler.scale(factor * loss).backward()
        if t.reduction == "sum":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def _compare(counts: Counter[str], reading: Any, gradient: Tensor, forward: Any, y: Tensor, a: float) -> None:
    y = y.flatten()
    g = to_rows(gradient, forward.class_dim)
    live = g.any(1)
    if not bool(g.isfinite().all()) or not bool(live.any()):
        return
    counts["batches"] += 1
    if reading is None or not bool(reading.fits):
        counts["unread"] += 1
        return
    if len(reading.labels) == len(y):
        labelled = reading.labels < g.shape[1]
        counts["rows"] += int(labelled.sum())
        counts["wrong"] += int((labelled & (reading.labels != y)).sum())
    counts["off"] += abs(float(reading.scale) / float(reading.num_live) / a - 1.0) > 0.02


def _trainings(seed: int) -> Iterator[tuple[str, Training]]:
    rng = random.Random(seed)

    def new(name: str, classes: int, **more: Any) -> tuple[str, Training]:
        return name, Training(rng.randrange(10**6), classes, dcp=classes <= 8000 and rng.random() < 0.7, **more)

    both = (0.0, rng.choice([0.03, 0.1, 0.2]))
    for dtype in HALF:
        for layout in ("rows", "transposed", "flattened", "images"):
            for smoothing in both:
                place = rng.choice(["outside", "inside", "pure"] if dtype == torch.bfloat16 else ["outside", "inside"])
                few = rng.choice([3, 5, 10, 37])
                yield new(
                    f"half precision, {layout}", few, dtype=dtype, layout=layout, place=place, smoothing=smoothing
                )
    for layout in ("rows", "transposed", "flattened"):
        for classes in (1000, 8000):
            for smoothing in both:
                yield new(
                    f"float32, many classes, {layout}", classes, layout=layout, smoothing=smoothing, lr=2e-2, steps=80
                )
    yield new("float32, 32,000 classes, transposed", 32_000, layout="transposed", lr=3e-2, steps=25, size=32)
    yield new(
        "float32, 32,000 classes, transposed", 32_000, layout="transposed", lr=3e-2, steps=25, size=32, smoothing=0.1
    )
    changes: dict[str, Callable[[int], float]] = {
        "falls": lambda step: 1.0 if step < 100 else 0.25,
        "rises": lambda step: 0.25 if step < 100 else 1.0,
        "warm-up": lambda step: min(1.0, (step + 1) / 120),
        "accumulation": lambda step: 1.0 if step % 5 else 0.25,
        "decays": lambda step: 0.97**step,
    }
    for name, factor in changes.items():
        for dtype in (torch.float32, *HALF):
            smoothing = rng.choice([0.03, 0.1, 0.2])
            few = rng.choice([2, 3, 5, 10])
            yield new("a factor that changes", few, dtype=dtype, smoothing=smoothing, factor=factor, steps=200)
    for dtype in HALF:
        for classes in (2, 3, 10, 100):
            yield new("sum, ignored rows", classes, dtype=dtype, smoothing=0.1, reduction="sum", ignored=0.9)
    for dtype in (torch.float32, *HALF):
        for classes in (2, 3, 4, 10, 100):
            for smoothing in both:
                for noise in (0.0, 0.1):
                    yield new(
                        "a checkpoint that fits",
                        classes,
                        dtype=dtype,
                        smoothing=smoothing,
                        noise=noise,
                        before=200,
                        steps=40,
                    )
    for classes in (5, 100, 1000):
        for layout in ("rows", "transposed"):
            smoothing = rng.choice([0.1, 0.2])
            options = {"dtype": torch.float16, "layout": layout, "growth": 10, "smoothing": smoothing}
            yield new("a scaler that grows", classes, **options, steps=200)
    for dtype in (torch.float32, *HALF):
        for classes in (4, 10, 100):
            place = rng.choice(["outside", "inside"])
            spread = {"smoothing": 0.1, "is_spread": True}
            yield new("smoothing of the other classes", classes, dtype=dtype, place=place, **spread)
            odd = {"smoothing": 0.1 / 1.1}
            yield new("smoothing of the other classes", classes, dtype=dtype, place=place, **odd)


def count(seed: int, parts: int = 1) -> dict[str, Counter[str]]:
    """What was read in the trainings of a seed, or in one of ``parts`` of them, by setting."""
    counts: dict[str, Counter[str]] = {}
    for number, (name, training) in enumerate(_trainings(seed)):
        if number % parts == seed % parts:
            counts.setdefault(name, Counter()).update(run(training))
    return counts
