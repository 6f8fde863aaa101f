"""The tables of the pages, from the committed results files, and code from the examples; cog writes them.

python docs/results_tables.py           writes them
python docs/results_tables.py --check   fails if a table differs from its results file; the tests run it
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "examples" / "research" / "results"
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
    return "```text\n" + format_table(rows) + "\n```"


OVERVIEW = {  # of the settings in which methods were tuned, by what decides
    "kanji-5": "few images: 150 Japanese characters, 5 of each",
    "kanji-5-noise-20": "wrong labels: the same, a fifth wrong",
    "fashion-500-noise-30": "wrong labels, ten classes: clothes",
    "digits-30-noise-30": "wrong labels, ten classes: digits",
    "scripts": "network cannot fit: 100 writing systems",
    "fashion-5000": "clean data: 5,000 images of clothes",
}
SMALL_STEP = 10.0  # milliseconds: the overhead of a shorter step is visible
WAYS = ("DCP, line", "DCP, term", "DCL, line", "DCL, term")


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
        for way in ("DCP, term", "DCL, term"):
            ratios = [_ratios(way, "ratio_to_plain")[model] for model in chosen]
            if place == shorter:
                ratios.append(shortest[way]["ratio_to_plain"]["median"])
            line.append(f"{max(ratios):.1f}")
        rows.append(line)
    return "\n".join(grid(["one label per", "DCP", "DCL"], rows, words=1))


def _ratios(name: str, ratio: str) -> dict[str, Any]:
    """A row's median on each network, by the network's name."""
    found = {}
    for figures in _benchmark("steps")["steps"]:
        for row in figures["rows"]:
            if row["name"] == name:
                value = row.get(ratio)  # memory may not have been measured
                found[figures["model"]] = value["median"] if isinstance(value, dict) else value
    return found


def overview_accuracy() -> str:
    """The first page's table of gains: DCP beside the best rival, which is tuned for the data."""
    from examples.research.rivals import tables

    return tables.overview(RESULTS, OVERVIEW)


def experiment(name: str) -> str:
    """The table of an experiment of examples/research."""
    from examples.research.experiments import EXPERIMENTS
    from examples.research.table import markdown

    return _named(markdown(EXPERIMENTS[name], _records(name)))


def side_by_side(names: Sequence[str]) -> str:
    """Experiments with the same rows: the baseline's accuracy, and each other row's difference to it."""
    from benchmarks.table import grid
    from dcl_optim.demo.report import mean_and_error, plus_minus
    from examples.research.experiments import EXPERIMENTS
    from examples.research.table import accuracy, by_label, paired

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
    """Name the paper's settings by their values, which the records call a preset, and the average as the pages do."""
    return table.replace("preset paper", "λ = 1, α = 0.6").replace("EMA over 100 steps", "EMA")


def gains_by_experiment(columns: Mapping[str, str]) -> str:
    """The gains over plain training in some experiments, by the head of their column."""
    from examples.research import evidence, gain_tables

    return gain_tables.by_experiment({head: _records(name) for head, name in columns.items()}, evidence.CURVES)


def gains_by_size() -> str:
    """The gains over plain training by the size of the network, a column for each, and those of the primary two."""
    from examples.research import gain_tables, size

    columns = {_parameters(name): [r for run in size.runs_of(name) for r in _records(run)] for name in size.NETWORKS}
    together = {
        f"both largest, {seeds} seeds": [_records(size.runs_of(name)[index]) for name in size.PRIMARY]
        for index, seeds in enumerate(("first", "new"))
    }
    return gain_tables.by_experiment(columns, size.DRAWN, together)


def other_gains_by_size() -> str:
    """What else gains over plain training by the size of the network, a column for each."""
    from examples.research import gain_tables, size

    columns = {_parameters(name): _records(size.others_of(name)) for name in size.NETWORKS}
    return gain_tables.by_experiment(columns, size.OTHERS)


def gains_on_all_kanji() -> str:
    """The gains over plain training with all images of kanji, where the two largest networks make hardly an error."""
    from examples.research import gain_tables, size

    found = {_parameters(name, "kanji"): _records(f"size-kanji-{name}") for name in size.PRIMARY}
    return gain_tables.by_experiment(found, size.DRAWN)


def gains_on_few_kanji(experiments: Mapping[str, str]) -> str:
    """The gains over plain training with few images of kanji, by the title of an experiment."""
    from examples.research import gain_tables
    from examples.research.gains import Row

    found = {title: _records(name) for title, name in experiments.items()}
    made = {record["label"] for some in found.values() for record in some}
    rows = {label: Row(label) for label in ("DCP", "label smoothing 0.1", "DCL") if label in made}
    return gain_tables.by_setting(found, rows)


def accuracy_by_epochs(experiments: Mapping[str, str]) -> str:
    """Plain training's accuracy with fewer epochs, in per cent, by the title of an experiment."""
    from benchmarks.table import grid
    from examples.research import evidence
    from examples.research.experiments import EXPERIMENTS

    lines = []
    for title, name in experiments.items():
        found = _of_experiments([name])
        labels = [*(f"CE, {epochs} epochs" for epochs in evidence.EPOCHS), "CE"]
        lines.append([title, *(f"{fmean(found[label].values()):.1f}" for label in labels)])
    longest = {EXPERIMENTS[name].runs["CE"].epochs for name in experiments.values()}
    return "\n".join(grid(["epochs", *map(str, (*evidence.EPOCHS, *longest))], lines, words=1))


def tuning_by_size() -> str:
    """Plain training's accuracy on validation images by learning rate and weight decay, with the largest networks."""
    from benchmarks.table import grid
    from examples.research import size

    found = {name: {r["label"]: r["accuracy"]["model"] for r in _records(f"size-tuning-{name}")} for name in size.TUNED}
    lines = [
        [f"{lr:g}", f"{decay:g}", *(f"{100 * found[name][size.label_of(lr, decay)]:.1f}" for name in found)]
        for lr, decay in size.TRIED
    ]
    return "\n".join(grid(["learning rate", "weight decay", *map(_parameters, found)], lines, words=2))


def gains_when_tuned() -> str:
    """The gains over plain training with the learning rate and weight decay that are best for it."""
    from examples.research import gain_tables, size

    found = {_parameters(name): _records(f"size-scripts-{name}-tuned") for name in size.TUNED}
    return gain_tables.by_experiment(found, size.DRAWN, {"both": list(found.values())})


def _parameters(name: str, setting: str = "scripts") -> str:
    """The head of a network's column."""
    from examples.research import size

    return f"{size.parameters(setting, name) / 1000:,.0f} k parameters"


def gains_by_setting(*, bold: bool = False) -> str:
    """The gains over plain training in all settings, with corrected p values, or the small ones in bold."""
    from examples.research import gain_tables, pays

    return gain_tables.by_setting(_settings(), pays.TESTED, bold=bold)


def gains_by_weight() -> str:
    """The gains of DCP by its weight, in all settings."""
    from examples.research import gain_tables, pays

    return gain_tables.by_row(_settings(), pays.WEIGHTS)


def _settings() -> dict[str, list[Any]]:
    """The records of all settings by their title, the largest gain of DCP first."""
    from examples.research import pays
    from examples.research.gains import Row, by_gain

    found = {title: _records(name) for name, title in pays.PAYS.items()}
    return {title: found[title] for title in by_gain(found, Row("DCP"))}


def gains_by_measure(name: str, *measures: str) -> str:
    """What each row of an experiment changes, a column for each measure."""
    from examples.research.experiments import EXPERIMENTS
    from examples.research.gain_tables import by_measure
    from examples.research.gains import Row

    rows = {label: Row(label) for label in EXPERIMENTS[name].runs if label != EXPERIMENTS[name].baseline}
    return by_measure(_records(name), rows, measures)


def gains_of_peers(cost: str, *measures: str) -> str:
    """What other methods change, a column for each measure.

    ``cost`` is that of a training: "plain", also without the pairs as "plain, alone", or "twice".
    """
    from examples.research import gain_tables, peers

    alone = {name: row for name, row in peers.PLAIN_COST.items() if not name.startswith("DCP and ")}
    rows = {"plain": peers.PLAIN_COST, "plain, alone": alone, "twice": peers.TWICE_THE_COST}[cost]
    return gain_tables.by_measure(_records("peers-kanji"), rows, measures)


_LITE: dict[str, Any] = {"network": "efficientnet-lite0", "batch_size": 24, "full_lr": 0.03}
FROM_IMAGENET: dict[str, dict[str, Any]] = {
    "icons": _LITE | {"data": "icons", "shots": 5, "epochs": 8},
    "icons, 2 of each": _LITE | {"data": "icons", "shots": 2, "epochs": 20},
    "kanji": _LITE | {"data": "kanji-fonts", "shots": 5, "epochs": 16},
    "kanji, 2 of each": _LITE | {"data": "kanji-fonts", "shots": 2, "epochs": 40},
    "kanji, 20 of each": _LITE | {"data": "kanji-fonts", "shots": 20, "epochs": 4},
    "writing systems": _LITE | {"data": "noto-scripts", "shots": 5, "epochs": 24},
}
SMOOTHED = "label smoothing 0.1 in place of DCP"
# A row's title, its module, the settings that differ from the default, its label without and with each optimizer.
APPLICATIONS: tuple[tuple[str, str, dict[str, Any], str, str, str], ...] = (
    ("fine-tuning, all weights", "fine_tuning", {}, "full", "", "full, DCL"),
    *(
        (f"EfficientNet-Lite0 on {data}, {title}", "fine_tuning", settings, "full", dcp, dcl)
        for data, settings in FROM_IMAGENET.items()
        for title, dcp, dcl in (
            ("all weights", "full, DCP", "full, DCL"),
            ("λ = 1", "full, DCP, λ = 1", "full, DCL, λ = 1"),
            (SMOOTHED, "full, label smoothing", ""),
        )
    ),
    *(
        (f"EfficientNet-Lite0 on {title}", "fine_tuning", FROM_IMAGENET[data] | changed, "linear probe", dcp, dcl)
        for title, data, changed, dcp, dcl in (
            ("kanji, linear probe", "kanji", {}, "linear probe, DCP", "linear probe, DCL"),
            ("kanji, 2 of each, linear probe", "kanji, 2 of each", {}, "linear probe, DCP", ""),
            ("kanji, 20 of each, linear probe", "kanji, 20 of each", {}, "linear probe, DCP", ""),
            (f"kanji, linear probe, {SMOOTHED}", "kanji", {}, "linear probe, label smoothing", ""),
            ("icons, linear probe", "icons", {}, "linear probe, DCP", ""),
            ("writing systems, linear probe", "writing systems", {"probe_lr": 0.1}, "linear probe, DCP", ""),
        )
    ),
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
    ("crop and mirror", "augmentations", {}, "basic", "", "basic, DCL"),
    ("TrivialAugment", "augmentations", {}, "TrivialAugment", "", "TrivialAugment, DCL"),
    ("mixup", "augmentations", {}, "mixup", "mixup, DCP", "mixup, DCL"),
    ("CutMix", "augmentations", {}, "CutMix", "CutMix, DCP", "CutMix, DCL"),
    ("text", "text", {}, "plain", "DCP", "DCL"),
    ("classes of pixels (mean IoU)", "dense", {}, "plain", "DCP", "DCL"),
)


def applications() -> str:
    """The score of each application without the optimizers, and what they gain with the p of the paired t-test."""
    from benchmarks.table import grid
    from dcl_optim.demo.report import mean_and_error, plus_minus
    from examples.research.table import by_seed, probability, probability_cell

    lines = []
    for title, module, changed, plain, *others in APPLICATIONS:
        scores = _of_application(module, changed)
        line = [title, plus_minus(*mean_and_error(list(scores[plain].values())))]
        pairs = []
        for label in others:
            gains = by_seed(scores.get(label, {}), scores[plain])
            if gains:
                line += [plus_minus(*mean_and_error(gains), sign="+"), probability_cell(probability(gains))]
                pairs.append(str(len(gains)))
            else:
                line += ["", ""]
        if pairs:  # not every row was run on all data of FROM_IMAGENET
            lines.append([*line, ", ".join(dict.fromkeys(pairs))])
    return "\n".join(grid(["", "plain, %", "DCP, minus plain", "p", "DCL, minus plain", "p", "seeds"], lines, words=1))


# DCP's comparisons on a pretrained network that were fixed before their runs: data, row, its seeds, other settings.
PLANNED: tuple[tuple[str, str, range, dict[str, Any]], ...] = (
    ("icons", "full", range(10), {}),
    ("icons, 2 of each", "full", range(8), {}),
    ("kanji", "full", range(5), {}),
    ("kanji", "full", range(5, 15), {}),
    ("kanji, 2 of each", "full", range(5, 20), {}),
    ("kanji", "linear probe", range(5, 13), {}),
    ("icons", "linear probe", range(8), {}),
    ("writing systems", "linear probe", range(8), {"probe_lr": 0.1}),
)


def planned_comparisons() -> str:
    """DCP's gains on a pretrained network in comparisons that were planned, with p corrected for all of them."""
    from benchmarks.table import grid
    from dcl_optim.demo.report import mean_and_error, plus_minus
    from examples.research.gains import holm
    from examples.research.table import probability, probability_cell

    gains = {}
    for data, row, seeds, changed in PLANNED:
        scores = _of_application("fine_tuning", FROM_IMAGENET[data] | changed)
        weights = "all weights" if row == "full" else row
        title = f"{data}, {weights}, seeds {seeds[0]} to {seeds[-1]}"
        gains[title] = [scores[f"{row}, DCP"][seed] - scores[row][seed] for seed in seeds]
    p = {title: probability(found) for title, found in gains.items()}
    corrected = holm(p)
    cells = [
        [
            title,
            plus_minus(*mean_and_error(found), sign="+"),
            probability_cell(p[title]),
            probability_cell(corrected[title]),
        ]
        for title, found in gains.items()
    ]
    return "\n".join(grid(["", "DCP, minus plain", "p", "p, corrected"], cells, words=1))


def _of_application(module: str, changed: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """The scores of an application with its default settings but some, by the label and the seed."""
    from importlib import import_module

    from examples.research.applications.comparison import made, results_file
    from examples.research.table import by_label

    package = (ROOT / "examples" / "research" / "applications" / module).is_dir()
    found = import_module(f"examples.research.applications.{module}{'.__main__' if package else ''}").APPLICATION
    runs = by_label(made(found, {**found.settings, **changed}, results_file(found, RESULTS)))
    return {label: {seed: record["score"] for seed, record in of.items()} for label, of in runs.items()}


def _of_experiments(names: Sequence[str]) -> dict[str, dict[int, float]]:
    """The test accuracy in experiments of examples/research together, by the label and the seed."""
    from examples.research.table import accuracy, by_label

    runs = by_label([record for name in names for record in _records(name)])
    return {label: {seed: accuracy(record) for seed, record in of.items()} for label, of in runs.items()}


# What the experiments of examples/research are for, by the page and the heading.
MADE: dict[str, tuple[str, ...]] = {
    "[Results](../results.md), [All settings](gains.md#all-settings), figure of gains by setting": (
        *("data-kanji-480", "length-kanji-4k", "noise-kanji-20", "length-kanji-1k", "length-scripts-4k"),
        *("pays-fashion-5k", "pays-fashion-50k", "pays-kanji", "pays-kanji-adamw", "pays-scripts"),
        *("pays-debian", "pays-debian-adamw"),
    ),
    "[Length](gains.md#the-length-of-training), figure of gains by length": (
        *("length-kanji-1k", "length-kanji-4k", "length-kanji-16k", "length-kanji-64k"),
        *("length-scripts-1k", "length-scripts-4k"),
    ),
    "[Wrong labels](gains.md#wrong-labels)": (
        "epochs-noise",
        *("length-kanji-4k", "noise-kanji-20", "noise-kanji-40", "noise-fashion-500"),
    ),
    "[Noisy labels](../noisy-labels.md)": ("wrong-labels-digits", "wrong-labels-digits-short", "wrong-labels-clothes"),
    "[Few images](gains.md#few-training-images-and-many)": (
        *("data-kanji-480", "length-kanji-4k", "data-kanji-1600", "data-kanji-4800"),
    ),
    "[Other methods](gains.md#other-methods)": ("peers-kanji",),
    "[Probabilities](../results.md#probabilities)": ("probabilities-kanji",),
    "[Logits](gains.md#size-and-shape-of-the-logits)": ("data-kanji-480",),
    "[Controls](gains.md#controls)": ("controls-kanji",),
    "[Other images](gains.md#other-images-in-every-seed)": (
        "draws-kanji-5",
        "draws-kanji-3",
        "draws-kanji-5-noise-20",
    ),
    "[A loss with smaller gradients](rivals.md#a-loss-with-smaller-gradients)": ("losses-kanji",),
    "[Defaults](ablations.md#the-defaults)": tuple(
        f"defaults-{data}-{length}" for data in ("digits", "fashion", "scripts") for length in ("short", "long")
    ),
    "[The companion](ablations.md#the-companion-of-dcl)": ("distance", "rate", "companion", "alpha"),
    "[Table 10 of the paper](ablations.md#the-rows-that-the-companion-learns-from)": (
        "fraction-scripts",
        "fraction-kanji",
    ),
}


def made() -> str:
    """Which experiments each table and figure is made of, how many runs these are, and how long they took where."""
    from benchmarks.table import grid
    from examples.research import size

    stems = sorted(path.stem for path in RESULTS.glob("rivals-*.jsonl"))
    sizes = {
        "[Size of the network](gains.md#the-size-of-the-network), figure of gains by size": sorted(size.EXPERIMENTS),
        "README, [Rivals](rivals.md)": [name for name in stems if not name.startswith("rivals-companion")],
        "README, [The companion](companion.md)": [name for name in stems if name.startswith("rivals-companion")],
    }
    lines = []
    for place, names in (MADE | sizes).items():
        found = [record for name in names for record in _records(name)]
        lines.append([place, ", ".join(f"`{name}`" for name in names), *_took(found)])
    return "\n".join(grid(["table or figure", "experiments", "processor", "runs", "hours"], lines, words=3))


def made_applications() -> str:
    """How many runs each file of the applications has, and how long they took where."""
    from benchmarks.table import grid

    paths = sorted(RESULTS.glob("application-*.jsonl"))
    lines = [[f"`{path.stem}`", *_took(_records(path.stem))] for path in paths]
    return "\n".join(grid(["file", "processor", "runs", "hours"], lines, words=2))


def _took(found: Sequence[Mapping[str, Any]]) -> list[str]:
    devices = sorted({record["device"].removesuffix(" Processor").replace("(R)", "") for record in found})
    hours = f"{sum(record['seconds'] for record in found) / 3600:.1f}"
    return [", ".join(devices), str(len(found)), hours] if found else ["", "not run", ""]


def wrong_labels() -> str:
    """What to take with wrong labels: each method at its best learning rate."""
    from examples.research import wrong_labels

    return wrong_labels.table(RESULTS)


def rivals(table: str) -> str:
    """One of the tables of ``python -m examples.research.rivals.tables``."""
    from examples.research.rivals import tables

    found: str = getattr(tables, table)(RESULTS)
    return found


def rivals_stages() -> str:
    """How many runs of each stage of the queue are made."""
    from examples.research.rivals import queue

    return _stages(queue.counts(RESULTS))


def companion(table: str, *rounds: int) -> str:
    """One of the tables of ``python -m examples.research.rivals.companion_tables``, in the seeds of some rounds."""
    from examples.research.rivals import companion_tables

    found: str = getattr(companion_tables, table)(RESULTS, *([rounds] if rounds else []))
    if not found.startswith("|"):
        return found  # a sentence
    heads, rule, *lines = found.splitlines()
    has_figures = re.compile(r"[-+]\d|\d / ")  # gains or counts: rows that were not run are left out
    return "\n".join([heads, rule, *filter(has_figures.search, lines)])


def companion_stages() -> str:
    """How many runs of each stage of the queue of DCL's search are made."""
    from examples.research.rivals import companion_queue, queue

    return _stages(queue.counts(RESULTS, companion_queue.parts))


def _stages(counts: Mapping[str, tuple[int, int]]) -> str:
    from benchmarks.table import grid

    rows = [[stage, f"{made} of {of_stage}"] for stage, (made, of_stage) in counts.items()]
    return "\n".join(grid(["stage", "runs"], rows, words=1))


def losses() -> str:
    """DCP with cross-entropy and with generalized cross-entropy, by its weight; validation images."""
    from benchmarks.table import grid
    from dcl_optim.demo.report import mean_and_error, plus_minus
    from examples.research.losses import EXPERIMENTS
    from examples.research.table import accuracy, by_label, paired

    (name,) = EXPERIMENTS
    found = by_label(_records(name))
    rows = []
    for label in EXPERIMENTS[name].runs:
        alone = label.split(",")[0]
        reached = plus_minus(*mean_and_error([accuracy(record) for record in found[label].values()]), places=1)
        gained = plus_minus(*mean_and_error(paired(found[label], found[alone])), sign="+", places=1)
        rows.append([label, reached, "" if label == alone else gained])
    return "\n".join(grid(["loss, λ", "validation images, %", "minus the loss alone"], rows, words=1))


def source(module: str, *names: str) -> str:
    """The source of classes or functions, as a block of code."""
    from importlib import import_module
    from inspect import getsource

    found = import_module(module)
    return "```python\n" + "\n\n".join(getsource(getattr(found, name)) for name in names) + "```"


def benchmark(name: str) -> str:
    """One of the tables of ``python -m benchmarks``: steps, kernels or wide."""
    from benchmarks import table

    return "\n".join(table.TABLES[name](_benchmark(name)))


def benchmark_source(name: str) -> str:
    """Where its figures come from."""
    from benchmarks import table

    return table.source(_benchmark(name))


def cost() -> str:
    """The time and the memory of both optimizers over those of plain training, by the line and by the term."""
    from benchmarks.table import grid

    times = {name: _ratios(name, "ratio_to_plain") for name in WAYS}
    memory = {name: _ratios(name, "memory_ratio_to_plain") for name in ("DCP, line", "DCL, line")}
    lines = []
    for figures in _benchmark("steps")["steps"]:
        ratios = [found[figures["model"]] for found in (*times.values(), *memory.values())]
        cells = ["–" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        plain = f"{figures['rows'][0]['milliseconds']['median']:.1f}"
        lines.append([f"{figures['title']}, {figures['batch_size']}", plain, *cells])
    head = [
        "network, batch size",
        "plain, ms",
        *(f"{name}, time" for name in times),
        *(f"{name}, RAM" for name in memory),
    ]
    return "\n".join(grid(head, lines, words=1))


def _records(name: str) -> list[Any]:
    from examples.research import records

    return records.read(RESULTS / f"{name}.jsonl")


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
    prologue = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from results_tables import *"
    return int(Cog().main(["cog", *mode, "-I", str(ROOT / "docs"), "-p", prologue, *(str(ROOT / p) for p in PAGES)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
