"""Random training loops, by the line and by the term, and the literal loop that each has to equal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as of_seed
from hypothesis import strategies as st

from tests.adversary.cases import Case, Literal, cases, learned, set_rates, wrapped
from tests.helpers import linear_growth, running_average, through_a_file
from tests.reference import term_of

CLEARS = ("optimizer", "optimizer, in place", "model", "base", "model, in place", "base, in place")
TELLING = CLEARS[:2]  # that a step was skipped: only the wrapper knows (docs/supported.md, limit 2)
STEPS = ("plain", "scaler", "closure")
PARTS = ("plain, accumulation", "scaler, accumulation", "closure, accumulation", "plain, halves")
SKIPPED = ("skip", "not finite", "skip, accumulation")  # leave gradients that no step takes
IDLE = ("skip", "not finite", "forward", "evaluation", "evaluation, with gradients", "resume")


@dataclass(frozen=True)
class Event:
    """What a loop does next: a training step, or something in between.

    Gradients are cleared by ``clear``, when "first", "between" forward and backward pass, or "last". With ``evaluates``
    an evaluation comes between both; of a resumption it tells which state is loaded first.
    """

    kind: str
    clear: str
    when: str
    evaluates: bool
    term: bool

    @property
    def steps(self):
        return self.kind in STEPS + PARTS


@dataclass(frozen=True)
class Loop:
    """A random training of ``case``, whose sizes and rates are those of the events."""

    case: Case
    variant: str
    options: dict[str, Any]
    ignores: bool
    events: tuple[Event, ...]

    def script(self):
        imports = "from tests.adversary.loops import *\nfrom tests.adversary.cases import *\n"
        return f"{imports}\nprint({self!r}.error())  # at most 1e-8\n"

    def error(self):
        """How far the model and what the forecaster knows end from the literal loop, relative to the largest number."""
        case, script = self.case, Script(self)
        literal, batches = Literal(case, self.variant, **self.options), case.batches(self.ignores)
        torch.manual_seed(case.seed)
        for event, rate, (x, y) in zip(self.events, case.rates, batches, strict=True):
            script.do(event, rate, x, y)
        torch.manual_seed(case.seed)
        for event, rate, (x, y) in zip(self.events, case.rates, batches, strict=True):
            if event.steps:
                literal.step(x, y, rate)
            elif event.kind in (*SKIPPED, "forward"):
                literal.forward(x)
        ours = *script.model.state_dict().values(), *learned(script.optimizer)
        theirs = *literal.model.state_dict().values(), *literal.learned()
        return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(ours, theirs, strict=True))


class Script:
    """A training script with the wrapped optimizer."""

    def __init__(self, loop):
        self.loop, self.case = loop, loop.case
        self.grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
        self.make()

    def make(self):
        self.model, self.optimizer = wrapped(self.case, self.loop.variant, **self.loop.options)

    def do(self, event, rate, x, y):
        set_rates(self.optimizer, rate)
        kind = event.kind.partition(", ")[0]
        if not (event.steps or event.kind in SKIPPED):
            getattr(self, kind)(event, x, y)
            return
        if kind == "closure":
            self.optimizer.step(lambda: self.gradients(event, x, y))
        else:
            self.gradients(event, x, y)
        if kind == "plain":
            self.optimizer.step()
        elif kind in ("scaler", "not finite"):
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
        self.clear(event, "last")

    def clear(self, event, when):
        if event.when == when:
            owners = {"optimizer": self.optimizer, "model": self.model, "base": self.optimizer.base}
            owner, _, in_place = event.clear.partition(", ")
            owners[owner].zero_grad(set_to_none=not in_place)

    def loss(self, event, x, y, share=1.0):
        z = self.model(x)
        loss = self.case.loss(z, y)
        if event.term:
            loss = loss + self.case.factor * term_of(self.optimizer)(z, y)
        loss = loss * (torch.inf if event.kind == "not finite" else share)
        return self.grad_scaler.scale(loss) if event.kind.startswith(("scaler", "not finite")) else loss

    def gradients(self, event, x, y):
        """Of a whole batch, accumulated over two unequal parts, or of two forward passes in one backward pass."""
        self.clear(event, "first")
        halves = "halves" in event.kind
        cuts = [len(x) // 2] if halves else [max(1, len(x) // 3)] if "accumulation" in event.kind else []
        losses = []
        for part in zip(x.tensor_split(cuts), y.tensor_split(cuts), strict=True):
            losses.append(self.loss(event, *part, len(part[0]) / len(x)))
            if event.evaluates:
                self.evaluation(event, x, y)
            self.clear(event, "between")
            if not halves:
                losses[-1].backward()
        if halves:
            torch.stack(losses).sum().backward()
        return torch.stack(losses).sum().detach()

    def forward(self, event, x, y):
        self.model(x)

    def evaluation(self, event, x, y):
        gradients = "with gradients" in event.kind
        self.model.eval()
        with torch.set_grad_enabled(gradients):
            z = self.model(x)
            assert gradients or not event.term or term_of(self.optimizer)(z, y) == 0
        self.model.train()

    def resume(self, event, x, y):
        random = torch.get_rng_state()
        state = through_a_file({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        self.make()
        for part in ("model", "optimizer") if event.evaluates else ("optimizer", "model"):
            getattr(self, part).load_state_dict(state[part])
        torch.set_rng_state(random)


def consistent(events):
    """Clear gradients that are there before others are added, and those of a skipped step by a way that tells it.

    After a first term all are terms.
    """
    found, there, skipped, term = [], False, False, False
    for event in events:
        if event.steps or event.kind in SKIPPED:
            term = term or event.term
            event = replace(event, term=term)
        if (there and event.when == "last") or (event.when == "between" and "accumulation" in event.kind):
            event = replace(event, when="first")
        if (skipped or event.kind in SKIPPED) and event.clear not in TELLING:
            event = replace(event, clear="optimizer")
        found.append(event)
        if event.kind == "resume":
            there = skipped = False
        elif event.steps or event.kind in SKIPPED:
            there = event.when != "last"
            skipped = there and not event.steps
    return tuple(found)


@st.composite
def loops(draw, interrupted):
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
        st.sampled_from(CLEARS),
        st.sampled_from(["first", "between", "last"]),
        st.booleans() if interrupted else st.just(False),
        st.booleans() if case.way == "line" else st.just(True),
    )
    events = draw(st.lists(event, min_size=2, max_size=10))
    events.append(replace(events[0], kind="plain"))

    def for_each(values):
        return tuple(draw(st.lists(values, min_size=len(events), max_size=len(events))))

    hundredths = st.integers(0, 100).map(lambda number: number / 100)
    growth = st.builds(partial, st.just(linear_growth), value=hundredths, steps=st.integers(1, 8))
    case = replace(
        case,
        sizes=for_each(st.integers(3 if case.way == "line" else 1, 5).map(lambda half: 2 * half)),
        rates=for_each(st.sampled_from([1.0, 0.5, 0.1])),
        weight=draw(hundredths.map(lambda number: 3 * number) | growth),
        alpha=draw(hundredths | st.just(running_average) | growth),
    )
    dcl = {"companion_lr_scale": st.sampled_from([1.0, 0.5])}
    options = draw(st.fixed_dictionaries(dcl if variant == "dcl" else {"update": st.sampled_from(["rows", "batch"])}))
    return Loop(case, variant, options, ignores, consistent(events))


def check(number, seed, interrupted):
    """Compare random loops with the literal ones."""

    def equals(loop):
        try:
            error = loop.error()
        except Exception as exception:
            raise AssertionError(loop.script()) from exception
        assert error <= 1e-8, f"{error:.1e}\n\n{loop.script()}"

    drawn = settings(derandomize=False, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    of_seed(seed)(settings(drawn, max_examples=number)(given(loops(interrupted))(equals)))()
