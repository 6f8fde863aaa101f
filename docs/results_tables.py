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
    shorter = "image, shorter steps"
    models = {
        f"image, steps of {min(plain[model] for model in long):.0f} ms or more": long,
        shorter: [model for model in images if plain[model] < SMALL_STEP],
        "pixel, 21 classes": ["pixels"],
        "token, 8,000 classes": ["tokens"],
    }
    shortest = {row["name"]: row for row in _benchmark("wide")["wide"][0]["rows"]}  # ten classes, float32
    rows = []
    for place, chosen in models.items():
        line = [place]
        for way in ("DCP, term", "DCL, term, half"):
            ratios = [_ratios(way)[model] for model in chosen]
            if place == shorter:
                ratios.append(shortest[way]["ratio_to_plain"]["median"])
            line.append(f"{max(ratios):.1f}")
        rows.append(line)
    return "\n".join(grid(["one label per", "DCP", "DCL"], rows, words=1))


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


SHARES = {"half of the rows": ", half", "all rows": ""}  # of DCL, and the ends of their rows' names


def cost(method: str, results: str = "steps") -> str:
    """The time of an optimizer, by the line and by the term, and its memory, over those of plain training."""
    from benchmarks import table

    measured = [{row["name"]: row for row in one["rows"]} | {"of": one} for one in _benchmark(results)["steps"]]
    shares = {"": ""} if method == "DCP" else {k: end for k, end in SHARES.items() if f"DCL, line{end}" in measured[0]}
    rows = []
    for found in measured:
        line = [f"{found['of']['title']}, {found['of']['batch_size']}"]
        if method == "DCP":
            line.append(f"{found['plain']['milliseconds']['median']:.1f}")
        for end in shares.values():
            ways = [found.get(f"{method}, {way}{end}") for way in ("line", "term")]
            if all(ways):  # DCP refuses 50,000 classes
                line += [", ".join(table.ratio(way, "time") for way in ways), table.ratio(ways[0], "memory")]
        rows.append(line)
    head = [f"{method}: network, batch size", *(["plain, ms"] if method == "DCP" else [])]
    for share in shares:
        head += [f"{share}, time: line, term".removeprefix(", "), "memory"]
    return "\n".join(table.grid(head, [row for row in rows if len(row) == len(head)], 1))


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
