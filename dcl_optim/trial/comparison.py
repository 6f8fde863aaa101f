"""What methods gain in a script of one's own, over seeds."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import combinations
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcl_optim import __version__
from dcl_optim.trial.extra import require
from dcl_optim.trial.figure import draw
from dcl_optim.trial.paired import holm, mean_and_error, plus_minus, probability, probability_cell

__all__ = ["Comparison", "compare"]

METHODS = {"plain": 0, "DCP": "auto", "DCP, weight=1": 1}
SEEDS = 10
ROUNDING = 1e-9  # of the largest value: a smaller error is one of the arithmetic
SUSPICIOUS = 3  # seeds with the same value: said at once, before hours of training
CHANCE = 0.05
LINE_EVERY = 60.0  # seconds, where the progress is no bar on a terminal


@dataclass
class Comparison:
    """The values of all runs, a table when it is printed.

    Attributes:
        curves: what ``train`` gave, by the name of the method: a list for each seed, the last value of which counts.
            The other methods are compared to the first one.
        seeds: those that were finished.
        interrupted: whether Ctrl-C ended it early.

    Examples:
        >>> found = Comparison({"plain": [[80.0], [82.0]], "DCP": [[83.0], [84.0]]}, seeds=[0, 1])
        >>> found.gains("DCP", "plain")
        [3.0, 2.0]
    """

    curves: dict[str, list[list[float]]]
    seeds: list[int]
    interrupted: bool = False

    @property
    def figures(self) -> dict[str, list[float]]:
        """What counts of each run, by the name of the method, in the order of the seeds."""
        return {name: [run[-1] for run in runs] for name, runs in self.curves.items()}

    @property
    def first(self) -> str:
        """The name of the method that the others are compared to."""
        return next(iter(self.curves))

    def gains(self, name: str, over: str) -> list[float]:
        """Return the differences of a method to another one, for each seed."""
        return [run[-1] - other[-1] for run, other in zip(self.curves[name], self.curves[over], strict=True)]

    def p_values(self) -> dict[str, float]:
        """Return p of the paired t-test against the first method, with Holm's correction, by the name of the method.

        Those that are not finite in every seed, or have less than two seeds, are left out.
        """
        others = list(self.curves)[1:]
        return {name: p for (name, _), p in self._tests((name, self.first) for name in others).items()}

    def _tests(self, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], float]:
        p = {}
        for pair in pairs:
            gains = self.gains(*pair)
            if len(gains) > 1 and _are_finite(gains):
                p[pair] = probability(*mean_and_error(gains), len(gains))
        return holm(p)

    def plot(self, path: str | Path, title: str = "Gain of each seed") -> None:
        """Draw the gain of each seed, and the curves if ``train`` gave some; the suffix of the file chooses the format.

        Raises:
            ValueError: no method beside the first has finite values.
        """
        gains = {name: self.gains(name, self.first) for name in self.curves}
        finite = {name: values for name, values in gains.items() if _are_finite(values)}
        if len(finite) < 2:
            raise ValueError(f"there is nothing to draw: no method beside {self.first!r} has finite values")
        draw({name: self.curves[name] for name in finite}, finite, title).savefig(path)

    def save(self, path: str | Path) -> None:
        """Write all values as JSON, null for those that are not finite, with the table."""
        results = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "dcl_optim": __version__,
            "torch": torch.__version__,
            "table": str(self).splitlines(),
            "interrupted": self.interrupted,
            "seeds": self.seeds,
            "curves": json.loads(json.dumps(self.curves), parse_constant=lambda name: None),  # JSON has no NaN
        }
        Path(path).write_text(json.dumps(results, indent=1), encoding="utf-8")

    def __str__(self) -> str:
        from tabulate import tabulate

        p = self.p_values()
        body = []
        places = self._places((name, self.first) for name in self.curves)
        for name, figures in self.figures.items():
            gain = "" if name == self.first else _shown(self.gains(name, self.first), places, "+")
            body.append([name, _shown(figures, places), gain, probability_cell(p.get(name))])
        head = ["method", "mean", f"minus {self.first}", "p"]
        table = tabulate(body, head, disable_numparse=True, colalign=("left", "right", "right", "right"))
        early = "interrupted; " if self.interrupted else ""
        legend = f"{early}seeds: {len(self.seeds)}; ± one standard error; p of the paired t-test with Holm's correction"
        return "\n".join([table, legend, *self._verdict(), *self.notes()])

    __repr__ = __str__

    def _verdict(self) -> list[str]:
        """Say which of the methods beside the first differ from one another, by the same test."""
        pairs = list(combinations(list(self.curves)[1:], 2))
        p = self._tests(pairs)
        if not p:
            return []
        places = self._places(pairs)
        differ = [
            f"{name} minus {other}: {_shown(self.gains(name, other), places, '+')}"
            for (name, other), value in p.items()
            if value < CHANCE
        ]
        if not differ:
            return [f"No two of the methods beside {self.first} differ (p >= {CHANCE})."]
        return [f"Of the methods beside {self.first} these differ (p < {CHANCE}):", *differ]

    def _places(self, pairs: Iterable[tuple[str, str]]) -> int:
        """Count the decimals that show two digits of the smallest error, or four of the values if there is none."""
        figures = [values for values in self.figures.values() if _are_finite(values)]
        size = max((abs(value) for values in figures for value in values), default=0.0)
        gains = [self.gains(*pair) for pair in pairs]
        errors = [mean_and_error(values)[1] or 0.0 for values in (*figures, *gains) if _are_finite(values)]
        shown = [error for error in errors if error > ROUNDING * size]
        if shown:
            return max(2, 1 - math.floor(math.log10(min(shown))))
        return max(2, 3 - math.floor(math.log10(size))) if size else 2

    def notes(self) -> list[str]:
        """Say what makes the values doubtful: not finite, or the same where they should differ."""
        count = len(self.seeds)
        found = ["One seed says nothing of noise: take ten."] if count == 1 else []
        for name, figures in self.figures.items():
            if not _are_finite(figures):
                seeds = [
                    str(seed) for seed, figure in zip(self.seeds, figures, strict=True) if not math.isfinite(figure)
                ]
                found.append(f"{name} gave a value that is not finite (seed {', '.join(seeds)}): not compared.")
            elif count > 1 and len(set(figures)) == 1:
                said = f"{name} gave {figures[0]:g} in all {count} seeds"
                found.append(f"{said}: does train use its seed, as in torch.manual_seed(seed)?")
            if count > 1 and name != self.first and figures == self.figures[self.first]:
                said = f"{name} gave what {self.first} gave in all {count} seeds"
                found.append(
                    f"{said}: its effect is too small to change a prediction, or train does not use its method."
                )
        return found


def _are_finite(figures: Iterable[float]) -> bool:
    return all(map(math.isfinite, figures))


def _shown(values: Sequence[float], places: int, sign: str = "") -> str:
    return plus_minus(*mean_and_error(values), sign, places) if _are_finite(values) else "not finite"


def compare(
    train: Callable[[Any, int], Any],
    methods: Mapping[str, Any] | Sequence[Any] = METHODS,
    seeds: int | Iterable[int] = SEEDS,
) -> Comparison:
    """Train in several ways, and compare them over the same seeds.

    It needs the extra ``trial``. Progress goes to stderr: a bar, or a line a minute where there is no terminal. After
    Ctrl-C the finished seeds are returned. The table has as many digits as its errors need.

    Args:
        train: function of a method and a seed that trains a fresh model and returns its accuracy in percent, or another
            number that is better if it is larger. It begins with ``torch.manual_seed(seed)`` and ends with ``return
            accuracy(model, batches)``. For curves it returns a list, or yields: the last value counts.
        methods: what ``train`` gets first: weights, names or whatever it understands. A list, or a dict by the names of
            the methods. The others are compared to the first one. Default: the weights 0, which is plain training,
            "auto" and 1.
        seeds: how many, counted from 0, or the seeds themselves. Default 10, which show a gain of about one standard
            deviation of the differences.

    Returns:
        The table: print it. Its ``plot(path)`` draws the curves and the gain of each seed, ``save(path)`` writes JSON.

    Raises:
        ImportError: a package of the extra is missing.
        TypeError: ``train`` returned no number.
        ValueError: there are less than two methods, a seed is there twice, or there are no seeds.
        KeyboardInterrupt: no seed was finished.

    Examples:
        >>> def train(weight, seed):
        ...     torch.manual_seed(seed)
        ...     return 80 + torch.randn(()).item() + (weight == "auto") * torch.rand(()).item()
        >>> print(compare(train, {"plain": 0, "DCP": "auto"}, seeds=3))
        method            mean    minus plain      p
        --------  ------------...
        plain     80...
        DCP       8...
        seeds: 3; ± one standard error; p of the paired t-test with Holm's correction
    """
    require("trial", "scipy.special", "tabulate", "tqdm", "matplotlib")
    from tqdm import tqdm

    chosen = methods if isinstance(methods, Mapping) else {str(method): method for method in methods}
    numbers = list(range(seeds) if isinstance(seeds, int) else seeds)
    _check(chosen, numbers)
    found = Comparison({name: [] for name in chosen}, [])
    is_terminal = sys.stderr.isatty()
    said = time.monotonic()
    try:
        with tqdm(total=len(numbers) * len(chosen), desc="compare", file=None if is_terminal else io.StringIO()) as bar:
            for seed in numbers:
                runs = {}
                for name, method in chosen.items():
                    with _with_note(method, seed, chosen is METHODS):
                        runs[name] = _curve(train(method, seed), name, seed)
                    bar.set_postfix_str(f"seed {seed}, {name} {runs[name][-1]:.4g}", refresh=False)
                    bar.update()
                    if not is_terminal and (bar.n == bar.total or time.monotonic() - said >= LINE_EVERY):
                        said = time.monotonic()
                        print(bar, file=sys.stderr, flush=True)
                for name, run in runs.items():
                    found.curves[name].append(run)
                found.seeds.append(seed)
                if len(found.seeds) == SUSPICIOUS:
                    _print_notes(found)
    except KeyboardInterrupt:
        if not found.seeds:
            raise
        found.interrupted = True
    except Exception:
        if found.seeds:
            print(f"compare: train failed; until then:\n{found}", file=sys.stderr)
        raise
    return found


def _print_notes(found: Comparison) -> None:
    from tqdm import tqdm

    for note in found.notes():
        tqdm.write(f"compare: {note}", file=sys.stderr)


def _check(methods: Mapping[str, Any], seeds: list[int]) -> None:
    if len(methods) < 2:
        raise ValueError(f"methods has {list(methods)}, nothing to compare; pass two or more, such as (0, 'auto')")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds has {seeds}; it must have at least one seed, and none twice, which is no other run")


@contextmanager
def _with_note(method: Any, seed: int, is_default: bool) -> Iterator[None]:
    """Say with which method train failed, in a note of the error, which Python knows from 3.11 on."""
    try:
        yield
    except Exception as error:
        note = f"compare: train failed with method {method!r} and seed {seed}"
        if is_default:
            note += ", a weight of the default methods; for others pass methods=[...], on the shell --methods"
        if hasattr(error, "add_note"):
            error.add_note(note)
        raise


def _curve(given: Any, name: str, seed: int) -> list[float]:
    """Return the values of a run: those of a list, or that a generator yields as it trains, or the only one."""
    curve = []
    for value in given if isinstance(given, (list, Iterator)) else [given]:
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(
                f"train returned {type(value).__name__} for {name!r} and seed {seed}; it must return a number, as by "
                "return accuracy(model, batches)"
            )
        curve.append(float(number))
    if not curve:
        raise TypeError(f"train returned no number for {name!r} and seed {seed}")
    return curve
