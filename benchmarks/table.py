"""Print the Markdown table of a results file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HEAD = (
    "| model, batch | method | ms per step | × plain | × handwritten | parameters added | optimizer state added "
    "| other state added |\n|---|---|--:|--:|--:|--:|--:|--:|"
)


def _spread(figures: dict[str, float]) -> str:
    return f"{figures['median']:.2f} ({figures['lower']:.2f}–{figures['upper']:.2f})"


def _size(count: int) -> str:
    if count >= 2**20:
        return f"{count / 2**20:.2f} MiB"
    return f"{count / 2**10:.1f} KiB" if count else "0"


def _row(first: str, method: dict[str, Any]) -> str:
    memory = method["memory"]
    cells = [
        first,
        method["name"],
        f"{method['milliseconds']['median']:.2f}",
        "1" if method["name"] == "plain" else _spread(method["ratio_to_plain"]),
        "1" if method["name"] == "handwritten" else _spread(method["ratio_to_handwritten"]),
        f"{memory['parameters_added']:,}",
        _size(memory["optimizer_state_bytes_added"]),
        _size(memory["other_bytes_added"]),
    ]
    return f"| {' | '.join(cells)} |"


def markdown(results: dict[str, Any]) -> str:
    """Lay results out as the README shows them: the table, then where the figures come from."""
    rows = [
        _row(f"{model['title']}, {model['batch_size']}" if method is model["methods"][0] else "", method)
        for model in results["models"]
        for method in model["methods"]
    ]
    machine, versions = results["machine"], results["versions"]
    source = (
        f"Medians of {results['rounds']} interleaved rounds (quartiles of the per-round ratio in brackets); "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {machine['os']}; "
        f"Python {versions['python']}, torch {versions['torch']}, dcl_optim {versions['dcl_optim']}; "
        f"{results['date'][:10]}; `{results['command']}`."
    )
    return "\n".join([HEAD, *rows, "", source])


def main(arguments: list[str]) -> None:
    """Read a results file and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks table", description=__doc__)
    parser.add_argument("file", type=Path, help="a JSON file that python -m benchmarks wrote")
    path = parser.parse_args(arguments).file
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"cannot read {path}: {error}")
    print(markdown(results))
