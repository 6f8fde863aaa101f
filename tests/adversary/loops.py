"""Random training loops, and the literal loop that each has to equal."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer, LinearWarmup, RunningAverage
from dcl_optim.reference import dcl_step, dcp_step
from tests.reliability.cases import DISTANCES, IGNORED, Batch, Case, cases, set_rates


def set_to_none(optimizer: Any, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def write_zeros(optimizer: Any, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


# The first five also tell that a step was skipped (docs/troubleshooting.md).
CLEARS: dict[str, Callable[[Any, nn.Module], None]] = {
    "optimizer": lambda optimizer, model: optimizer.zero_grad(),
    "optimizer, in place": lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    "model": lambda optimizer, model: model.zero_grad(),
    "base": lambda optimizer, model: optimizer.base.zero_grad(),
    "by hand": set_to_none,
    "model, in place": lambda optimizer, model: model.zero_grad(set_to_none=False),
    "base, in place": lambda optimizer, model: optimizer.base.zero_grad(set_to_none=False),
    "by hand, in place": write_zeros,
}
TELLING = list(CLEARS)[:5]
STEPS = ("plain", "scaler", "closure", "closure, lazy")
PARTS = ("plain, accumulation", "scaler, accumulation", "closure, accumulation", "halves")
IDLE = ("skip", "not finite", "forward", "evaluation", "evaluation, with gradients", "resume")
LEAVES_GRADIENTS = ("skip", "skip, accumulation", "not finite")


@dataclass(frozen=True)
class Event:
    """What a loop does next: a training step, or something in between.

    Attributes:
        kind: the name of a method of :class:`Script`; what follows a comma is how.
        clear: how gradients are cleared.
        when: "first", "between" forward and backward, or "last".
        evaluates: whether an evaluation comes between forward and backward; which state is loaded first.
    """

    kind: str
    clear: str
    when: str
    evaluates: bool

    @property
    def steps(self) -> bool:
        return self.kind in STEPS + PARTS


@dataclass(frozen=True)
class Loop:
    """A random training of ``case``, whose sizes and rates are those of the events."""

    case: Case
    variant: str
    options: dict[str, Any]
    reads_labels: bool  # or the script gives them
    ignores: bool
    events: tuple[Event, ...]

    def script(self) -> str:
        return (
            "from dcl_optim import LinearWarmup, RunningAverage\nfrom tests.adversary.loops import Event, Loop\n"
            "from tests.reliability.cases import Case\nfrom tests.reliability.networks import Base, Network\n\n"
            f"loop = {self!r}\nprint(loop.error())  # at most 1e-8\n"
        )

    def error(self) -> float:
        """How far the model and what the forecaster knows end from the literal loop, relative to the largest number."""
        both = zip(Script(self).run(), literal(self), strict=True)
        return float(torch.stack([(a - b).abs().max() / b.abs().max() for a, b in both]).max())

    def batches(self) -> list[Batch]:
        return self.case.batches(self.ignores)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def parts(x: Tensor, y: Tensor) -> list[Batch]:
    """A batch in two unequal micro-batches."""
    first = max(1, len(x) // 3)
    return [(x[:first], y[:first]), (x[first:], y[first:])]


class Script:
    """A training script with the wrapped optimizer."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.case = loop, loop.case
        self.grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
        self.make()

    def make(self) -> None:
        self.model = self.case.model()
        base, options = self.case.base.build(self.model), self.case.options() | self.loop.options
        if "loss_scale" in options:
            options["loss_scale"] = lambda: self.factor
        wrapper: Any = DCLOptimizer if self.loop.variant == "dcl" else DCPOptimizer
        self.optimizer = wrapper(base, self.model, **options)

    def run(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(self.case.seed)
        for event, rate, (x, y) in zip(self.loop.events, self.case.rates, self.loop.batches(), strict=True):
            set_rates(self.optimizer, rate)
            getattr(self, event.kind.partition(",")[0].replace(" ", "_"))(event, x, y)
        dcl = self.loop.variant == "dcl"
        learned = self.optimizer.companion.state_dict().values() if dcl else [self.optimizer.prototypes]
        return flat(self.model.state_dict().values()), flat(learned)

    def clear(self, event: Event, when: str) -> None:
        if event.when == when:
            CLEARS[event.clear](self.optimizer, self.model)

    def loss(self, event: Event, x: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
        self.factor = share * self.case.factor
        if self.loop.variant == "dcp" and not self.loop.reads_labels:
            self.optimizer.set_targets(y)
        loss = self.factor * F.cross_entropy(self.model(x), y)
        if event.kind.startswith(("scaler", "not finite")):
            self.factor *= self.grad_scaler.get_scale()
            return self.grad_scaler.scale(loss)
        return loss

    def gradients(self, event: Event, x: Tensor, y: Tensor) -> Tensor:
        self.clear(event, "first")
        total = torch.zeros(())
        for part in parts(x, y) if "accumulation" in event.kind else [(x, y)]:
            loss = self.loss(event, *part, len(part[0]) / len(x))
            if event.evaluates:
                self.evaluation(event, x, y)
            self.clear(event, "between")
            loss.backward()
            total = total + loss.detach()
        return total

    def plain(self, event: Event, x: Tensor, y: Tensor) -> None:
        self.gradients(event, x, y)
        self.optimizer.step()
        self.clear(event, "last")

    def scaler(self, event: Event, x: Tensor, y: Tensor) -> None:
        self.gradients(event, x, y)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.clear(event, "last")

    def closure(self, event: Event, x: Tensor, y: Tensor) -> None:
        """A lazy one leaves the backward pass to the optimizer."""
        self.optimizer.step(lambda: (self.loss if "lazy" in event.kind else self.gradients)(event, x, y))
        self.clear(event, "last")

    def halves(self, event: Event, x: Tensor, y: Tensor) -> None:
        """Two forward passes and one backward pass."""
        self.clear(event, "first")
        losses = [self.loss(event, *half, 0.5) for half in zip(x.chunk(2), y.chunk(2), strict=True)]
        self.clear(event, "between")
        sum(losses).backward()  # type: ignore[union-attr]
        self.optimizer.step()
        self.clear(event, "last")

    def skip(self, event: Event, x: Tensor, y: Tensor) -> None:
        self.gradients(event, x, y)
        self.clear(event, "last")

    def not_finite(self, event: Event, x: Tensor, y: Tensor) -> None:
        """A step that the gradient scaler skips."""
        self.clear(event, "first")
        (self.loss(event, x, y) * torch.inf).backward()
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.clear(event, "last")

    def forward(self, event: Event, x: Tensor, y: Tensor) -> None:
        self.model(x)

    def evaluation(self, event: Event, x: Tensor, y: Tensor) -> None:
        self.model.eval()
        with torch.set_grad_enabled("with gradients" in event.kind):
            F.cross_entropy(self.model(x), y)
        self.model.train()

    def resume(self, event: Event, x: Tensor, y: Tensor) -> None:
        file, random = io.BytesIO(), torch.get_rng_state()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        self.make()
        for part in ("model", "optimizer") if event.evaluates else ("optimizer", "model"):
            getattr(self, part).load_state_dict(state[part])
        torch.set_rng_state(random)


def literal(loop: Loop) -> tuple[Tensor, Tensor]:
    """The same by the written-out algorithm, which takes each batch whole."""
    case, options, dcl = loop.case, loop.options, loop.variant == "dcl"
    model, companion, prototypes = case.model(), case.model(), {}
    plain, chasing = case.base.build(model), case.base.build(companion, options.get("companion_lr_scale", 1.0))
    numbers: dict[int, float] | None = None if options.get("update") == "batch" else {}
    step = 0
    torch.manual_seed(case.seed)
    for event, rate, (x, y) in zip(loop.events, case.rates, loop.batches(), strict=True):
        set_rates(plain, rate)
        set_rates(chasing, rate)
        if not event.steps:
            if event.kind in (*LEAVES_GRADIENTS, "forward"):  # random draws, and the statistics of batch norm
                random = torch.get_rng_state()
                for network in (companion, model):
                    torch.set_rng_state(random)
                    network(x)
            continue
        step += 1
        settings = {"weight": case.weight_at(step), "alpha": case.alpha_at(step)}
        functions = (lambda z, y: case.factor * F.cross_entropy(z, y), DISTANCES[case.distance][1])
        if dcl:
            settings["learns"] = step % options.get("companion_every", 1) == 0
            dcl_step(model, companion, plain, chasing, x, y, *functions, **settings)
        else:
            settings["numbers"] = numbers
            of_labelled: Any = lambda x, rows=y != IGNORED: model(x)[rows]  # noqa: E731
            dcp_step(of_labelled, prototypes, plain, x, y[y != IGNORED], *functions, **settings)
    unseen = torch.zeros(case.classes, dtype=torch.float64)
    learned = companion.state_dict().values() if dcl else [prototypes.get(k, unseen) for k in range(case.classes)]
    return flat(model.state_dict().values()), flat(learned)


# ---- random ones -----------------------------------------------------------------------------------------------------

hundredths = st.integers(0, 100).map(lambda number: number / 100)


def consistent(events: list[Event]) -> tuple[Event, ...]:
    """Clear gradients that are there before others are added, and those of a skipped step by a way that tells it."""
    found, there, skipped = [], False, False
    for event in events:
        if (there and event.when == "last") or (event.when == "between" and "accumulation" in event.kind):
            event = replace(event, when="first")
        if (skipped or event.kind in LEAVES_GRADIENTS) and event.clear not in TELLING:
            event = replace(event, clear="optimizer")
        found.append(event)
        if event.kind == "resume":
            there = skipped = False
        elif event.steps or event.kind in LEAVES_GRADIENTS:
            there = event.when != "last"
            skipped = there and not event.steps
    return tuple(found)


@st.composite
def loops(draw: st.DrawFn, interrupted: bool) -> Loop:
    """A training of up to ten steps; an interrupted one also skips steps, evaluates and resumes."""
    case, variant = draw(cases()), draw(st.sampled_from(["dcl", "dcp"]))
    ignores = variant == "dcp" and draw(st.booleans())
    splits = case.network.rows_are_independent and case.distance != "infonce" and not ignores
    kinds = STEPS + splits * PARTS
    if interrupted:
        kinds += IDLE[: -1 if case.base.name == "NAdam" else None]  # which torch does not resume bit for bit
        kinds += splits * ("skip, accumulation",)
    event = st.builds(
        Event,
        st.sampled_from(kinds),
        st.sampled_from(list(CLEARS)),
        st.sampled_from(["first", "between", "last"]),
        st.booleans() if interrupted else st.just(False),
    )
    events = draw(st.lists(event, min_size=2, max_size=10))
    events.append(replace(events[0], kind="plain"))
    sizes = draw(st.lists(st.integers(1, 4).map(lambda half: 2 * half), min_size=len(events), max_size=len(events)))
    rates = draw(st.lists(st.sampled_from([1.0, 0.5, 0.1]), min_size=len(events), max_size=len(events)))
    ramp = st.builds(LinearWarmup, hundredths, st.integers(1, 8))
    case = replace(
        case,
        sizes=tuple(sizes),
        rates=tuple(rates),
        loop="plain",
        parts=1,
        weight=draw(hundredths.map(lambda number: 3 * number) | ramp),
        alpha=draw(hundredths | st.just(RunningAverage()) | ramp),
    )
    options = (
        {"companion_every": draw(st.sampled_from([1, 1, 2])), "companion_lr_scale": draw(st.sampled_from([1.0, 0.5]))}
        if variant == "dcl"
        else {"update": draw(st.sampled_from(["rows", "batch"]))}
    )
    reads_labels = case.factor_from == "gradient" and min(sizes) > 4
    return Loop(case, variant, options, reads_labels, ignores, consistent(events))
