"""The order in which the runs are made, so that an early end leaves comparisons that are complete.

    python -m examples.research.rivals.queue                 # all runs that have no record, one after the other
    python -m examples.research.rivals.queue --until 03:10   # starts no run after this time of the day (UTC)
    python -m examples.research.rivals.queue --list          # the stages, and how many runs of each are made

The stages: every method with its first value, the search for the default with its confirmation, the second search with
its own, the other values; then a second seed of the best rows. The values are chosen then, on validation images; what
follows are the chosen ones in new seeds, DCP on top, and the expensive settings. A run has its record in runs/results,
and the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from examples.research import records
from examples.research.experiments import EXPERIMENTS
from examples.research.jobs import Job, finish
from examples.research.rivals import choice, rules, selection, values
from examples.research.rivals.experiments import name_of, search_of, top_of
from examples.research.rivals.settings import (
    CHOICE_ROUNDS,
    CHOSEN_ROUNDS,
    CONFIRMATION_ROUNDS,
    CONFIRMED,
    EXPENSIVE,
    FAST,
    FIRST_SEARCH_ROUNDS,
    PLACES,
    SEARCH_ROUNDS,
    SEARCHED,
    SECOND_ROUNDS,
)

CHECKPOINTS = Path("runs/paper")


@dataclass(frozen=True)
class Item:
    """A run: its stage, experiment, row and seed."""

    stage: str
    experiment: str
    label: str
    seed: int


def choices() -> Iterator[Item]:
    """The runs that values and the default are chosen by, and those that confirm the default's candidates."""
    first = ["CE", *(labels[0] for labels in values.LABELS.values())]
    some = next(iter(FAST.values()))
    others = [label for label in values.rows(some.plain) if label not in first]
    yield from _methods("first values, round 0", first, 0)
    for number_of_round in FIRST_SEARCH_ROUNDS:
        yield from _search(f"default, round {number_of_round}", number_of_round)
    yield from _candidates("candidate for the default", CONFIRMED, [rules.CANDIDATE], CONFIRMATION_ROUNDS)
    for number_of_round in SEARCH_ROUNDS[len(FIRST_SEARCH_ROUNDS) :]:
        yield from _search(f"default, round {number_of_round}", number_of_round)
    yield from _candidates("second candidates", list(FAST), rules.SECOND_CANDIDATES, SECOND_ROUNDS)
    yield from _methods("other values, round 0", others, 0)


def best_rows(scores: choice.AllScores) -> Iterator[Item]:
    """A second seed of the rows that were ahead in the first."""
    for name, labels in selection.kept(scores).items():
        for seed in PLACES[name].of_round(CHOICE_ROUNDS[1]):
            for label in labels:
                yield Item("best rows, round 1", name_of(name), label, seed)


def _candidates(
    stage: str, names: Sequence[str], candidates: Sequence[rules.Rule], rounds: Sequence[int]
) -> Iterator[Item]:
    """CE, today's default and candidates for it."""
    for number_of_round in rounds:
        for name in names:
            labels = rules.confirmation_rows(PLACES[name].plain, PLACES[name].classes, candidates)
            for seed in PLACES[name].of_round(number_of_round):
                for label in labels:
                    yield Item(stage, search_of(name), label, seed)


def _methods(stage: str, labels: Sequence[str], number_of_round: int) -> Iterator[Item]:
    for label in labels:
        for name, place in FAST.items():
            for seed in place.of_round(number_of_round):
                yield Item(stage, name_of(name), label, seed)


def _search(stage: str, number_of_round: int) -> Iterator[Item]:
    rows = {name: list(EXPERIMENTS[search_of(name)].runs) for name in SEARCHED}
    for position in range(max(map(len, rows.values()))):
        for name, labels in rows.items():
            for label in labels[position : position + 1]:
                for seed in PLACES[name].of_round(number_of_round):
                    yield Item(stage, search_of(name), label, seed)


def confirmations(chosen: selection.Chosen) -> Iterator[Item]:
    """The runs of what was chosen: in new seeds, with DCP on top, in the expensive settings."""
    yield from _chosen(chosen, CHOSEN_ROUNDS[:3])
    yield from _expensive(chosen, 0)
    yield from _chosen(chosen, CHOSEN_ROUNDS[3:])
    yield from _expensive(chosen, 1)


def _chosen(chosen: selection.Chosen, rounds: Sequence[int]) -> Iterator[Item]:
    for number_of_round in rounds:
        for name, place in FAST.items():
            for seed in place.of_round(number_of_round):
                for label in chosen.labels(name):
                    yield Item(f"chosen, round {number_of_round}", name_of(name), label, seed)
                for label in chosen.under[name]:
                    yield Item(f"on top, round {number_of_round}", top_of(name), values.top_label(label), seed)


def _expensive(chosen: selection.Chosen, seed: int) -> Iterator[Item]:
    for name in EXPENSIVE:
        for label in chosen.for_all():
            yield Item(f"ResNet-10 and EfficientNet-Lite0, seed {seed}", name_of(name), label, seed)


Parts = Callable[[Path], Sequence[Callable[[], Iterator[Item]]]]


def rivals(folder: Path) -> Sequence[Callable[[], Iterator[Item]]]:
    """The parts of the plan; what a part has depends on the results of those before it."""
    return (
        choices,
        lambda: best_rows(selection.validation(folder, CHOICE_ROUNDS[:1])),
        lambda: confirmations(selection.choose(folder)),
    )


def wanted(folder: Path, parts: Parts = rivals) -> Iterator[Item]:
    """All runs in their order; what depends on the results of others comes once all of those are there."""
    for part in parts(folder):
        items = list(part())
        yield from items
        done = _done(folder)
        if any((item.experiment, item.label, item.seed) not in done for item in items):
            return


def _done(folder: Path) -> set[tuple[str, str, int]]:
    return {
        (name, record["label"], record["seed"])
        for name in EXPERIMENTS
        if name.startswith("rivals-")
        for record in records.finished(folder, f"{name}.jsonl")
    }


def attempt(job: Job) -> records.Record | str:
    """The record of a run, or the error that ended it, such as for logits that are not finite."""
    try:
        return finish(job)
    except (ArithmeticError, RuntimeError, ValueError):
        return traceback.format_exc()


def run(folder: Path, checkpoints: Path, until: str | None, parts: Parts = rivals, processes: int = 1) -> None:
    """Make all runs that have no record, until a time of the day."""
    names = [name for name in EXPERIMENTS if name.startswith("rivals-")]
    known = records.by_identity(place / f"{name}.jsonl" for place in (records.COMMITTED, folder) for name in names)
    for part in parts(folder):
        done = _done(folder)
        jobs: dict[str, Job] = {}
        items: dict[str, list[Item]] = {}  # experiments have runs in common
        for item in part():
            if (item.experiment, item.label, item.seed) not in done:
                job = _job(item, checkpoints)
                jobs[_identity(job)] = job
                items.setdefault(_identity(job), []).append(item)
        for identity in [identity for identity in jobs if identity in known]:
            del jobs[identity]
            _write(known[identity], items.pop(identity), folder, "known")
        for job, made in _attempts(list(jobs.values()), processes, until):
            waiting = items.pop(_identity(job))
            if isinstance(made, str):
                print(f"{_name(waiting[0])}: {made}", flush=True)
                continue
            known[_identity(job)] = made
            _write(made, waiting, folder, f"{made['seconds']:.0f} s")
            job.checkpoint.unlink(missing_ok=True)
        if items:
            print(f"it is {until}: the same command goes on from here", flush=True)
            return


def _write(made: records.Record, items: Sequence[Item], folder: Path, remark: str) -> None:
    for item in items:
        records.append(made | {"label": item.label}, folder / f"{item.experiment}.jsonl")
        print(f"{_name(item)}: {remark}", flush=True)
        remark = "known"


def _job(item: Item, checkpoints: Path) -> Job:
    experiment = EXPERIMENTS[item.experiment]
    return Job(item.label, experiment.runs[item.label], item.seed, experiment.part, "cpu", 1, checkpoints)


def _name(item: Item) -> str:
    return f"{item.stage}: {item.experiment}, {item.label}, seed {item.seed}"


def _identity(job: Job) -> str:
    return records.identity(job.configuration.as_dict(), job.seed, job.part)


def _attempts(jobs: Sequence[Job], processes: int, until: str | None) -> Iterator[tuple[Job, records.Record | str]]:
    """Runs and their results as they come in; none begins after a time of the day."""
    if processes == 1:
        for job in jobs:
            if _is_late(until):
                return
            yield job, attempt(job)
        return
    context = multiprocessing.get_context("spawn")  # forked processes inherit OpenMP's threads in a broken state
    with ProcessPoolExecutor(processes, mp_context=context) as executor:
        running: dict[Future[records.Record | str], Job] = {}
        for job in jobs:
            if _is_late(until):
                break
            running[executor.submit(attempt, job)] = job
            if len(running) == processes:
                yield from _ended(running)
        while running:
            yield from _ended(running)


def _ended(running: dict[Future[records.Record | str], Job]) -> Iterator[tuple[Job, records.Record | str]]:
    ended, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in ended:
        yield running.pop(future), future.result()


def _is_late(until: str | None) -> bool:
    return until is not None and f"{datetime.now(timezone.utc):%H:%M}" >= until


def counts(folder: Path, parts: Parts = rivals) -> dict[str, tuple[int, int]]:
    """How many runs of each stage have a record, and how many there are."""
    done = _done(folder)
    found: dict[str, tuple[int, int]] = {}
    for item in wanted(folder, parts):
        made, of_stage = found.get(item.stage, (0, 0))
        is_made = (item.experiment, item.label, item.seed) in done
        found[item.stage] = (made + is_made, of_stage + 1)
    return found


def main(arguments: Sequence[str] | None = None, description: str | None = __doc__, parts: Parts = rivals) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--until", help="HH:MM in UTC, after which no run starts")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread")
    parser.add_argument("--list", action="store_true", help="count the runs, and make none")
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder of the records")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="their folder")
    options = parser.parse_args(arguments)
    if options.list:
        for stage, (made, of_stage) in counts(options.results, parts).items():
            print(f"{stage}: {made} of {of_stage}")
        return
    try:
        run(options.results, options.checkpoints, options.until, parts, options.jobs)
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")


if __name__ == "__main__":
    main()
