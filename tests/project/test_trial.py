"""A trial of a script: what a step costs, and that nothing of the script changes."""

from __future__ import annotations

import copy
import math
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.plots import seed_gains
from dcl_optim.trial import accuracy, compare, overhead
from dcl_optim.trial.paired import probability
from tests.helpers import PATIENCE

ROWS = ["plain", "DCP, line", "DCP, term", "DCL, line", "DCL, term"]
SHORT = 0.05  # seconds


class Network(nn.Module):
    """Draws random numbers in its forward pass, counts batches, and changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        noise = random.random() + np.random.rand()  # noqa: NPY002
        return self.head(self.layers(x + 0)) * scale + 0 * noise


def script(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = torch.randn(16, 6), torch.arange(16) % 3
    train(model, optimizer, batch)  # so that there is a state to change
    return model, optimizer, batch


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    """What a measurement must leave alone."""
    gradients = [parameter.grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    streams = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    found = model.state_dict(), optimizer.state_dict(), gradients, batch, modes, hooks, streams
    return copy.deepcopy(found)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, (Tensor, np.ndarray)):
        assert bool((one == other).all())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("is_training", [True, False])
def test_a_measurement_changes_nothing_bit_for_bit(is_training: bool) -> None:
    model, optimizer, batch = script()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # it replaces the optimizer's step
    model.train(is_training)
    model.layers[2].eval()
    before = everything(model, optimizer, batch)
    measured = overhead(model, optimizer, batch, seconds=SHORT)
    assert_same(everything(model, optimizer, batch), before)
    assert [row.name for row in measured.rows] == ROWS
    assert scheduler.get_last_lr() == [0.1]


def test_the_table_has_times_ratios_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, batch = script()
    measured = overhead(model, optimizer, batch, seconds=SHORT)
    plain, *others = measured.rows
    assert (plain.ratio, plain.lower, plain.upper, plain.state_bytes) == (1, 1, 1, 0)
    for row in others:
        assert row.lower <= row.ratio <= row.upper
        assert 0.2 < row.ratio / (row.milliseconds / plain.milliseconds) < 5
    prototypes = 3 * 3 * 4 + 3 * 4 + 2 * 4  # with the rows of each class and the running accuracy
    assert {row.state_bytes for row in others if row.name.startswith("DCP")} == {prototypes}
    wrapped = DCLOptimizer(optimizer, model)
    parameters = sum(parameter.nbytes for parameter in wrapped.companion.parameters())
    assert all(row.state_bytes > 3 * parameters for row in others if row.name.startswith("DCL"))  # with Adam's moments
    assert {row.peak_bytes for row in measured.rows} == {None}  # a CPU does not tell it
    lines = str(measured).splitlines()
    assert repr(measured) == str(measured)
    assert [line.partition("  ")[0] for line in lines[2:7]] == ROWS
    assert re.fullmatch(r"cpu, \d+ threads?; \d+ rounds of \d+ steps?", lines[-1])
    said = capsys.readouterr().err
    assert re.fullmatch(r"overhead: a plain step takes about \S+ ms; measuring takes about \d+ s ...\n", said)


def test_the_slower_row_has_the_larger_ratio() -> None:
    """The companion computes a second forward and backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measured = overhead(model, optimizer, (torch.randn(256, 512), torch.arange(256) % 10), seconds=0.5)
    ratios = {row.name: row.ratio for row in measured.rows}
    assert 0.8 < ratios["DCP, line"] < ratios["DCL, line"]
    assert 1.5 < ratios["DCL, term"] < 5


@pytest.mark.parametrize("kind", [tuple, dict])
def test_inputs_are_arguments_of_the_model(kind: type) -> None:
    model, optimizer, (x, y) = script()
    inputs = (x, 2.0) if kind is tuple else {"x": x, "scale": 2.0}
    measured = overhead(model, optimizer, (inputs, y), seconds=SHORT)
    assert [row.name for row in measured.rows] == ROWS


def test_a_loss_that_the_line_cannot_read_has_the_term_alone() -> None:
    model, optimizer, batch = script()
    measured = overhead(model, optimizer, batch, F.multi_margin_loss, seconds=SHORT)
    assert [row.name for row in measured.rows] == ["plain", "DCP, term", "DCL, term"]
    assert set(measured.refused) == {"DCP, line", "DCL, line"}
    assert "\nDCP, line: DCPOptimizer cannot read the labels" in str(measured)


def test_the_loss_gets_what_the_model_returned() -> None:
    class InDict(Network):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return {"scores": super().forward(x, scale)}

    torch.manual_seed(0)
    model = InDict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(16, 6), torch.arange(16) % 3
    found = overhead(
        model,
        optimizer,
        batch,
        lambda output, y: F.cross_entropy(output["scores"], y),
        logits=lambda output: output["scores"],
        seconds=SHORT,
    )
    assert [row.name for row in found.rows] == ROWS


def test_a_faulty_script_has_its_own_error() -> None:
    model, optimizer, (x, y) = script()
    with pytest.raises(RuntimeError, match="shapes"):
        overhead(model, optimizer, (x[:, :5], y), seconds=SHORT)


def test_wrong_arguments_are_named() -> None:
    model, optimizer, batch = script()
    with pytest.raises(TypeError, match=r"batch must be a pair \(inputs, labels\), got Tensor"):
        overhead(model, optimizer, batch[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seconds must be above 0, got 0"):
        overhead(model, optimizer, batch, seconds=0)
    with pytest.raises(ValueError, match="optimizer is a DCPOptimizer already; pass the plain optimizer"):
        overhead(model, DCPOptimizer(optimizer, model), batch)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model, _, (x, y) = script()
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measured = overhead(model, optimizer, (x.cuda(), y.cuda()), seconds=0.5)
    assert all(row.milliseconds > 0 for row in measured.rows)
    assert all(row.peak_bytes is not None and row.peak_bytes > row.state_bytes for row in measured.rows)
    assert "peak memory" in str(measured)


# ---- the comparison --------------------------------------------------------------------------------------------------


def noisy(weight: Any, seed: int) -> float:
    """A gain of two points with the automatic weight, and none with 1."""
    torch.manual_seed(seed)
    level = 80 + 5 * torch.randn(()).item()
    return level + torch.randn(()).item() * (weight != 0) + 2 * (weight == "auto")


def test_the_table_is_that_of_paired_statistics() -> None:
    from scipy.stats import ttest_rel

    found = compare(noisy, seeds=8)
    assert (found.weights, found.seeds, found.interrupted) == ((0, "auto", 1), tuple(range(8)), False)
    plain, auto, one = (torch.tensor(figures, dtype=torch.float64) for figures in found.figures)
    assert plain.tolist() == [noisy(0, seed) for seed in range(8)]
    raw = [ttest_rel(other, plain).pvalue for other in (auto, one)]
    corrected = {1: 2 * raw[0], 2: raw[1]}  # Holm's: the smaller one times two
    assert raw[0] < raw[1]
    assert found.p_values() == pytest.approx(corrected)
    difference = auto - plain
    error = (difference.std() / 8**0.5).item()
    lines = str(found).splitlines()
    assert lines[0].split("  ")[0] == "weight"
    assert lines[2].split() == ["0", f"{plain.mean():.2f}", "±", f"{(plain.std() / 8**0.5):.2f}"]
    assert corrected[1] < 0.001 < corrected[2]
    cells = [f"{difference.mean():+.2f}", "±", f"{error:.2f}", "<", "0.001"]
    assert lines[3].split()[4:] == cells
    legend = "8 seeds, 0 to 7; ± one standard error; p of the paired t-test with Holm's correction for 2 tests"
    assert lines[5:] == [legend]


@pytest.mark.parametrize("runs", [2, 3, 4, 5, 10, 11, 40])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 12.0])
def test_p_is_that_of_students_distribution(runs: int, t: float) -> None:
    from scipy.special import stdtr

    assert probability(-t, 1.0, runs) == pytest.approx(2 * stdtr(runs - 1, -t), abs=1e-12)


def test_runs_of_a_seed_are_side_by_side_and_any_seeds_are_possible() -> None:
    asked: list[Any] = []
    found = compare(lambda weight, seed: asked.append((weight, seed)) or seed + len(asked), [0.1, 0.2], [7, 3])
    assert asked == [(0.1, 7), (0.2, 7), (0.1, 3), (0.2, 3)]
    assert found.seeds == (7, 3)
    assert found.gains(1) == [1, 1]


def test_ctrl_c_keeps_the_finished_seeds() -> None:
    def train(weight: Any, seed: int) -> float:
        if (weight, seed) == (1, 2):
            raise KeyboardInterrupt
        return noisy(weight, seed)

    found = compare(train)
    assert (found.seeds, found.interrupted) == ((0, 1), True)
    assert found.figures == compare(noisy, seeds=2).figures
    assert "interrupted after 2 seeds, 0 to 1" in str(found)
    with pytest.raises(KeyboardInterrupt):
        compare(train, seeds=[2])


def test_a_failure_shows_what_was_finished(capsys: pytest.CaptureFixture[str]) -> None:
    def train(weight: Any, seed: int) -> float:
        return noisy(weight, seed) / (seed < 2)

    with pytest.raises(ZeroDivisionError):
        compare(train)
    assert f"{noisy(0, 0) / 2 + noisy(0, 1) / 2:.2f} ± " in capsys.readouterr().err


def with_nan(weight: Any, seed: int) -> float:
    return math.nan if (weight, seed) == (1, 3) else noisy(weight, seed)


@pytest.mark.parametrize(
    ("train", "notes"),
    [
        (with_nan, ["weight=1 gave no finite figure in 1 of 4 seeds: not compared."]),
        (
            lambda weight, seed: 50.0 + weight,
            ["weight=0 gave 50 in all 4 seeds: does train use its seed", "weight=1 gave 51 in all 4 seeds"],
        ),
        (
            lambda weight, seed: noisy(0, seed),
            ["weight=1 gave what weight=0 gave in all 4 seeds: does train use its weight?"],
        ),
        (noisy, []),
    ],
)
def test_doubtful_figures_are_said(train: Any, notes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(train, (0, 1), 4)
    said = str(found).splitlines()[5:]
    assert len(said) == len(notes)
    for note, line in zip(notes, said, strict=True):
        assert note in line
    early = [line for line in capsys.readouterr().err.splitlines() if "does train" in line]
    assert len(early) == len([note for note in said if "does train" in note])  # after three seeds already


def test_what_is_not_finite_is_not_compared() -> None:
    found = compare(lambda weight, seed: math.inf if weight == 1 and seed == 1 else noisy(weight, seed), seeds=4)
    assert set(found.p_values()) == {1}
    assert found.p_values() == compare(noisy, (0, "auto"), 4).p_values()
    baseline = compare(lambda weight, seed: noisy(weight, seed) if weight else math.nan, seeds=4)
    assert baseline.p_values() == {}
    assert "+" not in str(baseline).splitlines()[3]


@pytest.mark.parametrize("figure", [None, "80", (80.0, 0.1), True, torch.ones(2), torch.tensor(True)])
def test_a_figure_is_a_number(figure: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"train\(0, 0\) returned {type(figure).__name__}, but it must return a number"
    ):
        compare(lambda weight, seed: figure)


def test_tensors_and_numpy_are_numbers() -> None:
    kinds = (torch.tensor(1.5), np.float32(2.5), 3)
    assert compare(lambda weight, seed: kinds[weight] + seed, (0, 1, 2), 1).figures == ((1.5,), (2.5,), (3.0,))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"weights": (0,)}, "weights=.* has nothing to compare"),
        ({"weights": (0, 1, 0)}, "has a weight twice"),
        ({"seeds": [0, 0, 1, 1]}, "has a seed twice"),
        ({"seeds": 0}, "seeds must be at least 1"),
    ],
)
def test_there_is_something_to_compare(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compare(noisy, **arguments)


def test_one_seed_says_nothing_of_noise() -> None:
    found = compare(noisy, seeds=1)
    assert found.p_values() == {}
    assert str(found).splitlines()[-1] == "One seed says nothing of noise: take ten."


def test_the_plot_has_a_point_for_each_gain(tmp_path: Path) -> None:
    found = compare(noisy, seeds=4)
    found.plot(tmp_path / "gains.png")
    assert (tmp_path / "gains.png").read_bytes()[:4] == b"\x89PNG"
    names = {"plain": found.figures[0], "DCP, weight=auto": found.figures[1], "DCP, weight=1": found.figures[2]}
    axes = seed_gains(names, seeds=found.seeds).axes[0]
    points = [line for line in axes.get_lines() if line.get_linestyle() == "None"]
    assert [line.get_label() for line in points] == list(names)[1:]
    assert list(points[0].get_ydata()) == found.gains(1)


def test_without_tqdm_there_are_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 10**6, 61))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setitem(sys.modules, "tqdm", None)
    compare(noisy, (0, 1), 2)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "compare: 4 runs, 2 seeds of 2 weights"
    assert [line.partition(" runs")[0] for line in lines] == [f"compare: {done} of 4" for done in (1, 2, 3, 4)]
    assert lines[1].endswith(f"seed 0: 0 {noisy(0, 0):.2f}, 1 {noisy(1, 0):.2f}")


# ---- the accuracy ----------------------------------------------------------------------------------------------------


def test_accuracy_is_measured_in_evaluation_mode_and_the_mode_comes_back() -> None:
    model, _, (x, y) = script()
    model.layers[2].eval()  # a frozen layer in a model that trains
    before = everything(model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y))
    found = accuracy(model, [(x[:10], y[:10]), (x[10:], y[10:])])
    after = everything(model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y))
    assert_same(after[4:6], before[4:6])
    assert_same(after[0], before[0])  # batch norm's statistics too
    model.eval()
    assert found == pytest.approx(100 * (model(x).argmax(1) == y).double().mean().item())


def test_accuracy_takes_what_a_model_takes_and_leaves_ignored_labels_out() -> None:
    model, _, (x, y) = script()
    expected = accuracy(model, [(x, y)])
    assert accuracy(model, [({"x": x, "scale": 2.0}, y)]) == accuracy(model, [((x, 2.0), y)]) == expected
    ignored = torch.cat([y, y.new_full((16,), -100)])
    assert accuracy(model, [(torch.cat([x, x]), ignored)]) == expected
    pixels = nn.Conv2d(2, 3, 1)
    images, labels = torch.randn(4, 2, 5, 5), torch.randint(3, (4, 5, 5))
    right = (pixels(images).argmax(1) == labels).double().mean().item()
    assert accuracy(pixels, [(images, labels)]) == pytest.approx(100 * right)


def test_accuracy_needs_class_indices() -> None:
    model, _, (x, y) = script()
    with pytest.raises(TypeError, match=r"labels must be class indices, got torch\.float32; pass labels\.argmax"):
        accuracy(model, [(x, F.one_hot(y, 3).float())])
    with pytest.raises(
        TypeError, match=r"labels must be class indices of shape \(16,\), got \(16, 3\).*labels\.argmax"
    ):
        accuracy(model, [(x, F.one_hot(y, 3))])
    with pytest.raises(TypeError, match=r"got \(16, 1\); .*labels\.squeeze\(1\)"):  # which torch would broadcast
        accuracy(model, [(x, y[:, None])])
    assert model.training
    with pytest.raises(ValueError, match="batches has no labels"):
        accuracy(model, [])


# ---- the command -----------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from beside import classes

def make():
    model = torch.nn.Linear(4, classes)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(8, 4), torch.arange(8) % classes)

def wrong():
    return make()[0]

def train(weight, seed):
    torch.manual_seed(seed)
    return 80 + torch.randn(()).item() + (weight == "auto") + (0.5 if weight == 0.3 else 0)

if __name__ == "__main__":
    raise SystemExit("the script ran")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my-script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("classes = 3")
    return tmp_path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "dcl_optim", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)


def test_overhead_from_the_shell(folder: Path) -> None:
    done = run("overhead", f"{folder / 'my-script.py'}:make", "--seconds", "0.05")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert [line.partition("  ")[0] for line in done.stdout.splitlines()[2:7]] == ROWS


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("my-script.py", "names no function; write file.py:function"),
        ("FOLDER/other.py:make", "there is no file FOLDER/other.py"),
        ("FOLDER/my-script.py:fit", "my-script.py has no function 'fit'"),
        ("FOLDER/my-script.py:wrong", "my-script.py:wrong must return (model, optimizer, batch)"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
    ],
)
def test_what_the_command_line_names_is_there(folder: Path, place: str, said: str) -> None:
    done = run("overhead", place.replace("FOLDER", str(folder)))
    assert done.returncode == 2
    assert said.replace("FOLDER", str(folder)) in done.stderr
    assert "Traceback" not in done.stderr


def test_compare_from_the_shell(folder: Path) -> None:
    plot = folder / "gains.png"
    words = ["--weights", "0", "auto", "0.3", "--seeds", "3", "--plot", str(plot)]
    done = run("compare", f"{folder / 'my-script.py'}:train", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["0", "auto", "0.3"]
    assert lines[-1] == f"Wrote {plot}."
    assert plot.stat().st_size > 0


def test_ctrl_c_in_the_shell_prints_what_is_done(folder: Path) -> None:
    text = SCRIPT.replace(
        "torch.manual_seed(seed)", "torch.manual_seed(seed)\n    if seed == 2: raise KeyboardInterrupt"
    )
    (folder / "my-script.py").write_text(text)
    done = run("compare", f"{folder / 'my-script.py'}:train")
    assert done.returncode == 130
    assert "interrupted after 2 seeds" in done.stdout


@pytest.mark.example
def test_the_example_is_a_script_of_ones_own() -> None:
    script = Path(__file__).parents[2] / "examples" / "own_script.py"
    done = run("compare", f"{script}:train", "--weights", "0", "1", "--seeds", "1")
    assert done.returncode == 0, done.stderr
    plain, penalized = (float(line.split()[1]) for line in done.stdout.splitlines()[2:4])
    assert 60 < plain < penalized
    assert run("overhead", f"{script}:make", "--seconds", "0.05").returncode == 0
