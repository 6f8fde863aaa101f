"""The blocks of docs/logging.md, each with the package it is for; what was logged is read back and compared."""

import csv
import json
import math
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import batches, mlp, train, wrap
from tests.integrations import EACH_METHOD
from tests.integrations.huggingface import arguments, sentences, text_classifier
from tests.integrations.lightning_modules import QUIET, Validated, network, quiet_trainer
from tests.integrations.lightning_modules import loader as lightning_loader

PAGE = (Path(__file__).parents[2] / "docs" / "logging.md").read_text(encoding="utf-8")
pytestmark = QUIET
STEPS = 101  # logged at 0, 50 and 100
KEYS = ["dcl/alpha", "dcl/loss_scale", "dcl/penalty", "dcl/skipped", "dcl/step", "dcl/weight"]


def block(heading):
    """The code of a section of the page."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return code


class Script(dict):
    """The names that a block takes for granted. The first ``train`` does nothing, so that nan is logged."""

    def __init__(self, kind=DCLOptimizer):
        torch.manual_seed(0)
        self.model = mlp()
        self.ours = kind(torch.optim.SGD(self.model.parameters(), lr=0.1), self.model)
        self.logged = []
        loader = DataLoader(list(batches(STEPS)), batch_size=None)
        super().__init__(model=self.model, optimizer=self.ours, loader=loader, train=self.train)

    def train(self, batch):
        if self.logged:
            train(self.model, self.ours, [batch])
        self.logged.append(self.ours.logs(prefix="dcl/"))

    def curve(self, key):
        """What a logger has to have; TensorBoard keeps float32."""
        curve = [(step, self.logged[step][key]) for step in range(0, STEPS, 50)]
        return [(step, pytest.approx(value, rel=1e-6, nan_ok=True)) for step, value in curve]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """In a folder of its own, and without the network."""
    for name in ("DO_NOT_TRACK", "WANDB_SILENT"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.chdir(tmp_path)
    return Script()


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(folder).Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard(script):
    ours = Script(DCPOptimizer)
    exec(block("TensorBoard"), ours)
    found = events("runs/digits")
    assert sorted(found) == sorted(KEYS)
    assert found == {key: ours.curve(key) for key in found}
    assert math.isnan(found["dcl/penalty"][0][1])


def test_norm_and_margin_of_prototypes_by_hand():
    names = {"optimizer": SimpleNamespace(prototypes=torch.tensor([[3.0, 4.0], [0.0, -6.0]]))}
    exec(block("DCP: norm and margin of the prototypes"), names)
    assert names["norm"] == pytest.approx(5.5)
    assert names["margin"] == pytest.approx(math.sqrt((1.0**2 + 6.0**2) / 2))


def test_weights_and_biases(script):
    exec(block("Weights & Biases"), script)
    script["wandb"].teardown()  # ends the process that writes the file, which run.finish() may be ahead of
    (path,) = Path("wandb").glob("offline-run-*/*.wandb")
    assert wandb_history(path) == {key: script.curve(key) for key in KEYS}


def wandb_history(path):
    """Read LevelDB's log format: 7 bytes, then blocks of 32 KiB with records of a checksum, a length and a type."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, rows = path.read_bytes(), 7, []
    assert len(content) < 2**15, "else records are split over blocks"
    while place < len(content):
        _, length, kind = struct.unpack_from("<IHB", content, place)
        assert kind == 1, "a whole record"
        place += 7 + length
        items = Record.FromString(content[place - length : place]).history.item
        rows.append({"".join(item.nested_key): json.loads(item.value_json) for item in items})
    return {key: [(row["_step"], row[key]) for row in rows if row] for key in KEYS}


# ---- Lightning and Trainer ------------------------------------------------------------------------------------------


def test_agreement():
    """The model predicts class 0 everywhere; the companion does for three rows in four."""
    model, companion = nn.Linear(2, 3), nn.Linear(2, 3)
    with torch.no_grad():
        for module, weight in ((model, 0.0), (companion, 1.0)):
            module.weight.zero_()[1, 0] = weight
            module.bias.copy_(torch.tensor([0.5, 0.0, 0.0]))
    optimizer = wrap(model, companion=companion)
    validation = [(torch.tensor([[0.0, 0.0], [0.2, 0.0]]), None), (torch.tensor([[0.4, 0.0], [0.6, 0.0]]), None)]
    names = {"torch": torch, "model": model, "optimizer": optimizer, "validation": validation}
    exec(block("DCL: agreement with the companion"), names)
    assert names["agreement"] == 0.75
    assert model.training


class Noting(Validated):
    """Keeps what the shell that Lightning hands out logs after each step."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.noted = [*getattr(self, "noted", []), self.optimizers().logs(prefix="dcl/")]


def rows_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@EACH_METHOD
def test_lightning(tmp_path, method):
    from lightning.pytorch.loggers import CSVLogger

    torch.manual_seed(0)
    names = {}
    exec(block("Lightning"), names)
    module, data = Noting(method, network()), lightning_loader()
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = quiet_trainer(
        logger=logger, callbacks=[names["LogPenalty"]()], log_every_n_steps=5, num_sanity_val_steps=1
    )
    trainer.fit(module, data, lightning_loader(seed=9))
    rows = rows_of(tmp_path)
    found = [{key: float(row[key]) for key in module.noted[0]} for row in rows if row["dcl/penalty"]]
    assert found == [pytest.approx(module.noted[step - 1]) for step in (5, 10)]
    assert found[-1]["dcl/penalty"] > 0


class Noted(TrainerCallback):
    """Keeps what the optimizer logs after each step."""

    def __init__(self, optimizer):
        self.seen, self._optimizer = [optimizer.logs(prefix="dcl/")], optimizer

    def on_step_end(self, *args, **kwargs):
        self.seen.append(self._optimizer.logs(prefix="dcl/"))


@pytest.mark.parametrize("kind", [DCLOptimizer, DCPOptimizer])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_trainer(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    names = {}
    exec(block("transformers' Trainer"), names)
    model = text_classifier()
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    logged = {"logging_strategy": "steps", "logging_steps": 5, "report_to": "tensorboard"}
    trainer = names["LoggingTrainer"](
        model,
        arguments(tmp_path, eval_strategy="epoch", **logged),
        train_dataset=sentences(),
        eval_dataset=sentences(10),
        optimizers=(optimizer, None),
        callbacks=[noted := Noted(optimizer)],
    )
    trainer.evaluate()
    assert math.isnan(trainer.state.log_history[-1]["dcl/penalty"]), "before the first step"
    trainer.train()
    history = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in history] == [5, 10]
    assert [{key: row[key] for key in noted.seen[0]} for row in history] == [noted.seen[5], noted.seen[10]]
    assert history[-1]["dcl/penalty"] > 0
    found = events(str(tmp_path / "events"))
    assert dict(found["train/dcl/penalty"])[10] == pytest.approx(noted.seen[10]["dcl/penalty"])
