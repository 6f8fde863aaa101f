"""What the commands write down: where, when and how the figures were made."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, versions
from benchmarks.measure import say


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add where the results go, and note the start; ``name`` is what the default for the file's name begins with."""
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the files")
    parser.add_argument("--name", help=f"the files' name without its suffix (default: {name}- and the date)")
    parser.set_defaults(begin=datetime.datetime.now(datetime.timezone.utc), default_name=name)


def results(options: argparse.Namespace, arguments: list[str], device: str = "cpu") -> dict[str, Any]:
    """The head of a results file, of a command with these arguments."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": options.begin.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "machine": machine(device),
        "versions": versions(),
        "minutes": round((now - options.begin).total_seconds() / 60, 1),
    }


def write(options: argparse.Namespace, results: dict[str, Any]) -> Path:
    """Write the results file."""
    name = options.name or f"{options.default_name}-{options.begin:%Y-%m-%d}"
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    say(f"wrote {path} after {results['minutes']} minutes")
    return path
