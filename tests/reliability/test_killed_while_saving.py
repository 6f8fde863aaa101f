"""Kills while checkpoints are written: what is there afterwards is whole, and training goes on from it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.helpers import PATIENCE
from tests.reliability.processes import server
from tests.reliability.savers import Board, example, fingerprint

KILLS = 75


def kill(saver: Callable[[Path, Board], None], folder: Path, draw: random.Random) -> bool:
    """Let a process go on from what is there, kill it at a random moment; say whether it was writing."""
    context = server()
    board = Board(context.RawValue("b", 0), context.RawValue("i", 0))
    process = context.Process(target=saver, args=(folder, board), daemon=True)
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


def uninterrupted(saves: int, folder: Path) -> Iterator[str]:
    """The names of the states that a run writes which nobody kills."""
    context = server()
    board = Board(context.RawValue("b", 0), context.RawValue("i", 0), saves, folder / "names")
    process = context.Process(target=example, args=(folder, board), daemon=True)
    process.start()
    process.join()
    return iter((folder / "names").read_text().split())


def test_after_each_kill_the_last_checkpoint_is_whole_and_training_goes_on(tmp_path):
    draw, killed, whole = random.Random(0), tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    before, landed, found = 0, 0, {}
    for _ in range(KILLS):
        landed += kill(example, killed, draw)
        path = killed / "run.pt"
        state = torch.load(path, weights_only=True) if path.exists() else {"epoch": 0}
        steps = state["epoch"]
        assert steps >= before, "an older state came back"
        if steps:
            found[steps] = fingerprint(state)
        assert len(list(killed.iterdir())) <= 2, "a kill leaves at most one file, which the next save takes over"
        before = steps
    assert landed >= KILLS / 2, f"{landed} kills came during a save"
    assert before >= KILLS / 2, f"{before} saves survived"
    names = list(uninterrupted(before, whole))
    assert all(names[steps - 1] == name for steps, name in found.items())
    assert len(set(found.values())) > KILLS / 4
