"""The share of right answers, by hand."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from examples.research.applications.classification import accuracy, moved, placed

CPU = torch.device("cpu")
BATCHES = [(torch.eye(3), torch.tensor([0, 1, 0])), (torch.eye(3)[:2], torch.tensor([1, 0]))]


class Wrapped(nn.Module):
    """Returns more than logits."""

    def forward(self, x):
        return SimpleNamespace(logits=x)


def test_batches_of_any_size_count_by_their_rows():
    assert accuracy(nn.Identity(), BATCHES, CPU) == pytest.approx(100 * 2 / 5)
    assert accuracy(Wrapped(), BATCHES, CPU, logits=attrgetter("logits")) == pytest.approx(100 * 2 / 5)


def test_it_is_the_model_in_evaluation_mode_that_is_scored():
    model = nn.Sequential(nn.Dropout(0.999), nn.Identity())
    assert accuracy(model, [(torch.eye(3), torch.arange(3))], CPU) == 100
    assert not model.training


def test_network_and_pictures_have_the_channels_last():
    model, x = placed(nn.Conv2d(3, 4, 3), CPU), moved(torch.rand(2, 3, 8, 8), CPU)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert model(x).is_contiguous(memory_format=torch.channels_last)
