"""Run an experiment, print its table, draw its figures, or draw the plots of all results.

    python -m examples.paper list
    python -m examples.paper run main-fashion --jobs 2
    python -m examples.paper table main-fashion
    python -m examples.paper figures main-fashion --only CE DCL DCP
    python -m examples.paper plot

A run that is in the results file is not trained again, and one that another experiment's file has is copied from there;
one that was interrupted continues from its checkpoint in runs/paper. Results go to docs/results/<experiment>.jsonl.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from examples.paper import figures, plots, records
from examples.paper.experiments import EXPERIMENTS
from examples.paper.jobs import Job, finished, pending
from examples.paper.table import markdown

RESULTS, IMAGES, CHECKPOINTS = Path("docs/results"), Path("docs/images"), Path("runs/paper")


def run(name: str, options: argparse.Namespace) -> None:
    """Make the runs of an experiment that are not made yet."""
    experiment = EXPERIMENTS[name]
    path = options.results / f"{name}.jsonl"
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.jobs)
    wanted, known = [], records.by_identity(options.results / f"{other}.jsonl" for other in EXPERIMENTS)
    for label, configuration, seed in pending(experiment, records.read(path), options.seeds or experiment.seeds):
        if options.only and label not in options.only:
            continue
        made = known.get(records.identity(configuration.as_dict(), seed, experiment.part))
        if made is not None:
            records.append(made | {"label": label}, path)
        else:
            wanted.append(
                Job(label, configuration, seed, experiment.part, options.device, threads, options.checkpoints)
            )
    with tqdm(total=len(wanted), desc=name, unit="run") as bar:
        for job, record in finished(wanted, options.jobs):
            records.append(record, path)
            job.checkpoint.unlink(missing_ok=True)
            bar.update()


def draw(name: str, options: argparse.Namespace) -> None:
    """Train some rows of an experiment and draw what they show on the way."""
    experiment = EXPERIMENTS[name]
    labels, seeds = options.only or list(experiment.runs), options.seeds or experiment.seeds
    if options.threads:
        torch.set_num_threads(options.threads)
    folders = figures.Folders(options.results, options.images, options.checkpoints)
    for path in figures.make(name, experiment, labels, seeds, options.device, folders):
        print(path)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m examples.paper", description=__doc__.split("\n")[0])
    made.add_argument("command", choices=("list", "run", "table", "figures", "plot"))
    made.add_argument("experiment", nargs="?", choices=tuple(EXPERIMENTS))
    made.add_argument("--seeds", type=int, help="how many (default: the experiment's own number)")
    made.add_argument("--only", nargs="+", metavar="LABEL", help="these rows of the table only")
    made.add_argument("--jobs", type=int, default=1, help="runs at a time, each in its own process")
    made.add_argument("--threads", type=int, help="threads of a run (default: the cores divided by --jobs)")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--results", type=Path, default=RESULTS, help=f"folder of the results (default {RESULTS})")
    made.add_argument("--images", type=Path, default=IMAGES, help=f"folder of the figures (default {IMAGES})")
    made.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help=f"(default {CHECKPOINTS})")
    return made


def main(arguments: list[str] | None = None) -> None:
    made = parser()
    options = made.parse_args(arguments)
    if options.command == "list":
        for name, experiment in EXPERIMENTS.items():
            print(f"{name}: {experiment.title} ({len(experiment.runs)} rows, {experiment.seeds} seeds)")
        return
    if options.command == "plot":
        paths = plots.draw(EXPERIMENTS, options.results, options.images)
        print(*paths or [f"no results to plot in {options.results}"], sep="\n")
        return
    if options.experiment is None:
        made.error(f"{options.command} needs an experiment: {', '.join(EXPERIMENTS)}")
    if options.command == "table":
        print(markdown(EXPERIMENTS[options.experiment], records.read(options.results / f"{options.experiment}.jsonl")))
        return
    try:
        if options.command == "figures":
            draw(options.experiment, options)
        else:
            run(options.experiment, options)
    except (ValueError, ImportError) as error:
        made.error(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")


if __name__ == "__main__":
    main()
