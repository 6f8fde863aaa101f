"""What the penalty costs in a training step of one's own."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.pytorch.outputs import find_logits
from dcl_optim.trial.evaluation import call
from dcl_optim.trial.extra import require
from dcl_optim.trial.memory import peak_of, readable, tensor_bytes
from dcl_optim.trial.timing import interleaved, is_accelerator, quartiles, ratios, seconds_per_step

__all__ = ["Cost", "Overhead", "overhead"]

SECONDS = 10.0
ROUNDS = (5, 20)  # the fewest, also of a long step, and the most
# A row's name, its wrapper, and whether the penalty is a term of the loss.
ROWS: tuple[tuple[str, Any, bool], ...] = (
    ("plain", None, False),
    ("DCP, line", DCPOptimizer, False),
    ("DCP, term", DCPOptimizer, True),
    ("DCL, line", DCLOptimizer, False),
    ("DCL, term", DCLOptimizer, True),
)
WARM_UP = 2  # steps: what the first ones allocate later ones reuse
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
        from tabulate import tabulate

        body = []
        for row in self.rows:
            cells = {
                "": row.name,
                "ms a step": f"{row.milliseconds:.3g}",
                "times plain": f"{row.ratio:.2f}",
                "half of the rounds": f"{row.lower:.2f} to {row.upper:.2f}",
                "state": f"+{readable(row.state_bytes)}",
            }
            if row.peak_bytes is not None:
                cells["peak memory"] = readable(row.peak_bytes)
            body.append(cells)
        table = tabulate(body, headers="keys", disable_numparse=True, stralign="right", colalign=["left"])
        refused = [f"{name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join([table, *refused, self.setting])

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
    random streams and the mode stay as they were. On stderr it says how long it takes. It needs the extra
    ``trial``.

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
        The table: print it. With one thread its milliseconds are those of the processor, on an accelerator those of
        the wall clock while the device works, else those of the wall clock.

    Raises:
        ImportError: a package of the extra is missing.
        TypeError: the batch is no pair.
        ValueError: the optimizer is a DCPOptimizer or DCLOptimizer already, or ``seconds`` is not positive.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batch = torch.randn(128, 32), torch.randint(10, (128,))
        >>> print(overhead(model, optimizer, batch, seconds=0.5))
                   ms a step    times plain    half of the rounds       state
        ---------  ...
        plain      ...   1.00          1.00 to 1.00    +0.0 KiB
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
    require("trial", "tabulate")
    device = optimizer.param_groups[0]["params"][0].device
    with _random_streams_kept(device):
        return _measured(partial(_Training, (model, optimizer, batch, loss), logits), device, seconds)


class _Training:
    """A copy of the script, trained in one way."""

    def __init__(self, script: Any, logits: Callable[[Any], Tensor] | None, wrapper: Any, is_term: bool) -> None:
        self.model, base, (self.inputs, self.labels), self.loss = copy.deepcopy(script)  # together: they share tensors
        if not self.model.training:
            self.model.train()
        for group in base.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * STANDS_STILL
        self.optimizer: Any = base if wrapper is None else wrapper(base, self.model, logits=logits)
        self.is_term = is_term
        self.logits = logits

    def step(self) -> None:
        """Take a step as the script does."""
        self.optimizer.zero_grad()
        output = call(self.model, self.inputs)
        loss = self.loss(output, self.labels)
        if self.is_term:
            labels = [] if isinstance(self.optimizer, DCLOptimizer) else [self.labels]
            loss = loss + self.optimizer.penalty(find_logits(output, self.logits), *labels)
        loss.backward()
        self.optimizer.step()


def _measured(make: Callable[[Any, bool], _Training], device: torch.device, seconds: float) -> Overhead:
    trainings = {}
    refused = {}
    of_round = 0.0
    for name, wrapper, is_term in ROWS:
        started = _started(make, wrapper, is_term)
        if isinstance(started, str):
            refused[name] = started
        else:
            trainings[name] = started
            of_round += seconds_per_step(started.step, 1, device)
    fewest, most = ROUNDS
    count = max(1, int(seconds / most / of_round))
    rounds = min(most, max(fewest, round(seconds / (count * of_round))))
    expected = max(1, round(rounds * count * of_round))
    print(f"overhead: measuring takes about {expected} s ...", file=sys.stderr, flush=True)
    times = interleaved({name: training.step for name, training in trainings.items()}, rounds, count, device)
    rows = tuple(_cost(name, training, times, device) for name, training in trainings.items())
    setting = f"{device}, {torch.get_num_threads()} threads; {rounds} rounds of {count} steps"
    return Overhead(rows, refused, setting)


def _started(make: Callable[[Any, bool], _Training], wrapper: Any, is_term: bool) -> _Training | str:
    """Return a training that has taken its first steps, or why it cannot."""
    try:
        training = make(wrapper, is_term)
        for _ in range(WARM_UP):
            training.step()
    except (RuntimeError, TypeError, ValueError) as error:
        if wrapper is None:
            raise  # a fault of the script
        return (str(error) or type(error).__name__).splitlines()[0]
    return training


def _cost(name: str, training: _Training, times: Mapping[str, list[float]], device: torch.device) -> Cost:
    spread = ratios(times[name], times["plain"])
    state = 0
    if isinstance(training.optimizer, (DCPOptimizer, DCLOptimizer)):
        state = tensor_bytes(training.optimizer.state_dict()) - tensor_bytes(training.optimizer.base.state_dict())
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


@contextmanager
def _random_streams_kept(device: torch.device) -> Iterator[None]:
    """Put the random streams of Python, NumPy and torch back, on the CPU and on the devices of an accelerator."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002
    devices = range(torch.accelerator.device_count()) if is_accelerator(device) else ()
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
