"""A trial of a script: what a step costs, and that nothing of the script changes."""

from __future__ import annotations

import copy
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.trial import overhead
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


# ---- the command -----------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from beside import classes

def make():
    model = torch.nn.Linear(4, classes)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(8, 4), torch.arange(8) % classes)

def wrong():
    return make()[0]

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
        ("FOLDER/my-script.py:train", "my-script.py has no function 'train'"),
        ("FOLDER/my-script.py:wrong", "my-script.py:wrong must return (model, optimizer, batch)"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
    ],
)
def test_what_the_command_line_names_is_there(folder: Path, place: str, said: str) -> None:
    done = run("overhead", place.replace("FOLDER", str(folder)))
    assert done.returncode == 2
    assert said.replace("FOLDER", str(folder)) in done.stderr
    assert "Traceback" not in done.stderr
