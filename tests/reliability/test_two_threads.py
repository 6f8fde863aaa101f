"""Two threads train as one after the other does."""

import sys
import threading

import pytest
import torch
from torch import nn

from tests.helpers import PATIENCE, assert_same, batch_norm_net, batches, mlp
from tests.reference import wrap


class Trainee:
    """A training without random draws: dropout draws from the process's one generator, in the order of the threads."""

    def __init__(self, variant, seed):
        self.model = (mlp, batch_norm_net)[seed % 2](seed)
        self.criterion, self.seed = nn.CrossEntropyLoss(), seed
        self.optimizer = wrap(variant, self.model, torch.optim.AdamW(self.model.parameters(), lr=0.01))

    def train(self, barrier=None):
        torch.set_num_threads(1)
        for x, y in batches(150, seed=self.seed):
            if barrier:
                barrier.wait(timeout=PATIENCE)
            self.optimizer.zero_grad()
            self.criterion(self.model(x), y).backward()
            self.optimizer.step()

    def end(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@pytest.mark.parametrize("pair", [("dcl", "dcl"), ("dcp", "dcp"), ("dcl", "dcp")], ids="-".join)
def test_two_threads_train_as_one_after_the_other_does(pair):
    alone = [Trainee(variant, seed) for seed, variant in enumerate(pair)]
    for trainee in alone:
        trainee.train()
    together, barrier = [Trainee(variant, seed) for seed, variant in enumerate(pair)], threading.Barrier(2)
    threads = [threading.Thread(target=trainee.train, args=(barrier,)) for trainee in together]
    state, interval = torch.get_rng_state(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # many more changes of threads than usual
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    for one, other in zip(alone, together, strict=True):
        assert_same(one.end(), other.end())
    assert torch.equal(torch.get_rng_state(), state)
