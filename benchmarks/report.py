"""What the commands beside ``run`` write down: where, when and how the figures were made."""

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
    """Add where the results go, and note the start."""
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the file")
    parser.add_argument("--name", help=f"the file's name without its suffix (default: {name}- and the date)")
    parser.set_defaults(begin=datetime.datetime.now(datetime.timezone.utc))


def results(options: argparse.Namespace, command: str, arguments: list[str]) -> dict[str, Any]:
    """The head of a results file."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": options.begin.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", command, *arguments]),
        "machine": machine(),
        "versions": versions(),
        "minutes": round((now - options.begin).total_seconds() / 60, 1),
    }


def write(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write the results file."""
    name = options.name or f"{results['command'].split()[3]}-{options.begin:%Y-%m-%d}"
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    say(f"wrote {path} after {results['minutes']} minutes")
