"""Run an experiment of the paper, or print its table.

    python -m examples.paper list
    python -m examples.paper run main-fashion --jobs 2
    python -m examples.paper table main-fashion

A run that is in the results file is not trained again; one that was interrupted continues from its checkpoint in
runs/paper. Results go to docs/results/<experiment>.jsonl.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm import tqdm

from examples.paper import records
from examples.paper.configuration import Configuration, Experiment
from examples.paper.experiments import EXPERIMENTS
from examples.paper.records import Record
from examples.paper.table import markdown
from examples.paper.trainer import Run, train

RESULTS, CHECKPOINTS = Path("docs/results"), Path("runs/paper")

Job = tuple[str, Configuration, int, str, str, int, Path]  # label, configuration, seed, part, device, threads, folder


def finish(job: Job, quiet: bool = True) -> Record:
    """Train a run to its end and measure it."""
    label, configuration, seed, part, device, threads, folder = job
    torch.set_num_threads(threads)
    run = Run(configuration, seed, torch.device(device))
    checkpoint = folder / f"{configuration.key(seed)}.pt"
    with tqdm(total=configuration.epochs, desc=f"{label}, seed {seed}", leave=False, disable=quiet or None) as bar:
        train(run, checkpoint, progress=lambda epoch: bar.update(epoch - bar.n) and None)
    record = {"label": label, "seed": seed, "part": part, "configuration": configuration.as_dict()}
    record |= run.figures(part) | records.circumstances(device, threads)
    checkpoint.unlink(missing_ok=True)
    return record


def pending(experiment: Experiment, done: list[Record], seeds: int, only: list[str] | None) -> Iterator[tuple]:
    """The runs that no record is there for, seed by seed, so that an early end leaves whole comparisons."""
    known = {(r["label"], r["seed"]): r["configuration"] for r in done}
    for seed in range(seeds):
        for label, configuration in experiment.runs.items():
            if only and label not in only:
                continue
            if (label, seed) not in known:
                yield label, configuration, seed
            elif known[label, seed] != configuration.as_dict():
                raise ValueError(f"the results of {label!r}, seed {seed}, are of another configuration; move the file")


def run(name: str, options: argparse.Namespace) -> None:
    """Make the runs of an experiment that are not made yet."""
    experiment = EXPERIMENTS[name]
    path = options.results / f"{name}.jsonl"
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.jobs)
    wanted = pending(experiment, records.read(path), options.seeds or experiment.seeds, options.only)
    jobs = [(*one, experiment.part, options.device, threads, options.checkpoints) for one in wanted]
    with tqdm(total=len(jobs), desc=name, unit="run") as bar:
        for record in _finished(jobs, options.jobs):
            records.append(record, path)
            bar.update()


def _finished(jobs: list[Job], processes: int) -> Iterator[Record]:
    if processes == 1:
        yield from (finish(job, quiet=False) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")  # forked processes inherit OpenMP's threads in a broken state
    with ProcessPoolExecutor(processes, mp_context=context) as executor:
        for future in as_completed([executor.submit(finish, job) for job in jobs]):
            yield future.result()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m examples.paper", description=__doc__.split("\n")[0])
    made.add_argument("command", choices=("list", "run", "table"))
    made.add_argument("experiment", nargs="?", choices=tuple(EXPERIMENTS))
    made.add_argument("--seeds", type=int, help="how many (default: the experiment's own number)")
    made.add_argument("--only", nargs="+", metavar="LABEL", help="these rows of the table only")
    made.add_argument("--jobs", type=int, default=1, help="runs at a time, each in its own process")
    made.add_argument("--threads", type=int, help="threads of a run (default: the cores divided by --jobs)")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--results", type=Path, default=RESULTS, help=f"folder of the results (default {RESULTS})")
    made.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help=f"(default {CHECKPOINTS})")
    return made


def main(arguments: list[str] | None = None) -> None:
    made = parser()
    options = made.parse_args(arguments)
    if options.command == "list":
        for name, experiment in EXPERIMENTS.items():
            print(f"{name}: {experiment.title} ({len(experiment.runs)} rows, {experiment.seeds} seeds)")
        return
    if options.experiment is None:
        made.error(f"{options.command} needs an experiment: {', '.join(EXPERIMENTS)}")
    if options.command == "table":
        print(markdown(EXPERIMENTS[options.experiment], records.read(options.results / f"{options.experiment}.jsonl")))
        return
    try:
        run(options.experiment, options)
    except (ValueError, ImportError) as error:
        made.error(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")


if __name__ == "__main__":
    main()
