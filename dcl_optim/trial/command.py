"""The commands ``compare my_script.py:train`` and ``overhead my_script.py:make``: a trial from the shell."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from dcl_optim.trial.comparison import METHODS, SEEDS, Comparison, compare
from dcl_optim.trial.costs import SECONDS, overhead

__all__ = ["WrongFunctionError", "add_commands", "report"]


class WrongFunctionError(Exception):
    """What the command line names is not there, or does not return what the command needs."""


def add_commands(commands: Any) -> None:
    """Add both to the subparsers of a command line, each with a function of the arguments as ``run``."""
    gains = commands.add_parser("compare", help="train your script in several ways over the same seeds")
    function_help = "takes (method, seed) and returns the accuracy in percent, or another number: more is better"
    gains.add_argument("function", metavar="FILE:FUNCTION", help=function_help)
    methods_help = "numbers or names; the others are compared to the first (default: the weights 0, auto and 1)"
    gains.add_argument("--methods", nargs="+", type=_number, default=METHODS, metavar="METHOD", help=methods_help)
    gains.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="how many (default: %(default)s)")
    gains.add_argument("--out", type=Path, metavar="FOLDER", help="write results.json and curves.png")
    gains.set_defaults(run=_compare)
    costs = commands.add_parser("overhead", help="time a step of your script with DCP and with DCL, and without")
    costs_help = "returns (model, optimizer, batch) or, with the loss, four"
    costs.add_argument("function", metavar="FILE:FUNCTION", help=costs_help)
    seconds_help = "about how long to measure (default: %(default)g)"
    costs.add_argument("--seconds", type=float, default=SECONDS, help=seconds_help)
    costs.set_defaults(run=_overhead)


def _number(text: str) -> float | str:
    """Read a number, or else a name."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _compare(args: argparse.Namespace) -> int:
    return report(compare(load(args.function), args.methods, args.seeds), args.out, args.function)


def report(found: Comparison, out: Path | None, title: str) -> int:
    """Print a comparison, write it into a folder and return the exit code.

    Args:
        found: the comparison.
        out: where results.json and curves.png are written; None: nowhere.
        title: of the figure.
    """
    print(found)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found.save(out / "results.json")
        found.plot(out / "curves.png", title)
        print(f"Wrote {out / 'results.json'} and {out / 'curves.png'}.")
    return 130 if found.interrupted else 0


def _overhead(args: argparse.Namespace) -> int:
    made = load(args.function)()
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        raise WrongFunctionError(
            f"{args.function} must return (model, optimizer, batch) or (model, optimizer, batch, loss)"
        )
    print(overhead(*made, seconds=args.seconds))
    return 0


def load(place: str) -> Callable[..., Any]:
    """Import a function of a script or module.

    Args:
        place: ``folder/script.py:function``, or ``package.module:function``. A script is imported, not run: what stands
            under ``if __name__ == "__main__":`` does not run.

    Raises:
        ImportError: there is no module of that name.
        WrongFunctionError: there is no colon, file or function of that name.
    """
    name, colon, attribute = place.rpartition(":")
    if not colon:
        raise WrongFunctionError(f"{place!r} names no function; write file.py:function")
    module = _load_script(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise WrongFunctionError(f"{name} has no function {attribute!r}")
    return function


def _load_script(path: Path) -> ModuleType:
    if not path.is_file():
        raise WrongFunctionError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))  # a script finds what stands beside it
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module  # worker processes import the classes of a script by its name
    SourceFileLoader(path.stem, str(path)).exec_module(module)
    return module
