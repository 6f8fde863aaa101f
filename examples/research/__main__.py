"""Run an experiment, print its table, put its results into the repository, or draw the plots of all results.

    python -m examples.research list
    python -m examples.research run pays-fashion-5k --jobs 2
    python -m examples.research table pays-fashion-5k
    python -m examples.research publish pays-fashion-5k
    python -m examples.research plot

A run that is in the results file is not trained again, and one that another experiment's file has is copied from there;
one that was interrupted continues from its checkpoint in runs/paper. Results go to runs/results/<experiment>.jsonl;
those that the repository has in examples/research/results are read in addition.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.research import plots, records
from examples.research.arguments import Parser, add_device, number
from examples.research.experiments import EXPERIMENTS
from examples.research.extras import explain
from examples.research.jobs import Job, finished, pending
from examples.research.table import markdown

IMAGES, CHECKPOINTS = Path("runs/images"), Path("runs/paper")
PROGRAM = "python -m examples.research"
COMMANDS = {
    "list": "name the experiments",
    "run": "make the runs of an experiment that are not made yet",
    "table": "print the table of an experiment's results",
    "publish": "write an experiment's results into the repository, without what no table shows",
    "plot": "draw the plots of all results",
}


def run(options: argparse.Namespace) -> None:
    """Make the runs of an experiment that are not made yet."""
    name, experiment = options.experiment, EXPERIMENTS[options.experiment]
    if options.first_seed is not None:
        experiment = replace(experiment, first_seed=options.first_seed)
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

    add("run table publish", "experiment", type=experiment, help=f"one of those that `{PROGRAM} list` names")
    add("run", "--seeds", type=number(int, 1), help="how many (default: the experiment's own number)")
    add("run", "--first-seed", type=number(int, 0), help="the others follow it (default: the experiment's own)")
    add("run", "--only", nargs="+", metavar="LABEL", help="these rows of the table only")
    add("run", "--jobs", type=number(int, 1), default=1, help="runs at a time, each in its own process (default 1)")
    add("run", "--threads", type=number(int, 1), help="of a run (default: the cores divided by --jobs)")
    add("run", "--fresh", action="store_true", help=f"train runs of {records.COMMITTED} too")
    add_device(found["run"])
    own, known = records.RESULTS, records.COMMITTED
    of_results = f"their folder, beside {known} (default {own})"
    add("run table publish plot", "--results", type=Path, default=own, help=of_results)
    add("plot", "--images", type=Path, default=IMAGES, help=f"folder of the figures (default {IMAGES})")
    add("run", "--checkpoints", type=Path, default=CHECKPOINTS, help=f"their folder (default {CHECKPOINTS})")
    return made


def show_list(options: argparse.Namespace) -> None:
    """Print all experiments."""
    for name, one in EXPERIMENTS.items():
        print(f"{name}: {one.title} ({len(one.runs)} rows, {one.seeds} seeds)")


def results(options: argparse.Namespace) -> list[records.Record]:
    """The records of an experiment.

    Raises:
        ValueError: there is none.
    """
    name = options.experiment
    found = records.finished(options.results, f"{name}.jsonl")
    if not found:
        raise ValueError(f"{name} has no results yet; `{PROGRAM} run {name}` makes them")
    return found


def show_table(options: argparse.Namespace) -> None:
    """Print the table of an experiment's results."""
    print(markdown(EXPERIMENTS[options.experiment], results(options)))


def publish(options: argparse.Namespace) -> None:
    """Write an experiment's results into the repository."""
    results(options)
    print(records.publish(options.results, f"{options.experiment}.jsonl"))


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
    commands = {"list": show_list, "run": run, "table": show_table, "publish": publish, "plot": plot}
    try:
        commands[options.command](options)
    except (ValueError, ImportError) as error:
        made.error(explain(error) or str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")


if __name__ == "__main__":
    main()
