"""What trains and what is frozen: nothing frozen moves, the companion shares it, and twins written otherwise agree."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer
from examples.research import networks
from examples.research.applications import adapters
from examples.research.applications import fine_tuning as module
from examples.research.applications.adapters import METHODS
from examples.research.applications.fine_tuning import Settings
from examples.research.datasets.base import InMemory
from tests.helpers import assert_same

CPU = torch.device("cpu")
NETWORK, CLASSES, BATCH = "small-cnn-quarter", 4, 4
BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture
def data():
    """Noise with a mean other than 0, augmented."""
    generator = torch.Generator().manual_seed(0)
    part = (torch.rand(12, 1, 12, 12, generator=generator), torch.arange(12) % CLASSES)
    return InMemory("noise", "abcd", dict.fromkeys(("train", "validation", "test"), part), "crop")


@pytest.fixture
def weights(tmp_path, data):
    torch.manual_seed(7)
    torch.save(networks.build(NETWORK, 5, data.shape).state_dict(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


@pytest.fixture
def tuned(data, weights):
    """The network before and after fine-tuning."""

    def run(method, dcl, seed=0, **changed):
        settings = Settings(network=NETWORK, batch_size=BATCH, **({"epochs": 2} | changed))
        begin = module.prepare(settings, method, data, weights, seed)
        return begin, module.fine_tune(settings, method, dcl, data, weights, seed, CPU, lambda text: None)

    return run


def test_lora_leaves_the_depthwise_convolutions_alone():
    model = adapters.adapt(networks.build("efficientnet-b0", 3, (3, 32, 32)), "LoRA", 2)
    adapted = {name for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    convolutions = [
        (name, layer)
        for name, layer in networks.build("efficientnet-b0", 3, (3, 32, 32)).named_modules()
        if isinstance(layer, nn.Conv2d)
    ]
    assert len(adapted) > 50
    assert adapted == {f"base_model.model.{name}" for name, layer in convolutions if layer.groups == 1}


@pytest.mark.parametrize("dcl", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_frozen_moves_and_all_else_does(tuned, method, dcl):
    begin, end = tuned(method, dcl)
    before, trains = begin.state_dict(), {name for name, p in end.named_parameters() if p.requires_grad}
    moved = {name for name, tensor in end.state_dict().items() if not torch.equal(tensor, before[name])}
    if method == "full":
        assert moved == {*before}
    if method == "linear probe":
        assert moved == trains == {"12.weight", "12.bias"}
    if method == "LoRA":
        places = [f"base_model.model.{layer}.lora_{which}.default.weight" for layer in (0, 3, 7) for which in "AB"]
        heads = [f"base_model.model.12.modules_to_save.default.{what}" for what in ("weight", "bias")]
        assert moved == trains == {*places, *heads}


@pytest.mark.parametrize("method", METHODS)
def test_the_companion_holds_the_very_same_frozen_tensors(tuned, method, monkeypatch):
    made = []

    def kept(*arguments, **keywords):
        made.append(DCLOptimizer(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(module, "DCLOptimizer", kept)
    _, model = tuned(method, True)
    companion = made[0].companion
    shared = {
        name: ours is theirs
        for (name, ours), theirs in zip(model.named_parameters(), companion.parameters(), strict=True)
    }
    assert shared == {name: not p.requires_grad for name, p in model.named_parameters()}
    assert any(shared.values()) == (method != "full")
    ours, theirs = model.state_dict(), companion.state_dict()
    statistics = [name for name in ours if name.endswith(BATCH_NORM)]
    assert len(statistics) == 9
    if method != "full":
        assert_same([theirs[name] for name in statistics], [ours[name] for name in statistics])
    for name, p in model.named_parameters():
        assert torch.equal(p, companion.get_parameter(name)) != p.requires_grad, name


def test_frozen_parts_are_in_evaluation_mode_and_trained_ones_are_not():
    frozen = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout()).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Sequential(nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(2, 2)))
    adapters.to_training_mode(model.eval())
    assert not any(layer.training for layer in frozen.modules())
    assert all(layer.training for layer in model[1].modules())


@pytest.mark.parametrize("dcl", [False, True])
def test_a_linear_probe_is_logistic_regression_on_fixed_features(tuned, data, dcl):
    seed, epochs, lr = 5, 3, 0.1
    begin, end = tuned("linear probe", dcl, seed, epochs=epochs, probe_lr=lr, weight=2.0)
    features, head = begin[:-1].eval(), copy.deepcopy(begin[-1])
    companion = copy.deepcopy(head)
    optimizers = [torch.optim.SGD(each.parameters(), lr, 0.9, weight_decay=5e-4) for each in (head, companion)]
    generator = torch.Generator().manual_seed(seed)
    is_first = True  # the companion's first gradient is 0 but for rounding
    for epoch in range(epochs):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
        for x, y, _ in data.epoch(BATCH, generator):
            fixed = features(x).detach()
            z, c = head(fixed), companion(fixed)
            penalty = 2.0 * (z - c.detach()).square().mean() if dcl else 0.0
            chase = (c - (0.6 * c + 0.4 * z).detach()).square().mean()
            for optimizer, loss in zip(optimizers, (F.cross_entropy(z, y) + penalty, chase), strict=True):
                optimizer.zero_grad()
                loss.backward()
                if optimizer is optimizers[0] or not is_first:
                    optimizer.step()
            is_first = False
    assert torch.allclose(end[-1].weight, head.weight, atol=1e-6)
    assert torch.allclose(end[-1].bias, head.bias, atol=1e-6)


def test_lora_is_the_network_with_two_ba_on_its_weights(tuned, data, weights):
    begin, end = tuned("LoRA", True, epochs=5, lora_lr=0.1)
    merged = networks.build(NETWORK, CLASSES, data.shape, weights).eval()
    for layer, adapted in end.base_model.model.named_children():
        if hasattr(adapted, "lora_A"):
            a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight[:, :, 0, 0]
            assert a.shape[0] == Settings().rank
            change = 2 * torch.einsum("or,rikl->oikl", b, a)
            assert change.abs().max() > 1e-3
            merged[int(layer)].weight.data += change
    merged[12].load_state_dict(end.base_model.model[12].modules_to_save["default"].state_dict())
    x = next(data.fixed("test"))[0]
    assert torch.allclose(end.eval()(x), merged(x), atol=1e-5)
    assert not torch.allclose(end(x), begin.eval()(x), atol=1e-2)


def test_unknown_methods_name_the_known():
    with pytest.raises(ValueError, match="method='probe' is unknown; choose one of full, linear probe, LoRA"):
        adapters.adapt(nn.Linear(2, 2), "probe", 4)
