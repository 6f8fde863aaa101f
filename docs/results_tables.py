"""The tables of the pages, from the committed results files, and code from the examples; cog writes them.

python docs/results_tables.py           writes them
python docs/results_tables.py --check   fails if a table differs from its results file; the tests run it
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
# The pages that have tables or code of the examples.
PAGES = (
    "README.md",
    *(
        str(page.relative_to(ROOT))
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if "[[[cog" in page.read_text(encoding="utf-8")
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
    "150 Japanese characters in unseen fonts, 3 images per class": "data-kanji-480",
    "the same, 5 images per class": "length-kanji-4k",
    "the same, 5 images per class, a fifth of the labels wrong": "noise-kanji-20",
    "40 categories of software, from a line of text": "pays-debian",
    "Fashion-MNIST: 10 kinds of clothes, 5,000 images": "pays-fashion-5k",
    "Fashion-MNIST, 50,000 images": "pays-fashion-50k",
}
SMALL_STEP = 10.0  # milliseconds: the overhead of a shorter step is visible


def overview_cost() -> str:
    """The first page's table of costs: time of a step, memory, and what is left after training."""
    from benchmarks import table

    lines = benchmark("summary").splitlines()
    head, _, *models = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    plain = {tuple(cells): float(cells[head.index("plain")].removesuffix(" ms")) for cells in models}
    small = [cells for cells in plain if plain[cells] < SMALL_STEP]
    large = [cells for cells in plain if plain[cells] >= SMALL_STEP]
    slowest, fastest = max(plain[cells] for cells in small), min(plain[cells] for cells in large)

    def times(some: Sequence[Sequence[str]], name: str) -> str:
        ratios = sorted(float(cells[head.index(name)]) for cells in some)
        return f"{ratios[0]:.2f} to {ratios[-1]:.2f} ×"

    both = ("DCPOptimizer", "DCLOptimizer")
    rows = [
        [f"time, for steps of {fastest:.0f} ms or more", *(times(large, name) for name in both)],
        [f"time, for steps of {slowest:.1f} ms or less", *(times(small, name) for name in both)],
        ["memory", "K × K numbers for K classes", "a second network and its optimizer"],
        ["at prediction", "none", "none"],
    ]
    return "\n".join(table.grid(["", "DCP", "DCL"], rows, words=3))


def overview_accuracy() -> str:
    """The first page's table of gains, beside the accuracy without them."""
    from benchmarks import table
    from dcl_optim.demo.report import plus_minus
    from examples.paper.gains import CE, Row, gain
    from examples.paper.table import accuracy, by_label

    rows = []
    for title, name in OVERVIEW.items():
        records = _records(name)
        plain = fmean(accuracy(record) for record in by_label(records)["CE"].values())
        gains = [gain(records, Row(label), CE) for label in ("DCP", "DCL")]
        rows.append([title, f"{plain:.1f} %", *(plus_minus(one.mean, one.error, sign="+") for one in gains if one)])
    return "\n".join(table.grid(["data", "accuracy", "DCP", "DCL"], rows, words=1))


def seeds(lines: Mapping[str, str], label: str = "DCP") -> str:
    """How much a gain differs from seed to seed, a line for each experiment."""
    from benchmarks.table import grid
    from dcl_optim.demo.report import mean_and_error, plus_minus
    from examples.paper.table import by_label, paired

    rows = []
    for title, name in lines.items():
        found = by_label(_records(name))
        gains = sorted(paired(found[label], found["CE"]))
        mean = plus_minus(*mean_and_error(gains), sign="+")
        rows.append([title, str(len(gains)), f"{gains[0]:+.2f}", f"{gains[-1]:+.2f}", mean])
    return "\n".join(grid(["data", "seeds", "lowest gain", "highest gain", "mean"], rows, words=1))


def experiment(name: str) -> str:
    """The table of an experiment of examples/paper."""
    from examples.paper.experiments import EXPERIMENTS
    from examples.paper.table import markdown

    return _named(markdown(EXPERIMENTS[name], _records(name)))


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
    return _named("\n".join(grid(["", *titles], list(zip(heads, *columns, strict=True)), words=1)))


def _named(table: str) -> str:
    """Name the paper's settings by their values; the records call them a preset."""
    return table.replace("preset paper", "λ = 1, α = 0.6")


def gains_by_experiment(columns: Mapping[str, str]) -> str:
    """The gains over plain training in some experiments, by the head of their column."""
    from examples.paper import evidence, gain_tables

    return gain_tables.by_experiment({head: _records(name) for head, name in columns.items()}, evidence.CURVES)


def gains_by_fit(lines: Mapping[str, str], label: str) -> str:
    """How well a row learns its training images and what it gains, by the head of an experiment's line."""
    from examples.paper import gain_tables

    return gain_tables.by_fit({head: _records(name) for head, name in lines.items()}, label)


def gains_by_setting(*, bold: bool = False) -> str:
    """The gains over plain training in all settings, with corrected p values, or the small ones in bold."""
    from examples.paper import gain_tables, pays

    return gain_tables.by_setting(_settings(), pays.TESTED, bold=bold)


def gains_by_weight(*, all_settings: bool = True) -> str:
    """The gains of DCP by its weight, in all settings or in those where all weights were run."""
    from examples.paper import gain_tables, pays
    from examples.paper.gains import CE, gain

    found = _settings()
    if not all_settings:
        found = {title: some for title, some in found.items() if all(gain(some, r, CE) for r in pays.WEIGHTS.values())}
    return gain_tables.by_row(found, pays.WEIGHTS)


def _settings() -> dict[str, list[Any]]:
    """The records of all settings by their title, the largest gain of DCP first."""
    from examples.paper import pays
    from examples.paper.gains import Row, by_gain

    found = {title: _records(name) for name, title in pays.PAYS.items()}
    return {title: found[title] for title in by_gain(found, Row("DCP"))}


def gains_by_measure(name: str, *measures: str) -> str:
    """What each row of an experiment changes, a column for each measure."""
    from examples.paper.experiments import EXPERIMENTS
    from examples.paper.gain_tables import by_measure
    from examples.paper.gains import Row

    rows = {label: Row(label) for label in EXPERIMENTS[name].runs if label != EXPERIMENTS[name].baseline}
    return by_measure(_records(name), rows, measures)


def gains_of_peers(cost: str, *measures: str) -> str:
    """What other methods change, a column for each measure.

    ``cost`` is that of a training: "plain", also without the pairs as "plain, alone", or "twice".
    """
    from examples.paper import gain_tables, peers

    alone = {name: row for name, row in peers.PLAIN_COST.items() if not name.startswith("DCP and ")}
    rows = {"plain": peers.PLAIN_COST, "plain, alone": alone, "twice": peers.TWICE_THE_COST}[cost]
    return gain_tables.by_measure(_records("peers-kanji"), rows, measures)


def grids_of_peers() -> str:
    """The gains on validation data of all values that were tried."""
    from examples.paper import gain_tables, peers
    from examples.paper.evidence import KANJI

    return gain_tables.by_value(_records("peers-kanji-grids"), peers.grids(KANJI))


def variation(name: str) -> str:
    """How much logits and accuracy change from epoch to epoch, from the figures file of an experiment."""
    from benchmarks.table import grid

    runs_of = json.loads((RESULTS / f"figures-{name}.json").read_text())["runs"]
    found = {_named(label): runs for label, runs in runs_of.items()}
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


# A row's title, its module, the settings that differ from the default, its label without and with each optimizer.
APPLICATIONS: tuple[tuple[str, str, dict[str, Any], str, str, str], ...] = (
    ("fine-tuning, all weights", "fine_tuning", {}, "full", "", "full, DCL"),
    ("fine-tuning, linear probe", "fine_tuning", {}, "linear probe", "", "linear probe, DCL"),
    ("fine-tuning, LoRA", "fine_tuning", {}, "LoRA", "", "LoRA, DCL"),
    ("FixMatch, 40 labels", "semi_supervised", {}, "FixMatch", "", "FixMatch, DCL"),
    ("FixMatch, 250 labels", "semi_supervised", {"labels": 250}, "FixMatch", "", "FixMatch, DCL"),
    (
        "FixMatch, 4,000 labels",
        "semi_supervised",
        {"labels": 4000, "train_size": 8000},
        "FixMatch",
        "",
        "FixMatch, DCL",
    ),
    ("masked autoencoder", "masked_autoencoder", {}, "MAE", "", "MAE, DCL"),
    ("distillation: no teacher", "distillation", {}, "student", "", "student, DCL"),
    ("distillation: KD", "distillation", {}, "KD", "", "KD, DCL"),
    ("distillation: ReviewKD", "distillation", {}, "ReviewKD", "", "ReviewKD, DCL"),
    ("distillation: SimKD", "distillation", {}, "SimKD", "", "SimKD, DCL"),
    ("distillation: DKD", "distillation", {}, "DKD", "", "DKD, DCL"),
    ("no augmentation", "augmentations", {}, "basic", "", "basic, DCL"),
    ("TrivialAugment", "augmentations", {}, "TrivialAugment", "", "TrivialAugment, DCL"),
    ("mixup", "augmentations", {}, "mixup", "mixup, DCP", "mixup, DCL"),
    ("CutMix", "augmentations", {}, "CutMix", "CutMix, DCP", "CutMix, DCL"),
    ("text", "text", {}, "plain", "DCP", "DCL"),
    ("classes of pixels (mean IoU)", "dense", {}, "plain", "DCP", "DCL"),
)


def applications() -> str:
    """The score of each application without the optimizers, and what they gain with the p of the paired t-test."""
    from importlib import import_module

    from benchmarks.table import grid
    from dcl_optim.demo.report import mean_and_error, plus_minus
    from examples.applications.comparison import made, results_file
    from examples.paper.table import by_seed, probability_cell

    lines = []
    for title, module, changed, plain, *others in APPLICATIONS:
        package = (ROOT / "examples" / "applications" / module).is_dir()
        found = import_module(f"examples.applications.{module}{'.__main__' if package else ''}").APPLICATION
        records = made(found, {**found.settings, **changed}, results_file(found, RESULTS))
        scores = {label: {r["seed"]: r["score"] for r in records if r["label"] == label} for label in (plain, *others)}
        line = [title, plus_minus(*mean_and_error(list(scores[plain].values())))]
        for label in others:
            gains = by_seed(scores[label], scores[plain])
            line += [plus_minus(*mean_and_error(gains), sign="+"), probability_cell(gains)] if gains else ["", ""]
        lines.append([*line, str(len(scores[plain]))])
    return "\n".join(grid(["", "plain, %", "DCP, minus plain", "p", "DCL, minus plain", "p", "seeds"], lines, words=1))


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


def cost() -> str:
    """The time and the memory of both optimizers over those of plain training."""
    from benchmarks.table import grid

    names = ("DCPOptimizer", "DCLOptimizer")
    lines = []
    for table in _benchmark()["methods"]:
        rows = {row["name"]: row for row in table["rows"]}
        times = [f"{rows[name]['ratio_to_plain']['median']:.2f}" for name in names]
        memory = [f"{rows[name]['memory_ratio_to_plain']:.2f}" for name in names]
        title = f"{table['title']}, {table['batch_size']}"
        lines.append([title, f"{rows['plain']['milliseconds']['median']:.1f}", *times, *memory])
    head = ["network, batch size", "plain, ms", "DCP, time", "DCL, time", "DCP, RAM", "DCL, RAM"]
    return "\n".join(grid(head, lines, words=1))


def options() -> str:
    """The time of DCLOptimizer's options over that of plain training, a column for each network.

    Options that need a change of the script itself are in the detailed table only.
    """
    from benchmarks.knobs import KNOBS
    from benchmarks.table import grid

    tables = _benchmark()["knobs"]
    times = [{row["name"]: f"{row['ratio_to_plain']['median']:.2f}" for row in one["rows"]} for one in tables]
    names = [name for name, knob in KNOBS.items() if not knob.variant and any(name in one for one in times)]
    lines = [[name, KNOBS[name].changes, *(one.get(name, "–") for one in times)] for name in names]
    return "\n".join(grid(["option", "changes", *(one["title"] for one in tables)], lines, words=2))


BOTH = ("DCLOptimizer", "DCPOptimizer")


def kernels() -> str:
    """The kernels of a step."""
    from benchmarks import table
    from benchmarks.methods import BY_HAND_AND_WRAPPED

    methods = (*BY_HAND_AND_WRAPPED, "DCPOptimizer, defaults")
    found = {(row["dtype"], row["loss"], row["method"]): row for row in _benchmark("kernels-after")["kernels"]}
    lines = [
        [dtype, loss, *(f"{found[dtype, loss, name]['kernels']:.0f}" for name in methods)]
        for dtype, loss in dict.fromkeys((dtype, loss) for dtype, loss, _ in found)
    ]
    return "\n".join(table.grid(["logits", "loss", *methods], lines, words=2))


def wide() -> str:
    """The time of a step with many classes over that of a plain step, and over that of the handwritten step."""
    from benchmarks import table
    from benchmarks.methods import BY_HAND_AND_WRAPPED as METHODS

    def ratio(rows: Mapping[str, Any], name: str, reference: str) -> str:
        return f"{rows[name][reference]['median']:.2f}" if name in rows else "–"

    lines = []
    for point in _benchmark("wide-after")["wide"]:
        rows = {row["name"]: row for row in point["rows"]}
        place = [f"{point['classes']:,}", point["precision"], f"{rows['plain']['milliseconds']['median']:.1f}"]
        over_plain = [ratio(rows, name, "ratio_to_plain") for name in METHODS[1:]]
        lines.append(place + over_plain + [ratio(rows, name, "ratio_to_handwritten") for name in BOTH])
    head = ["classes", "precision", "plain, ms", *METHODS[1:], "DCL ÷ handwritten", "DCP ÷ handwritten"]
    return "\n".join(table.grid(head, lines, words=2))


def wide_memory() -> str:
    """The peak of the memory with many classes."""
    from benchmarks import table
    from benchmarks.methods import BY_HAND_AND_WRAPPED as METHODS

    found = {
        (row["classes"], row["rows"], row["precision"], row["name"]): f"{row['used_bytes'] / 2**20:,.0f}"
        for row in _benchmark("wide-after")["wide_memory"]
    }
    lines = [
        [f"{classes:,} × {rows:,}", precision, *(found.get((classes, rows, precision, name), "–") for name in METHODS)]
        for classes, rows, precision in dict.fromkeys(place[:3] for place in found)
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
