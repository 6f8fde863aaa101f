"""The benchmark's command, its arithmetic, and that what it compares is the same training."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import run, table, timing
from benchmarks.methods import METHODS, start
from benchmarks.models import CLASSES, WORKLOADS

ROOT = Path(__file__).parent.parent
MLP_PARAMETERS = 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10


def command(*arguments: object) -> str:
    line = [sys.executable, "-W", "error", "-m", "benchmarks", *map(str, arguments)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("results") / "new"
    options = ("--models", "mlp", "--rounds", 2, "--slot", 0.01, "--threads", 1, "--out", folder, "--name", "small")
    return folder / "small.json", command(*options)


def test_the_file_says_what_was_measured_and_where(measured):
    path, _ = measured
    results = json.loads(path.read_text())
    assert set(results["machine"]) == {"cpu", "cores", "threads", "os"}
    assert results["machine"]["threads"] == 1
    assert results["machine"]["cores"] >= 1
    assert results["versions"]["torch"] == str(torch.__version__)
    assert set(results["versions"]) == {"python", "torch", "dcl_optim"}
    assert results["command"].startswith("python -m benchmarks --models mlp --rounds 2")
    assert results["date"][:2] == "20"
    (model,) = results["models"]
    assert (model["name"], model["batch_size"], model["parameters"]) == ("mlp", 128, MLP_PARAMETERS)
    assert [method["name"] for method in model["methods"]] == list(METHODS)
    for method in model["methods"]:
        assert len(method["rounds_milliseconds"]) == 2
        for key in ("milliseconds", "ratio_to_plain", "ratio_to_handwritten"):
            spread = method[key]
            assert 0 < spread["lower"] <= spread["median"] <= spread["upper"]
    assert model["methods"][0]["ratio_to_plain"] == {"median": 1.0, "lower": 1.0, "upper": 1.0}


def test_the_memory_is_counted_exactly(measured):
    path, _ = measured
    memory = {m["name"]: m["memory"] for m in json.loads(path.read_text())["models"][0]["methods"]}
    momentum = 4 * MLP_PARAMETERS
    assert set(memory["plain"].values()) == {0, momentum}
    assert memory["plain"]["optimizer_state_bytes"] == momentum
    for name in ("handwritten", "DCLOptimizer", "DCLOptimizer fraction 10 %"):
        assert memory[name] == {
            "parameters_added": MLP_PARAMETERS,
            "parameter_bytes_added": 4 * MLP_PARAMETERS,
            "other_bytes_added": 0,
            "optimizer_state_bytes": 2 * momentum,
            "optimizer_state_bytes_added": momentum,
        }
    prototypes_and_seen = 4 * CLASSES * CLASSES + CLASSES
    assert memory["DCPOptimizer"] == memory["plain"] | {"other_bytes_added": prototypes_and_seen}


def test_the_second_command_prints_the_table(measured):
    path, printed = measured
    again = command("table", path)
    assert again == printed
    lines = again.splitlines()
    widths = {line.count("|") for line in lines[: 2 + len(METHODS)]}
    assert widths == {lines[0].count("|")}
    assert lines[2].startswith("| MLP 784-512-512-10, 128 | plain |")
    assert [line.split("|")[2].strip() for line in lines[2 : 2 + len(METHODS)]] == list(METHODS)
    assert "| 669,706 | 2.55 MiB | 0 |" in again
    assert "2 interleaved rounds" in lines[-1]
    assert "`python -m benchmarks --models mlp" in lines[-1]


@pytest.mark.parametrize("arguments", ["--models lenet", "--rounds 0", "--threads -1", "--slot 0", "--nothing"])
def test_wrong_arguments_are_argparse_errors(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        run.main(arguments.split())
    assert raised.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_table_of_no_file(tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{")
    for name in ("missing.json", "broken.json"):
        with pytest.raises(SystemExit):
            table.main([str(tmp_path / name)])
        assert "cannot read" in capsys.readouterr().err


def test_rounds_are_interleaved_and_rotated():
    order: list[str] = []
    steps = {name: (lambda name=name: order.append(name)) for name in "abc"}
    collected: list[int] = []
    times = timing.interleaved(steps, rounds=4, count=2, progress=collected.append)
    assert "".join(order) == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert collected == [1, 2, 3, 4]


def test_the_collector_is_off_while_a_slot_runs_and_back_afterwards():
    seen: list[bool] = []
    assert gc.isenabled()
    timing.seconds_per_step(lambda: seen.append(gc.isenabled()), 3)
    assert seen == [False] * 3
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        timing.seconds_per_step(lambda: 1 / 0, 1)
    assert gc.isenabled()


def test_the_slot_is_filled_by_the_slowest_method(monkeypatch):
    cost = {"fast": 0.01, "slow": 0.05}
    monkeypatch.setattr(timing, "seconds_per_step", lambda step, steps: cost[step()])
    steps = {name: (lambda name=name: name) for name in cost}
    assert timing.steps_per_slot(steps, 0.2) == 4
    assert timing.steps_per_slot(steps, 0.001) == 1


def test_a_ratio_is_taken_within_each_round():
    """Round two ran on a machine ten times slower; the ratio does not see it."""
    assert timing.ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == {"median": 2.0, "lower": 2.0, "upper": 2.0}
    assert timing.quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "lower": 2.0, "upper": 4.0}
    assert timing.quartiles([7.0]) == {"median": 7.0, "lower": 7.0, "upper": 7.0}


@pytest.mark.parametrize("workload", ["mlp", "cnn"])
def test_the_wrapper_trains_what_the_handwritten_loop_trains(workload):
    """Otherwise their times could not be compared."""
    work = WORKLOADS[workload]
    trained = {}
    for method in ("handwritten", "DCLOptimizer", "plain"):
        batches = [(x[:32], y[:32]) for x, y in work.batches(dtype=torch.float64)]
        trained[method] = start(method, work.model(dtype=torch.float64), batches, warm_up=5)
    wrapped, written, plain = trained["DCLOptimizer"], trained["handwritten"], trained["plain"]
    for ours, theirs in ((wrapped.model, written.model), (wrapped.companion, written.companion)):
        for name, tensor in ours.state_dict().items():
            torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-12, atol=1e-12)
    assert any(
        not torch.allclose(a, b) for a, b in zip(wrapped.model.parameters(), plain.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_steps_on_every_network(method):
    pytest.importorskip("torchvision")
    for work in WORKLOADS.values():
        model, before = work.model(), work.model()
        start(method, model, [(x[:4], y[:4]) for x, y in work.batches()], warm_up=1)
        assert not torch.equal(next(model.parameters()), next(before.parameters()))
        assert work.batches()[0][0].shape == (work.batch_size, *work.shape)


def test_a_diverging_method_is_not_timed():
    work = WORKLOADS["mlp"]
    with pytest.raises(RuntimeError, match="plain diverged"):
        start("plain", work.model(), [(x * float("inf"), y) for x, y in work.batches()])
