"""Random trainings whose labels and loss scale are known, and what the optimizers read from their gradients.

The model returns the logits that a case draws. DCP's prototypes are twice unit vectors, and its distance is the product
with them: what it adds to the gradient of a row is a multiple of the row's label.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.pytorch import synchronization

LOGITS = 50_000  # at most, in a batch
COUNTS = ("cases", "refused", "hardly read", "rows", "unread", "wrong", "scales", "off")
ANY, FROM_THREE = (2, 200), (3, 200)  # classes

ce, bce = F.cross_entropy, F.binary_cross_entropy_with_logits
Meant = tuple[Tensor, Tensor, Any]  # the loss, the labels that it means, and the factor of their mean cross-entropy


@dataclass(frozen=True)
class Kind:
    """A kind of loss, of a batch and its logits (N, K), and which scripts with it are drawn."""

    loss: Callable[[Any, Tensor], Meant]
    classes: tuple[int, int] = ANY
    mixes: str = ""  # whether labels are mixed by one share in each "batch", in "some batches" or for each of "rows"
    logs: bool = False  # whether the model returns log-probabilities
    smooths: bool = False

    def tells_scale(self, b, g, meant):
        """Whether the gradient of a batch does.

        Not if entries may underflow, in float32 from a range of 80 in a row on: a row without gradient looks like one
        that is ignored. Nor if their squares do. Nor if predictions are so uniform that it is about that of a loss
        without smoothing.
        """
        p, half = b.z.softmax(1), g.dtype.itemsize < 4
        if not g.float().norm():
            return False
        if (b.z.amax(1) - b.z.amin(1)).max() > 80:
            return False
        size = torch.where(meant < 0, 1.0, g.abs().amax(1))
        if g.dtype == torch.float16 and not ((size > torch.finfo(g.dtype).tiny) & (size < torch.inf)).all():
            return False
        if self.smooths:
            r, added = p - b.e, p - 1 / p.shape[1]
            added = added - r * ((added * r).sum() / r.square().sum())  # the rest could be a factor
            return bool(b.smoothing * added.norm() > (0.04 if half else 0.002) * r.norm())
        return True


def kind(labels="y", function=ce, reduction="mean", **more):
    """A loss of torch's; ``labels`` is what a batch calls them."""

    def loss(b, z):
        meant = getattr(b, labels)
        options = {"label_smoothing": b.smoothing} if more.get("smooths") else {}
        factor = 1.0 if reduction == "mean" else int((meant >= 0).sum())
        return function(z, meant, reduction=reduction, **options), meant, factor

    return Kind(loss, **more)


def other(function, labels="y", **more):
    """A loss that cannot be read."""
    return Kind(lambda b, z: (function(b, z), getattr(b, labels), 1.0), **more)


def mixup(b, z):
    """As scripts write it."""
    share = float(b.share[0])
    return share * ce(z, b.y) + (1 - share) * ce(z, b.other)


def focal(b, z):
    losses = ce(z, b.y, reduction="none")
    return ((1 - (-losses).exp()) ** (1 + b.knob) * losses).mean()  # its gradient is nan below 1 if a row is certain


READABLE = {
    "mean": kind(),
    "sum": kind(reduction="sum"),
    "square of the mean": Kind(lambda b, z: ((loss := ce(z, b.y)).square(), b.y, 2 * loss.detach())),
    "ignored rows": kind("ignored"),
    "ignored rows, sum": kind("ignored", reduction="sum"),
    "smoothing": kind(smooths=True),
    "smoothing, ignored rows": kind("ignored", smooths=True),
    "smoothing, sum": kind(smooths=True, reduction="sum"),
    "log-probabilities": kind(function=F.nll_loss, logs=True),
    "log-probabilities, ignored rows": kind("ignored", F.nll_loss, logs=True),
}
# Of the first ones rows have factors of their own, or several labels: where that does not show, as in a batch of one
# row or of one class, they are read as what they are.
OTHERS = {
    "class weights": other(lambda b, z: ce(z, b.y, b.weights.to(z))),
    "class weights, ignored rows": other(lambda b, z: ce(z, b.ignored, b.weights.to(z)), "ignored"),
    "class weights, smoothing": other(lambda b, z: ce(z, b.y, b.weights.to(z), label_smoothing=b.smoothing)),
    "sample weights": other(lambda b, z: (ce(z, b.y, reduction="none") * b.rows.to(z)).mean()),
    "focal": other(focal),
    "symmetric": other(lambda b, z: b.knob * ce(z, b.y) + 4 * (1 - (z.softmax(1) * b.e).sum(1)).mean()),
    "log-probabilities, class weights": other(lambda b, z: F.nll_loss(z, b.y, b.weights.to(z)), logs=True),
    "mixup, two losses": other(mixup, "q", mixes="batch"),
    "mixup, soft targets, smoothing": other(
        lambda b, z: ce(z, b.q.to(z), None, label_smoothing=b.smoothing), "q", mixes="batch"
    ),
    "mixup of some batches": other(lambda b, z: ce(z, b.q.to(z)), "q", mixes="some batches"),
    "CutMix of some rows": other(lambda b, z: ce(z, b.q.to(z)), "q", mixes="rows"),
    "with a logit penalty": other(lambda b, z: ce(z, b.y) + b.knob * z.square().mean()),
    "with Dice": other(lambda b, z: ce(z, b.y) - b.knob * ((p := z.softmax(1)) * b.e / (p + b.e).sum(0)).sum(0).mean()),
    "with an entropy": other(lambda b, z: ce(z, b.y) + b.knob * -(z.softmax(1) * z.log_softmax(1)).sum(1).mean()),
    "with the label's logit": other(lambda b, z: ce(z, b.y) + b.knob * (z * b.e).sum(1).square().mean()),
    "temperature": other(lambda b, z: ce(z / (0.5 + b.knob), b.y)),
    "logit adjustment": other(lambda b, z: ce(z + b.weights.log(), b.y)),
    "margin": other(lambda b, z: ce(z - b.knob * b.e, b.y)),
    "distillation": other(lambda b, z: ce(z, (z.detach().roll(1, 0) + b.weights).softmax(1))),
    "binary": other(lambda b, z: bce(z, b.e.to(z))),
    "focal of sigmoids": other(lambda b, z: (bce(z, b.e.to(z), reduction="none") * z.sigmoid() ** 2).mean()),
    "squares": other(lambda b, z: F.mse_loss(z, b.e.to(z))),
    "hinge": other(lambda b, z: F.multi_margin_loss(z, b.y)),
    "negated": other(lambda b, z: -ce(z, b.y)),
    # Of two classes it is the other's cross-entropy.
    "unlikelihood": other(lambda b, z: -(1 - 0.999 * (z.softmax(1) * b.e).sum(1)).log().mean(), classes=FROM_THREE),
}


class Case:
    """A random training with a kind of loss; ``number`` is its place among those of a seed.

    The spread of the logits grows to ``gain``, of which the labels' gain ``fit``. Class k has a frequency of k to the
    power of ``-tail``; the first ``sorted`` batches have the first class only.
    """

    def __init__(self, name, seed, number):
        self.of, self.kind = (name, seed, number), (READABLE | OTHERS)[name]
        rng = random.Random(f"{name} {seed} {number}")

        def spread(least, most):
            return math.exp(rng.uniform(math.log(least), math.log(most)))

        self.dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
        half = self.dtype == torch.float16
        self.layout = "(N, K)" if self.kind.logs else rng.choice(["(N, K)", "(N, K)", "(N, K, H, W)", "(B, T, K)"])
        self.classes = round(spread(*self.kind.classes))
        self.rows = round(spread(8, min(200 if half else LOGITS, LOGITS // self.classes)))
        self.rows = 1 if rng.random() < 0.1 else self.rows
        self.rows = self.rows if self.layout == "(N, K)" else 6 * (self.rows // 6 + 1)
        self.sorted = rng.choice([18] + 9 * [0])
        self.batches = 24 if self.sorted or self.rows == 1 else 8
        self.parts = 1 if self.sorted else rng.choice([1, 1, 2, 4])  # backward passes a step
        self.factor = (spread(64, 8_192) if half else spread(1 / 64, 65_536)) / self.parts
        self.gain, self.fit, self.tail = spread(0.1, 25), rng.uniform(0, 2), rng.choice([0, 0, 1, 2])
        self.reads = bool(self.sorted) or rng.random() < 0.5  # whether each step may read values, as on a CPU
        self.seed = rng.randrange(10**6)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        mixes, size = self.kind.mixes, self.rows
        weights = 0.2 + 2 * torch.rand(self.classes, generator=generator)
        knob = 0.2 + 2 * float(torch.rand((), generator=generator))
        frequencies = torch.arange(1.0, self.classes + 1) ** -self.tail
        for number in range(1, self.batches + 1):
            y = torch.multinomial(frequencies, size, replacement=True, generator=generator) * (number > self.sorted)
            other = y[torch.randperm(size, generator=generator)]
            share = 0.02 + 0.96 * torch.rand(size, 1, generator=generator)
            some = torch.rand(size, generator=generator) < 1 / 3
            if mixes == "some batches" and torch.rand((), generator=generator) < 0.5:
                share = torch.ones_like(share)
            share = share.masked_fill(some[:, None], 1.0) if mixes == "rows" else share[:1].expand_as(share)
            e = F.one_hot(y, self.classes)
            q = share * e + (1 - share) * F.one_hot(other, self.classes) if mixes else e
            z = (torch.randn(q.shape, generator=generator) + self.fit * q) * (self.gain * number / self.batches)
            rows = 0.2 + 2 * torch.rand(size, generator=generator)
            some[0] = False  # one row has a label
            batch = {"z": z, "y": y, "e": e, "q": q, "other": other, "share": share, "some": some, "rows": rows}
            more = {"ignored": y.masked_fill(some, -100), "weights": weights, "knob": knob}
            yield SimpleNamespace(**batch, **more, smoothing=0.02 + 0.1 * knob)

    def script(self):
        drawn = dict(list(vars(self).items())[2:])
        return f"from tests.adversary.losses import Case, read\n\nprint(read(Case{self.of!r}))  # {drawn}\n"


class Given(nn.Module):
    """A model that returns its input."""

    def __init__(self, logs, dtype):
        super().__init__()
        self.one, self.logs = nn.Parameter(torch.ones((), dtype=dtype)), logs

    def forward(self, x):
        return x.log_softmax(1) * self.one if self.logs else x * self.one


def laid_out(rows, layout):
    """Rows (N, K) as a model's output, and its class dimension."""
    if layout == "(N, K, H, W)":
        return rows.reshape(-1, 2, 3, rows.shape[1]).movedim(-1, 1), 1
    return (rows.reshape(-1, 6, rows.shape[1]), 2) if layout == "(B, T, K)" else (rows, 1)


def read(case):
    """Run a case by both optimizers, and count what was read."""
    counts = Counter(cases=1)
    answer = synchronization.may_sync if case.reads else lambda step, tensor: synchronization.is_sync_step(step)
    with warnings.catch_warnings(), mock.patch.object(synchronization, "may_sync", answer):
        warnings.simplefilter("ignore")
        for dcp in (True, False):
            _train(case, dcp, counts)
    counts["hardly read"] = int(counts["unread"] > 0.1 * counts["rows"])
    return counts


def _wrapped(model, case, dcp):
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    if not dcp:
        return DCLOptimizer(base, model, companion_fraction=1)
    weight = 2.0 if case.dtype == torch.float16 else 512.0  # rounding of the loss's gradient is small beside it
    optimizer = DCPOptimizer(base, model, alpha=1.0, update="batch", weight=weight, distance=torch.linalg.vecdot)
    classes = torch.arange(case.classes).repeat(2)  # once would be the rows' places
    optimizer.penalty(2.0 * F.one_hot(classes) * model.one, classes).backward()  # ones would be probabilities
    optimizer.step()
    state = optimizer.state_dict()
    state[optimizer._key]["term"] = False  # else the line is off
    optimizer.load_state_dict(state)
    return optimizer


def _train(case, dcp, counts):
    kind, half = case.kind, case.dtype.itemsize < 4
    model = Given(kind.logs, case.dtype)
    optimizer = _wrapped(model, case, dcp)
    ever, last = False, 0.0
    for number, batch in enumerate(case):
        if number % case.parts == 0:
            optimizer.zero_grad()
        x, dim = laid_out(batch.z.to(case.dtype), case.layout)
        output = model(x)
        output.retain_grad()
        z = output.movedim(dim, -1).reshape(batch.z.shape)
        leaf = z.detach().requires_grad_()
        loss, meant, factor = kind.loss(batch, leaf.float() if half else leaf)
        (g,) = torch.autograd.grad(loss * case.factor, leaf)
        loss, *_ = kind.loss(batch, z.float() if half else z)
        try:
            (loss * case.factor).backward()
        except RuntimeError as error:
            if "optimizer.penalty(" not in str(error):
                raise
            counts["refused"] += 1
            return
        found = bool(g.isfinite().all())
        if dcp:
            added = (output.grad.movedim(dim, -1).reshape(g.shape) - g).double()
            found = _compare(added.nan_to_num(0.0, 0.0, 0.0), meant, counts)
        if found and case.of[0] in READABLE:
            scale, told = optimizer.logs()["loss_scale"], kind.tells_scale(batch, g, meant)
            right = abs(scale - float(factor) * case.factor) <= 0.02 * abs(float(factor) * case.factor)
            ever = ever or (told and (right or scale != 1.0))  # which it is before any was read
            # In a step that may not read values, the last s stays if a batch shows another form, or it is 0.
            stale = (
                scale in (last, 0.0)
                and not case.reads
                and not synchronization.is_sync_step(number // case.parts + 1 + dcp)
            )
            last = scale
            counts["scales"] += told
            counts["off"] += told and ever and not (right or stale)
        if number % case.parts == case.parts - 1 and model.one.grad.isfinite():  # as a gradient scaler skips steps
            optimizer.step()


def _compare(added, meant, counts):
    """Count rows, and those with no label and with a wrong one; whether there is a label."""
    classes, sums = added.shape[1], added.sum(1)
    q = meant if meant.ndim == 2 else F.one_hot(meant.where(meant >= 0, classes), classes + 1)[:, :-1]
    labelled = sums.abs() > 0.5 * sums.abs().max()
    right = (added / sums[:, None] - q).abs().amax(1) <= 0.11  # which leaves room for the rounding of half precision
    unread, wrong = ~labelled & (q.sum(1) > 0), labelled & ~right
    counts.update(rows=len(q), unread=int(unread.sum()), wrong=int(wrong.sum()))
    return bool(labelled.any())


def count(number, seed, readable):
    """What was read in random cases of each kind and of all of them, and scripts of the cases with a fault."""
    counts, faults = {}, []
    for name in READABLE if readable else OTHERS:
        counts[name] = Counter(dict.fromkeys(COUNTS, 0))
        for case in [Case(name, seed, place) for place in range(number)]:
            try:
                found = read(case)
            except Exception as error:
                found = Counter(cases=1, wrong=1)
                faults.append(repr(error))
            counts[name].update(found)
            if found["wrong"] or found["off"]:
                faults.append(case.script())
    counts["**all that can be read**" if readable else "**all others**"] = sum(counts.values(), Counter())
    return counts, faults
