"""Run an experiment, print its table, draw its figures, or draw the plots of all results.

    python -m examples.paper list
    python -m examples.paper run main-fashion --jobs 2
    python -m examples.paper table main-fashion
    python -m examples.paper figures main-fashion --only CE DCL DCP
    python -m examples.paper plot

A run that is in the results file is not trained again, and one that another experiment's file has is copied from there;
one that was interrupted continues from its checkpoint in runs/paper. Results go to runs/results/<experiment>.jsonl;
those that the repository has in docs/results are read in addition.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from examples.helpers.arguments import Parser, add_device, number
from examples.helpers.extras import explain
from examples.paper import figures, plots, records
from examples.paper.experiments import EXPERIMENTS
from examples.paper.jobs import Job, finished, pending
from examples.paper.table import markdown

IMAGES, CHECKPOINTS = Path("runs/images"), Path("runs/paper")
PROGRAM = "python -m examples.paper"
COMMANDS = {
    "list": "name the experiments",
    "run": "make the runs of an experiment that are not made yet",
    "table": "print the table of an experiment's results",
    "figures": "train some rows of an experiment and draw what they show on the way",
    "plot": "draw the plots of all results",
}


def run(options: argparse.Namespace) -> None:
    """Make the runs of an experiment that are not made yet."""
    name, experiment = options.experiment, EXPERIMENTS[options.experiment]
    path = options.results / f"{name}.jsonl"
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.jobs)
    done = records.read(path) if options.fresh else records.finished(options.results, path.name)
    folders = (options.results,) if options.fresh else (records.COMMITTED, options.results)
    wanted, known = [], records.by_identity(folder / f"{other}.jsonl" for folder in folders for other in EXPERIMENTS)
    for label, configuration, seed in pending(experiment, done, options.seeds or experiment.seeds):
        if options.only and label not in options.only:
            continue
        made = known.get(records.identity(configuration.as_dict(), seed, experiment.part))
        if made is not None:
            records.append(made | {"label": label}, path)
        else:
            wanted.append(
                Job(label, configuration, seed, experiment.part, options.device, threads, options.checkpoints)
            )
    if not wanted:
        count = (options.seeds or experiment.seeds) * len(options.only or experiment.runs)
        print(records.nothing_to_do(name, count, options.results), file=sys.stderr)
        return
    with tqdm(total=len(wanted), desc=name, unit="run") as bar:
        for job, record in finished(wanted, options.jobs):
            records.append(record, path)
            job.checkpoint.unlink(missing_ok=True)
            bar.update()


def draw(options: argparse.Namespace) -> None:
    """Train some rows of an experiment and draw what they show on the way."""
    name, experiment = options.experiment, EXPERIMENTS[options.experiment]
    labels, seeds = options.only or list(experiment.runs), options.seeds or experiment.seeds
    if options.threads:
        torch.set_num_threads(options.threads)
    folders = figures.Folders(options.results, options.images, options.checkpoints)
    for path in figures.make(name, experiment, labels, seeds, options.device, folders):
        print(path)


def experiment(text: str) -> str:
    """Take the name of an experiment: the type of the argument."""
    if text not in EXPERIMENTS:
        near = difflib.get_close_matches(text, EXPERIMENTS)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise argparse.ArgumentTypeError(f"unknown experiment {text!r}; {meant}`{PROGRAM} list` names all")
    return text


def parser() -> argparse.ArgumentParser:
    """The command line: an option belongs to the commands that it changes."""
    made = Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True, metavar="command")
    found = {
        name: commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        for name, text in COMMANDS.items()
    }

    def add(names: str, *flags: str, **options: Any) -> None:
        for name in names.split():
            found[name].add_argument(*flags, **options)

    add("run table figures", "experiment", type=experiment, help=f"one of those that `{PROGRAM} list` names")
    add("run figures", "--seeds", type=number(int, 1), help="how many (default: the experiment's own number)")
    add("run figures", "--only", nargs="+", metavar="LABEL", help="these rows of the table only")
    add("run", "--jobs", type=number(int, 1), default=1, help="runs at a time, each in its own process (default 1)")
    add("run", "--threads", type=number(int, 1), help="of a run (default: the cores divided by --jobs)")
    add("figures", "--threads", type=number(int, 1), help="of torch (default: torch's own)")
    add("run", "--fresh", action="store_true", help=f"train runs of {records.COMMITTED} too")
    for name in ("run", "figures"):
        add_device(found[name])
    own, known = records.RESULTS, records.COMMITTED
    add("run table plot", "--results", type=Path, default=own, help=f"their folder, beside {known} (default {own})")
    add("figures", "--results", type=Path, default=own, help=f"folder of the figures by epoch (default {own})")
    add("figures plot", "--images", type=Path, default=IMAGES, help=f"folder of the figures (default {IMAGES})")
    add("run figures", "--checkpoints", type=Path, default=CHECKPOINTS, help=f"their folder (default {CHECKPOINTS})")
    return made


def show_list(options: argparse.Namespace) -> None:
    """Print all experiments."""
    for name, one in EXPERIMENTS.items():
        print(f"{name}: {one.title} ({len(one.runs)} rows, {one.seeds} seeds)")


def show_table(options: argparse.Namespace) -> None:
    """Print the table of an experiment's results."""
    name = options.experiment
    found = records.finished(options.results, f"{name}.jsonl")
    if not found:
        raise ValueError(f"{name} has no results yet; `{PROGRAM} run {name}` makes them")
    print(markdown(EXPERIMENTS[name], found))


def plot(options: argparse.Namespace) -> None:
    """Draw the plots of all results."""
    paths = plots.draw(EXPERIMENTS, options.results, options.images)
    if not paths:
        raise ValueError(f"no results to plot yet; `{PROGRAM} run length-kanji-4k` makes some")
    print(*paths, sep="\n")


def main(arguments: list[str] | None = None) -> None:
    made = parser()
    options = made.parse_args(arguments)
    known = EXPERIMENTS[options.experiment].runs if "experiment" in options else {}
    for label in getattr(options, "only", None) or ():
        if label not in known:
            rows = ", ".join(map(repr, known))
            made.error(f"argument --only: {label!r} is no row of {options.experiment}; choose from {rows}")
    commands = {"list": show_list, "run": run, "table": show_table, "figures": draw, "plot": plot}
    try:
        commands[options.command](options)
    except (ValueError, ImportError) as error:
        made.error(explain(error) or str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")


if __name__ == "__main__":
    main()
