"""torchvision's models: one output, auxiliary ones beside it, dictionaries of dense logits, of losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models import detection, segmentation, video

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.distances import mse, squared
from dcl_optim.layout import to_rows
from tests.helpers import assert_same, cells
from tests.reference import dcl_step

CLASSES, WEIGHT, IGNORED = 4, 0.7, 255
PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=CLASSES), (3, 32, 32)),
    "mobilenet_v3_small": (lambda: torchvision.models.mobilenet_v3_small(num_classes=CLASSES), (3, 32, 32)),
    "shufflenet": (lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=CLASSES), (3, 32, 32)),
    "vit": (
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, dropout=0.1, num_classes=CLASSES),
        (3, 32, 32),
    ),
    "swin": (
        lambda: torchvision.models.SwinTransformer([4, 4], 8, [1, 1], [2, 2], [4, 4], num_classes=CLASSES),
        (3, 32, 32),
    ),
    "video": (lambda: video.mc3_18(num_classes=CLASSES), (3, 2, 16, 16)),
}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def batches(steps: int, shape: tuple[int, ...], size: int = 4, dense: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
        labels = torch.randint(CLASSES, (size, *shape[1:]) if dense else (size,), generator=generator)
        if dense:
            labels[:, :5] = IGNORED
        yield x, labels


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("name", cells(PLAIN, "mobilenet_v3_small", "vit", "swin"))  # batch norm, dropout, random depth
def test_a_classifier_trains_as_the_algorithm_written_out(name: str) -> None:
    make, shape = PLAIN[name]
    by_hand, model = build(make), build(make)
    companion = copy.deepcopy(by_hand)
    base, second = sgd(by_hand.parameters()), sgd(companion.parameters())
    optimizer = DCLOptimizer(sgd(model.parameters()), model, weight=WEIGHT)
    torch.manual_seed(5)
    for x, y in batches(2, shape):
        dcl_step(by_hand, companion, base, second, x, y, F.cross_entropy, mse, weight=WEIGHT)
    torch.manual_seed(5)
    for x, y in batches(2, shape):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_same(by_hand, model, atol=1e-9)
    assert_same(companion, optimizer.companion, atol=1e-9)


# ---- auxiliary outputs -----------------------------------------------------------------------------------------------


def deeplab() -> nn.Module:
    return segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True
    )


def lraspp() -> nn.Module:
    return segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)


def pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


def googlenet_loss(output: Any, y: Tensor) -> Tensor:
    heads = (output.aux_logits1, output.aux_logits2)
    return F.cross_entropy(output.logits, y) + 0.3 * sum(F.cross_entropy(head, y) for head in heads)


def inception_loss(output: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, y) + 0.4 * F.cross_entropy(output.aux_logits, y)


def segmentation_loss(output: Any, y: Tensor) -> Tensor:
    loss = pixel_loss(output["out"], y)
    return loss + 0.5 * pixel_loss(output["aux"], y) if "aux" in output else loss


# how to build it, the shape of an input, the batch, the script's loss, the main logits
SEVERAL: dict[str, tuple[Any, ...]] = {
    "googlenet": (
        lambda: torchvision.models.googlenet(num_classes=CLASSES, aux_logits=True, init_weights=False),
        (3, 32, 32),
        googlenet_loss,
        lambda output: output.logits,
    ),
    "inception_v3": (
        lambda: torchvision.models.inception_v3(num_classes=CLASSES, aux_logits=True, init_weights=False),
        (3, 299, 299),  # its auxiliary head takes no less
        inception_loss,
        lambda output: output.logits,
    ),
    "deeplab": (deeplab, (3, 32, 32), segmentation_loss, lambda output: output["out"]),
    "lraspp": (lraspp, (3, 32, 32), segmentation_loss, lambda output: output["out"]),
}
CHEAP = ("googlenet", "deeplab", "lraspp")  # a named tuple, a dictionary of two, of one


@pytest.mark.parametrize("name", cells(SEVERAL, *CHEAP))
def test_the_penalty_is_on_the_main_logits_only(name: str) -> None:
    make, shape, loss_of, main = SEVERAL[name]
    model = build(make)
    by_hand, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    second = copy.deepcopy(other)
    optimizer = DCLOptimizer(sgd(model.parameters()), model, weight=WEIGHT, alpha=0.6, companion=other)
    ((x, y),) = batches(1, shape, size=2, dense=name in ("deeplab", "lraspp"))
    z, c = seeded(by_hand, x), main(seeded(second, x))
    rows, targets = (to_rows(tensor) for tensor in (main(z), c))
    penalty = mse(rows, targets.detach()).mean()
    (loss_of(z, y) + WEIGHT * penalty).backward()
    mse(targets, targets.detach() + 0.4 * (rows - targets).detach()).mean().backward()
    loss_of(seeded(model, x), y).backward()
    assert penalty > 1e-6
    assert optimizer.logs()["penalty"] == pytest.approx(penalty.item(), rel=1e-9)
    assert_gradients_agree(by_hand, model)
    learned = sgd(second.parameters())
    learned.step()
    optimizer.step()
    assert_same(second, optimizer.companion, rtol=1e-9, atol=1e-12)


def seeded(network: nn.Module, x: Tensor) -> Any:
    torch.manual_seed(5)
    return network(x)


def assert_gradients_agree(expected: nn.Module, found: nn.Module) -> None:
    total = torch.nn.utils.get_total_norm([p.grad for p in expected.parameters() if p.grad is not None])
    for theirs, ours in zip(expected.parameters(), found.parameters(), strict=True):
        assert (theirs.grad is None) == (ours.grad is None)
        if theirs.grad is not None:
            assert (theirs.grad - ours.grad).norm() <= 1e-10 * total


# ---- dense labels for prototypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["line", "term"])
@pytest.mark.parametrize("make", [lraspp, deeplab])
def test_prototypes_of_dense_labels_leave_ignored_pixels_out(make: Callable[[], nn.Module], way: str) -> None:
    """As written out; an eighth of the loss, and of the auxiliary head's in it."""
    model, by_hand = build(make), build(make)
    base = sgd(by_hand.parameters())
    settings = {"weight": WEIGHT, "alpha": 0.6, "update": "batch", "distance": "squared"}
    optimizer: Any = DCPOptimizer(sgd(model.parameters()), model, **settings)
    prototypes = torch.zeros(CLASSES, CLASSES, dtype=torch.float64)
    for step, (x, y) in enumerate(batches(2, (3, 32, 32), dense=True)):
        output = seeded(by_hand, x)
        rows = output["out"].movedim(1, -1)[y != IGNORED]
        labels = y[y != IGNORED]
        penalty = squared(rows, prototypes[labels]).mean() if step else rows.sum() * 0.0
        base.zero_grad()
        ((segmentation_loss(output, y) + WEIGHT * penalty) / 8).backward()
        base.step()
        means = torch.stack([rows[labels == k].detach().mean(0) for k in range(CLASSES)])
        prototypes = 0.6 * prototypes + 0.4 * means if step else means

        output = seeded(model, x)
        optimizer.zero_grad()
        term = optimizer.penalty(output["out"], y, ignore_index=IGNORED) if way == "term" else 0.0
        ((segmentation_loss(output, y) + term) / 8).backward()
        optimizer.step()
        assert optimizer.logs()["loss_scale"] == pytest.approx(0.125)
        assert optimizer.logs()["penalty"] == pytest.approx(penalty.item(), rel=1e-7, abs=1e-12)
        assert_same(optimizer.prototypes, prototypes, rtol=1e-8, atol=1e-10)
    assert_same(by_hand, model, rtol=1e-7, atol=1e-9)


# ---- models without logits -------------------------------------------------------------------------------------------


def test_a_detector_gives_losses_and_no_logits_and_is_refused_at_its_first_forward() -> None:
    torch.manual_seed(0)
    model = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)
    optimizer = DCLOptimizer(sgd(model.parameters()), model, weight=1.0)
    boxes = torch.tensor([[2.0, 2.0, 20.0, 20.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1])} for _ in range(2)]
    with pytest.raises(TypeError, match=r"type dict with keys 'bbox_regression', 'classification'\.\n  Fix: .*logits="):
        model(list(torch.rand(2, 3, 32, 32)), targets)
    optimizer.detach()
    assert sorted(model(list(torch.rand(2, 3, 32, 32)), targets)) == ["bbox_regression", "classification"]
