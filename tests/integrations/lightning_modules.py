"""A LightningModule as users write them, a quiet Trainer, and the same training as a hand-written loop."""

from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dcl_optim import DCLOptimizer
from tests.helpers import CLASSES, FEATURES, batches
from tests.integrations import wrap

BATCHES = 7  # no multiple of 3: the last accumulation of an epoch is a short one

# Lightning's own: its use of a deprecated class of torch, and advice about loaders that four tiny batches do not need.
QUIET = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


def network(dtype=torch.float64, seed=0, dropout=0.3):
    """Batch norm and dropout: what a companion gets wrong first."""
    torch.manual_seed(seed)
    layers = (nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, CLASSES))
    return nn.Sequential(*layers).to(dtype)


def loader(dtype=torch.float64, seed=1):
    """A generator of its own: the loader's seed would be drawn from dropout's stream otherwise."""
    return DataLoader(list(batches(BATCHES, seed=seed, dtype=dtype)), batch_size=None, generator=torch.Generator())


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4 * BATCHES + 1)


class Classifier(pl.LightningModule):
    """Nothing but ``configure_optimizers`` knows of dcl_optim."""

    def __init__(self, method, net, scheduler=None, **settings):
        super().__init__()
        self.method, self.net, self.settings = method, net, settings
        self.scheduler = scheduler
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        optimizer = wrap(self.method, optimizer, self.net, **self.settings)
        if self.scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class CallsItself(Classifier):
    """The other habit, ``self(x)`` in training_step; DCL wraps this module, ``"self"``, or its network."""

    def __init__(self, wrapped, net):
        super().__init__("dcl", net)
        self.wrapped = wrapped

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        return DCLOptimizer(optimizer, self if self.wrapped == "self" else self.net, weight=1.0, companion_fraction=1)


class Validated(Classifier):
    """The same with a validation loop."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("validation_loss", self.criterion(self.net(x), y), batch_size=len(y))


def quiet_trainer(**options):
    silence = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False}
    return pl.Trainer(**(silence | defaults | options))


def fit(module, data=None, seed=3, **options):
    """Train with a Trainer; returns the optimizer that configure_optimizers gave."""
    trainer = quiet_trainer(**options)
    torch.manual_seed(seed)
    trainer.fit(module, data or loader())
    return trainer.optimizers[0]


def by_hand(method, net, *, data=None, accumulate=1, autocast=None, scheduler=None, **settings):
    """What Lightning does in two epochs, written out in plain PyTorch."""
    criterion, data = nn.CrossEntropyLoss(), list(data or loader())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    optimizer = wrap(method, optimizer, net, **settings)
    schedule = scheduler(optimizer) if scheduler else None
    torch.manual_seed(3)
    for index, (x, y) in enumerate(data * 2):
        index %= len(data)
        if index % accumulate == 0:
            optimizer.zero_grad()
        with autocast or nullcontext():
            loss = criterion(net(x), y)
        (loss / accumulate).backward()
        is_last = index + 1 == len(data)
        if (index + 1) % accumulate == 0 or is_last:
            optimizer.step()
            if schedule:
                schedule.step()
    return optimizer
