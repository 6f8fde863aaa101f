"""The paper's networks: sizes known from the literature, twins written otherwise, and weights from files."""

from __future__ import annotations

import pickle
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from examples.research.networks import NAMES, build
from tests.helpers import cells

COLOUR, GREY = (3, 32, 32), (1, 28, 28)
# One of each family, small.
REPRESENTATIVES = ("cnn", "resnet10-xs", "resnet8x4", "wrn-28-2", "shufflenetv2", "efficientnet-b0", "vit-tiny")


def built(name: str, classes: int = 10, shape: tuple[int, int, int] = COLOUR, seed: int = 0, **options) -> nn.Module:
    torch.manual_seed(seed)
    return build(name, classes, shape, **options)


def pictures(shape: tuple[int, int, int], number: int = 2) -> Tensor:
    return torch.randn(number, *shape, generator=torch.Generator().manual_seed(0))


def settled(model: nn.Module) -> nn.Module:
    """Give batch norm other statistics and scales than its first ones, which hide mistakes; switch to evaluation."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            module.bias.data.neg_()
    return model.eval()


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        # The exact numbers are those of the architectures' common CIFAR forms; the rounded ones are in the literature.
        ("resnet18", 100, 11_220_132),
        ("resnet34", 100, 21_328_292),
        ("resnet50", 100, 23_705_252),
        ("resnet10", 100, 4.95e6),
        ("resnet10-l", 100, 1.25e6),
        ("resnet10-l-strided", 100, 1.25e6),
        ("resnet10-m", 100, 320e3),
        ("resnet10-s", 100, 84e3),
        ("resnet10-xs", 100, 28e3),
        ("resnet8x4", 100, 1_233_540),
        ("resnet32x4", 100, 7_433_860),
        ("wrn-28-10", 10, 36_479_194),
        ("wrn-28-2", 10, 1_467_610),
        ("shufflenetv2", 1000, 2_278_604),
        ("efficientnet-b0", 1000, 5_288_548),
        ("efficientnet-lite0", 1000, 4_652_008),
    ],
)
def test_parameter_counts(name: str, classes: int, parameters: float):
    with torch.device("meta"):
        count = sum(p.numel() for p in build(name, classes, COLOUR).parameters())
    assert count == pytest.approx(parameters, rel=0 if isinstance(parameters, int) else 5e-3)


@pytest.mark.parametrize(("name", "parameters"), [("vit-tiny", 5_717_416), ("swin-tiny", 28_288_354)])
def test_transformers_at_imagenets_size_are_imagenets(name: str, parameters: int):
    assert sum(p.numel() for p in built(name, 1000, (3, 224, 224)).parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "shape"),
    cells(product(NAMES, [COLOUR, GREY]), *zip(REPRESENTATIVES, [COLOUR, GREY] * 3, strict=False), ("swin-tiny", GREY)),
)
def test_shape_and_gradient_of_every_parameter(name: str, shape: tuple[int, int, int]):
    model = built(name, 7, shape)
    logits = model(pictures(shape, 4))
    assert logits.shape == (4, 7)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 6])).backward()
    without = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("name", cells(NAMES, *REPRESENTATIVES))
def test_the_seed_decides_the_weights_and_nothing_else(name: str):
    first, again, other = (built(name, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(tensor, again[key]) for key, tensor in first.items())
    assert not all(torch.equal(tensor, other[key]) for key, tensor in first.items())


MAPS = {
    ("resnet18", COLOUR): {"conv1": 32, "layer1": 32, "layer2": 16, "layer3": 8, "layer4": 4},
    ("resnet50", GREY): {"maxpool": 28, "layer1": 28, "layer2": 14, "layer3": 7, "layer4": 4},
    ("resnet10-xs", COLOUR): {"conv1": 32, "layer1": 32, "layer2": 16, "layer3": 8, "layer4": 4},
    ("resnet10-l-strided", COLOUR): {"conv1": 16, "layer1": 16, "layer2": 8, "layer3": 4, "layer4": 2},
    ("resnet8x4", COLOUR): {"conv1": 32, "layer1": 32, "layer2": 16, "layer3": 8},
    ("wrn-28-2", COLOUR): {"conv1": 32, "stages.0": 32, "stages.1": 16, "stages.2": 8},
    ("shufflenetv2", COLOUR): {"conv1": 32, "maxpool": 32, "stage2": 16, "stage3": 8, "stage4": 4},
    ("efficientnet-b0", GREY): {"features.0": 14, "features.8": 1},
}


@pytest.mark.parametrize(
    ("case", "sides"), MAPS.items(), ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
def test_sizes_of_the_maps(case: tuple[str, tuple[int, int, int]], sides: dict[str, int]):
    name, shape = case
    model, seen = built(name, shape=shape), {}
    for key in sides:
        model.get_submodule(key).register_forward_hook(lambda _m, _i, out, key=key: seen.update({key: out.shape[2:]}))
    model(pictures(shape))
    assert seen == {key: (side, side) for key, side in sides.items()}


@pytest.mark.parametrize(
    ("name", "shape", "patch", "positions"),
    [
        ("vit-tiny", COLOUR, 4, (8, 8)),
        ("vit-tiny", GREY, 4, (7, 7)),
        ("vit-tiny", (3, 64, 64), 8, (8, 8)),
        ("vit-tiny", (3, 224, 224), 16, (14, 14)),
        ("swin-tiny", COLOUR, 2, (16, 16)),
        ("swin-tiny", GREY, 2, (14, 14)),
        ("swin-tiny", (1, 28, 32), 2, (14, 16)),
        ("swin-tiny", (3, 64, 64), 2, (32, 32)),
        ("swin-tiny", (3, 224, 224), 4, (56, 56)),
    ],
)
def test_patches(name: str, shape: tuple[int, int, int], patch: int, positions: tuple[int, int]):
    model = built(name, shape=shape)
    assert model.patch_embed.proj.stride == (patch, patch)
    assert model.patch_embed.grid_size == positions
    if name == "swin-tiny":
        window = 7 if positions in ((14, 14), (56, 56)) else 4
        assert model.layers[0].blocks[0].window_size == (window, window)


def test_features_are_the_maps_after_stem_and_stages_of_a_twin_made_of_torchvisions_blocks():
    model = settled(built("resnet8x4", 100))
    state, x, expected = model.state_dict(), pictures(COLOUR), []
    h = F.relu(normed(F.conv2d(x, state["conv1.weight"], padding=1), state, "bn1"))
    expected.append(h)
    for i, (inputs, width) in enumerate(((32, 64), (64, 128), (128, 256))):
        stride = 1 if i == 0 else 2
        shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        block = torchvision.models.resnet.BasicBlock(inputs, width, stride, shortcut).eval()
        prefix = f"layer{i + 1}.0."
        block.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        h = block(h)
        expected.append(h)
    maps, before = model.features(x), model.features(x, before_relu=True)
    assert [tuple(m.shape[1:]) for m in maps] == [(32, 32, 32), (64, 32, 32), (128, 16, 16), (256, 8, 8)]
    torch.testing.assert_close(maps, expected, rtol=1e-4, atol=1e-4)
    assert all((b < 0).any() and torch.equal(b.relu(), m) for b, m in zip(before, maps, strict=True))
    assert torch.equal(model.fc(maps[-1].mean((2, 3))), model(x))


def normed(x: Tensor, state: dict[str, Tensor], key: str) -> Tensor:
    mean, var, weight, bias = (state[f"{key}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
    return F.batch_norm(x, mean, var, weight, bias)


def test_the_wide_resnet_against_its_equations():
    model = settled(built("wrn-28-2"))
    state, x = model.state_dict(), pictures(COLOUR)
    h = F.conv2d(x, state["conv1.weight"], padding=1)
    for stage in range(3):
        for block in range(4):
            key, stride = f"stages.{stage}.{block}.", 2 if stage and not block else 1
            active = normed(h, state, key + "bn1").relu()
            shortcut = F.conv2d(active, state[key + "shortcut.weight"], stride=stride) if not block else h
            inner = F.conv2d(active, state[key + "conv1.weight"], stride=stride, padding=1)
            h = shortcut + F.conv2d(normed(inner, state, key + "bn2").relu(), state[key + "conv2.weight"], padding=1)
    pooled = F.adaptive_avg_pool2d(normed(h, state, "bn").relu(), 1).flatten(1)
    expected = F.linear(pooled, state["fc.weight"], state["fc.bias"])
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def saved(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "weights.pt")
    return folder / "weights.pt"


@pytest.mark.parametrize(
    "name",
    cells(
        ["efficientnet-b0", "resnet32x4", "vit-tiny", "swin-tiny", "shufflenetv2", "cnn"],
        "resnet32x4",
        "vit-tiny",
        "cnn",
    ),
)
def test_weights_of_as_many_classes_are_all_taken(name: str, tmp_path: Path):
    source = settled(built(name, seed=1))
    model = built(name, seed=2, weights=saved(source, tmp_path)).eval()
    assert torch.equal(model(pictures(COLOUR)), source(pictures(COLOUR)))


@pytest.mark.parametrize(
    ("name", "head"),
    cells(
        [("efficientnet-b0", "classifier.1"), ("swin-tiny", "head.fc"), ("cnn", "16")],
        ("efficientnet-b0", "classifier.1"),
    ),
)
def test_weights_of_other_classes_leave_the_new_head_random(name: str, head: str, tmp_path: Path):
    source = built(name, 1000, seed=1)
    model = built(name, 5, seed=2, weights=saved(source, tmp_path)).state_dict()
    fresh = built(name, 5, seed=2).state_dict()
    for key, tensor in model.items():
        assert torch.equal(tensor, (fresh if key.startswith(head + ".") else source.state_dict())[key])
    assert model[f"{head}.weight"].shape[0] == 5


def test_torchvisions_own_file_of_efficientnet_is_taken(tmp_path: Path):
    torch.manual_seed(1)
    theirs = torchvision.models.efficientnet_b0().eval()
    x = pictures((3, 64, 64))
    model = built("efficientnet-b0", 37, (3, 224, 224), weights=saved(theirs, tmp_path)).eval()
    assert torch.equal(model.features(x), theirs.features(x))


def test_weights_that_do_not_fit(tmp_path: Path):
    path = saved(built("resnet10-xs"), tmp_path)
    with pytest.raises(
        ValueError, match=r"weights is '.*', where 1 entries .* another shape: conv1.weight; it must be"
    ):
        build("resnet10-xs", 10, GREY, path)
    with pytest.raises(ValueError, match="left over"):
        build("resnet8x4", 10, COLOUR, path)
    torch.save([1], path)
    with pytest.raises(ValueError, match="holds a list; it must hold a state dict"):
        build("resnet8x4", 10, COLOUR, path)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path):
    torch.save(built("resnet10-xs"), tmp_path / "model.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        build("resnet10-xs", 10, COLOUR, tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet19", 10, COLOUR), "name is 'resnet19'; it must be one of cnn, small-cnn, strided-cnn, "),
        (("cnn", 1, COLOUR), "classes is 1; it must be at least 2"),
        (("cnn", 10, (32, 32)), r"shape is \(32, 32\); it must be \(channels, height, width\)"),
        (("cnn", 10, (0, 32, 32)), r"shape is \(0, 32, 32\); .* at least \(1, 4, 4\)"),
        (("mlp", 10, (1, 0, 5)), r"shape is \(1, 0, 5\); .* at least \(1, 1, 1\)"),
        (("resnet18", 10, (3, 32, 3)), r"shape is \(3, 32, 3\); .* at least \(1, 4, 4\)"),
        (("vit-tiny", 10, (3, 30, 32)), r"shape is \(3, 30, 32\); vit_tiny needs .* multiples of 4"),
        (("swin-tiny", 10, (3, 33, 32)), r"shape is \(3, 33, 32\); swin_tiny needs .* multiples of 2"),
    ],
)
def test_bad_arguments(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        build(*arguments)


@pytest.mark.parametrize("name", cells(NAMES, *REPRESENTATIVES))
def test_the_smallest_pictures_of_the_error_message_are_taken(name: str):
    shape = (1, 4, 4)
    assert built(name, shape=shape)(pictures(shape)).shape == (2, 10)


def test_the_mlp_takes_rows():
    model = built("mlp", 7, (1, 1, 300))
    assert [tuple(p.shape) for p in model.parameters()] == [
        *((128, 300), (128,), (128,)),  # weights; batch norm's scale and shift
        *((128, 128), (128,), (128,)),
        *((7, 128), (7,)),
    ]
    x = pictures((1, 1, 300), 5)
    first, second, last = (module for module in model if isinstance(module, nn.Linear))
    hidden = F.relu(F.batch_norm(x.flatten(1) @ first.weight.T, None, None, training=True))
    hidden = F.relu(F.batch_norm(hidden @ second.weight.T, None, None, training=True))
    torch.testing.assert_close(model(x), hidden @ last.weight.T + last.bias)
    assert built("mlp", 2, (1, 1, 1))(pictures((1, 1, 1))).shape == (2, 2)
    with pytest.raises(ValueError, match=r"at least \(1, 4, 4\)"):
        build("cnn", 7, (1, 1, 300))
