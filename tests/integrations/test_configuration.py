"""Hydra and LightningCLI: the files of docs/frameworks.md and of the example train as the constructors do."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import assert_same, train
from tests.integrations import differ
from tests.integrations.lightning_modules import QUIET

pytestmark = QUIET
PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```(?:python|yaml)\n# (\S+\.(?:py|yaml))\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_cli.yaml"
# What is added to the command line, and the wrapper and its weight that this stands for.
HYDRA = {
    (): (DCPOptimizer, "auto"),
    ("wrapper.weight=0.3",): (DCPOptimizer, 0.3),
    ("wrapper._target_=dcl_optim.DCLOptimizer", "wrapper.weight=0.1"): (DCLOptimizer, 0.1),
    ("wrapper=null",): (None, None),
}
CLI = {
    (): (DCPOptimizer, "auto"),
    ("--model.wrapper.weight", "0.3"): (DCPOptimizer, 0.3),
    ("--model.wrapper", "dcl_optim.DCLOptimizer"): (DCLOptimizer, 0.1),
    ("--model.wrapper", "null"): (None, None),
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The current folder, with the page's files."""
    for name, content in FILES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data():
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(20, 64, generator=draw), torch.randint(10, (20,), generator=draw)) for _ in range(5)]


def by_hand(kind, weight):
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind is not None:
        optimizer = kind(optimizer, model, weight=weight)
    train(model, optimizer, data())
    return model


def test_the_ways_of_training_differ():
    """Else what follows would compare nothing."""
    models = [by_hand(*way) for way in HYDRA.values()]
    assert all(differ(first, second) for first in models for second in models if first is not second)


@pytest.mark.parametrize("overrides", HYDRA)
def test_hydra(files, monkeypatch, overrides):
    trained = []

    def fit(model, optimizer):
        train(model, optimizer, data())
        trained.append(model)

    monkeypatch.setitem(sys.modules, "my_project", SimpleNamespace(fit=fit))
    quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null")
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides, *quiet])
    torch.manual_seed(0)
    runpy.run_path("train.py", run_name="__main__")
    (model,) = trained
    assert_same(model, by_hand(*HYDRA[overrides]))


@pytest.mark.parametrize("arguments", CLI)
def test_lightning_cli(monkeypatch, arguments):
    from lightning.pytorch.cli import LightningCLI

    from examples.lightning_cli import Classifier

    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what Lightning 2.6 calls
    monkeypatch.setattr(sys, "argv", ["lightning_cli.py", f"--config={EXAMPLE}", *arguments])
    cli = LightningCLI(
        Classifier,
        run=False,
        seed_everything_default=0,
        save_config_callback=None,
        trainer_defaults={"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
        | {"enable_progress_bar": False, "enable_model_summary": False},
    )
    cli.trainer.fit(cli.model, DataLoader(data(), batch_size=None))
    assert_same(cli.model.net, by_hand(*CLI[arguments]))
