"""The benchmark's command: what it measures, what it writes down, what it refuses; and its memory and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import measure, table
from benchmarks.methods import METHODS
from benchmarks.workloads import Setting
from tests.devices.on_device import needs_device

ROOT = Path(__file__).parents[2]
MIB = 2**20
MLP_PARAMETERS = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems cannot forget a peak")


def python(*words: str) -> str:
    line = [sys.executable, "-W", "error", *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pytest_benchmark_times_a_step_of_each_method() -> None:
    found = python(
        "-m", "pytest", "benchmarks", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--benchmark-disable"
    )
    assert f"{len(METHODS)} passed" in found


def test_the_slot_is_filled_by_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {"fast": 0.01, "slow": 0.05}
    monkeypatch.setattr(measure, "seconds_per_step", lambda step, steps, device: cost[step()])
    named = {name: (lambda name=name: name) for name in cost}
    assert measure.steps_per_slot(named, 0.2, torch.device("cpu")) == 4
    assert measure.steps_per_slot(named, 0.001, torch.device("cpu")) == 1


# ---- the command ----------------------------------------------------------------------------------------------------

SMALL = ["--models", "mlp-small", "--slot", "0.001"]
TINY = ["steps", *SMALL, "--rounds", "2", "--methods", "DCL, by hand", "DCL, line, paper"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """Three rows of one network: the file, and what was printed on stdout and on stderr."""
    folder = tmp_path_factory.mktemp("results") / "new"
    line = [sys.executable, "-W", "error", "-m", "benchmarks", *TINY, "--out", str(folder)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "steps.json").read_text()), done.stdout, done.stderr


def test_the_file_says_where_and_how_it_was_measured(measured: tuple[dict[str, Any], str, str]) -> None:
    results, printed, _ = measured
    assert set(results["machine"]) == {"cpu", "cores", "threads", "os"}
    assert results["machine"]["threads"] == 2
    assert results["versions"]["torch"] == str(torch.__version__)
    assert results["setting"] == {"device": "cpu", "precision": "float32", "compiled": False}
    assert (results["command"][:35], results["rounds"]) == ("python -m benchmarks steps --models", 2)
    assert results["date"][:2] == "20"
    assert printed == "\n".join([*table.steps(results), "", table.source(results), "", ""])


def test_ratios_are_those_of_the_rounds_and_memory_is_beyond_what_the_imports_hold(
    measured: tuple[dict[str, Any], str, str],
) -> None:
    (figures,) = measured[0]["steps"]
    assert (figures["batch_size"], figures["parameters"]) == (128, MLP_PARAMETERS)
    plain, hand, line = figures["rows"]
    for row, reference, ratio in ((line, plain, "ratio_to_plain"), (line, hand, "ratio_to_handwritten")):
        pairs = zip(row["rounds_milliseconds"], reference["rounds_milliseconds"], strict=True)
        expected = sum(ours / theirs for ours, theirs in pairs) / 2  # the median of two
        assert row[ratio]["median"] == pytest.approx(expected)
    assert (plain["ratio_to_handwritten"], hand["ratio_to_handwritten"]) == (None, None)
    for row in figures["rows"]:
        used = row["memory"]["used_bytes"]
        assert used == row["memory"]["peak_bytes"] - row["memory"]["before_bytes"] > 0
        assert row["memory"]["before_bytes"] > 100 * MIB
        assert row["memory_ratio_to_plain"] == used / plain["memory"]["used_bytes"]
    assert line["state_bytes_added"] == 8 * MLP_PARAMETERS + torch.get_rng_state().nbytes


def test_a_process_is_a_fresh_one_with_its_threads() -> None:
    assert measure.in_a_process(torch.get_num_threads, threads=2) == 2
    with pytest.raises(KeyError, match="no row"):
        measure.in_a_process(measure.memory_of, "mlp-small", "no row", Setting())


@pytest.mark.parametrize(
    "arguments",
    [
        *("--models lenet", "--methods DCQ", "--rounds 0", "--slot 0", "--nothing", "growth"),
        *("--device nowhere", "--precision float8"),
    ],
)
def test_wrong_arguments_are_argparse_errors(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        command.main(arguments.split())
    assert raised.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_without_memory_no_process_is_started_and_the_table_has_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "in_a_process", None)
    found = measure.steps(command.parse([*SMALL, "--no-memory", "--methods", "plain", "--rounds", "1"]))
    assert "| 1.00 (1.00–1.00) | – | – | 0 |" in table.steps(found)[-1]


COUNTED = """
import json, torch
from benchmarks import fake_device, measure
torch.set_num_threads(1)
fake_device.register()
print(json.dumps([measure.kernel_row("float32", "mixup", method) for method in ("plain", "DCP, term")]))
"""


@needs_device
def test_kernels_are_counted_and_waits_too() -> None:
    plain, term = json.loads(python("-c", COUNTED))
    assert (plain["kernels"], plain["refused"]) == (29.0, "")
    assert plain["synchronizations"] == {"1": 0, "2": 0, "3": 0, "100": 0, "others": 0}
    assert term["kernels"] > 29
    assert term["synchronizations"]["100"] >= 1


def test_a_refusal_is_told_as_one() -> None:
    loss = measure.Loss(lambda: torch.nn.CrossEntropyLoss(torch.ones(3)))  # of another number of classes
    said = measure.refusal(METHODS["plain"].build, loss, torch.float32)
    assert said.startswith("RuntimeError: weight tensor should be defined")
    row = {"dtype": "float32", "loss": "mixup", "method": "DCP, line", "refused": "RuntimeError: no labels"}
    assert table.kernels({"kernels": [row]})[-1] == "| float32 | mixup | refused |"


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
def test_a_known_allocation_is_measured() -> None:
    """In a fresh process: this one's peak is no longer known once it is forgotten."""
    spent, again = json.loads(python("-c", TWICE))
    assert 195 * MIB < spent["used_bytes"] < 230 * MIB
    assert spent["used_bytes"] == spent["peak_bytes"] - spent["before_bytes"]
    assert 15 * MIB < again["used_bytes"] < 40 * MIB  # the first peak is forgotten


@linux
def test_a_process_counts_its_own_memory_and_not_that_of_who_started_it() -> None:
    """ru_maxrss, which Linux hands down, would say at least what this process holds."""
    held = torch.ones(250 * MIB)
    assert measure.resident_peak() > 1000 * MIB
    spent = measure.in_a_process(measure.memory_of, "mlp", "DCP, line", Setting())
    assert spent["peak_bytes"] < measure.resident_peak() - 500 * MIB
    assert len(held) == 250 * MIB


# ---- tables ---------------------------------------------------------------------------------------------------------


def spread(median: float) -> dict[str, float]:
    return {"median": median, "lower": median - 0.125, "upper": median + 0.125}


def row(name: str, milliseconds: float, ratio: float, hand: float | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "milliseconds": spread(milliseconds),
        "ratio_to_plain": spread(ratio),
        "ratio_to_handwritten": None if hand is None else spread(hand),
        "memory_ratio_to_plain": 1.75,
        "state_bytes_added": 3 * 2**19,
    }


def test_every_cell_of_the_tables_is_a_figure_of_the_file() -> None:
    rows = [row("plain", 2.0, 1.0), row("DCP, line", 5.25, 2.5, 0.5)]
    assert table.steps({"steps": [{"title": "net", "batch_size": 64, "rows": rows}]})[2:] == [
        "| net, 64 | plain | 2.00 | 1.00 (0.88–1.12) | – | 1.75 | 1.50 MiB |",
        "|  | DCP, line | 5.25 | 2.50 (2.38–2.62) | 0.50 (0.38–0.62) | 1.75 | 1.50 MiB |",
    ]
    points = [{"classes": 1000, "precision": "float32", "rows": rows}]
    points.append({"classes": 50_000, "precision": "autocast", "rows": rows[:1]})
    assert table.wide({"wide": points}) == [
        "| classes | precision | plain, ms | DCP, line |",
        "| --- | --- | --: | --: |",
        "| 1,000 | float32 | 2.0 | 2.50 |",
        "| 50,000 | autocast | 2.0 | – |",
    ]
    counted = [
        {"dtype": dtype, "loss": "mixup", "method": method, "kernels": kernels, "refused": ""}
        for dtype, method, kernels in (("float32", "plain", 29.0), ("float32", "DCP, line", 130.2))
    ]
    assert table.kernels({"kernels": counted})[2:] == ["| float32 | mixup | 29 | 130 |"]
    results = {
        "machine": {"cpu": "chip", "cores": 8, "threads": 4, "os": "Linux", "device": "H200"},
        "versions": {"python": "3.11", "torch": "2.6", "dcl_optim": "0.1.0"},
        "setting": {"device": "cuda", "precision": "float32", "compiled": True},
        **{"rounds": 9, "date": "2026-11-21T10:00:00", "command": "python -m benchmarks", "minutes": 1.5},
    }
    text = table.source(results)
    assert "9 interleaved rounds" in text
    assert "H200, chip, 8 cores, 4 threads, float32, compiled, Linux; Python 3.11, torch 2.6, dcl_optim 0.1.0" in text
    assert text.endswith("2026-11-21; `python -m benchmarks`, 1.5 minutes.")
