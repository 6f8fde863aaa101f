"""The tables of the pages, from the committed results files, and code from the examples; cog writes them.

python docs/results_tables.py           writes them
python docs/results_tables.py --check   fails if a table differs from its results file; the research's tests run it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from examples.research.pages import *  # noqa: E402, F403 - the pages call them by name

# The pages that have tables or code of the examples.
PAGES = (
    "README.md",
    *(
        str(page.relative_to(ROOT))
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if "[[[cog" in page.read_text(encoding="utf-8")
    ),
)
SMALL_STEP = 10.0  # milliseconds: the overhead of a shorter step is visible


def overview_cost() -> str:
    """The first page's table of costs, by what decides them: how many labels a step has, and of how many classes."""
    from benchmarks.table import grid

    plain = {one["model"]: one["rows"][0]["milliseconds"]["median"] for one in _benchmark("steps")["steps"]}
    images = [model for model in plain if model not in ("pixels", "tokens")]
    long = [model for model in images if plain[model] >= SMALL_STEP]
    shorter, many = "images or text, shorter steps", "8,000 classes"
    models = {
        f"images or text, steps of {min(plain[model] for model in long):.0f} ms or more": long,
        shorter: [model for model in images if plain[model] < SMALL_STEP],
        "21 classes for each pixel": ["pixels"],
        many: ["tokens"],
    }
    in_float32 = [figures for figures in _benchmark("wide")["wide"] if figures["precision"] == "float32"]
    wide = {figures["title"]: {row["name"]: row for row in figures["rows"]} for figures in in_float32}
    others = {shorter: "MLP 64-128-10", many: "MLP 64-128-8000"}
    rows = []
    for place, chosen in models.items():
        line = [place]
        for way in ("DCP, term", "DCL, term, half"):
            ratios = [_ratios(way)[model] for model in chosen]
            if place in others:
                ratios.append(wide[others[place]][way]["ratio_to_plain"]["median"])
            line.append(f"{max(ratios):.1f}")
        rows.append(line)
    return "\n".join(grid(["task", "DCP", "DCL"], rows, words=1))


def _ratios(name: str) -> dict[str, float]:
    """A row's median time over that of plain training on each network, by the network's name."""
    return {
        figures["model"]: row["ratio_to_plain"]["median"]
        for figures in _benchmark("steps")["steps"]
        for row in figures["rows"]
        if row["name"] == name
    }


def source(module: str, *names: str) -> str:
    """The source of classes or functions, as a block of code."""
    from importlib import import_module
    from inspect import getsource

    found = import_module(module)
    return "```python\n" + "\n\n".join(getsource(getattr(found, name)) for name in names) + "```"


def benchmark_source(name: str) -> str:
    """Where the figures of a results file come from."""
    from benchmarks import table

    return table.source(_benchmark(name))


def cost(method: str, results: str = "steps") -> str:
    """The time of an optimizer, by the line and by the term, and its memory, over those of plain training."""
    from benchmarks import table

    rows = []
    for figures in _benchmark(results)["steps"]:
        found = {row["name"]: row for row in figures["rows"]}
        line = [f"{figures['title']}, {figures['batch_size']}"]
        if method == "DCP":
            line.append(f"{found['plain']['milliseconds']['median']:.1f}")
        by_line, by_term = (found.get(f"{method}, {way}") for way in ("line", "term"))
        if by_line and by_term:  # DCP refuses 50,000 classes
            times = f"{table.ratio(by_line, 'time')}, {table.ratio(by_term, 'time')}"
            rows.append([*line, times, table.ratio(by_line, "memory")])
    plain = ["plain, ms"] if method == "DCP" else []
    rows_of = "DCP" if method == "DCP" else "DCL, all rows"
    head = [f"{rows_of}: network, batch size", *plain, "time: line, term", "memory"]
    return "\n".join(table.grid(head, rows, 1))


# The row of each share of the batch that DCL's companion gets.
SHARES = {"all rows": "DCL, line", "half of them (default)": "DCL, line, half", "a quarter": "DCL, line, quarter"}


def cost_of_shares() -> str:
    """The time and the memory of DCL by the line over those of plain training, by the companion's share of the rows."""
    from benchmarks import table

    rows = []
    for figures in _benchmark("steps")["steps"]:
        found = {row["name"]: row for row in figures["rows"]}
        chosen = [found[name] for name in SHARES.values()]
        cells = [f"{table.ratio(row, 'time')}, {table.ratio(row, 'memory')}" for row in chosen]
        rows.append([f"{figures['title']}, {figures['batch_size']}", *cells])
    return "\n".join(table.grid(["DCL: network, batch size", *SHARES], rows, 1))


def _benchmark(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def show(text: str) -> None:
    """Put a text into a page; the empty lines around it keep the markers from being taken for a part of it."""
    import cog

    cog.outl(f"\n{text}\n")


def main(arguments: Sequence[str]) -> int:
    """Write the tables into the pages, or with --check only compare; cog's exit code, 0 if all is well."""
    from cogapp import Cog

    mode = ["--check"] if "--check" in arguments else ["-r"]
    prologue = "from results_tables import *"
    return int(Cog().main(["cog", *mode, "-I", str(ROOT / "docs"), "-p", prologue, *(str(ROOT / p) for p in PAGES)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
