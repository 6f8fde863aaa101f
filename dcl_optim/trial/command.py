"""``python -m dcl_optim compare my_script.py:train`` and ``overhead my_script.py:make``: a trial from the shell."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from dcl_optim.trial.comparison import SEEDS, WEIGHTS, compare
from dcl_optim.trial.costs import SECONDS, overhead

__all__ = ["COMMANDS", "main"]


COMMANDS = ("compare", "overhead")


class WrongFunctionError(Exception):
    """What the command line names is not there, or does not return what the command needs."""


def main(argv: Sequence[str]) -> int:
    """Run the command, print its table and return the exit code: 130 after Ctrl-C.

    Args:
        argv: the name of the command and its arguments.

    Raises:
        SystemExit: an argument is wrong, or the file has no such function; with code 2.
    """
    parser = _make_parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(load(args.function), args))
    except WrongFunctionError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dcl_optim", description="What DCP and DCL do in your script.")
    commands = parser.add_subparsers(required=True, metavar="command")
    gains = commands.add_parser("compare", help="train with several weights of the penalty over the same seeds")
    gains.add_argument("function", metavar="FILE:FUNCTION", help="takes (weight, seed) and returns the accuracy")
    weights_help = "numbers or auto; the others are compared to the first (default: 0 auto 1)"
    gains.add_argument("--weights", nargs="+", type=_weight, default=WEIGHTS, metavar="WEIGHT", help=weights_help)
    gains.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="how many (default: %(default)s)")
    gains.add_argument("--plot", type=Path, metavar="FILE", help="draw the gain of each seed")
    gains.set_defaults(run=_compare)
    costs = commands.add_parser("overhead", help="time a step of yours with DCP and with DCL, and without")
    costs.add_argument(
        "function", metavar="FILE:FUNCTION", help="returns (model, optimizer, batch) or, with the loss, four"
    )
    costs.add_argument(
        "--seconds", type=float, default=SECONDS, help="about how long to measure (default: %(default)g)"
    )
    costs.set_defaults(run=_overhead)
    return parser


def _weight(text: str) -> float | str:
    """Read a number, or else a name."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _compare(function: Callable[[Any, int], float], args: argparse.Namespace) -> int:
    found = compare(function, args.weights, args.seeds)
    print(found)
    if args.plot is not None:
        found.plot(args.plot)
        print(f"Wrote {args.plot}.")
    return 130 if found.interrupted else 0


def _overhead(function: Callable[[], Any], args: argparse.Namespace) -> int:
    made = function()
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
        WrongFunctionError: there is no colon, file, module or function of that name.
    """
    name, colon, attribute = place.rpartition(":")
    if not colon:
        raise WrongFunctionError(f"{place!r} names no function; write file.py:function")
    module = _load_script(Path(name)) if name.endswith(".py") else _load_module(name)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise WrongFunctionError(f"{name} has no function {attribute!r}")
    return cast("Callable[..., Any]", function)


def _load_module(name: str) -> ModuleType:
    if importlib.util.find_spec(name) is None:
        raise WrongFunctionError(f"there is no module {name!r}; a script ends in .py")
    return importlib.import_module(name)


def _load_script(path: Path) -> ModuleType:
    if not path.is_file():
        raise WrongFunctionError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))  # a script finds what stands beside it
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module  # worker processes import the classes of a script by its name
    SourceFileLoader(path.stem, str(path)).exec_module(module)
    return module
