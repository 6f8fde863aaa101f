"""A hundred kills while checkpoints are written: what is there afterwards is whole, and training goes on from it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.paper import records
from tests.helpers import PATIENCE
from tests.reliability.processes import server
from tests.reliability.savers import KINDS, Board, fingerprint, record

KILLS = {"example": 75, "results": 25}


def steps_of(kind: str, folder: Path) -> int:
    """How many saves a folder's file is the result of, 0 if there is none; raises if it is not whole."""
    if kind == "results":
        found = records.read(folder / "results.jsonl")
        assert found == [record(number) for number in range(len(found))]
        return len(found)
    if not (folder / "run.pt").exists():
        return 0
    return torch.load(folder / "run.pt", weights_only=True)["epoch"]


def kill(kind: str, folder: Path, draw: random.Random) -> bool:
    """Let a process go on from what is there, kill it at a random moment; say whether it was writing."""
    context = server()
    board = Board(context.RawValue("b", 0), context.RawValue("i", 0))
    process = context.Process(target=KINDS[kind], args=(folder, board), daemon=True)
    process.start()
    until, saves = time.monotonic() + PATIENCE, draw.randrange(3)
    while not (board.writing.value and board.saves.value >= saves):
        assert process.exitcode is None, "it ended by itself"
        assert time.monotonic() < until
        time.sleep(2e-4)
    time.sleep(draw.expovariate(500.0))  # a save takes some milliseconds
    process.kill()
    process.join()
    return bool(board.writing.value)


def uninterrupted(kind: str, saves: int, folder: Path) -> Iterator[str]:
    """The names of the states that a run writes which nobody kills."""
    context = server()
    board = Board(context.RawValue("b", 0), context.RawValue("i", 0), saves, folder / "names")
    process = context.Process(target=KINDS[kind], args=(folder, board), daemon=True)
    process.start()
    process.join()
    return iter((folder / "names").read_text().split())


@pytest.mark.parametrize("kind", KINDS)
def test_after_each_kill_the_last_checkpoint_is_whole_and_training_goes_on(kind, tmp_path):
    draw, killed, whole = random.Random(0), tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    before, landed, found = 0, 0, {}
    for _ in range(KILLS[kind]):
        landed += kill(kind, killed, draw)
        steps = steps_of(kind, killed)
        assert steps >= before, "an older state came back"
        if steps and kind != "results":
            found[steps] = fingerprint(torch.load(killed / "run.pt", weights_only=True))
        assert len(list(killed.iterdir())) <= 2, "a kill leaves at most one file, which the next save takes over"
        before = steps
    assert landed >= KILLS[kind] / 2, f"{landed} kills came during a save"
    assert before >= KILLS[kind] / 2, f"{before} saves survived"
    if found:
        names = list(uninterrupted(kind, before, whole))
        assert all(names[steps - 1] == name for steps, name in found.items())
        assert len(set(found.values())) > KILLS[kind] / 4
