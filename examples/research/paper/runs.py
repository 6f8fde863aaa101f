"""The trainings of a table that have no result yet, one after the other, and the table."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.research import records
from examples.research.checkpoint import save_atomically
from examples.research.paper import checks, estimate, figures, report
from examples.research.paper.images import load
from examples.research.paper.loop import Signals, Stopped, duration, train
from examples.research.paper.rows import Row, Table, Work, works
from examples.research.paper.session import Session
from examples.research.paper.training import Training
from examples.research.records import Record

RESULTS = "runs.jsonl"


def run(table: Table, rows: Sequence[Row], seeds: int, session: Session, changed: str = "") -> None:
    """Make the runs that have no result, then print the table.

    Args:
        table: what is printed.
        rows: of it, what is trained.
        seeds: of each row.
        session: where.
        changed: how the settings differ from the paper's, which is printed beside the table.

    Raises:
        ValueError: something is missing; the message has all of it.
    """
    path = session.out / RESULTS
    wanted = pending(rows, seeds, path)
    check([work for work, _ in wanted], session)
    if session.first and wanted:
        print(announcement(wanted, session), flush=True)
    with Signals() as signals:
        try:
            for number, (work, seed) in enumerate(wanted, 1):
                label = f"{number}/{len(wanted)} {name_of(work, rows)}"
                if work.needs is not None and _has_diverged(work.needs, path):
                    if session.first:
                        print(f"{label}, seed {seed}: not trained, what it begins with has diverged", flush=True)
                    continue
                one(work, seed, session, signals, label)
                gc.collect()  # the hooks of a network refer to it, and hold its memory on the device
        except Stopped as stopped:
            if session.first:
                print(f"{stopped}: the checkpoint is written; the same command goes on from here", flush=True)
            sys.exit(128 + stopped.number)
    if session.first:
        made = results(path)
        drawn = figures.draw(rows, made, session.out / "figures")
        print(*(part for part in (report.table(table, made), changed, *drawn) if part), sep="\n")


def pending(rows: Sequence[Row], seeds: int, path: Path) -> list[tuple[Work, int]]:
    """The runs without a result, seed by seed; of what others need only seed 0, before them."""
    done = {(record["key"], record["seed"]) for record in records.read(path)}
    own = {row.work.key(0) for row in rows}
    wanted = ((work, seed) for seed in range(seeds) for work in works(rows) if seed == 0 or work.key(0) in own)
    return [(work, seed) for work, seed in wanted if (work.key(0), seed) not in done]


def results(path: Path) -> dict[str, list[Record]]:
    """The finished runs of each training."""
    found: dict[str, list[Record]] = {}
    for record in records.read(path):
        found.setdefault(record["key"], []).append(record)
    return found


def _has_diverged(work: Work, path: Path) -> bool:
    return any("diverged" in record for record in results(path).get(work.key(0), ()) if record["seed"] == 0)


def check(wanted: Sequence[Work], session: Session) -> None:
    """Raise a ValueError of everything that is missing; the first process looks, and all of them raise."""
    found: list[Any] = [checks.problems(wanted, session) if session.first and wanted else []]
    if session.control is not None:
        dist.broadcast_object_list(found, group=session.control)
    if found[0]:
        raise ValueError("nothing was started, for:\n- " + "\n- ".join(found[0]))


def announcement(wanted: Sequence[tuple[Work, int]], session: Session) -> str:
    """What the runs will take."""
    hours = sum(max(estimate.hours(work, session), checks.loading_hours(work, session)) for work, _ in wanted)
    memory = max(estimate.memory(work, session) for work, _ in wanted)
    disk = max(estimate.disk(work, session) for work, _ in wanted)
    return (
        f"{len(wanted)} runs on {estimate.machine(session)}, {session.processes} processes, {session.workers} workers: "
        f"about {duration(3600 * hours)}, {memory / checks.GIB:.1f} GiB of memory, checkpoints of "
        f"{disk / checks.GIB:.2f} GiB in {session.out}"
    )


def name_of(work: Work, rows: Sequence[Row]) -> str:
    """The first row that shows a training."""
    return next((row.name for row in rows if row.work.key(0) == work.key(0)), f"before: {work.task}")


def one(work: Work, seed: int, session: Session, signals: Signals, label: str) -> None:
    """Train to the end, measure, write the record down."""
    checkpoint = session.out / "checkpoints" / f"{work.key(seed)}.pt"
    training = Training(work, seed, session, load(work, session, seed))

    def say(text: str) -> None:
        if session.first:
            print(f"{label}, seed {seed}: {text}", flush=True)

    train(training, checkpoint, signals, say)
    if session.first:
        record = {"key": work.key(0), "label": label, "seed": seed, "work": work.as_dict()}
        record |= _outcome(training)
        record |= {"images": training.data.train_size(), "class_names": list(training.data.class_names)}
        record |= records.circumstances(str(session.device), torch.get_num_threads())
        record |= {"command": shlex.join(sys.argv), "processes": session.processes}
        records.append(record, session.out / RESULTS)
        checkpoint.unlink(missing_ok=True)
    session.wait()


def _outcome(training: Training) -> dict[str, Any]:
    """What a run has reached; it leaves weights for others and what the figures show."""
    if training.diverged is not None:
        return {"diverged": training.diverged, "accuracy": {}, "history": training.history}
    work, seed = training.work, training.seed
    if seed == 0 and keeps(work):
        training.save_weights()
    if training.draws():
        folder = training.session.out / "figures"
        save_atomically(training.drawings(), figures.file(folder, work.key(0), seed))
    return training.figures()


def keeps(work: Work) -> bool:
    """Whether other trainings begin with its weights."""
    return work.task == "reconstruct" or (work.task == "distill" and work.configuration.network == "resnet32x4")
