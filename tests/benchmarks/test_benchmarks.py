"""The benchmark's command: what it measures, what it writes down, what it refuses; and its memory and its tables."""

import json
import sys

import pytest
import torch

from benchmarks import measure, table
from benchmarks.methods import METHODS
from benchmarks.workloads import Setting
from tests.devices.on_device import needs_device, python

MIB = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems cannot forget a peak")


def test_pytest_benchmark_times_a_step_of_each_method():
    words = ["-m", "pytest", "benchmarks", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--benchmark-disable"]
    assert f"{len(METHODS)} passed" in python(*words)


def test_the_slot_is_filled_by_the_slowest(monkeypatch):
    cost = {"fast": 0.01, "slow": 0.05}
    monkeypatch.setattr(measure, "seconds_per_step", lambda step, steps, device: cost[step()])
    named = {name: (lambda name=name: name) for name in cost}
    assert measure.steps_per_slot(named, 0.2, torch.device("cpu")) == 4
    assert measure.steps_per_slot(named, 0.001, torch.device("cpu")) == 1


# ---- the command ----------------------------------------------------------------------------------------------------

SMALL = ["--models", "mlp-small", "--slot", "0.001"]
TINY = ["steps", *SMALL, "--rounds", "2", "--methods", "DCL, by hand", "DCL, line"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Three rows of one network: the file, and what was printed on stdout."""
    folder = tmp_path_factory.mktemp("results") / "new"
    printed = python("-m", "benchmarks", *TINY, "--out", str(folder))
    return json.loads((folder / "steps.json").read_text()), printed


def test_the_file_says_where_and_how_it_was_measured(measured):
    results, printed = measured
    assert set(results["machine"]) == {"cpu", "cores", "threads", "os"}
    assert results["machine"]["threads"] == 1
    assert results["versions"]["torch"] == str(torch.__version__)
    assert results["setting"] == {"device": "cpu", "precision": "float32"}
    assert (results["command"][:35], results["rounds"]) == ("python -m benchmarks steps --models", 2)
    assert results["date"][:2] == "20"
    tables = [*table.steps(results), "", *table.over_by_hand(results["steps"]), "", table.source(results)]
    assert printed == "\n".join([*tables, "", ""])


def test_ratios_are_those_of_the_rounds_and_memory_is_beyond_what_the_imports_hold(measured):
    (figures,) = measured[0]["steps"]
    assert figures["batch_size"] == 128
    plain, hand, line = figures["rows"]
    for other, ratio in ((plain, "ratio_to_plain"), (hand, "ratio_to_hand")):
        pairs = zip(line["rounds_milliseconds"], other["rounds_milliseconds"], strict=True)
        expected = sum(ours / theirs for ours, theirs in pairs) / 2  # the median of two
        assert line[ratio]["median"] == pytest.approx(expected)
    assert line["memory_ratio_to_plain"] == line["memory_bytes"] / plain["memory_bytes"]
    assert 0 < plain["memory_bytes"] < 100 * MIB


def test_a_process_is_a_fresh_one_with_its_threads():
    assert measure.in_a_process(torch.get_num_threads, threads=2) == 2
    with pytest.raises(KeyError, match="no row"):
        measure.in_a_process(measure.memory_of, "mlp-small", "no row", Setting())


COUNTED = """
import json, torch
from benchmarks import fake_device, measure
torch.set_num_threads(1)
fake_device.register()
print(json.dumps([measure.kernel_row("float32", "hard labels", method) for method in ("plain", "DCP, term")]))
"""


@needs_device
def test_kernels_are_counted_and_waits_too():
    plain, term = json.loads(python("-c", COUNTED))
    assert (plain["kernels"], plain["waits"]) == (24.0, 0)
    assert term["kernels"] > 24
    assert 0 < term["waits"] < 0.2


# ---- memory ---------------------------------------------------------------------------------------------------------

TWICE = """
import json, mmap
from benchmarks import measure

def touch(size):
    pages = mmap.mmap(-1, size)  # from the kernel, past any allocator, which may have as much at hand
    for start in range(0, size, mmap.PAGESIZE):
        pages[start] = 1
    pages.close()

print(json.dumps([measure.used_by(lambda: touch(size * 2**20)) for size in (200, 20)]))
"""


@linux
def test_a_known_allocation_is_measured():
    """In a fresh process: this one's peak is no longer known once it is forgotten."""
    spent, again = json.loads(python("-c", TWICE))
    assert 195 * MIB < spent < 230 * MIB
    assert 15 * MIB < again < 40 * MIB  # the first peak is forgotten


@linux
def test_a_process_counts_its_own_memory_and_not_that_of_who_started_it():
    """ru_maxrss, which Linux hands down, would say no less than what this process holds, and nothing beyond it."""
    held = torch.ones(250 * MIB)
    assert measure.resident_peak() > 1000 * MIB
    spent = measure.in_a_process(measure.memory_of, "mlp", "DCP, line", Setting())
    assert 1 * MIB < spent < 100 * MIB
    assert len(held) == 250 * MIB


# ---- tables ---------------------------------------------------------------------------------------------------------


def spread(median):
    return {"median": median, "lower": median - 0.125, "upper": median + 0.125}


def row(name, milliseconds, ratio):
    return {
        "name": name,
        "milliseconds": spread(milliseconds),
        "ratio_to_plain": spread(ratio),
        "memory_ratio_to_plain": ratio + 0.25,
    }


def test_every_cell_of_the_tables_is_a_figure_of_the_file():
    rows = [row("plain", 2.0, 1.0), row("DCP, line", 5.25, 2.5), row("DCL, term", 5.25, 3.125)]
    assert table.steps({"steps": [{"title": "net", "batch_size": 64, "rows": rows}]}) == [
        "| network, batch size | plain, ms | DCP, line, time | DCP, term, time | DCL, line, time | DCL, term, time "
        "| DCP, line, memory | DCL, line, memory |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
        "| net, 64 | 2.0 | 2.50 | – | – | 3.12 | 2.75 | – |",
    ]
    points = [{"classes": 1000, "precision": "float32", "rows": rows[:2]}]
    points.append({"classes": 50_000, "precision": "bf16-channels-last", "rows": rows[:1]})
    assert table.wide({"wide": points}) == [
        "| classes | precision | plain, ms | DCP, line |",
        "| --- | --- | --: | --: |",
        "| 1,000 | float32 | 2.0 | 2.50 |",
        "| 50,000 | bf16-channels-last | 2.0 | – |",
    ]
    counted = [
        {"dtype": dtype, "loss": "hard labels", "method": method, "kernels": kernels}
        for dtype, method, kernels in (("float32", "plain", 24.0), ("float32", "DCP, line", 70.2))
    ]
    assert table.kernels({"kernels": counted})[2:] == ["| float32 | hard labels | 24 | 70 |"]
    results = {
        "machine": {"cpu": "chip", "cores": 8, "threads": 4, "os": "Linux", "device": "H200"},
        "versions": {"python": "3.11", "torch": "2.6", "dcl_optim": "0.1.0"},
        "setting": {"device": "cuda", "precision": "float32"},
        **{"rounds": 9, "date": "2026-11-21T10:00:00", "command": "python -m benchmarks", "minutes": 1.5},
    }
    text = table.source(results)
    assert "9 interleaved rounds" in text
    assert "H200, chip, 8 cores, threads: 4, float32, Linux, python 3.11, torch 2.6, dcl_optim 0.1.0" in text
    assert text.endswith("2026-11-21; `python -m benchmarks`, 1.5 minutes.")
