"""A few steps of each row on the user's data: what would fail at size fails here."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from examples.research.datasets.folders import Folders
from examples.research.paper.checks import problems
from examples.research.paper.images import Stream, load
from examples.research.paper.rows import Row, Work, works
from examples.research.paper.session import Session
from examples.research.paper.training import Training

STEPS = 2


def run(chosen: Mapping[str, Sequence[Row]], session: Session) -> int:
    """Train and measure a little of each training; say how it went, and give the exit status."""
    names: dict[str, list[str]] = {}
    for table, rows in chosen.items():
        for row in rows:
            names.setdefault(_like(row.work), []).append(f"{table} {row.name}")
    begin = time.perf_counter()
    all_works = list({_like(work): work for work in works(row for rows in chosen.values() for row in rows)}.values())
    missing = problems(all_works, session, space=False)
    say = print if session.first else _silent
    for line in missing:
        say(f"a whole run would be refused: {line}")
    failed = 0
    for work in all_works:
        label = ", ".join(names.get(_like(work), ["what others need"]))
        clock = time.perf_counter()
        try:
            data = load(work, session, 0)
        except (ValueError, ImportError, OSError):  # said above, once for all rows
            say(f"{label}: FAILED, its data cannot be read", flush=True)
            failed += 1
            continue
        try:
            said = "ok    " + _tried(work, replace(session, random_needs=True), data)
        except Exception as error:  # whatever it is, the other rows are tried
            said = f"FAILED {type(error).__name__}: {error}"
            failed += 1
        gc.collect()  # the hooks of a network refer to it
        say(f"{label}: {said}, {time.perf_counter() - clock:.1f} s", flush=True)
    seconds = time.perf_counter() - begin
    say(f"{len(all_works)} trainings behind {sum(map(len, names.values()))} rows, {failed} failed, {seconds:.0f} s")
    return int(bool(failed))


def _silent(*given: object, **options: object) -> None:
    """Stand for print in the processes that do not report."""


def _like(work: Work) -> str:
    """A name for what is tried: the training that another begins with is left out, as random weights stand for it."""
    return replace(work, needs=None).key(0)


def _tried(work: Work, session: Session, data: Folders | Stream) -> str:
    training = Training(work, 0, session, data)
    steps = training.steps()
    count = sum(1 for _ in islice(steps, STEPS))
    steps.close()  # type: ignore[attr-defined]
    x, _ = next(iter(training.data.fixed("test", 2)))
    shapes = {name: tuple(predict(training._moved(x)).shape) for name, predict in training.predictors().items()}
    loss = float(training.total / training.images)
    if not math.isfinite(loss):
        raise ValueError("the loss is not finite")
    predicted = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return f"{count} steps, loss {loss:.3f}, {predicted or 'no classes'}"
