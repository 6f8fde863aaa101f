"""One training from its checkpoint to its end: progress, a checkpoint after each epoch, and what a signal does.

The end is the last epoch, or the first one whose loss is not finite.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from examples.research.paper.training import Training


class Stopped(Exception):
    """A signal asked for the end, and the checkpoint is written."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Notes Ctrl-C and SIGTERM while a block runs; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        signal.signal(number, self._before[number])


def train(training: Training, checkpoint: Path, signals: Signals, say: Callable[[str], None]) -> None:
    """Train to the end, from the checkpoint if there is one.

    Raises:
        Stopped: a signal came; the checkpoint has the step that was reached.
    """
    session, epochs = training.session, training.configuration.epochs
    if checkpoint.exists():
        training.resume(checkpoint)
        say(f"goes on after epoch {training.epochs} and {training.batches} steps")
    session.wait()

    def save() -> None:
        if session.first:
            training.save(checkpoint)

    def stop_if_asked() -> None:
        if session.any(bool(signals.number)):
            # The others' losses are not in the first one's checkpoint.
            training.total.fill_(session.mean(float(training.total)))
            save()
            session.wait()
            raise Stopped(signals.number or signal.SIGTERM)

    while training.epochs < epochs and training.diverged is None:
        begin, waited, first = time.perf_counter(), training.waited, training.batches
        for _ in training.steps():
            stop_if_asked()
        seconds = time.perf_counter() - begin
        if session.first and training.diverged is None:
            training.measure()
        save()
        session.wait()
        measured = time.perf_counter() - begin - seconds
        steps = training.steps_in_all() // epochs
        whole = seconds * steps / max(1, steps - first)  # of an epoch that goes on in its middle
        left = (whole + measured) * (epochs - training.epochs)
        if training.diverged is not None:
            say(f"epoch {training.epochs}/{epochs}: loss {training.losses[-1]}: diverged, the run ends here")
            continue
        shown = f"test accuracy {100 * training.history[-1]:.2f} %, " if training.history else ""
        say(
            f"epoch {training.epochs}/{epochs}: {shown}loss {training.losses[-1]:.4f}, {seconds:.1f} s, of which "
            f"{training.waited - waited:.1f} s waiting for images, {duration(left)} left"
        )
        stop_if_asked()


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, name in ((365 * 86400.0, "years"), (86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"
