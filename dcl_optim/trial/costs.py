"""What the penalty costs in a training step of one's own."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.outputs import find_logits
from dcl_optim.trial.evaluation import call
from dcl_optim.trial.memory import peak_of, readable, state_bytes
from dcl_optim.trial.text import aligned
from dcl_optim.trial.timing import interleaved, is_accelerator, quartiles, ratios

__all__ = ["Cost", "Overhead", "overhead"]

SECONDS = 10.0
ROUNDS = (5, 20)  # the fewest, also of a long step, and the most
WARM_UP = 2  # steps: what the first ones allocate later ones reuse
# A row's name, its wrapper, and whether the penalty is a term of the loss.
ROWS: tuple[tuple[str, type[DCPOptimizer] | type[DCLOptimizer] | None, bool], ...] = (
    ("plain", None, False),
    ("DCP, line", DCPOptimizer, False),
    ("DCP, term", DCPOptimizer, True),
    ("DCL, line", DCLOptimizer, False),
    ("DCL, term", DCLOptimizer, True),
)
PASSES = 7.5  # about how many plain steps one step of each row takes
STANDS_STILL = 1e-6  # times the learning rate: a batch that is fitted would have no gradients left to compute with


@dataclass(frozen=True)
class Cost:
    """What one way to train costs.

    Attributes:
        name: plain, or the optimizer and how it was added.
        milliseconds: of a step, the median over the rounds.
        ratio: to the plain step of the same round, the median.
        lower: the lower quartile of that ratio.
        upper: its upper quartile.
        state_bytes: what the optimizer keeps beyond its base.
        peak_bytes: the most that a step takes of the device beyond model, gradients, plain optimizer and batch, with
            ``state_bytes``; None where the device does not count.
    """

    name: str
    milliseconds: float
    ratio: float
    lower: float
    upper: float
    state_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class Overhead:
    """The costs of a step, a table when it is printed.

    Attributes:
        rows: what each way to train costs, plain training first.
        refused: why a way cannot train this script, by its name.
        setting: device, threads and rounds.
    """

    rows: tuple[Cost, ...]
    refused: Mapping[str, str]
    setting: str

    def __str__(self) -> str:
        has_peak = self.rows[0].peak_bytes is not None
        head = ["", "ms a step", "times plain", "half of the rounds", "state", *(["peak memory"] if has_peak else [])]
        body = []
        for row in self.rows:
            spread = f"{row.lower:.2f} to {row.upper:.2f}" if row is not self.rows[0] else ""
            line = [row.name, f"{row.milliseconds:.3g}", f"{row.ratio:.2f}", spread, f"+{readable(row.state_bytes)}"]
            body.append([*line, readable(row.peak_bytes)] if row.peak_bytes is not None else line)
        refused = [f"{name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join([aligned(head, body), *refused, self.setting])

    __repr__ = __str__


def overhead(
    model: nn.Module,
    optimizer: Optimizer,
    batch: tuple[Any, Tensor],
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
    *,
    logits: Callable[[Any], Tensor] | None = None,
    seconds: float = SECONDS,
) -> Overhead:
    """Measure what a training step takes with DCP and with DCL, by the line and by the term, and without.

    Each row trains a copy of the model by a copy of the optimizer, always on the same batch and with a learning rate
    near 0, so that the work of a step stays the same. Steps of all rows are interleaved. Model, optimizer, batch,
    random streams and the mode stay as they were. On stderr it says first how long it takes.

    Args:
        model: what the script trains, in training mode or not.
        optimizer: the plain one that trains it, before it is wrapped.
        batch: (inputs, labels). The inputs are a tensor, a tuple of positional arguments or a dict of keyword arguments
            of the model. The labels are as ``loss`` takes them.
        loss: function of the model's output and the labels that returns the loss. Default: softmax cross-entropy.
        logits: function of the model's output that returns the logits tensor, as the optimizers have it. None (default)
            finds them.
        seconds: about how long to measure, above 0. Steps of a quarter second or more take longer. Default 10.

    Returns:
        The table: print it. With one thread its milliseconds are those of the processor, on an accelerator those
        between two events, else those of the wall clock.

    Raises:
        TypeError: the batch is no pair.
        ValueError: the optimizer is a DCPOptimizer or DCLOptimizer already, or ``seconds`` is not positive.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batch = torch.randn(128, 32), torch.randint(10, (128,))
        >>> print(overhead(model, optimizer, batch, seconds=0.5))
                   ms a step  times plain  half of the rounds      state
        ----------------------------------------------------------------
        plain      ...   1.00                       +0.0 KiB
        DCP, line  ...
        DCP, term  ...
        DCL, line  ...
        DCL, term  ...
        cpu, ... rounds of ...
    """
    if isinstance(optimizer, (DCPOptimizer, DCLOptimizer)):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__} already; pass the plain optimizer and its model, before the "
            "line that wraps it"
        )
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(f"batch must be a pair (inputs, labels), got {type(batch).__name__}")
    if not seconds > 0:
        raise ValueError(f"seconds must be above 0, got {seconds!r}")
    device = optimizer.param_groups[0]["params"][0].device
    with _random_streams_kept(device):
        return _measured(_Script(model, optimizer, batch, loss, logits), device, seconds)


@dataclass(frozen=True)
class _Script:
    """What the user gave."""

    model: nn.Module
    optimizer: Optimizer
    batch: Any
    loss: Callable[[Any, Tensor], Tensor]
    logits: Callable[[Any], Tensor] | None


class _Training:
    """A copy of the script, trained in one way."""

    def __init__(self, script: _Script, wrapper: Any, is_term: bool) -> None:
        given = script.model, script.optimizer, script.batch, script.loss
        self.model, base, (self.inputs, self.labels), self.loss = copy.deepcopy(given)  # together: they share tensors
        if not self.model.training:
            self.model.train()
        for group in base.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * STANDS_STILL
        self.optimizer: Any = base if wrapper is None else wrapper(base, self.model, logits=script.logits)
        self.is_term = is_term
        self.logits = script.logits

    def step(self) -> None:
        """Take a step as the script does."""
        self.optimizer.zero_grad()
        output = call(self.model, self.inputs)
        loss = self.loss(output, self.labels)
        if self.is_term:
            loss = loss + self._penalty(find_logits(output, self.logits))
        loss.backward()
        self.optimizer.step()

    def _penalty(self, z: Tensor) -> Tensor:
        if isinstance(self.optimizer, DCLOptimizer):
            return self.optimizer.penalty(z)
        return self.optimizer.penalty(z, self.labels)


def _measured(script: _Script, device: torch.device, seconds: float) -> Overhead:
    plain = _Training(script, None, False)
    of_step = _warmed_up(plain, device)
    _announce(of_step, seconds)
    trainings = {"plain": plain}
    refused = {}
    of_round = of_step
    for name, wrapper, is_term in ROWS[1:]:
        started = _start(script, wrapper, is_term, device)
        if isinstance(started, str):
            refused[name] = started
        else:
            trainings[name], of_step = started
            of_round += of_step
    rounds, count = _plan(of_round, seconds)
    times = interleaved({name: training.step for name, training in trainings.items()}, rounds, count, device)
    rows = tuple(_cost(name, training, times, device) for name, training in trainings.items())
    return Overhead(rows, refused, _setting(device, rounds, count))


def _start(script: _Script, wrapper: Any, is_term: bool, device: torch.device) -> tuple[_Training, float] | str:
    """Return a training with the seconds of its step, or why it cannot train this script."""
    try:
        training = _Training(script, wrapper, is_term)
        return training, _warmed_up(training, device)
    except (RuntimeError, TypeError, ValueError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]


def _warmed_up(training: _Training, device: torch.device) -> float:
    """Take the first steps, and return the seconds of the last one by the wall clock."""
    for _ in range(WARM_UP):
        begin = time.perf_counter()
        training.step()
        if is_accelerator(device):
            torch.accelerator.synchronize(device)
    return time.perf_counter() - begin


def _plan(of_round: float, seconds: float) -> tuple[int, int]:
    """Choose how many rounds there are, and how many steps a slot of them has, by the seconds of a step of each row."""
    fewest, most = ROUNDS
    count = max(1, int(seconds / most / of_round))
    rounds = round(seconds / (count * of_round))
    return min(most, max(fewest, rounds)), count


def _announce(of_step: float, seconds: float) -> None:
    of_round = PASSES * of_step
    rounds, count = _plan(of_round, seconds)
    expected = of_round * (rounds * count + WARM_UP)
    step = f"overhead: a plain step takes about {1000 * of_step:.3g} ms"
    print(f"{step}; measuring takes about {max(1, round(expected))} s ...", file=sys.stderr, flush=True)


def _cost(name: str, training: _Training, times: Mapping[str, list[float]], device: torch.device) -> Cost:
    spread = ratios(times[name], times["plain"])
    state = state_bytes(training.optimizer)
    peak = peak_of(training.step, device)
    return Cost(
        name,
        milliseconds=1000 * quartiles(times[name])["median"],
        ratio=spread["median"],
        lower=spread["lower"],
        upper=spread["upper"],
        state_bytes=state,
        peak_bytes=None if peak is None else peak + state,
    )


def _setting(device: torch.device, rounds: int, count: int) -> str:
    threads = torch.get_num_threads()
    where = str(device) if is_accelerator(device) else f"{device}, {threads} thread{'s' if threads > 1 else ''}"
    return f"{where}; {rounds} rounds of {count} step{'s' if count > 1 else ''}"


@contextmanager
def _random_streams_kept(device: torch.device) -> Iterator[None]:
    """Put the random streams of Python, NumPy and torch back, on the CPU and on the devices of an accelerator."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002
    kept: dict[str, Any] = {"devices": []}
    if is_accelerator(device):
        kept = {"devices": range(torch.accelerator.device_count()), "device_type": device.type}
    try:
        with torch.random.fork_rng(**kept):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
