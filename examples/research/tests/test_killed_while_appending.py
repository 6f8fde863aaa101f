"""Kills while records are appended: the results file keeps all that were written, and the next run goes on from it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from examples.research import records
from tests.reliability.savers import Board
from tests.reliability.test_killed_while_saving import kill

KILLS = 25


def record(number: int) -> dict[str, Any]:
    """One that is long enough to be killed in."""
    return {"seed": number, "losses": [number + epoch / 7 for epoch in range(3000)]}


def saver(folder: Path, board: Board) -> None:
    path, append = folder / "results.jsonl", board.noted(records.append)
    for number in itertools.count(len(records.read(path))):
        append(record(number), path)


@pytest.mark.stress
def test_after_each_kill_all_records_are_whole_and_none_is_lost(tmp_path):
    draw, before, landed = random.Random(0), 0, 0
    for _ in range(KILLS):
        landed += kill(saver, tmp_path, draw)
        found = records.read(tmp_path / "results.jsonl")
        assert found == [record(number) for number in range(len(found))]
        assert len(found) >= before, "a record is lost"
        before = len(found)
    assert landed >= KILLS / 2, f"{landed} kills came during a save"
    assert before >= KILLS / 2, f"{before} records survived"
