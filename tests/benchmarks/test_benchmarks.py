"""The benchmark's command: what it measures, what it writes down, what it refuses; and its memory and its tables."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks import first_steps, kernels, memory, run, steps, table, timing, wide
from benchmarks.methods import METHODS
from benchmarks.setting import Setting
from benchmarks.workloads import ON_CPU
from tests.devices.on_device import needs_device

MIB = 2**20
MLP_PARAMETERS = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems cannot forget a peak")


def python(*words: str) -> str:
    line = [sys.executable, "-W", "error", *words]
    done = subprocess.run(line, cwd=memory.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pytest_benchmark_times_a_step_of_each_method() -> None:
    found = python(
        "-m", "pytest", "benchmarks", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--benchmark-disable"
    )
    assert f"{len(METHODS)} passed" in found


# ---- the command ----------------------------------------------------------------------------------------------------

TINY = """
from benchmarks import memory, methods, run
methods.METHODS = {name: methods.METHODS[name] for name in ("plain", "DCL, by hand", "DCL, line, paper")}
run.steps.METHODS = methods.METHODS
run.run("steps", run.parse("steps --models mlp-small --rounds 2 --slot 0.001 --out OUT".split()), "the command")
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Three rows of one network: the file and what was printed."""
    folder = tmp_path_factory.mktemp("results") / "new"
    printed = python("-c", TINY.replace("OUT", str(folder)))
    return json.loads((folder / "steps.json").read_text()), printed


def test_the_file_says_where_and_how_it_was_measured(measured: tuple[dict[str, Any], str]) -> None:
    results, printed = measured
    assert set(results["machine"]) == {"cpu", "cores", "threads", "os"}
    assert results["machine"]["threads"] == 2
    assert results["versions"]["torch"] == str(torch.__version__)
    assert results["setting"] == {"device": "cpu", "precision": "float32", "compiled": False}
    assert (results["command"], results["rounds"], results["date"][:2]) == ("the command", 2, "20")
    assert printed == "\n".join([*table.steps(results), "", table.source(results), "", ""])


def test_ratios_are_those_of_the_rounds_and_memory_is_beyond_what_the_imports_hold(
    measured: tuple[dict[str, Any], str],
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
    assert (line["parameters_added"], line["state_bytes_added"]) == (MLP_PARAMETERS, 8 * MLP_PARAMETERS)


def test_each_table_is_measured_in_a_process_and_an_error_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []

    class Process:
        def __init__(self, target: Any, args: Any) -> None:
            assert target is run.run
            started.append((args[0], args[2]))
            self.exitcode = int(args[0] == "kernels")

        def start(self) -> None: ...

        def join(self) -> None: ...

    context = argparse.Namespace(Process=Process)
    monkeypatch.setattr(run.multiprocessing, "get_context", lambda kind: {"spawn": context}[kind])
    run.main(["steps", "wide", "--rounds", "3"])
    assert started == [(name, "python -m benchmarks steps wide --rounds 3") for name in ("steps", "wide")]
    started.clear()
    with pytest.raises(SystemExit, match="1"):
        run.main([])
    assert [name for name, _ in started] == ["steps", "kernels"]


@pytest.mark.parametrize(
    "arguments",
    ["--models lenet", "--rounds 0", "--slot 0", "--nothing", "growth", "--device nowhere", "--precision float8"],
)
def test_wrong_arguments_are_argparse_errors(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run.main(arguments.split())
    assert raised.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_package_that_is_missing_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    run.parse(["--models", "cnn"])
    with pytest.raises(SystemExit):
        run.parse([])
    assert "torchvision is missing: pip install torchvision" in capsys.readouterr().err


def test_the_defaults_are_measured_by_the_line_and_by_the_term() -> None:
    ways = ["by hand", "line", "line, paper", "term", "term, paper"]
    assert list(METHODS) == ["plain", *(f"{method}, {way}" for method in ("DCP", "DCL") for way in ways)]
    assert (
        run.parse([]).models
        == list(ON_CPU)
        == ["mlp-small", "mlp", "cnn", "resnet18", "shufflenet", "vit", "pixels", "tokens"]
    )


COUNTED = """
import json, torch
from benchmarks import kernels
torch.set_num_threads(1)
kernels.METHODS = {name: kernels.METHODS[name] for name in ("plain", "DCP, term")}
kernels.DTYPES = {"float32": torch.float32}
print(json.dumps(kernels.measure(None, ["mixup"])))
"""


@needs_device
def test_kernels_are_counted_and_waits_too() -> None:
    plain, term = json.loads(python("-c", COUNTED))["kernels"]
    assert (plain["kernels"], plain["refused"]) == (29.0, "")
    assert plain["synchronizations"] == {"1": 0, "2": 0, "3": 0, "100": 0, "others": 0}
    assert term["kernels"] > 29
    assert term["synchronizations"]["100"] >= 1


def test_a_refusal_is_told_as_one() -> None:
    loss = kernels.Loss(lambda: torch.nn.CrossEntropyLoss(torch.ones(3)))  # of another number of classes
    assert kernels.refusal("plain", loss, torch.float32).startswith("RuntimeError: weight tensor should be defined")
    row = {"dtype": "float32", "loss": "mixup", "method": "DCP, line", "refused": "RuntimeError: no labels"}
    assert table.kernels({"kernels": [row]})[-1] == "| float32 | mixup | refused |"


def test_many_classes_leave_dcp_out() -> None:
    assert wide.names(16_384) == list(METHODS)
    assert wide.names(16_385) == [name for name in METHODS if "DCP" not in name]
    point = wide.times(10, "autocast", 1, 0.001)
    assert [row["name"] for row in point["rows"]] == list(METHODS)
    assert point["rows"][0]["ratio_to_plain"]["median"] == 1.0


# ---- timing ---------------------------------------------------------------------------------------------------------


def test_rounds_are_interleaved_and_rotated() -> None:
    order: list[str] = []
    named = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = timing.interleaved(named, rounds=4, count=2)
    assert "".join(order) == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_the_collector_is_off_while_a_slot_runs_and_back_afterwards() -> None:

    seen: list[bool] = []
    timing.seconds_per_step(lambda: seen.append(gc.isenabled()), 3)
    with pytest.raises(ZeroDivisionError):
        timing.seconds_per_step(lambda: 1 / 0, 1)
    assert (seen, gc.isenabled()) == ([False] * 3, True)


def test_the_device_is_waited_for_before_and_after_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(order.append("clock") is None))
    timing.seconds_per_step(lambda: order.append("step"), 2, lambda: order.append("wait"))
    assert order == ["wait", "clock", "step", "step", "wait", "clock"]
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    Setting("cpu").synchronise()
    Setting("cuda:1").synchronise()
    assert waited == ["cuda:1"]


def test_the_slot_is_filled_by_the_slowest_method(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {"fast": 0.01, "slow": 0.05}
    monkeypatch.setattr(timing, "seconds_per_step", lambda step, steps, synchronise: cost[step()])
    named = {name: (lambda name=name: name) for name in cost}
    assert timing.steps_per_slot(named, 0.2) == 4
    assert timing.steps_per_slot(named, 0.001) == 1


def test_a_ratio_is_taken_within_each_round() -> None:
    """Round two ran on a machine ten times slower; the ratio does not see it."""
    assert timing.ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == {"median": 2.0, "lower": 2.0, "upper": 2.0}
    assert timing.quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "lower": 2.0, "upper": 4.0}
    assert timing.quartiles([7.0]) == {"median": 7.0, "lower": 7.0, "upper": 7.0}


# ---- memory ---------------------------------------------------------------------------------------------------------

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
    assert memory.resident_peak() > 1000 * MIB
    spent = memory.ask("mlp", "DCP, line", Setting(), threads=1)
    assert spent["peak_bytes"] < memory.resident_peak() - 500 * MIB
    assert len(held) == 250 * MIB


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"no row on mlp could not be measured:\n(.|\n)*KeyError: 'no row'"):
        memory.ask("mlp", "no row", Setting(), threads=1)


def test_the_process_trains_the_row_that_was_timed_in_its_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[list[str]] = []

    class Done:
        returncode, stdout = 0, 'chatter\n{"used_bytes": 1}\n'

    setting, started = Setting("cpu", "bf16-channels-last", True), []
    monkeypatch.setattr(memory.subprocess, "run", lambda line, **_: lines.append(line) or Done)
    assert memory.ask("cnn", "DCL, term", setting, threads=torch.get_num_threads()) == {"used_bytes": 1}
    monkeypatch.setattr(memory, "start", lambda *arguments: started.append(arguments))
    memory.main(lines[0][3:])
    assert started == [(METHODS["DCL, term"], ON_CPU["cnn"], setting, memory.STEPS)]
    assert '"used_bytes"' in capsys.readouterr().out


def test_memory_is_divided_by_that_of_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_of = {"plain": 40, "DCL, line": 70}
    monkeypatch.setattr(memory, "ask", lambda model, name, *_: {"used_bytes": bytes_of[name]})
    figures = {"model": "mlp", "title": "MLP", "rows": [{"name": name} for name in bytes_of]}
    steps.weigh(figures, Setting())
    assert [row["memory_ratio_to_plain"] for row in figures["rows"]] == [1.0, 1.75]


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


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (512, "0.5 KiB"), (2**20, "1.00 MiB"), (-(2**21), "-2.00 MiB")])
def test_sizes(count: int, text: str) -> None:
    assert table.size(count) == text


def test_the_first_steps_of_a_method_are_those_of_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_steps, "NAMES", (first_steps.BY_HAND,))
    first_steps.main(["--classes", "20", "--rows", "4", "--steps", "3"])
    name, first, peak, over_by_hand = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert name == first_steps.BY_HAND
    assert float(first) > 0
    assert float(peak.replace(",", "")) > 100  # torch alone takes more
    assert over_by_hand == "1.00"
