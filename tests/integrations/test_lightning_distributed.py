"""Lightning's DistributedDataParallel: two processes with half a batch each are one process with the whole batch."""

import os
from unittest import mock

import pytest
import torch

from tests.helpers import assert_same, mlp
from tests.integrations import differ
from tests.integrations.lightning_modules import CallsItself, by_hand, loader, quiet_trainer
from tests.reference import NEAR


class Halves(CallsItself):
    """Each process takes its half of the batch."""

    def training_step(self, batch, batch_idx):
        return super().training_step([part[self.global_rank :: 2] for part in batch], batch_idx)


def worker(rank, folder):
    ranks = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, ranks):
        for name in ("net", "self"):
            module = Halves(name, mlp())
            trainer = quiet_trainer(strategy="ddp", devices=2, use_distributed_sampler=False)
            trainer.fit(module, loader())
            optimizer = trainer.optimizers[0]
            state = {"net": module.net.state_dict(), "companion": optimizer.companion.state_dict()}
            torch.save(state, folder / f"{name}-{rank}.pt")


@pytest.mark.parametrize("wrapped", ["net", "self"])
def test_two_processes_are_one_with_the_whole_batch(wrapped, ranks):
    first, second = (torch.load(ranks / f"{wrapped}-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first, second)
    net = mlp()
    expected = by_hand("dcl", net)
    assert_same(first["net"], net.state_dict(), **NEAR)
    companion = {name.removeprefix("net."): value for name, value in first["companion"].items()}
    assert_same(companion, expected.companion.state_dict(), **NEAR)
    assert differ(expected.companion, net)
