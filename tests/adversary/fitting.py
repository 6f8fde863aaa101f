"""Trainings of plain cross-entropies until the model fits, whose labels and loss scale are known.

``python -m tests.adversary fitting SEED`` prints what was read in each setting.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.nn.functional as F
from torch import nn

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
        sure: what logits are multiplied by then.
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
    sure: float = 1.0
    lr: float = 5e-3
    size: int = 48
    growth: int = 0
    dcp: bool = True
    factor: Callable[[int], float] = field(default=lambda step: 1.0)

    def loss(self, z, y):
        if z.ndim == 3 and self.layout == "flattened":
            z, y = z.flatten(0, 1), y.flatten()
        elif z.ndim == 3:
            z = z.transpose(1, 2)
        smoothing = self.smoothing
        if self.is_spread:  # as in speech and translation: the label's own share is 1 - smoothing
            smoothing *= self.classes / (self.classes - 1)
        return F.cross_entropy(z, y, label_smoothing=smoothing, reduction=self.reduction)


def run(training):
    """Train, and count what was read."""
    counts = Counter(trainings=1)
    truth = []
    read = LossReader.read

    def spy(reader, forward, gradient):
        reading = read(reader, forward, gradient)
        _compare(counts, training, reading, gradient, forward, *truth)
        return reading

    LossReader.read = spy
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _train(training, truth, counts)
    except RuntimeError as error:
        if "cannot read" not in str(error):
            raise
        counts["ended"] += 1
    finally:
        LossReader.read = read
    return counts


def _model(training):
    t, count = training, 64
    if t.classes >= 300:  # tokens
        model = nn.Sequential(nn.Embedding(count, 32), nn.Linear(32, t.classes))
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


def _train(training, truth, counts):
    t = training
    torch.manual_seed(t.seed)
    model, x, y = _model(t)
    base = torch.optim.AdamW(model.parameters(), t.lr, weight_decay=0.0, eps=1e-8 if t.place != "pure" else 1e-4)
    enabled = t.dtype == torch.float16 and t.place != "pure"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=t.growth or 2000, enabled=enabled)
    optimizer = base
    for step in range(t.before + t.steps):
        if step == t.before:
            with torch.no_grad():
                for parameter in model[-1].parameters():
                    parameter.mul_(t.sure)
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


def _compare(counts, training, reading, gradient, forward, y, a):
    g = to_rows(gradient, forward.class_dim)
    live = g.any(1)
    if not bool(g.isfinite().all()) or not bool(live.any()):
        return
    counts["batches"] += 1
    if reading is None or not bool(reading.fits):
        counts["unread"] += 1
        return
    if training.dcp:
        y = y.flatten()
        labelled = reading.labels < g.shape[1]
        counts["rows"] += int(labelled.sum())
        counts["wrong"] += int((labelled & (reading.labels != y)).sum())
    is_off = abs(float(reading.scale) / float(reading.num_live) / a - 1.0) > 0.02
    counts["off"] += is_off and _tells_factor(training.smoothing, forward.rows[live], y.flatten()[live])


def _tells_factor(smoothing, z, y):
    """Not if predictions are so uniform that the gradient is about that of another factor without smoothing."""
    p = z.float().softmax(1)
    r = p - F.one_hot(y, p.shape[1])
    added = p - 1.0 / p.shape[1]
    added -= r * ((added * r).sum() / r.square().sum())
    return not smoothing or bool(smoothing * added.norm() > (0.04 if z.dtype in HALF else 0.002) * r.norm())


CHANGES = (
    lambda step: 1.0 if step < 100 else 0.25,
    lambda step: 0.25 if step < 100 else 1.0,
    lambda step: min(1.0, (step + 1) / 120),  # a warm-up
    lambda step: 1.0 if step % 5 else 0.25,  # the last group of an accumulation
    lambda step: 0.97**step,
)
DTYPES = (torch.float32, *HALF)


def _sure():
    """Checkpoints whose predictions are surer than their labels."""
    for dtype, classes, noise in product(DTYPES, (2, 3, 10, 100), (0.0, 0.1)):
        more = {"noise": noise, "before": 200, "steps": 40, "sure": 5.0}
        yield "a checkpoint that is certain of every row", {"dtype": dtype, "classes": classes, "lr": 2e-3, **more}
    for dtype, classes, smoothing, noise in product(DTYPES, (3, 10, 100), (0.1, 0.2), (0.0, 0.1)):
        more = {"smoothing": smoothing, "noise": noise, "before": 200, "steps": 40, "sure": 1.5}
        yield "a checkpoint that is surer than its smoothed labels", {"dtype": dtype, "classes": classes, **more}


def _settings(rng):
    """The name of each setting, and a training's arguments."""
    some = rng.choice([0.03, 0.1, 0.2])
    for dtype, layout, smoothing in product(HALF, ("rows", "transposed", "flattened", "images"), (0.0, some)):
        place = rng.choice(["outside", "inside", "pure"] if dtype == torch.bfloat16 else ["outside", "inside"])
        more = {"dtype": dtype, "layout": layout, "place": place, "smoothing": smoothing}
        yield f"half precision, {layout}", {"classes": rng.choice([3, 5, 10, 37]), **more}
    for layout, classes, smoothing in product(("rows", "transposed", "flattened"), (1000, 8000), (0.0, some)):
        more = {"layout": layout, "classes": classes, "smoothing": smoothing}
        yield f"float32, many classes, {layout}", {"lr": 2e-2, "steps": 80, **more}
    for smoothing in (0.0, 0.1):
        more = {"layout": "transposed", "smoothing": smoothing, "steps": 25, "size": 32}
        yield "float32, 32,000 classes, transposed", {"classes": 32_000, "lr": 3e-2, **more}
    for factor, dtype in product(CHANGES, DTYPES):
        more = {"classes": rng.choice([2, 3, 5, 10]), "smoothing": rng.choice([0.03, 0.1, 0.2])}
        yield "a factor that changes", {"dtype": dtype, "factor": factor, "steps": 200, **more}
    for dtype, classes in product(HALF, (2, 3, 10, 100)):
        more = {"smoothing": 0.1, "reduction": "sum", "ignored": 0.9}
        yield "sum, ignored rows", {"dtype": dtype, "classes": classes, **more}
    for dtype, classes, smoothing, noise in product(DTYPES, (2, 3, 4, 10, 100), (0.0, some), (0.0, 0.1)):
        more = {"smoothing": smoothing, "noise": noise, "before": 200, "steps": 40}
        number = "two" if classes == 2 else "more"
        yield f"a checkpoint that fits, {number} classes", {"dtype": dtype, "classes": classes, **more}
    yield from _sure()
    for classes, layout in product((5, 100, 1000), ("rows", "transposed")):
        more = {"layout": layout, "growth": 10, "smoothing": rng.choice([0.1, 0.2])}
        yield "a scaler that grows", {"dtype": torch.float16, "classes": classes, "steps": 200, **more}
    for dtype, classes, is_spread in product(DTYPES, (4, 10, 100), (True, False)):
        more = {"smoothing": 0.1 if is_spread else 0.1 / 1.1, "is_spread": is_spread}
        place = rng.choice(["outside", "inside"])
        yield "smoothings that nobody writes", {"dtype": dtype, "classes": classes, "place": place, **more}


def _trainings(seed):
    rng = random.Random(seed)
    for name, options in _settings(rng):
        dcp = options["classes"] <= 8000 and rng.random() < 0.7
        yield name, Training(rng.randrange(10**6), dcp=dcp, **options)


def count(seed, parts=1):
    """What was read in the trainings of a seed, or in one of ``parts`` of them, by setting."""
    counts = {}
    for number, (name, training) in enumerate(_trainings(seed)):
        if number % parts == seed % parts:
            counts.setdefault(name, Counter()).update(run(training))
    return counts
