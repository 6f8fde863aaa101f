"""The tables of the pages that come from the records; docs/results_tables.py has cog write them into the pages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.table import grid
from dcl_optim.demo import report
from dcl_optim.demo.training import METHODS
from dcl_optim.trial.paired import holm, mean_and_error, plus_minus, probability_cell
from examples.research import evidence, gain_tables, pays, peers, records, size, tabular
from examples.research import wrong_labels as rows_with_wrong_labels
from examples.research.applications.comparison import made, results_file
from examples.research.experiments import EXPERIMENTS
from examples.research.gain_tables import by_measure
from examples.research.gains import Row, by_gain
from examples.research.rivals import companion_queue, companion_tables, queue, tables
from examples.research.table import accuracy, by_label, by_seed, markdown, paired, probability

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "examples" / "research" / "results"


def demo(name: str = "demo") -> str:
    """The demo's table, as it prints it."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    rows = sorted((report.Row(**row) for row in found["table"]), key=lambda row: METHODS.index(row.method))
    return "```text\n" + report.format_table(rows) + "\n```"


OVERVIEW = {  # of the settings in which methods were tuned, by what decides
    "kanji-5": "few images: 150 Japanese characters, 5 of each",
    "kanji-5-noise-20": "wrong labels: the same, a fifth wrong",
    "fashion-500-noise-30": "wrong labels, ten classes: clothes",
    "digits-30-noise-30": "wrong labels, ten classes: digits",
    "scripts": "network cannot fit: 100 writing systems",
    "fashion-5000": "clean data: 5,000 images of clothes",
}


def overview_accuracy() -> str:
    """The first page's table of gains: DCP beside the best rival, which is tuned for the data."""
    return tables.overview(RESULTS, OVERVIEW)


def experiment(name: str) -> str:
    """The table of an experiment of examples/research."""
    return _named(markdown(EXPERIMENTS[name], _records(name)))


def side_by_side(names: Sequence[str]) -> str:
    """Experiments with the same rows: the baseline's accuracy, and each other row's difference to it."""
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


SHOWN_ROWS = ("label smoothing 0.1", "DCL", "DCP", "DCP, λ = 0.1", "DCP, λ = 1, α = 0.6")


def gains_by_experiment(columns: Mapping[str, str]) -> str:
    """The gains over plain training in some experiments, by the head of their column."""
    rows = {name: row for name, row in evidence.CURVES.items() if name in SHOWN_ROWS}
    return gain_tables.by_experiment({head: _records(name) for head, name in columns.items()}, rows)


def gains_by_size() -> str:
    """The gains over plain training by the size of the network, a column for each, and those of the primary two."""
    columns = {_parameters(name): [r for run in size.runs_of(name) for r in _records(run)] for name in size.NETWORKS}
    together = {
        f"both largest, {seeds} seeds": [_records(size.runs_of(name)[index]) for name in size.PRIMARY]
        for index, seeds in enumerate(("first", "new"))
    }
    return gain_tables.by_experiment(columns, size.DRAWN, together)


def other_gains_by_size() -> str:
    """What else gains over plain training by the size of the network, a column for each."""
    columns = {_parameters(name): _records(size.others_of(name)) for name in size.NETWORKS}
    return gain_tables.by_experiment(columns, size.OTHERS)


def gains_on_few_kanji(experiments: Mapping[str, str]) -> str:
    """The gains over plain training with few images of kanji, by the title of an experiment."""
    found = {title: _records(name) for title, name in experiments.items()}
    made = {record["label"] for some in found.values() for record in some}
    rows = {label: Row(label) for label in ("DCP", "label smoothing 0.1", "DCL") if label in made}
    return gain_tables.by_setting(found, rows)


def accuracy_by_epochs(experiments: Mapping[str, str]) -> str:
    """Plain training's accuracy with fewer epochs, in per cent, by the title of an experiment."""
    lines = []
    for title, name in experiments.items():
        found = _of_experiments([name])
        labels = [*(f"CE, {epochs} epochs" for epochs in evidence.EPOCHS), "CE"]
        lines.append([title, *(f"{fmean(found[label].values()):.1f}" for label in labels)])
    longest = {EXPERIMENTS[name].runs["CE"].epochs for name in experiments.values()}
    return "\n".join(grid(["epochs", *map(str, (*evidence.EPOCHS, *longest))], lines, words=1))


def gains_when_tuned() -> str:
    """The gains over plain training with the learning rate and weight decay that are best for it."""
    found = {_parameters(name): _records(f"size-scripts-{name}-tuned") for name in size.TUNED}
    return gain_tables.by_experiment(found, size.DRAWN, {"both": list(found.values())})


def _parameters(name: str, setting: str = "scripts") -> str:
    """The head of a network's column."""
    return f"{size.parameters(setting, name) / 1000:,.0f} k parameters"


def gains_by_setting(*, bold: bool = False) -> str:
    """The gains over plain training in all settings, with corrected p values, or the small ones in bold."""
    return gain_tables.by_setting(_settings(), pays.TESTED, bold=bold)


def _settings() -> dict[str, list[Any]]:
    """The records of all settings by their title, the largest gain of DCP first."""
    found = {title: _records(name) for name, title in pays.PAYS.items()}
    return {title: found[title] for title in by_gain(found, Row("DCP"))}


def gains_by_measure(name: str, *measures: str) -> str:
    """What each row of an experiment changes, a column for each measure."""
    rows = {label: Row(label) for label in EXPERIMENTS[name].runs if label != EXPERIMENTS[name].baseline}
    return by_measure(_records(name), rows, measures)


def gains_of_peers(cost: str, *measures: str) -> str:
    """What other methods change, a column for each measure.

    ``cost`` is that of a training: "plain", also without the pairs as "plain, alone", or "twice".
    """
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
# A row's title, its module, the settings that differ from the default, its label without and with each optimizer.
APPLICATIONS: tuple[tuple[str, str, dict[str, Any], str, str, str], ...] = (
    ("fine-tuning, all weights", "fine_tuning", {}, "full", "", "full, DCL"),
    *(
        (f"EfficientNet-Lite0 on {data}, {title}", "fine_tuning", FROM_IMAGENET[data], row, f"{row}, DCP", "")
        for data, title, row in (
            ("kanji, 20 of each", "all weights", "full"),
            ("writing systems", "all weights", "full"),
            ("kanji, 2 of each", "linear probe", "linear probe"),
            ("kanji, 20 of each", "linear probe", "linear probe"),
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

    package = (ROOT / "examples" / "research" / "applications" / module).is_dir()
    found = import_module(f"examples.research.applications.{module}{'.__main__' if package else ''}").APPLICATION
    runs = by_label(made(found, {**found.settings, **changed}, results_file(found, RESULTS)))
    return {label: {seed: record["score"] for seed, record in of.items()} for label, of in runs.items()}


def _of_experiments(names: Sequence[str]) -> dict[str, dict[int, float]]:
    """The test accuracy in experiments of examples/research together, by the label and the seed."""
    runs = by_label([record for name in names for record in _records(name)])
    return {label: {seed: accuracy(record) for seed, record in of.items()} for label, of in runs.items()}


def wrong_labels() -> str:
    """What to take with wrong labels: each method at its best learning rate."""
    return rows_with_wrong_labels.table(RESULTS)


def tables_of_numbers() -> str:
    """The gains over plain training on tables of two to ten classes."""
    return tabular.table(RESULTS)


def rivals(table: str) -> str:
    """One of the tables of ``python -m examples.research.rivals.tables``."""
    found: str = getattr(tables, table)(RESULTS)
    return found


def companion(table: str, *rounds: int) -> str:
    """One of the tables of ``python -m examples.research.rivals.companion_tables``, in the seeds of some rounds."""
    found: str = getattr(companion_tables, table)(RESULTS, *([rounds] if rounds else []))
    if not found.startswith("|"):
        return found  # a sentence
    heads, rule, *lines = found.splitlines()
    has_figures = re.compile(r"[-+]\d|\d / ")  # gains or counts: rows that were not run are left out
    return "\n".join([heads, rule, *filter(has_figures.search, lines)])


def companion_stages() -> str:
    """How many runs of each stage of the queue of DCL's search are made."""
    return _stages(queue.counts(RESULTS, companion_queue.parts))


def _stages(counts: Mapping[str, tuple[int, int]]) -> str:

    rows = [[stage, f"{made} of {of_stage}"] for stage, (made, of_stage) in counts.items()]
    return "\n".join(grid(["stage", "runs"], rows, words=1))


def rivals_in_new_seeds() -> str:
    """The table in new seeds without its last columns: the second best rival, and the number of seeds."""
    lines = [line.split(" | ") for line in tables.in_new_seeds(RESULTS).splitlines()]
    return "\n".join(" | ".join(line[: lines[0].index("second")]) + " |" for line in lines)


def losses() -> str:
    """DCP with cross-entropy and with generalized cross-entropy, by its weight; validation images."""
    name = "losses-kanji"
    found = by_label(_records(name))
    rows = []
    for label in EXPERIMENTS[name].runs:
        alone = label.split(",")[0]
        reached = plus_minus(*mean_and_error([accuracy(record) for record in found[label].values()]), places=1)
        gained = plus_minus(*mean_and_error(paired(found[label], found[alone])), sign="+", places=1)
        rows.append([label, reached, "" if label == alone else gained])
    return "\n".join(grid(["loss, λ", "validation images, %", "minus the loss alone"], rows, words=1))


def _records(name: str) -> list[Any]:

    return records.read(RESULTS / f"{name}.jsonl")


KANJI, SCRIPTS = "characters", "writing systems"
GROWS = "DCL, λ grows to 1 over half of the training"
# What was tried beside the methods and did not improve on them: what, where, the row, and what it is compared with.
TRIED: tuple[tuple[str, str, str, str, str], ...] = (
    ("DCP with label smoothing", KANJI, "peers-kanji", "DCP and label smoothing", "DCP, 1"),
    ("DCP with mixup", KANJI, "peers-kanji", "DCP and mixup", "DCP, 1"),
    (
        "DCP, prototypes of the first epoch",
        KANJI,
        "controls-kanji",
        "λ = 1, prototypes of the first epoch",
        "DCP, λ = 1",
    ),
    ("DCP, λ = 1 in place of 0.1", "digits", "defaults-digits-short", "DCP, λ = 1, α = 0.97", "DCP, λ = 0.1"),
    ("DCP, λ = 1 in place of 0.1", SCRIPTS, "defaults-scripts-short", "DCP, λ = 1, α = 0.97", "DCP, λ = 0.1"),
    ("DCL, λ grows to 1", "digits", "defaults-digits-short", GROWS, "CE"),
    ("DCL, λ grows to 1", SCRIPTS, "defaults-scripts-short", GROWS, "CE"),
    ('DCL, λ = 1, `distance="l1"`', SCRIPTS, "distance", "l1", "mse"),
    ('DCL, λ = 1, `distance="kl"`', SCRIPTS, "distance", "kl", "mse"),
    ('DCL, λ = 1, `distance="infonce"`', SCRIPTS, "distance", "infonce", "mse"),
    ("DCL, λ = 1, the companion's rate halved", SCRIPTS, "rate", "η_ω = 0.5 η_θ", "η_ω = 1 η_θ"),
    ("DCL, λ = 1, the companion's rate doubled", SCRIPTS, "rate", "η_ω = 2 η_θ", "η_ω = 1 η_θ"),
    ("DCL, λ = 1, a companion half as wide", SCRIPTS, "companion", "half as wide", "the model's twin"),
    ("DCL, λ = 1, a companion a quarter as wide", SCRIPTS, "companion", "a quarter as wide", "the model's twin"),
    ("DCL, λ = 1, a companion of a tenth of the rows", SCRIPTS, "fraction-scripts", "a share of 0.1", "a share of 1"),
    ("DCL, λ = 1, a companion of half of the rows", SCRIPTS, "fraction-scripts", "a share of 0.5", "a share of 1"),
    ("DCL, λ = 1, α = 0 in place of 0.6", SCRIPTS, "alpha", "α = 0", "α = 0.6"),
    ("DCL, λ = 1, α = 0.99 in place of 0.6", SCRIPTS, "alpha", "α = 0.99", "α = 0.6"),
)


def tried() -> str:
    """What was tried and did not improve on what it was added to: the paired difference, and its p."""
    lines = []
    for title, where, name, label, other in TRIED:
        runs = by_label(_records(name))
        found = paired(runs[label], runs[other])
        difference = plus_minus(*mean_and_error(found), sign="+", places=1)
        lines.append([title, where, difference, probability_cell(probability(found)), str(len(found))])
    return "\n".join(grid(["tried", "data", "difference", "p", "seeds"], lines, words=2))
