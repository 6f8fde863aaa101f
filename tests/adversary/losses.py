"""Random trainings whose labels and loss scale are known, and what the optimizers read from their gradients.

The model returns the logits that a case draws, so a case says exactly what a script shows the optimizer.
"""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer, _sync
from tests.test_loss_reader import readings

IGNORED = -100
UNDERFLOW = 80  # the range of logits in a row from which on probabilities may be zero in float32
GAIN = 25  # the largest spread of logits
SCALE_TOLERANCE = 0.02
FACTORS = {torch.float16: (64, 8_192)}  # of the loss; those of a gradient scaler
SHARE_TOLERANCE = {2: 0.11, 4: 0.02, 8: 0.02}  # of soft labels, by the bytes of a logit
COUNTS = ("cases", "refused", "rows", "unread", "wrong", "scales", "off")


class Batch(NamedTuple):
    """What a loss is made of: logits as rows (N, K), labels and what else the script's loss depends on."""

    z: Tensor
    y: Tensor
    other: Tensor  # the labels that y is mixed with
    share: Tensor  # of y, (N, 1)
    q: Tensor  # the mixture, (N, K)
    some: Tensor  # a third of the rows
    numbers: Tensor  # random ones in [0.2, 2.2], the same in each batch of a case
    rows: Tensor  # random ones in [0.2, 2.2], one a row

    @property
    def knob(self) -> float:
        return float(self.numbers[-1])

    @property
    def smoothing(self) -> float:
        return 0.02 + 0.1 * self.knob

    @property
    def weights(self) -> Tensor:
        return self.numbers[: self.z.shape[1]].to(self.z)

    @property
    def ignored(self) -> Tensor:
        return self.y.masked_fill(self.some, IGNORED)


Meant = tuple[Tensor, Tensor, Any]  # the loss, the labels that it means, and the factor of their mean cross-entropy
Loss = Callable[[Batch], Meant]


@dataclass(frozen=True)
class Kind:
    """A kind of loss, and which scripts with it are drawn."""

    loss: Loss
    classes: tuple[int, int] = (2, 30)
    mixes: str = ""  # whether labels are mixed by one share in each "batch", in "some batches" or for each of "rows"
    logs: bool = False  # whether the model returns log-probabilities
    given: bool = False  # whether the script passes loss_scale=
    smooths: bool = False
    weighs: bool = False  # whether each row has its own factor
    readable: bool = True

    def tells_scale(self, b: Batch, half: bool) -> bool:
        """Whether the gradient of a batch does.

        It does not if entries may underflow, since a row without gradient looks like one that is ignored; nor, in half
        precision, if rows have factors and the model is certain of one, since rounding is all that is left; nor if the
        predictions are so uniform that it is about that of a loss without smoothing or weights.
        """
        classes, e = b.z.shape[1], one_hot(b)
        p = b.z.softmax(1)
        if (b.z.amax(1) - b.z.amin(1)).max() > UNDERFLOW or (half and self.weighs and (p * e).max() > 1 - 1e-4):
            return False
        if self.smooths:
            r, added = p - e, p - 1 / classes
            added = added - r * ((added * r).sum() / r.square().sum())  # the rest could be a factor
            return bool(b.smoothing * added.norm() > (0.04 if half else 0.002) * r.norm())
        return not self.weighs or bool(p.amax(1).mean() * classes > 1.5)


def one_hot(b: Batch) -> Tensor:
    return F.one_hot(b.y, b.z.shape[1]).to(b.z)


def kind(
    labels: str = "y",
    function: Callable[..., Tensor] = F.cross_entropy,
    weighs: bool = False,
    smooths: bool = False,
    reduction: str = "mean",
    **more: Any,
) -> Kind:
    """A loss of torch's; ``labels`` is what a batch calls them."""

    def loss(b: Batch) -> Meant:
        meant = getattr(b, labels)
        target = meant.to(b.z) if meant.is_floating_point() else meant
        options = {"weight": b.weights} if weighs else {"label_smoothing": b.smoothing} if smooths else {}
        factor = 1.0 if reduction == "mean" else int((meant >= 0).sum())
        return function(b.z, target, reduction=reduction, **options), meant, factor

    return Kind(loss, weighs=weighs, smooths=smooths, **more)


def of_rows(function: Callable[[Tensor, Batch], Tensor], classes: tuple[int, int], labels: str = "y") -> Kind:
    """A loss that is a function of each row's cross-entropy, whose derivatives are the factors of the rows."""

    def loss(b: Batch) -> Meant:
        losses = F.cross_entropy(b.z, b.y, reduction="none")
        alone = losses.detach().double().requires_grad_()
        factors = torch.autograd.grad(function(alone, b).mean(), alone)[0]
        return function(losses, b).mean(), getattr(b, labels), factors.sum()

    return Kind(loss, classes, weighs=True)


def alone(function: Callable[[Batch], Tensor], given: bool = False, **more: Any) -> Kind:
    """A loss whose scale is given, or that cannot be read."""
    return Kind(lambda b: (function(b), b.y, 1.0), given=given, **more)


def plus(function: Callable[[Batch], Tensor]) -> Kind:
    return alone(lambda b: F.cross_entropy(b.z, b.y) + b.knob * function(b))


def two_losses(smooths: bool) -> Kind:
    """Mixup as scripts write it."""

    def loss(b: Batch) -> Meant:
        share, options = float(b.share[0]), {"label_smoothing": b.smoothing * smooths}
        first, second = (F.cross_entropy(b.z, y, **options) for y in (b.y, b.other))
        return share * first + (1 - share) * second, b.q, 1.0

    return Kind(loss, FROM_FIVE, "batch", smooths=smooths)


def squared(b: Batch) -> Meant:
    loss = F.cross_entropy(b.z, b.y)
    return loss.square(), b.y, 2 * loss.detach()


def focal(losses: Tensor, b: Batch) -> Tensor:
    return (1 - (-losses).exp()) ** (1 + b.knob) * losses  # its gradient is nan below 1 if a row is certain


def weighted(losses: Tensor, b: Batch) -> Tensor:
    return losses * b.rows.to(losses)


def dice(b: Batch) -> Tensor:
    p, e = b.z.softmax(1), one_hot(b)
    return 1 - (2 * (p * e).sum(0) / (p + e).sum(0)).mean()


def temperature(b: Batch) -> Tensor:
    return F.cross_entropy(b.z / (0.5 + b.knob), b.y)


def margin(b: Batch) -> Tensor:
    return F.cross_entropy(b.z - b.knob * one_hot(b), b.y)


FROM_THREE, FROM_FIVE, TWO, FEW = (3, 30), (5, 30), (2, 2), (3, 4)
READABLE = {
    "mean": kind(),
    "sum": kind(reduction="sum"),
    "square of the mean": Kind(squared),
    "ignored rows": kind("ignored"),
    "ignored rows, sum": kind("ignored", reduction="sum"),
    "smoothing": kind(smooths=True),
    "smoothing, ignored rows": kind("ignored", smooths=True),
    "smoothing, sum": kind(smooths=True, reduction="sum"),
    "class weights": kind(weighs=True),
    "class weights, ignored rows": kind("ignored", weighs=True),
    "sample weights": of_rows(weighted, FROM_THREE),
    "sample weights, some of them 0": of_rows(lambda losses, b: weighted(losses, b) * ~b.some, FROM_THREE, "ignored"),
    "focal": of_rows(focal, FROM_THREE),
    "Poly-1": of_rows(lambda losses, b: losses + b.knob * (1 - (-losses).exp()), FROM_THREE),
    "generalized": of_rows(lambda losses, b: (1 - (-b.knob * losses).exp()) / b.knob, FROM_THREE),
    "symmetric": of_rows(lambda losses, b: b.knob * losses + 4 * (1 - (-losses).exp()), FROM_THREE),
    "log-probabilities": kind(function=F.nll_loss, logs=True),
    "log-probabilities, ignored rows": kind("ignored", F.nll_loss, logs=True),
    "log-probabilities, class weights": kind("y", F.nll_loss, weighs=True, logs=True),
    "mixup, two losses": two_losses(smooths=False),
    "mixup, two losses, smoothing": two_losses(smooths=True),
    "mixup, soft targets": kind("q", classes=FROM_FIVE, mixes="batch"),
    "mixup, soft targets, smoothing": kind("q", smooths=True, classes=FROM_FIVE, mixes="batch"),
    "mixup of some batches": kind("q", classes=FROM_FIVE, mixes="some batches"),
    "CutMix of some rows": kind("q", classes=FROM_FIVE, mixes="rows"),
    "focal, loss_scale=": alone(lambda b: focal(F.cross_entropy(b.z, b.y, reduction="none"), b).mean(), given=True),
    "temperature, loss_scale=": alone(temperature, given=True),
    "margin, loss_scale=": alone(margin, given=True),
}
OTHERS = {
    "with a logit penalty": plus(lambda b: b.z.square().mean()),
    "with Dice": plus(dice),
    "with an entropy": plus(lambda b: -(b.z.softmax(1) * b.z.log_softmax(1)).sum(1).mean()),
    "with a confidence penalty of the label": plus(lambda b: (b.z * one_hot(b)).sum(1).square().mean()),
    "temperature": alone(temperature),
    "logit adjustment": alone(lambda b: F.cross_entropy(b.z + b.weights.log(), b.y)),
    "margin": alone(margin),
    "distillation": alone(lambda b: F.cross_entropy(b.z, (b.z.detach().roll(1, 0) + b.weights).softmax(1))),
    "binary": alone(lambda b: F.binary_cross_entropy_with_logits(b.z, one_hot(b))),
    "focal of sigmoids": alone(
        lambda b: (F.binary_cross_entropy_with_logits(b.z, one_hot(b), reduction="none") * b.z.sigmoid() ** 2).mean()
    ),
    "squares": alone(lambda b: F.mse_loss(b.z, one_hot(b))),
    "hinge": alone(lambda b: F.multi_margin_loss(b.z, b.y)),
    "negated": alone(lambda b: -F.cross_entropy(b.z, b.y)),
    # Of two classes it is the other's cross-entropy.
    "unlikelihood": alone(
        lambda b: -torch.log1p(-0.999 * (b.z.softmax(1) * one_hot(b)).sum(1)).mean(), classes=FROM_THREE
    ),
    "class weights, smoothing": alone(lambda b: F.cross_entropy(b.z, b.y, b.weights, label_smoothing=b.smoothing)),
    "two classes, sample weights": of_rows(weighted, TWO),
    "two classes, focal": of_rows(focal, TWO),
    "few classes, mixup": dataclasses.replace(two_losses(smooths=False), classes=FEW),
}
KINDS = READABLE | {name: dataclasses.replace(other, readable=False) for name, other in OTHERS.items()}
LAYOUTS = ("(N, K)", "(N, K)", "(N, K, H, W)", "(B, T, K)")


@dataclass(frozen=True)
class Case:
    """A training: ``gain`` is the spread of the last logits, ``fit`` what the labels' have gained, in units of it."""

    kind: str
    classes: int
    rows: int
    layout: str
    dtype: torch.dtype
    factor: float
    parts: int  # backward passes a step
    gain: float
    fit: float
    reads: bool  # whether each step may read values, as on a CPU
    seed: int
    batches: int = 8

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.seed)
        mixes, classes = KINDS[self.kind].mixes, self.classes
        numbers = 0.2 + 2 * torch.rand(31, generator=generator)
        for number in range(1, self.batches + 1):
            y = torch.randint(classes, (self.rows,), generator=generator)
            other = y[torch.randperm(self.rows, generator=generator)]
            share = 0.02 + 0.96 * torch.rand(self.rows, 1, generator=generator)
            some = torch.rand(self.rows, generator=generator) < 1 / 3
            if mixes == "some batches" and torch.rand((), generator=generator) < 0.5:
                share = torch.ones_like(share)
            share = share.masked_fill(some[:, None], 1.0) if mixes == "rows" else share[:1].expand_as(share)
            q = F.one_hot(y, classes).float()
            q = share * q + (1 - share) * F.one_hot(other, classes) if mixes else q
            z = torch.randn(self.rows, classes, generator=generator) + self.fit * q
            z = z * (self.gain * number / self.batches)
            some[0] = False  # one row has a label
            rows = 0.2 + 2 * torch.rand(self.rows, generator=generator)
            yield Batch(z, y, other, share, q, some, numbers, rows)

    def script(self) -> str:
        return f"import torch\nfrom tests.adversary.losses import Case, read\n\nprint(read({self!r}))\n"


class Given(nn.Module):
    """A model that returns its input."""

    def __init__(self, logs: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.one, self.logs = nn.Parameter(torch.ones((), dtype=dtype)), logs

    def forward(self, x: Tensor) -> Tensor:
        return x.log_softmax(1) * self.one if self.logs else x * self.one


def laid_out(rows: Tensor, layout: str) -> tuple[Tensor, int]:
    """Rows (N, K) as a model's output, and its class dimension."""
    classes = rows.shape[1]
    if layout == "(N, K, H, W)":
        return rows.reshape(-1, 2, 3, classes).movedim(-1, 1), 1
    return (rows.reshape(-1, 6, classes), 2) if layout == "(B, T, K)" else (rows, 1)


def read(case: Case) -> Counter[str]:
    """Run a case by both optimizers, and count what was read."""
    counts = Counter(cases=1)
    answer = _sync.may_sync if case.reads else lambda step, tensor: _sync.is_sync_step(step)
    with warnings.catch_warnings(), mock.patch.object(_sync, "may_sync", answer):
        warnings.simplefilter("ignore")
        for method in (DCPOptimizer, DCLOptimizer):
            _train(case, method, counts)
    return counts


def _train(case: Case, method: Any, counts: Counter[str]) -> None:
    kind, dcp = KINDS[case.kind], method is DCPOptimizer
    model = Given(kind.logs, case.dtype)
    options = {"loss_scale": case.factor / case.parts} if kind.given else {}
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.0), model, **options)
    found, ever, last = readings(optimizer), False, 0.0
    for number, batch in enumerate(case):
        if number % case.parts == 0:
            optimizer.zero_grad()
        x, dim = laid_out(batch.z.to(case.dtype), case.layout)
        z = model(x).movedim(dim, -1).reshape(batch.z.shape)
        loss, meant, factor = kind.loss(batch._replace(z=z.float() if z.dtype.itemsize < 4 else z))
        factor = float(factor) * case.factor / case.parts
        found.clear()
        try:
            (loss * case.factor / case.parts).backward()
        except RuntimeError as error:
            if "labels of this batch cannot be read" not in str(error):
                raise
            counts["refused"] += 1
            return
        if dcp:
            _compare(found[0].labels if found else None, meant, case, counts)
        if found and kind.readable:
            scale, told = float(found[0].scale), kind.tells_scale(batch, case.dtype.itemsize < 4)
            told = told and (case.dtype != torch.float16 or _arrives(kind, batch, case))
            right = abs(scale / factor - 1) <= SCALE_TOLERANCE
            ever = ever or (told and (right or scale != 1.0))  # which it is before any was read
            # In a step that may not read values, the last s stays if a batch shows another form.
            stale = scale == last and not case.reads and not _sync.is_sync_step(number // case.parts + 1)
            last = scale
            counts["scales"] += told
            counts["off"] += told and ever and not (right or stale)
        if number % case.parts == case.parts - 1 and model.one.grad.isfinite():  # as a gradient scaler skips steps
            optimizer.step()


def _arrives(kind: Kind, batch: Batch, case: Case) -> bool:
    """Whether no row's gradient is too small or too large for float16: without one a row looks like one ignored."""
    z = batch.z.to(case.dtype).requires_grad_()
    loss, meant, _ = kind.loss(batch._replace(z=z.float()))
    (g,) = torch.autograd.grad(loss * case.factor / case.parts, z)
    size = torch.where(meant.reshape(len(g), -1).amax(1) < 0, 1.0, g.abs().amax(1))
    return bool(((size > torch.finfo(case.dtype).tiny) & (size < math.inf)).all())


def _compare(labels: Tensor | None, meant: Tensor, case: Case, counts: Counter[str]) -> None:
    """Count rows, and those with no label and with a wrong one."""
    classes = case.classes
    q = meant if meant.ndim == 2 else F.one_hot(meant.where(meant >= 0, classes), classes + 1)[:, :-1]
    if labels is not None and labels.shape not in (q.shape[:1], q.shape):  # read along another dimension
        counts.update(rows=len(q), wrong=len(q))
        return
    if labels is None:
        labels = torch.zeros_like(q)
    elif labels.ndim == 1:
        labels = F.one_hot(labels, classes + 1)[:, :-1]
    wrong = (labels.double() - q).abs().amax(1) > SHARE_TOLERANCE[case.dtype.itemsize]
    unread = (labels.sum(1) == 0) & (q.sum(1) > 0)
    counts["rows"] += len(q)
    counts["unread"] += int(unread.sum())
    counts["wrong"] += int((wrong & ~unread).sum())


def cases(kind: str, number: int, seed: int) -> Iterator[Case]:
    """Random cases of a kind."""
    rng = random.Random(f"{kind} {seed}")

    def spread(least: float, most: float) -> float:
        return math.exp(rng.uniform(math.log(least), math.log(most)))

    for _ in range(number):
        dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
        layout = "(N, K)" if KINDS[kind].logs else rng.choice(LAYOUTS)
        yield Case(
            kind=kind,
            classes=round(spread(*KINDS[kind].classes)),
            rows=6 * rng.randint(2, 8) if layout != "(N, K)" else rng.randint(8, 48),
            layout=layout,
            dtype=dtype,
            factor=spread(*FACTORS.get(dtype, (1 / 64, 65_536))),
            parts=rng.choice([1, 1, 2, 4]),
            gain=spread(0.1, GAIN),
            fit=rng.uniform(0, 2),
            reads=rng.random() < 0.5,
            seed=rng.randrange(10**6),
        )


def count(number: int, seed: int, readable: bool) -> tuple[dict[str, Counter[str]], list[Case]]:
    """What was read in random cases of each kind and of all of them, and the cases with a fault."""
    counts, faults = {}, []
    for kind in KINDS:
        if KINDS[kind].readable == readable:
            counts[kind] = Counter(dict.fromkeys(COUNTS, 0))
            for case in cases(kind, number, seed):
                found = read(case)
                counts[kind].update(found)
                if found["wrong"] or found["off"]:
                    faults.append(case)
    counts["**all that can be read**" if readable else "**all others**"] = sum(counts.values(), Counter())
    return counts, faults
