"""The memory of a method: its process measures a known allocation, and its own only."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import measure, memory
from benchmarks.methods import METHODS
from benchmarks.setting import Setting
from benchmarks.workloads import WORKLOADS

MIB = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems cannot forget a peak")


TWICE = """
import json, mmap
from benchmarks import memory

def touch(size):
    pages = mmap.mmap(-1, size)  # from the kernel, past any allocator, which may have as much at hand
    for start in range(0, size, mmap.PAGESIZE):
        pages[start] = 1
    pages.close()

print(json.dumps([memory.used_by(lambda: touch(size * 2**20)) for size in (200, 20)]))
"""


@linux
def test_a_known_allocation_is_measured():
    """In a fresh process: this one's peak is no longer known once it is forgotten."""
    line = [sys.executable, "-c", TWICE]
    spent, again = json.loads(subprocess.run(line, cwd=memory.ROOT, capture_output=True, text=True, check=True).stdout)
    assert 195 * MIB < spent["used_bytes"] < 230 * MIB
    assert spent["used_bytes"] == spent["peak_bytes"] - spent["before_bytes"]
    assert 15 * MIB < again["used_bytes"] < 40 * MIB  # the first peak is forgotten


@linux
def test_a_process_counts_its_own_memory_and_not_that_of_who_started_it():
    """ru_maxrss, which Linux hands down, would say at least what this process holds."""
    held = torch.ones(250 * MIB)
    assert memory.resident_peak() > 1000 * MIB
    spent = memory.ask("mlp", "DCPOptimizer", Setting(), threads=1)
    assert spent["peak_bytes"] < memory.resident_peak() - 500 * MIB
    assert len(held) == 250 * MIB


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"no row on mlp could not be measured:\n(.|\n)*KeyError: 'no row'"):
        memory.ask("mlp", "no row", Setting(), threads=1)


def test_the_process_is_told_all_that_the_times_were_measured_with(monkeypatch):
    lines: list[list[str]] = []

    class Done:
        returncode, stdout = 0, 'chatter\n{"used_bytes": 1}\n'

    monkeypatch.setattr(memory.subprocess, "run", lambda line, **_: lines.append(line) or Done)
    answer = memory.ask("cnn", "SAM", Setting("cuda:1", "bf16-channels-last", True), threads=3)
    assert answer == {"used_bytes": 1}
    told = ["cnn", "SAM", "--device", "cuda:1", "--precision", "bf16-channels-last", "--threads", "3", "--compile"]
    assert lines[0][3:] == told


def test_the_process_trains_the_row_it_was_asked_for(monkeypatch, capsys):
    started: list[tuple] = []
    monkeypatch.setattr(memory, "start", lambda *arguments: started.append(arguments))
    threads = str(torch.get_num_threads())
    memory.main(["cnn", "companion_every=2", "--precision", "bf16-channels-last", "--threads", threads])
    ((row, work, setting, steps),) = started
    assert (row.name, work.title, setting) == (
        "companion_every=2",
        "CNN 28x28",
        Setting("cpu", "bf16-channels-last"),
    )
    assert steps >= max(one.period for model in WORKLOADS for one in memory.rows_by_name(model).values()) == 5
    assert '"used_bytes"' in capsys.readouterr().out


def test_ratios_are_of_what_was_used_and_each_row_is_asked_for_once(monkeypatch):
    asked: list[str] = []
    bytes_of = {"plain": 40, "DCLOptimizer": 70}
    monkeypatch.setattr(
        memory, "ask", lambda model, name, *_: asked.append(name) or {"peak_bytes": 999, "used_bytes": bytes_of[name]}
    )
    figures = {"rows": [{"name": name, "reference": "plain"} for name in bytes_of]}
    known: dict = {}
    measure.add_memory(figures, "mlp", Setting(), 1, known)
    measure.add_memory(figures, "mlp", Setting(), 1, known)
    assert [row["memory_ratio_to_plain"] for row in figures["rows"]] == [1.0, 1.75]
    assert asked == ["plain", "DCLOptimizer"]


def test_all_rows_can_be_asked_for():
    assert set(METHODS) < set(memory.rows_by_name("resnet18"))
    assert {"plain, linear probe", "companion=ResNet-10"} < set(memory.rows_by_name("resnet18"))
