"""What a weight gains in a script of one's own, over seeds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcl_optim.plots import seed_gains
from dcl_optim.trial.paired import holm, mean_and_error, plus_minus, probability, probability_cell
from dcl_optim.trial.progress import progress_of
from dcl_optim.trial.text import aligned

__all__ = ["Comparison", "compare"]

WEIGHTS = (0, "auto", 1)
SEEDS = 10
SUSPICIOUS = 3  # seeds with the same figure: said at once, before hours of training


@dataclass(frozen=True)
class Comparison:
    """The figures of all runs, a table when it is printed.

    Attributes:
        weights: what was compared, the first being what the others are compared to.
        seeds: those that were finished.
        figures: what ``train`` returned, a list for each weight with a value for each seed.
        interrupted: whether Ctrl-C ended it early.
    """

    weights: tuple[Any, ...]
    seeds: tuple[int, ...]
    figures: tuple[tuple[float, ...], ...]
    interrupted: bool = False

    def gains(self, index: int) -> list[float]:
        """Return the differences of a weight, by its place, to the first one, for each seed."""
        return [one - first for one, first in zip(self.figures[index], self.figures[0], strict=True)]

    def p_values(self) -> dict[int, float]:
        """Return p of the paired t-test with Holm's correction, by the place of a weight.

        Those that are not finite in every seed, or have less than two seeds, are left out.
        """
        p = {}
        for index in range(1, len(self.weights)):
            mean, error = mean_and_error(self.gains(index)) if self._is_finite(index) else (math.nan, None)
            if error is not None:
                p[index] = probability(mean, error, len(self.seeds))
        return holm(p)

    def plot(self, path: str | Path) -> None:
        """Draw the gain of each seed, as the demo does, into a file; the suffix chooses the format.

        Raises:
            ValueError: no weight beside the first has finite figures.
            ImportError: matplotlib is missing.
        """
        names = ["plain" if weight == 0 else f"DCP, weight={weight}" for weight in self.weights]
        finite = [index for index in range(len(self.weights)) if self._is_finite(index)]
        figure = seed_gains({names[index]: self.figures[index] for index in finite}, seeds=self.seeds)
        figure.savefig(path)

    def __str__(self) -> str:
        p = self.p_values()
        body = []
        for index, weight in enumerate(self.weights):
            figures = self.figures[index]
            mean = plus_minus(*mean_and_error(figures)) if all(map(math.isfinite, figures)) else "not finite"
            gain = plus_minus(*mean_and_error(self.gains(index)), sign="+") if index and self._is_finite(index) else ""
            body.append([str(weight), mean, gain, probability_cell(p.get(index))])
        head = ["weight", "mean", f"minus {self.weights[0]}", "p"]
        return "\n".join([aligned(head, body), self._legend(len(p)), *self.notes()])

    __repr__ = __str__

    def _legend(self, tests: int) -> str:
        count = len(self.seeds)
        seeds = f"{count} seed{'s' if count > 1 else ''}, {self.seeds[0]} to {self.seeds[-1]}"
        early = "interrupted after " if self.interrupted else ""
        if not tests:
            return f"{early}{seeds}"
        corrected = f" with Holm's correction for {tests} tests" if tests > 1 else ""
        return f"{early}{seeds}; ± one standard error; p of the paired t-test{corrected}"

    def notes(self) -> list[str]:
        """Say what makes the figures doubtful: not finite, or the same where they should differ."""
        found = []
        for weight, figures in zip(self.weights, self.figures, strict=True):
            bad = sum(not math.isfinite(figure) for figure in figures)
            if bad:
                found.append(f"weight={weight} gave no finite figure in {bad} of {len(figures)} seeds: not compared.")
            elif len(figures) > 1 and len(set(figures)) == 1:
                found.append(
                    f"weight={weight} gave {figures[0]:g} in all {len(figures)} seeds: does train use its seed, as in "
                    "torch.manual_seed(seed)?"
                )
        for weight, figures in zip(self.weights[1:], self.figures[1:], strict=True):
            if len(figures) > 1 and figures == self.figures[0]:
                found.append(
                    f"weight={weight} gave what weight={self.weights[0]} gave in all {len(figures)} seeds: does train "
                    "use its weight?"
                )
        if len(self.seeds) == 1:
            found.append("One seed says nothing of noise: take ten.")
        return found

    def _is_finite(self, index: int) -> bool:
        return all(map(math.isfinite, (*self.figures[0], *self.figures[index])))


def compare(
    train: Callable[[Any, int], float], weights: Sequence[Any] = WEIGHTS, seeds: int | Iterable[int] = SEEDS
) -> Comparison:
    """Train with several weights of the penalty, and compare them over the same seeds.

    Progress goes to stderr: a bar with tqdm, else a line a minute. After Ctrl-C the finished seeds are returned.

    Args:
        train: function of a weight and a seed that trains a fresh model and returns its accuracy in percent, or another
            figure that is better if it is larger. It begins with ``torch.manual_seed(seed)``, builds
            ``DCPOptimizer(optimizer, model, weight=weight)`` and ends with ``return accuracy(model, batches)``.
        weights: what ``train`` gets first. The others are compared to the first one. ``weight=0`` is plain training.
            Whatever ``train`` understands is possible, such as learning rates. Default ``(0, "auto", 1)``.
        seeds: how many, counted from 0, or the seeds themselves. Default 10, which show a gain of about one standard
            deviation of the differences.

    Returns:
        The table: print it. Its ``plot(path)`` draws the gain of each seed.

    Raises:
        TypeError: ``train`` returned no number.
        ValueError: there are less than two weights, a weight or a seed is there twice, or there are no seeds.
        KeyboardInterrupt: no seed was finished.

    Examples:
        >>> def train(weight, seed):
        ...     torch.manual_seed(seed)
        ...     return 80 + torch.randn(()).item() + (weight == "auto") * torch.rand(()).item()
        >>> print(compare(train, weights=(0, "auto"), seeds=3))
        weight          mean       minus 0      p
        -----------------------------------------
        0       80...
        auto    8...
        3 seeds, 0 to 2; ± one standard error; p of the paired t-test
    """
    chosen = tuple(weights)
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    _check(chosen, numbers)
    found: list[list[float]] = []  # for each finished seed the figures of all weights
    interrupted = False
    runs = len(numbers) * len(chosen)
    print(f"compare: {runs} runs, {len(numbers)} seeds of {len(chosen)} weights", file=sys.stderr, flush=True)
    try:
        with progress_of("compare", runs, "runs") as bar:
            for seed in numbers:
                found.append(_of_seed(train, chosen, seed, bar))
                if len(found) == SUSPICIOUS:
                    _warn(_comparison(chosen, numbers, found, False))
    except KeyboardInterrupt:
        if not found:
            raise
        interrupted = True
    except Exception:
        if found:
            print(f"compare: train failed; until then:\n{_comparison(chosen, numbers, found, True)}", file=sys.stderr)
        raise
    return _comparison(chosen, numbers, found, interrupted)


def _check(weights: tuple[Any, ...], seeds: tuple[int, ...]) -> None:
    if len(weights) < 2:
        raise ValueError(f"weights={weights!r} has nothing to compare; pass two or more, such as (0, 'auto')")
    names = [str(weight) for weight in weights]
    if len(set(names)) < len(names):
        raise ValueError(f"weights={weights!r} has a weight twice; pass each once")
    if not seeds:
        raise ValueError("seeds must be at least 1, got none")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={list(seeds)} has a seed twice, which would count as another run; pass each once")


def _of_seed(train: Callable[[Any, int], float], weights: tuple[Any, ...], seed: int, bar: Any) -> list[float]:
    found = []
    for weight in weights:
        found.append(_number(train(weight, seed), weight, seed))
        last = ", ".join(f"{name} {figure:.2f}" for name, figure in zip(weights, found, strict=False))
        bar.set_postfix_str(f"seed {seed}: {last}")
        bar.update()
    return found


def _number(figure: Any, weight: Any, seed: int) -> float:
    is_single = isinstance(figure, Tensor) and figure.numel() == 1 and figure.dtype is not torch.bool
    if is_single or (isinstance(figure, Real) and not isinstance(figure, bool)):
        return float(figure)
    hint = "; does it end with return?" if figure is None else ""
    raise TypeError(
        f"train({weight!r}, {seed}) returned {type(figure).__name__}, but it must return a number, such as "
        f"accuracy(model, batches){hint}"
    )


def _comparison(
    weights: tuple[Any, ...], seeds: tuple[int, ...], found: list[list[float]], interrupted: bool
) -> Comparison:
    return Comparison(weights, seeds[: len(found)], tuple(zip(*found, strict=True)), interrupted)


def _warn(early: Comparison) -> None:
    for note in early.notes():
        print(f"compare: {note}", file=sys.stderr, flush=True)
