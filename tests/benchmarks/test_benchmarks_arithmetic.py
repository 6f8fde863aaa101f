"""What the benchmark computes from times, and that its tables and images show just that."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from benchmarks import allocator, growth, plot, table, timing
from benchmarks.setting import Setting
from benchmarks.workloads import ON_CPU

GIB = 2**30


# ---- timing ---------------------------------------------------------------------------------------------------------


def test_rounds_are_interleaved_and_rotated():
    order: list[str] = []
    steps = {name: (lambda name=name: order.append(name)) for name in "abc"}
    told: list[int] = []
    times = timing.interleaved(steps, rounds=4, count=2, progress=told.append)
    assert "".join(order) == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert told == [1, 2, 3, 4]


def test_a_method_whose_cost_comes_and_goes_takes_whole_periods(monkeypatch):
    """Every fourth step costs 9 and the others 1, so 3 a step, in every round."""
    now = [0.0]
    costs = itertools.cycle([1.0, 1.0, 1.0, 9.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def step(cost):
        now[0] += cost

    steps = {"even": lambda: step(1.0), "uneven": lambda: step(next(costs))}
    assert timing.interleaved(steps, rounds=3, count=1, periods={"uneven": 4}) == {
        "even": [1.0] * 3,
        "uneven": [3.0] * 3,
    }
    assert timing.interleaved(steps, rounds=2, count=5, periods={"uneven": 4})["uneven"] == [3.0] * 2


def test_the_collector_is_off_while_a_slot_runs_and_back_afterwards():
    seen: list[bool] = []
    assert gc.isenabled()
    timing.seconds_per_step(lambda: seen.append(gc.isenabled()), 3)
    assert seen == [False] * 3
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        timing.seconds_per_step(lambda: 1 / 0, 1)
    assert gc.isenabled()


def test_the_device_is_waited_for_before_and_after_a_slot(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(order.append("clock") is None))
    timing.seconds_per_step(lambda: order.append("step"), 2, lambda: order.append("wait"))
    assert order == ["wait", "clock", "step", "step", "wait", "clock"]


def test_the_slot_is_filled_by_the_slowest_method(monkeypatch):
    cost = {"fast": 0.01, "slow": 0.05}
    monkeypatch.setattr(timing, "seconds_per_step", lambda step, steps, synchronise: cost[step()])
    steps = {name: (lambda name=name: name) for name in cost}
    assert timing.steps_per_slot(steps, 0.2) == 4
    assert timing.steps_per_slot(steps, 0.001) == 1


def test_a_ratio_is_taken_within_each_round():
    """Round two ran on a machine ten times slower; the ratio does not see it, the difference's median neither."""
    assert timing.ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == {"median": 2.0, "lower": 2.0, "upper": 2.0}
    more = timing.microseconds_more([2.0, 20.0, 2.0], [1.0, 10.0, 1.0])
    assert more == {"median": 1e6, "lower": 1e6, "upper": 5.5e6}
    assert timing.quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "lower": 2.0, "upper": 4.0}
    assert timing.quartiles([7.0]) == {"median": 7.0, "lower": 7.0, "upper": 7.0}


class Library:
    """In the place of the C library: what it is told, in order."""

    def __init__(self, grants: int = 1) -> None:
        self.told: list[tuple[int, ...]] = []
        self.mallopt = lambda name, value: self.told.append((name, value)) or grants
        self.malloc_trim = lambda pad: self.told.append((pad,))


def test_freed_memory_is_kept_inside_and_only_there(monkeypatch):
    """By the numbers of glibc's malloc.h: no block from mmap (-4), nothing trimmed (-1); its own values afterwards."""
    library = Library()
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    with allocator.freed_memory_kept() as kept:
        assert kept
        assert library.told == [(-4, 0), (-1, -1)]
    assert library.told[2:] == [(-4, 65536), (-1, 128 * 1024), (0,)]


@pytest.mark.parametrize("library", [Library(grants=0), object()], ids=["refuses", "has no mallopt"])
def test_a_library_that_does_not_keep_freed_memory_is_said_so(library, monkeypatch):
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    with allocator.freed_memory_kept() as kept:
        assert kept is False


# ---- growth ---------------------------------------------------------------------------------------------------------


def clock(seconds: dict[str, list[float]]):
    """In the place of ``timing.interleaved``: times by hand."""
    return lambda steps, *_, **__: {name: seconds[name] for name in steps}


def test_what_the_wrapper_adds_is_taken_from_the_loop_that_does_the_same_work(monkeypatch):
    seconds = {
        "plain": [0.010, 0.020, 0.010],
        "handwritten DCL": [0.020, 0.040, 0.020],
        "DCLOptimizer": [0.021, 0.041, 0.021],
        "DCPOptimizer": [0.0105, 0.0205, 0.0105],
    }
    monkeypatch.setattr(timing, "interleaved", clock(seconds))
    point = growth.measure_size(growth.SERIES["layers"], 4, Setting(), rounds=3, slot_seconds=0.001)
    added = {row["name"]: row["microseconds_added"] for row in point["rows"]}
    assert added["plain"] is added["handwritten DCL"] is None
    assert added["DCLOptimizer"]["median"] == pytest.approx(1000)
    assert added["DCPOptimizer"]["median"] == pytest.approx(500)
    assert {row["name"]: row["ratio_to_plain"]["median"] for row in point["rows"]} == pytest.approx(
        {"plain": 1, "handwritten DCL": 2, "DCLOptimizer": 2.1, "DCPOptimizer": 1.05}
    )
    assert point["parameters"] == 3 * (16 * 16 + 16) + 16 * 10 + 10


@pytest.mark.parametrize("size", growth.SERIES["parameters"].sizes)
def test_the_networks_have_about_as_many_parameters_as_they_say(size):
    with torch.device("meta"):
        model = growth.SERIES["parameters"].workload(size).build()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.01)


def test_each_series_grows_in_what_it_names():
    of = {name: [series.workload(size) for size in series.sizes] for name, series in growth.SERIES.items()}
    assert [work.batch_size for work in of["batch"]] == [8, 32, 128, 512]
    assert {work.build for work in of["batch"]} == {ON_CPU["cnn"].build}
    with torch.device("meta"):
        widths = [work.build()[1].out_features for work in of["width"]]
        layers = [sum(isinstance(m, torch.nn.Linear) for m in work.build()) for work in of["layers"]]
        assert [work.build()[-1].out_features for work in of["classes"]] == [work.classes for work in of["classes"]]
    assert widths == [512, 1024, 2048, 4096]
    assert layers == [1, 4, 16, 64, 256]
    assert [work.classes for work in of["classes"]] == [10, 100, 1_000, 10_000]


# ---- tables and images --------------------------------------------------------------------------------------------


def spread(median: float) -> dict[str, float]:
    return {"median": median, "lower": median - 0.125, "upper": median + 0.125}


def row(name: str, milliseconds: float, ratio: float, **further) -> dict:
    return {
        "name": name,
        "reference": "plain",
        "milliseconds": spread(milliseconds),
        "ratio_to_plain": spread(ratio),
        "ratio_to_handwritten": None,
        "parameters_added": 1234,
        "state_bytes_added": 3 * 2**19,
        "microseconds_added": None,
    } | further


@pytest.fixture
def results():
    """Made up by hand, every figure another."""
    memory = {"peak_bytes": 700 * 2**20, "used_bytes": 70 * 2**20, "before_bytes": 630 * 2**20}
    place = {"title": "net", "batch_size": 64}
    wrapped = row(
        "DCLOptimizer", 5.25, 2.5, memory=memory, memory_ratio_to_plain=1.75, ratio_to_handwritten=spread(0.5)
    )
    rows = [row("plain", 2.0, 1.0, memory=memory, memory_ratio_to_plain=1.0), wrapped]
    knob = row("companion_every=4", 3.0, 1.25, memory=memory, memory_ratio_to_plain=1.5)
    added = [
        row("plain", 4.0, 1.0),
        row("DCLOptimizer", 9.0, 2.25, microseconds_added=spread(-8.0)),
        row("DCPOptimizer", 5.0, 1.125, microseconds_added=spread(37.0)),
    ]
    points = [
        {"size": 1000, "rows": added},
        {"size": 100_000, "rows": added},
    ]
    return {
        "methods": [{**place, "rows": rows}],
        "knobs": [{**place, "rows": [rows[0], knob]}],
        "growth": [{"title": "classes", "points": points}],
        "freed_memory_kept": True,
        "machine": {"cpu": "chip", "cores": 8, "threads": 4, "os": "Linux", "device": "H200"},
        "versions": {"python": "3.11", "torch": "2.6", "dcl_optim": "0.1.0"},
        "setting": {"device": "cuda", "precision": "float32", "compiled": True},
        "rounds": 9,
        "date": "2026-11-21T10:00:00",
        "command": "python -m benchmarks --rounds 9",
        "minutes": 1.5,
    }


def test_every_cell_of_the_tables_is_a_figure_of_the_file(results):
    lines = table.markdown(results).splitlines()
    assert lines[2:5] == [
        "| model, batch | plain | DCLOptimizer |",
        "| --- | --: | --: |",
        "| net, 64 | 2.0 ms | 2.50 |",
    ]
    assert "| net, 64 | plain | 2.00 | 1 | – | 700 | 70 | 1 | 1,234 | 1.50 MiB |" in lines
    wrapped = "|  | DCLOptimizer | 5.25 | 2.50 (2.38–2.62) | 0.50 (0.38–0.62) | 700 | 70 | 1.75 | 1,234 | 1.50 MiB |"
    assert wrapped in lines
    fourth = "it learns at every fourth step | not in the paper | 1.25 (1.12–1.38) | 1.50 | 1.50 MiB |"
    assert f"| net, 64 | companion_every=4 | {fourth}" in lines
    both = "2.25 (2.12–2.38) | 1.12 (1.00–1.25) | -8 (-8 to -8) | 37 (37 to 37)"
    assert f"| classes | 1,000 | 4.00 | {both} |" in lines
    assert f"|  | 100,000 | 4.00 | {both} |" in lines
    assert "The benchmark does not return freed memory to the operating system." in lines
    assert "9 interleaved rounds" in lines[-1]
    assert "H200, chip, 8 cores, 4 threads, float32, compiled, Linux; Python 3.11, torch 2.6" in lines[-1]
    assert "2026-11-21; `python -m benchmarks --rounds 9`, 1.5 minutes." in lines[-1]


def test_the_tables_are_rectangular(results):
    blocks = [block.splitlines() for block in table.markdown(results).split("\n\n") if block.startswith("|")]
    assert len(blocks) == 4
    assert all(len({line.count("|") for line in block}) == 1 for block in blocks)


def test_memory_that_was_not_measured_is_a_dash(results):
    for figures in results["methods"]:
        for one in figures["rows"]:
            del one["memory"]
    assert "| net, 64 | plain | 2.00 | 1 | – | – | – | – | 1,234 | 1.50 MiB |" in table.markdown(results)


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (512, "0.5 KiB"), (2**20, "1.00 MiB"), (-(2**21), "-2.00 MiB")])
def test_sizes(count, text):
    assert table.size(count) == text


def test_the_figure_shows_the_ratios(results, tmp_path):
    (table,) = results["methods"]
    figure = plot.figure([table, {**table, "title": "other"}])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "net, batch 64, plain 2.0 ms",
        "other, batch 64, plain 2.0 ms",
    ]
    drawn = {container.get_label(): container.lines[0].get_xydata().tolist() for container in axes.containers}
    assert drawn == {"DCPOptimizer": [], "DCLOptimizer": [[2.5, 0], [2.5, 1]]}
    assert plot.draw(results, tmp_path / "some.json") == [tmp_path / "some-methods.png"]
    assert plot.draw({"methods": [{**table, "rows": table["rows"][:1]}]}, tmp_path / "none.json") == []
    assert plot.draw({"growth": results["growth"]}, tmp_path / "none.json") == []
