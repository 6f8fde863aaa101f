"""The benchmark's command: what it measures, what it writes down, what it refuses."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import knobs, measure, methods, run
from benchmarks.methods import METHODS
from benchmarks.workloads import ON_CPU, WORKLOADS

ROOT = Path(__file__).parents[2]
MLP_PARAMETERS = 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
OPTIONS = (
    *("--models", "mlp", "--methods", "DCLOptimizer", "--parts", "methods", "knobs", "memory", "growth"),
    *("--series", "layers", "--rounds", "2", "--slot", "0.001", "--threads", "1", "--name", "small"),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, str]:
    """One run of the command in small: its file and what it printed."""
    folder = tmp_path_factory.mktemp("results") / "new"
    line = [sys.executable, "-W", "error", "-m", "benchmarks", *OPTIONS, "--out", str(folder)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "small.json", done.stdout


@pytest.fixture(scope="module")
def results(measured):
    return json.loads(measured[0].read_text())


def command(*words: str) -> None:
    """As ``python -m benchmarks``, in this process."""
    before, sys.argv = sys.argv, ["benchmarks", *words]
    try:
        runpy.run_module("benchmarks", run_name="__main__")
    finally:
        sys.argv = before


def test_the_file_says_where_and_how_it_was_measured(results):
    assert set(results["machine"]) == {"cpu", "cores", "threads", "os"}
    assert results["machine"]["threads"] == 1
    assert results["machine"]["cores"] >= 1
    assert results["versions"]["torch"] == str(torch.__version__)
    assert {"python", "torch", "dcl_optim", "pytorch_optimizer", "schedulefree"} <= set(results["versions"])
    assert results["setting"] == {"device": "cpu", "precision": "float32", "compiled": False}
    assert results["command"].startswith("python -m benchmarks --models mlp --methods DCLOptimizer")
    assert results["date"][:2] == "20"


def test_the_tables_hold_the_chosen_rows_and_what_they_are_divided_by(results):
    (of_methods,), (of_knobs,) = results["methods"], results["knobs"]
    assert (of_methods["model"], of_methods["batch_size"], of_methods["parameters"]) == ("mlp", 128, MLP_PARAMETERS)
    assert [row["name"] for row in of_methods["rows"]] == ["plain", "DCLOptimizer"]
    assert [row["name"] for row in of_knobs["rows"]] == ["plain", "DCLOptimizer"]
    for row in of_methods["rows"] + of_knobs["rows"]:
        assert len(row["rounds_milliseconds"]) == 2
        assert 0 < row["milliseconds"]["lower"] <= row["milliseconds"]["median"] <= row["milliseconds"]["upper"]
        assert row["ratio_to_handwritten"] is None
    assert of_methods["rows"][0]["ratio_to_plain"] == {"median": 1.0, "lower": 1.0, "upper": 1.0}


def test_ratios_are_those_of_the_rounds(results):
    rows = {row["name"]: row for row in results["methods"][0]["rows"]}
    plain, wrapped = (rows[name]["rounds_milliseconds"] for name in ("plain", "DCLOptimizer"))
    expected = sum(ours / theirs for ours, theirs in zip(wrapped, plain, strict=True)) / 2  # the median of two
    assert rows["DCLOptimizer"]["ratio_to_plain"]["median"] == pytest.approx(expected)


def test_memory_is_raw_and_beyond_what_the_imports_hold(results):
    rows = {row["name"]: row for row in results["methods"][0]["rows"]}
    for row in rows.values():
        memory = row["memory"]
        assert memory["used_bytes"] == memory["peak_bytes"] - memory["before_bytes"] > 0
        assert memory["before_bytes"] > 100 * 2**20
        assert row["memory_ratio_to_plain"] == memory["used_bytes"] / rows["plain"]["memory"]["used_bytes"]
    companion_gradients_and_momentum = 3 * 4 * MLP_PARAMETERS
    more = rows["DCLOptimizer"]["memory"]["used_bytes"] - rows["plain"]["memory"]["used_bytes"]
    assert 0.5 * companion_gradients_and_momentum < more < 3 * companion_gradients_and_momentum
    assert results["knobs"][0]["rows"][1]["memory"] == rows["DCLOptimizer"]["memory"]  # asked for once


def test_the_other_part_is_there(results):
    (series,) = results["growth"]
    assert [point["size"] for point in series["points"]] == [1, 4, 16, 64, 256]
    assert [row["name"] for row in series["points"][0]["rows"]] == [
        "plain",
        "handwritten DCL",
        "DCLOptimizer",
        "DCPOptimizer",
    ]


def test_the_second_command_prints_the_tables_again(measured, capsys):
    path, printed = measured
    command("table", str(path))
    assert capsys.readouterr().out == printed
    assert [line for line in printed.splitlines() if line.startswith("###")] == [
        "### Time of a step, divided by plain training's",
        "### Methods",
        "### DCLOptimizer's cost options",
        "### Growth",
    ]


def test_the_figure_lies_beside_the_file_and_can_be_drawn_again(measured, capsys):
    path, _ = measured
    figure = path.with_name(f"{path.stem}-methods.png")
    assert figure.read_bytes()[:4] == b"\x89PNG"
    figure.unlink()
    command("plot", str(path))
    assert capsys.readouterr().out.split() == [str(figure)]
    assert figure.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *("--models lenet", "--rounds 0", "--threads -1", "--slot 0", "--nothing", "--methods SGD", "--parts all"),
        *("--device nowhere", "--precision float8", "--series depth"),
    ],
)
def test_wrong_arguments_are_argparse_errors(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        run.main(arguments.split())
    assert raised.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "arguments", "needed"),
    [
        ("pytorch_optimizer", "--parts methods --models mlp", True),
        ("schedulefree", "--parts methods --models mlp --methods DCLOptimizer", False),
        ("torchvision", "--parts knobs --models resnet18", True),
        ("torchvision", "--parts growth", False),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra_before_anything_runs(
    package, arguments, needed, monkeypatch, capsys
):
    there = methods.find_spec
    monkeypatch.setattr(methods, "find_spec", lambda name: None if name == package else there(name))
    if needed:
        with pytest.raises(SystemExit):
            run.parse(arguments.split())
        assert f"{package} is missing: pip install -e '.[integrations]'" in capsys.readouterr().err
    else:
        run.parse(arguments.split())


def test_without_matplotlib_the_figures_are_saved_and_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    some = json.loads((ROOT / "benchmarks" / "results" / "cpu-2-threads.json").read_text())["methods"]
    monkeypatch.setattr(run, "_measure_all", lambda options, setting: {"methods": some})
    threads = torch.get_num_threads()
    run.main(["--parts", "methods", "--out", str(tmp_path), "--name", "bare", "--threads", str(threads)])
    assert "no figures: " in (told := capsys.readouterr().err)
    assert 'pip install "dcl-optim[plots]"' in told
    assert json.loads((tmp_path / "bare.json").read_text())["methods"] == some
    with pytest.raises(SystemExit, match=r'pip install "dcl-optim\[plots\]"'):
        command("plot", str(tmp_path / "bare.json"))


@pytest.mark.parametrize("content", [None, "{", "[]", '{"models": []}'])
@pytest.mark.parametrize("name", ["table", "plot"])
def test_what_is_no_results_file(name, content, tmp_path, capsys):
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit):
        command(name, str(path))
    assert f"cannot read {path}" in capsys.readouterr().err


def test_without_choices_every_part_has_its_networks():
    options = run.parse([])
    assert options.of_part["methods"] == list(ON_CPU) == ["mlp-small", "mlp", "cnn", "resnet18", "shufflenet", "vit"]
    assert set(options.parts) == {"methods", "knobs", "memory", "growth"}
    assert all(model in WORKLOADS for models in run.DEFAULT_MODELS["cuda"].values() for model in models)


def test_a_chosen_row_brings_its_own_reference():
    rows = knobs.rows_for(WORKLOADS["cnn"])
    names = [row.name for row in measure.chosen(rows, ["channels last: the companion keeps the layout"])]
    assert names == ["plain, channels last", "channels last: the companion keeps the layout"]
    assert measure.chosen(rows, ["SAM"]) == []
    assert measure.chosen(list(METHODS.values()), None) == list(METHODS.values())
