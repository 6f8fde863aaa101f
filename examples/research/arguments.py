"""What the scripts' command lines have in common: numbers within bounds, a device that is there, errors of one line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

import torch


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def number(kind: type[int] | type[float], lowest: float, highest: float = float("inf")) -> Any:
    """Give the type of an argument that is a finite number within bounds."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not lowest <= value <= highest or value == float("inf"):
            limit = f" and at most {highest:g}" if highest < float("inf") else ""
            raise argparse.ArgumentTypeError(f"{text} must be a finite number of at least {lowest:g}{limit}")
        return value

    parse.__name__ = kind.__name__
    return parse


def device(text: str) -> str:
    """Take a device that is there: the type of ``--device``."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here ({reason}); cpu can") from error
    return text


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``: the GPU where there is one."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default, help="(default: cuda if it is there, else cpu)")
