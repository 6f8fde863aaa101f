"""The command line of ``python -m dcl_optim``. Not in trial, which knows no demo."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches

from dcl_optim import __version__
from dcl_optim.demo import main as run_demo
from dcl_optim.trial.command import WrongFunctionError, add_commands

__all__ = ["main"]

COMMANDS = ("demo", "compare", "overhead")


def main(argv: Sequence[str]) -> int:
    """Run a command and return the exit code: 130 after Ctrl-C. Without a command print the help.

    Args:
        argv: the name of the command and its arguments.

    Raises:
        SystemExit: an argument is wrong, the file has no such function, or a package is missing; with code 2.
    """
    parser = _make_parser()
    if not argv:
        parser.print_help()
        return 2
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        near = get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"{argv[0]!r} is no command, they are {', '.join(COMMANDS)}{hint}")
    if argv[0] == "demo":
        return run_demo(argv[1:])
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (ImportError, WrongFunctionError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dcl_optim",
        description="What DCP and DCL gain and cost, in the demo and in your script. "
        "COMMAND --help shows the options of each.",
    )
    parser.add_argument("--version", action="version", version=f"dcl-optim {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo_help = "train a small network on digits in four ways, in about 75 seconds of CPU time (as dcl-demo)"
    commands.add_parser("demo", help=demo_help)
    add_commands(commands)
    return parser
