"""The runs of an experiment that are not made yet, one after the other or in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from examples.research import records
from examples.research.configuration import Configuration, Experiment
from examples.research.records import Record
from examples.research.trainer import Run, train


@dataclass(frozen=True)
class Job:
    """One run to make: what, where, and the folder of its checkpoint."""

    label: str
    configuration: Configuration
    seed: int
    part: str
    device: str
    threads: int
    folder: Path

    @property
    def checkpoint(self) -> Path:
        """What an interrupted run goes on from; to be kept until its record is written."""
        return self.folder / f"{self.configuration.key(self.seed)}.pt"


def pending(experiment: Experiment, done: Sequence[Record], seeds: int) -> Iterator[tuple[str, Configuration, int]]:
    """The runs that no record is there for, seed by seed, so that an early end leaves whole comparisons.

    Raises:
        ValueError: a record is of another configuration.
    """
    known = {(record["label"], record["seed"]): record["configuration"] for record in done}
    for seed in range(experiment.first_seed, experiment.first_seed + seeds):
        for label, configuration in experiment.runs.items():
            if (label, seed) not in known:
                yield label, configuration, seed
            elif known[label, seed] != configuration.as_dict():
                raise ValueError(f"the results of {label!r}, seed {seed}, are of another configuration; move the file")


def finish(job: Job, quiet: bool = True) -> Record:
    """Train a run to its end and measure it."""
    torch.set_num_threads(job.threads)
    run = Run(job.configuration, job.seed, torch.device(job.device))
    title = f"{job.label}, seed {job.seed}"
    with tqdm(total=job.configuration.epochs, desc=title, leave=False, disable=quiet or None) as bar:
        train(run, job.checkpoint, progress=lambda epoch: bar.update(epoch - bar.n) and None)
    record = {"label": job.label, "seed": job.seed, "part": job.part, "configuration": job.configuration.as_dict()}
    return record | run.figures(job.part) | records.circumstances(job.device, job.threads)


def finished(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, Record]]:
    """Jobs and their records, as they come in."""
    if processes == 1:
        yield from ((job, finish(job, quiet=False)) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")  # forked processes inherit OpenMP's threads in a broken state
    with ProcessPoolExecutor(processes, mp_context=context) as executor:
        submitted = {executor.submit(finish, job): job for job in jobs}
        for future in as_completed(submitted):
            yield submitted[future], future.result()
