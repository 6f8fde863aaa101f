"""The tables of the pages, from the committed results files, and code from the examples: cog puts them in their places.

python docs/results_tables.py           writes them
python docs/results_tables.py --check   says whether they are as they should be; the tests run it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = (
    "README.md",
    *(
        f"docs/{page}.md"
        for page in ("applications", "evidence", "extending", "index", "performance", "results", "results/gains")
    ),
)


def demo(name: str = "demo") -> str:
    """The demo's table, as it prints it."""
    from dcl_optim.demo.report import Row, format_table
    from dcl_optim.demo.training import METHODS

    found = json.loads((RESULTS / f"{name}.json").read_text())
    rows = sorted((Row(**row) for row in found["table"]), key=lambda row: METHODS.index(row.method))
    return "```text\n" + format_table(rows, "test") + "\n```"


OVERVIEW = {
    "150 kanji in unseen fonts, 3 images of each": "data-kanji-480",
    "150 kanji, 5 images of each": "length-kanji-4k",
    "150 kanji, 5 images of each, four times the steps": "pays-kanji",
    "150 kanji, 5 images of each, AdamW": "pays-kanji-adamw",
    "150 kanji, 5 images of each, a fifth of the labels wrong": "noise-kanji-20",
    "150 kanji, 5 images of each, a quarter of the steps": "length-kanji-1k",
    "100 writing systems, unseen letters": "length-scripts-4k",
    "Fashion-MNIST, 5,000 images": "pays-fashion-5k",
    "Fashion-MNIST, 50,000 images": "pays-fashion-50k",
    "40 sections of Debian from a line of text": "pays-debian",
    "40 sections of Debian, AdamW": "pays-debian-adamw",
}


def overview() -> str:
    """The first page's table: both optimizers, what they cost and what they gain."""
    from benchmarks import table
    from dcl_optim.demo.report import plus_minus
    from examples.paper.gains import CE, Row, gain

    lines = benchmark("summary").splitlines()
    head, _, *models = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    times = [sorted(float(cells[head.index(name)]) for cells in models) for name in ("DCPOptimizer", "DCLOptimizer")]
    lines = [
        ["time of a step, over plain training's", *(f"{some[0]:.2f} to {some[-1]:.2f}" for some in times)],
        ["memory", "K x K numbers for K classes", "a second network with its optimizer"],
        ["works for", "softmax classifiers", "any model, without labels too"],
        ["what you deploy", "the model, unchanged", "the model, unchanged"],
    ]
    for title, name in OVERVIEW.items():
        gains = [gain(_records(name), Row(label), CE) for label in ("DCP", "DCL")]
        lines.append([title, *(plus_minus(one.mean, one.error, sign="+") for one in gains if one)])
    return "\n".join(table.grid(["", "`DCPOptimizer`", "`DCLOptimizer`"], lines, words=3))


def experiment(name: str) -> str:
    """The table of an experiment of examples/paper."""
    from examples.paper.experiments import EXPERIMENTS
    from examples.paper.table import markdown

    return markdown(EXPERIMENTS[name], _records(name))


def side_by_side(names: Sequence[str]) -> str:
    """Experiments with the same rows: the baseline's accuracy, and each other row's difference to it."""
    from benchmarks.table import grid
    from dcl_optim.demo.report import mean_and_error, plus_minus
    from examples.paper.experiments import EXPERIMENTS
    from examples.paper.table import accuracy, by_label, paired

    columns = []
    for name in names:
        found, baseline = by_label(_records(name)), EXPERIMENTS[name].baseline
        cells = [plus_minus(*mean_and_error([accuracy(record) for record in found[baseline].values()]))]
        others = [label for label in EXPERIMENTS[name].runs if label != baseline]
        differences = {label: paired(runs, found[baseline]) for label, runs in found.items()}
        cells += [plus_minus(*mean_and_error(differences[o]), sign="+") if o in found else "not run" for o in others]
        columns.append(cells)
    titles = [", ".join(name.split("-")[1:]) for name in names]
    heads = [f"{baseline}, %", *(f"{label}, minus {baseline}" for label in others)]
    return "\n".join(grid(["", *titles], list(zip(heads, *columns, strict=True)), words=1))


def gains_by_experiment(columns: Mapping[str, str]) -> str:
    """The gains over plain training in some experiments, by the head of their column."""
    from examples.paper import evidence, gain_tables

    return gain_tables.by_experiment({head: _records(name) for head, name in columns.items()}, evidence.CURVES)


def gains_by_fit(lines: Mapping[str, str], label: str) -> str:
    """How well a row learns its training images and what it gains, by the head of an experiment's line."""
    from examples.paper import gain_tables

    return gain_tables.by_fit({head: _records(name) for head, name in lines.items()}, label)


def gains_by_setting() -> str:
    """The gains over plain training in all settings, with corrected p values."""
    from examples.paper import gain_tables, pays

    return gain_tables.by_setting({title: _records(name) for name, title in pays.PAYS.items()}, pays.TESTED)


def gains_by_weight() -> str:
    """The gains of DCP by its weight in all settings."""
    from examples.paper import gain_tables, pays

    return gain_tables.by_row({title: _records(name) for name, title in pays.PAYS.items()}, pays.WEIGHTS)


def gains_by_measure(name: str, *measures: str) -> str:
    """What each row of an experiment changes, a column for each measure."""
    from examples.paper.experiments import EXPERIMENTS
    from examples.paper.gain_tables import by_measure
    from examples.paper.gains import Row

    rows = {label: Row(label) for label in EXPERIMENTS[name].runs if label != EXPERIMENTS[name].baseline}
    return by_measure(_records(name), rows, measures)


def gains_of_peers(cost: str, *measures: str) -> str:
    """What other methods of a training cost, "plain" or "twice", change, a column for each measure."""
    from examples.paper import gain_tables, peers

    rows = {"plain": peers.PLAIN_COST, "twice": peers.TWICE_THE_COST}[cost]
    return gain_tables.by_measure(_records("peers-kanji"), rows, measures)


def grids_of_peers() -> str:
    """The gains on validation data of all values that were tried."""
    from examples.paper import gain_tables, peers
    from examples.paper.evidence import KANJI

    return gain_tables.by_value(_records("peers-kanji-grids"), peers.grids(KANJI))


def variation(name: str) -> str:
    """How far logits and accuracy move from epoch to epoch, from the figures' file of an experiment."""
    from benchmarks.table import grid

    found = json.loads((RESULTS / f"figures-{name}.json").read_text())["runs"]
    epochs = len(next(iter(found.values()))[0]["accuracy"])
    fifth = epochs // 5
    parts = {f"epochs 2 to {fifth}": slice(0, fifth - 1), "the middle": slice(fifth - 1, -fifth)}
    parts |= {f"the last {fifth}": slice(-fifth, None)}
    head, lines = ["", *(f"d, {part}" for part in parts), "change of accuracy, points"], []
    for label, runs in found.items():
        cells = [f"{fmean(d for run in runs for d in run['drift'][part]):.2f}" for part in parts.values()]
        late = [run["accuracy"][fifth - 1 :] for run in runs]
        cells.append(f"{fmean(100 * abs(b - a) for accuracy in late for a, b in pairwise(accuracy)):.2f}")
        lines.append([label, *cells])
    return "\n".join(grid(head, lines, words=1))


def application(module: str, **changed: Any) -> str:
    """The table of an application at its default settings but for those changed, and where its figures come from."""
    from importlib import import_module

    from examples.applications.comparison import made, results_file, table

    found = import_module(f"examples.applications.{module}").APPLICATION
    path = results_file(found, RESULTS)
    return f"{table(found, made(found, {**found.settings, **changed}, path))}\n\n[{path.name}](results/{path.name})"


def source(module: str, *names: str) -> str:
    """The source of classes or functions, as a block of code."""
    from importlib import import_module
    from inspect import getsource

    found = import_module(module)
    return "```python\n" + "\n\n".join(getsource(getattr(found, name)) for name in names) + "```"


def benchmark(part: str, name: str = "cpu-2-threads") -> str:
    """One of the tables that ``python -m benchmarks table`` prints, without its heading."""
    from benchmarks import table

    results = _benchmark(name)
    lines = table.summary(results) if part == "summary" else table.SECTIONS[part](results)
    return "\n".join(lines[2:])


def benchmark_source(name: str = "cpu-2-threads") -> str:
    """Where a benchmark's figures come from."""
    from benchmarks import table

    return table.source(_benchmark(name))


BOTH = ("DCLOptimizer", "DCPOptimizer")


def kernels() -> str:
    """The kernels of a step: of the loops by hand, and of the optimizers before and after the rebuild."""
    from benchmarks import table
    from benchmarks.methods import BY_HAND_AND_WRAPPED

    methods = (*BY_HAND_AND_WRAPPED, "DCPOptimizer, defaults")
    before, after = (
        {(row["dtype"], row["loss"], row["method"]): _kernels(row) for row in _benchmark(f"kernels-{when}")["kernels"]}
        for when in ("before", "after")
    )
    lines = [
        [dtype, loss]
        + [
            f"{before[dtype, loss, name]} → {after[dtype, loss, name]}" if name in BOTH else after[dtype, loss, name]
            for name in methods
        ]
        for dtype, loss in dict.fromkeys((dtype, loss) for dtype, loss, _ in after)
    ]
    return "\n".join(table.grid(["logits", "loss", *methods], lines, words=2))


def _kernels(row: Mapping[str, Any]) -> str:
    return "refused" if row["refused"] else f"{row['kernels']:.0f}"


def wide() -> str:
    """The time of a step with many classes over that of a plain step, before and after the rebuild."""
    from benchmarks import table
    from benchmarks.methods import BY_HAND_AND_WRAPPED as METHODS

    before, after = (
        {
            (point["classes"], point["precision"]): {row["name"]: row for row in point["rows"]}
            for point in _benchmark(f"wide-{when}")["wide"]
        }
        for when in ("before", "after")
    )
    lines = [
        [f"{place[0]:,}", place[1], f"{rows['plain']['milliseconds']['median']:.1f}"]
        + [
            f"{before[place][name]['ratio_to_plain']['median']:.2f} → {rows[name]['ratio_to_plain']['median']:.2f}"
            if name in rows
            else "–"
            for name in METHODS[1:]
        ]
        + [f"{rows[name]['ratio_to_handwritten']['median']:.2f}" if name in rows else "–" for name in BOTH]
        for place, rows in after.items()
    ]
    head = ["classes", "precision", "plain, ms", *METHODS[1:], "DCL ÷ by hand", "DCP ÷ by hand"]
    return "\n".join(table.grid(head, lines, words=2))


def wide_memory() -> str:
    """The peak of the memory with many classes, before and after the rebuild."""
    from benchmarks import table
    from benchmarks.methods import BY_HAND_AND_WRAPPED as METHODS

    before, after = (
        {
            (row["classes"], row["rows"], row["precision"], row["name"]): f"{row['used_bytes'] / 2**20:,.0f}"
            for row in _benchmark(f"wide-{when}")["wide_memory"]
        }
        for when in ("before", "after")
    )
    lines = [
        [f"{classes:,} × {rows:,}", precision]
        + [
            f"{before[place]} → {after[place]}" if (place := (classes, rows, precision, name)) in after else "–"
            for name in METHODS
        ]
        for classes, rows, precision in dict.fromkeys(place[:3] for place in after)
    ]
    return "\n".join(table.grid(["classes × rows", "precision", *METHODS], lines, words=2))


def _records(name: str) -> list[Any]:
    from examples.paper import records

    return records.read(RESULTS / f"{name}.jsonl")


def _benchmark(name: str = "cpu-2-threads") -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def show(text: str) -> None:
    """Put a text into a page; the empty lines around it keep the markers from being taken for a part of it."""
    import cog

    cog.outl(f"\n{text}\n")


def main(arguments: Sequence[str]) -> int:
    """Write the tables into the pages, or with --check only compare; cog's exit code, 0 if all is well."""
    from cogapp import Cog

    mode = ["--check"] if "--check" in arguments else ["-r"]
    prologue = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from results_tables import *"
    return int(Cog().main(["cog", *mode, "-I", str(ROOT / "docs"), "-p", prologue, *(str(ROOT / p) for p in PAGES)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
