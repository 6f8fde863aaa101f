"""The commands that count kernels and that measure many classes: what they write down and print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernels, memory, methods, table, wide
from benchmarks.methods import start
from tests.on_device import needs_device

RESULTS = memory.ROOT / "benchmarks" / "results"


def run(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    line = [sys.executable, "-W", "error", "-m", "benchmarks", *words, "--out", str(folder), "--name", "small"]
    done = subprocess.run(line, cwd=memory.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "small.json").read_text()), done.stdout


@needs_device
def test_kernels_writes_what_it_counts_and_what_is_refused(tmp_path: Path) -> None:
    methods = ("plain", "handwritten DCP", "DCP, by the term")
    results, printed = run(tmp_path, "kernels", "--losses", "mixup", "--methods", *methods)
    assert [(row["dtype"], row["method"]) for row in results["kernels"]] == [
        (dtype, method) for dtype in ("float32", "bfloat16") for method in methods
    ]
    plain = results["kernels"][0]
    assert (plain["kernels"], plain["refused"]) == (29.0, "")
    assert plain["synchronizations"] == {"1": 0, "2": 0, "3": 0, "100": 0, "others": 0}
    assert results["machine"]["threads"] == 1
    assert results["command"].startswith("python -m benchmarks kernels --losses mixup")
    assert "| float32 | mixup | plain | 29.0 | 0 | 0 | 0 | 0 | 0 |" in printed


def test_a_refusal_is_told_as_one() -> None:
    loss = kernels.Loss(lambda: torch.nn.CrossEntropyLoss(torch.ones(3)))  # of another number of classes
    assert kernels.refusal("plain", loss, torch.float32).startswith("RuntimeError: weight tensor should be defined")
    row = {"dtype": "float32", "loss": "mixup", "method": "DCPOptimizer", "refused": "RuntimeError: no labels\nmore"}
    lines = table.kernels({"model": "MLP", "kernels": [row]})
    assert "| float32 | mixup | DCPOptimizer | refused |" in lines
    assert "DCPOptimizer refused mixup: RuntimeError: no labels more" in lines


@pytest.mark.parametrize("soft", [False, True])
def test_prototypes_by_hand_move_to_the_class_means(soft: bool) -> None:
    prototypes = methods.PrototypesByHand(3, torch.device("cpu"))
    prototypes.rows[0] = torch.tensor([1.0, 0.0, 0.0])
    z, y = torch.tensor([[3.0, 0.0, 0.0], [5.0, 2.0, 0.0], [0.0, 8.0, 0.0]]), torch.tensor([0, 0, 1])
    prototypes.learn(z, torch.nn.functional.one_hot(y, 3).float() if soft else y, alpha=0.75)
    torch.testing.assert_close(prototypes.rows, torch.tensor([[1.75, 0.25, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(prototypes.of(y), prototypes.rows[[0, 0, 1]])


def test_wide_divides_by_plain_and_by_hand(tmp_path: Path) -> None:
    words = ("--classes", "10", "20000", "--rounds", "2", "--slot", "0.001", "--precision", "float32", "--no-memory")
    results, printed = run(tmp_path, "wide", *words)
    few, many = results["wide"]
    assert [row["name"] for row in few["rows"]] == list(methods.BY_HAND_AND_WRAPPED)
    assert [row["name"] for row in many["rows"]] == ["plain", "handwritten DCL", "DCLOptimizer"]  # K² is too large
    assert few["rows"][0]["ratio_to_plain"]["median"] == 1.0
    assert "### Many classes" in printed


def test_wide_weighs_a_method_in_a_process() -> None:
    words = ("--weigh", "plain", "--classes", "1000", "--rows", "512", "--precision", wide.LOSS_OUTSIDE)
    figures = memory.answer("plain", "benchmarks", "wide", *words)
    assert figures["used_bytes"] == figures["peak_bytes"] - figures["before_bytes"]


@pytest.mark.parametrize("precision", wide.PRECISIONS)
def test_autocast_is_where_the_precision_says(precision: str) -> None:
    work, setting = wide.workload(10, 4, precision)
    training = start(methods.METHODS["handwritten DCP"], work, setting, warm_up=1)
    with setting.autocast():
        z = training.model(torch.ones(4, 64))
    assert z.dtype == (torch.float32 if precision == wide.FLOAT32 else torch.bfloat16)
    assert torch.is_autocast_enabled("cpu") is False


@pytest.mark.parametrize("name", ["kernels-after", "wide-after"])
def test_the_results_can_be_printed(name: str) -> None:
    printed = table.markdown(json.loads((RESULTS / f"{name}.json").read_text()))
    assert printed.startswith("### ")
    assert f"--name {name}" in printed
