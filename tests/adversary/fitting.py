"""Random trainings in half precision that go on until the model fits, and what the optimizers read of their losses.

A small network learns random labels by heart. After each backward pass the labels and the loss scale that the
forecaster observes are compared with those of the script. A loss that is no plain cross-entropy may be refused or left
unread; it is read wrongly if a label is another one, or if the scale is neither the script's nor the one with which a
plain cross-entropy of these labels, with any smoothing, has the same gradient.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer, _sync
from tests.adversary.losses import OTHERS, Kind, ce, kind

COUNTS = ("cases", "failed", "fitted", "ended", "batches", "unread", "rows", "wrong", "left out", "scales", "off")
BATCHES, MANY_BATCHES, OTHER_BATCHES = 600, 2_500, 150
SIZE, FEATURES, WIDTH = 64, 32, 128  # rows of a batch, and the network
IGNORED = 0.3  # of the rows
UNREAD_SHARE = 0.01  # of the batches of a plain training, at most
SCALE_TOLERANCE = 0.02
SMOOTHING_SHOWS = 0.04  # in half precision, if it is more of the gradient
TOLD = 0.01  # the scale that a gradient tells is as close to the script's, also after it has lost digits
GRADIENT_TOLERANCE = 0.05  # of another loss: a reading may leave 0.02, and rounding another 0.01
MAX_SMOOTHING = 0.5
LEAST_SHARE = 0.89  # of a mixed label that may be read as the only one


class Arithmetic(NamedTuple):
    """Where a script computes in half precision."""

    dtype: torch.dtype
    is_model: bool = False  # the parameters are in dtype; else the forward pass is under autocast
    has_loss: bool = False  # the loss is under autocast too, which computes it in float32


ARITHMETICS = {"float32": Arithmetic(torch.float32, is_model=True)}
for _name, _dtype in {"bfloat16": torch.bfloat16, "float16": torch.float16}.items():
    ARITHMETICS[f"model in {_name}"] = Arithmetic(_dtype, is_model=True)
    ARITHMETICS[f"forward pass in {_name}"] = Arithmetic(_dtype)
    ARITHMETICS[f"loss in autocast, {_name}"] = Arithmetic(_dtype, has_loss=True)
HALVES = tuple(ARITHMETICS)[1:]
CLASSES = (2, 3, 10, 100, 1_000)
SMOOTHINGS = (0.0, 0.05, 0.1)
VARIANTS = ("dcp", "dcl")
PLAIN = "plain"
# No hinge in float16 on a CPU. A teacher that has become certain gives hard labels, which are those of another row.
LEFT_OUT = ("hinge", "distillation")
OTHER_LOSSES = tuple(name for name, one in OTHERS.items() if not one.logs and name not in LEFT_OUT)
PLAIN_KEYS = (("loss",), ("arithmetic", "classes"), ("arithmetic", "smoothing"), ("variant", "base"))
OTHER_KEYS = (("start",), ("arithmetic", "start"), ("loss",))
STARTS = ("new", "fitted", "read")  # the model is new, fitted before it is wrapped, or fitted with the wrapper


class Case:
    """A random training; what the arguments leave open is drawn from them.

    Args:
        arithmetic: one of ``ARITHMETICS``.
        variant: "dcp" or "dcl".
        classes: K.
        smoothing: of plain labels.
        loss: ``PLAIN`` or one of ``OTHER_LOSSES``.
        start: one of ``STARTS``; how another loss finds the model.
        seed: of the draws.
    """

    def __init__(
        self, arithmetic: str, variant: str, classes: int, smoothing: float, loss: str, start: str, seed: int
    ) -> None:
        self.of = (arithmetic, variant, classes, smoothing, loss, start, seed)
        self.arithmetic, self.variant, self.classes, self.smoothing, self.loss, self.start, _ = self.of
        rng = random.Random(repr(self.of))
        self.reduction = rng.choice(["mean", "mean", "sum"])
        self.labels = rng.choice(["y", "ignored"])
        self.parts = rng.choice([1, 1, 3])  # backward passes a step
        self.factor = rng.choice([1.0, math.exp(rng.uniform(math.log(1 / 8), math.log(64)))]) / self.parts
        self.growth = rng.choice([50, 200, 2_000])  # after how many steps a gradient scaler grows
        self.base = rng.choice(["SGD", "AdamW"])
        self.reads = rng.random() < 0.5  # whether each step may read values, as on a CPU
        self.seed = rng.randrange(10**6)

    @property
    def place(self) -> Arithmetic:
        return ARITHMETICS[self.arithmetic]

    @property
    def batches(self) -> int:
        if self.loss != PLAIN:
            return OTHER_BATCHES
        is_hard_to_read = self.classes == 2 and self.smoothing == max(SMOOTHINGS) and self.place.has_loss
        return MANY_BATCHES if is_hard_to_read else BATCHES

    def plain(self) -> Kind:
        return kind(self.labels, reduction=self.reduction, smooths=True)

    def script(self) -> str:
        drawn = dict(list(vars(self).items())[8:])
        return f"from tests.adversary.fitting import Case, train\n\nprint(train(Case{self.of!r}))  # {drawn}\n"


class Script:
    """The training script of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        self.generator = torch.Generator().manual_seed(case.seed)
        self.model: nn.Module = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, case.classes))
        number = 256 if case.classes > 3 else 128
        self.x, self.y = torch.randn(number, FEATURES), torch.randint(case.classes, (number,))
        if case.place.is_model:
            self.model, self.x = self.model.to(case.place.dtype), self.x.to(case.place.dtype)
        # A model in float16 outright cannot use one: it raises for gradients in float16.
        has_scaler = case.place.dtype == torch.float16 and not case.place.is_model
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=case.growth, enabled=has_scaler)
        self.weights = 0.2 + 2 * torch.rand(case.classes, generator=self.generator)
        self.knob = 0.2 + 2 * float(torch.rand((), generator=self.generator))
        self.base = self.make_base()

    def make_base(self) -> torch.optim.Optimizer:
        case = self.case
        if case.base == "SGD":
            factor = case.factor * case.parts * (SIZE if case.reduction == "sum" else 1)
            return torch.optim.SGD(self.model.parameters(), lr=0.1 / factor, momentum=0.9)
        eps = 1e-4 if case.arithmetic == "model in float16" else 1e-8  # which is 0 in float16
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, eps=eps)

    def autocast(self, is_loss: bool) -> Any:
        place = self.case.place
        is_on = not place.is_model and (place.has_loss or not is_loss)
        return torch.autocast("cpu", torch.bfloat16 if place.is_model else place.dtype, enabled=is_on)

    def batch(self, mixes: str) -> tuple[Tensor, Any]:
        """Inputs, and what a :class:`~tests.adversary.losses.Kind` takes; mixed labels are of mixed inputs."""
        draw, classes = {"generator": self.generator}, self.case.classes
        rows = torch.randint(len(self.x), (SIZE,), **draw)
        x, y, order = self.x[rows], self.y[rows], torch.randperm(SIZE, **draw)
        share = 0.02 + 0.96 * torch.rand(SIZE, 1, **draw)
        is_plain = torch.rand(SIZE, 1, **draw) < 1 / 3
        if mixes != "rows":
            share, is_plain = share[:1].expand(SIZE, 1), is_plain[:1] & (mixes == "some batches")
        share = share.masked_fill(is_plain, 1.0) if mixes else torch.ones(SIZE, 1)
        e = nn.functional.one_hot(y, classes)
        ignored = y.masked_fill(torch.rand(SIZE, **draw) < IGNORED, -100)
        q = share * e + (1 - share) * e[order]
        batch = {"y": y, "e": e, "q": q, "other": y[order], "share": share, "ignored": ignored}
        more = {"weights": self.weights, "rows": 0.2 + 2 * torch.rand(SIZE, **draw), "knob": self.knob}
        batch = SimpleNamespace(**batch, **more, smoothing=self.case.smoothing)
        return (share * x + (1 - share) * x[order]).to(x.dtype), batch

    def loss(self, used: Kind, batch: Any, z: Tensor) -> Any:
        """The loss to run backward from, the labels, and what it is of the mean cross-entropy."""
        with self.autocast(is_loss=True):
            loss, meant, factor = used.loss(batch, z)
        return self.scaler.scale(loss * self.case.factor), meant, factor * self.case.factor * self.scaler.get_scale()

    def gradient(self, used: Kind, batch: Any, z: Tensor) -> Tensor:
        """That of the loss alone, as the logits get it."""
        leaf = z.detach().requires_grad_()
        (g,) = torch.autograd.grad(self.loss(used, batch, leaf)[0], leaf)
        return g

    def steps(self, optimizer: Any, used: Kind, number: int) -> Iterator[tuple[Any, Tensor, Tensor, Any, float]]:
        """Train; give batch, logits, gradient of the logits, labels and factor of each after its backward pass."""
        for place in range(number):
            if place % self.case.parts == 0:
                optimizer.zero_grad()
            x, batch = self.batch(used.mixes)
            with self.autocast(is_loss=False):
                z = self.model(x)
            g = self.gradient(used, batch, z)
            loss, meant, factor = self.loss(used, batch, z)
            loss.backward()
            yield batch, z.detach(), g, meant, factor
            if place % self.case.parts == self.case.parts - 1:
                self.scaler.step(optimizer)
                self.scaler.update()


class Reader:
    """Counts what an optimizer reads of the batches of a script."""

    def __init__(self, script: Script, optimizer: Any, counts: Counter[str]) -> None:
        self.script, self.optimizer, self.counts = script, optimizer, counts
        self.classes = script.case.classes
        self.last: tuple[Tensor | None, float] | None = None  # the labels and the scale that were read
        self._observe = optimizer.forecaster.observe
        optimizer.forecaster.observe = self.observe
        self.num_not_finite = 0
        self.skipped_before = optimizer.logs()["skipped"]

    def observe(self, forward: Any, pull: Any, labels: Any, scale: Any, alpha: float) -> None:
        rows = None if labels is None else labels.rows.clone()
        # Where no value may be read, an unread batch is observed without a label, or with a scale of 0.
        was_read = float(scale) != 0 if rows is None else bool((rows < self.classes).any())
        self.last = (rows, float(scale)) if was_read else None
        self._observe(forward, pull, labels, scale, alpha)

    def compare(self, batch: Any, z: Tensor, g: Tensor, meant: Tensor, factor: float) -> None:
        """Compare what was read of a batch with the script, and count it."""
        read, self.last = self.last, None
        if not g.isfinite().all() or not g.any():
            assert read is None, "read without a gradient"
            self.num_not_finite += not g.isfinite().all()
            return
        self.counts["batches"] += 1
        self.counts["unread"] += read is None
        if read is None:
            return
        if self.script.case.loss == PLAIN:
            self._compare_plain(*read, z, g, meant, factor)
        else:
            self._compare_other(*read, batch, z, g, factor)

    def check_skipped(self) -> None:
        """Check that ``skipped`` counts what was not observed."""
        skipped = self.optimizer.logs()["skipped"] - self.skipped_before
        assert skipped == self.counts["unread"] + self.num_not_finite, f"{skipped} are skipped"

    def _compare_plain(
        self, labels: Tensor | None, scale: float, z: Tensor, g: Tensor, meant: Tensor, factor: float
    ) -> None:
        live = g.any(1)
        if labels is not None:
            is_read = labels < self.classes
            found = {"rows": live, "wrong": is_read & (labels != meant), "left out": live & ~is_read}
            self.counts.update({name: int(rows.sum()) for name, rows in found.items()})
        # A row whose gradient is 0 looks like one that the loss ignores, and one without a positive entry may.
        of_row = factor / int((meant >= 0).sum())
        least, most = of_row * int((g.amax(1) > 0).sum()), of_row * int(live.sum())
        smoothing = self.script.case.smoothing
        plain, unsmoothed = self._plain(meant, smoothing, z), self._plain(meant, 0.0, z)
        rest = plain - unsmoothed * ((plain * unsmoothed).sum() / unsmoothed.square().sum())
        if rest.norm() <= SMOOTHING_SHOWS * plain.norm():  # uniform predictions: it looks like a factor
            least *= 1 - smoothing
        told = float((g.double() * plain).sum() / plain.square().sum())
        if abs(told - of_row) <= TOLD * of_row:
            is_told = (1 - SCALE_TOLERANCE) * least <= scale <= (1 + SCALE_TOLERANCE) * most
            self.counts["scales"] += 1
            self.counts["off"] += not (is_told or self._is_factor(scale, factor))

    def _compare_other(
        self, labels: Tensor | None, scale: float, batch: Any, z: Tensor, g: Tensor, factor: float
    ) -> None:
        live = g.any(1)
        if labels is None:
            number, candidates = live.sum(), (batch.y, batch.other)
        else:
            is_read = labels < self.classes
            number, candidates = is_read.sum(), (labels.where(is_read, -100),)
            shares = batch.q.double().gather(1, labels.where(is_read, 0)[:, None])[:, 0]
            self.counts["rows"] += int(live.sum())
            self.counts["wrong"] += int((is_read & (shares < LEAST_SHARE)).sum())
        # A margin may bring the gradient of another arithmetic than the script's, once the model fits.
        is_plain = any(self._is_plain(candidates, scale / int(number), one, g) for one in (z, z.float()))
        self.counts["scales"] += 1
        self.counts["off"] += not (is_plain or self._is_factor(scale, factor))

    def _is_plain(self, candidates: tuple[Tensor, ...], factor_of_row: float, z: Tensor, g: Tensor) -> bool:
        """Whether a gradient is that of a plain cross-entropy of these labels with this factor."""
        plain = [factor_of_row * self._plain(one, 0.0, z) for one in candidates]
        nearest = torch.stack([(g.double() - one).square().sum(1) for one in plain]).argmin(0)
        hard = torch.stack(plain)[nearest, torch.arange(len(g))]
        labels = torch.stack(candidates)[nearest, torch.arange(len(g))]
        # The gradient is linear in the smoothing, of which some may have been read.
        slope = factor_of_row * self._plain(labels, 1.0, z) - hard
        smoothing = ((g.double() - hard) * slope).sum() / slope.square().sum()
        rest = g.double() - hard - smoothing.clamp(0.0, MAX_SMOOTHING) * slope
        return bool(rest.norm() <= GRADIENT_TOLERANCE * g.double().norm())

    def _is_factor(self, scale: float, factor: float) -> bool:
        """Whether a scale is the script's, which the penalty term would have."""
        return abs(scale - factor) <= SCALE_TOLERANCE * factor

    def _plain(self, labels: Tensor, smoothing: float, z: Tensor) -> Tensor:
        """The gradient of each row's plain cross-entropy, as the script would compute it."""
        leaf = z.detach().requires_grad_()
        with self.script.autocast(is_loss=True):
            loss = ce(leaf, labels, reduction="sum", label_smoothing=smoothing)
        return torch.autograd.grad(loss, leaf)[0].double()


def train(case: Case) -> Counter[str]:
    """Run a case, and count what was read.

    ``ended`` is a training that an error refused; ``fitted`` one whose last batch was predicted right. ``unread`` are
    the ``batches`` with a gradient that got no penalty. Of the ``rows`` with a gradient in those that were read,
    ``wrong`` have another label, and ``left out`` none. Of the ``scales`` that a gradient tells, ``off`` are those by
    more than 2 %; of another loss, those with which a plain cross-entropy has not this gradient either.
    """
    counts = Counter(dict.fromkeys(COUNTS, 0), cases=1)
    answer = _sync.may_sync if case.reads else lambda step, tensor: _sync.is_sync_step(step)
    with warnings.catch_warnings(), mock.patch.object(_sync, "may_sync", answer):
        warnings.simplefilter("ignore")
        _train(case, counts)
    return counts


def _train(case: Case, counts: Counter[str]) -> None:
    script = Script(case)
    wrapper: Callable[..., Any] = {"dcp": DCPOptimizer, "dcl": DCLOptimizer}[case.variant]
    used = case.plain() if case.loss == PLAIN else OTHERS[case.loss]
    optimizer: Any = script.base if case.start == "fitted" else wrapper(script.base, script.model)
    if case.start != "new":
        for _ in script.steps(optimizer, case.plain(), BATCHES):
            pass
    if case.start == "fitted":
        optimizer = wrapper(script.make_base(), script.model)
    reader = Reader(script, optimizer, counts)
    try:
        for batch, z, g, meant, factor in script.steps(optimizer, used, case.batches):
            reader.compare(batch, z, g, meant, factor)
    except RuntimeError as error:
        if "optimizer.penalty(" not in str(error):
            raise
        counts["ended"] = 1
        return
    reader.check_skipped()
    counts["fitted"] = int(bool((z.argmax(1) == meant)[meant >= 0].all())) if case.loss == PLAIN else 0


def plain_cases(seed: int) -> list[Case]:
    """Of each setting one."""
    settings = itertools.product(ARITHMETICS, VARIANTS, CLASSES, SMOOTHINGS)
    return [Case(*setting, PLAIN, "new", seed) for setting in settings]


def other_cases(seed: int) -> list[Case]:
    """Of each loss that is no plain cross-entropy, start and arithmetic one."""
    rng, cases = random.Random(seed), []
    for name, start, arithmetic in itertools.product(OTHER_LOSSES, STARTS, HALVES):
        classes = rng.choice([number for number in CLASSES if number >= OTHERS[name].classes[0]])
        cases.append(Case(arithmetic, rng.choice(VARIANTS), classes, rng.choice(SMOOTHINGS), name, start, seed))
    return cases


class Found(NamedTuple):
    """What was read of a case."""

    case: Case
    counts: Counter[str]
    fault: str = ""  # a script


def found_in(case: Case) -> Found:
    """Run a case, and judge what was read."""
    try:
        counts = train(case)
    except Exception as error:
        counts = Counter(dict.fromkeys(COUNTS, 0), cases=1, failed=1)
        return Found(case, counts, f"# {error!r}\n{case.script()}")
    is_wrong = counts["wrong"] + counts["off"] > 0
    if case.loss == PLAIN:
        is_wrong = is_wrong or counts["ended"] > 0 or counts["unread"] > UNREAD_SHARE * counts["batches"]
    shown = ", ".join(f"{number} {name}" for name, number in counts.items())
    return Found(case, counts, f"# {shown}\n{case.script()}" if is_wrong else "")


def print_table(all_found: list[Found], *keys: str) -> None:
    """Add up by these attributes of the cases; the last column is the largest share of unread batches in a training."""
    print(f"\n| {', '.join(keys)} | {' | '.join(COUNTS)} | worst |\n| --- |{' --: |' * (len(COUNTS) + 1)}")
    groups: dict[str, list[Counter[str]]] = {}
    for found in all_found:
        values = ", ".join(str(getattr(found.case, key)) for key in keys)
        groups.setdefault(values, []).append(found.counts)
    for values, group in groups.items():
        total = sum(group, Counter())
        worst = max(counts["unread"] / max(counts["batches"], 1) for counts in group)
        print(f"| {values} |", " | ".join(f"{total[name]:,}" for name in COUNTS), f"| {100 * worst:.1f} % |")


def explore(seed: int) -> None:
    """Run one case of each setting, and print what was read; scripts of the faults go to standard error."""
    for cases, keys in ((plain_cases(seed), PLAIN_KEYS), (other_cases(seed), OTHER_KEYS)):
        all_found = []
        for case in cases:
            all_found.append(found_in(case))
            if all_found[-1].fault:
                print(all_found[-1].fault, file=sys.stderr, flush=True)
        for of_table in keys:
            print_table(all_found, *of_table)
