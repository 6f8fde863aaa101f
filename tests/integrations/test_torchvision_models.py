"""torchvision's models: one output, auxiliary ones beside it, dictionaries of dense logits, of losses."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torchvision.models import segmentation

from dcl_optim.distances import mse
from dcl_optim.layout import to_rows
from tests.helpers import assert_same, wrap
from tests.reference import NEAR

CLASSES, WEIGHT, IGNORED = 4, 0.7, 255


def build(make):
    torch.manual_seed(0)
    return make().double()


def batches(steps, shape, size=4, dense=False):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
        labels = torch.randint(CLASSES, (size, *shape[1:]) if dense else (size,), generator=generator)
        if dense:
            labels[:, :5] = IGNORED
        yield x, labels


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def deeplab():
    return segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True
    )


def lraspp():
    return segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)


def pixel_loss(logits, labels):
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


def googlenet_loss(output, y):
    heads = (output.aux_logits1, output.aux_logits2)
    return F.cross_entropy(output.logits, y) + 0.3 * sum(F.cross_entropy(head, y) for head in heads)


def segmentation_loss(output, y):
    loss = pixel_loss(output["out"], y)
    return loss + 0.5 * pixel_loss(output["aux"], y) if "aux" in output else loss


# A named tuple, a dictionary of two, and of one: how to build it, the shape of an input, the loss, the main logits.
SEVERAL = {
    "googlenet": (
        lambda: torchvision.models.googlenet(num_classes=CLASSES, aux_logits=True, init_weights=False),
        (3, 32, 32),
        googlenet_loss,
        lambda output: output.logits,
    ),
    "deeplab": (deeplab, (3, 32, 32), segmentation_loss, lambda output: output["out"]),
    "lraspp": (lraspp, (3, 32, 32), segmentation_loss, lambda output: output["out"]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_the_penalty_is_on_the_main_logits_only(name):
    make, shape, loss_of, main = SEVERAL[name]
    model = build(make)
    by_hand, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    second = copy.deepcopy(other)
    optimizer = wrap(model, sgd(model.parameters()), weight=WEIGHT, alpha=0.6, companion=other)
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
    assert_same(second, optimizer.companion, **NEAR)


def seeded(network, x):
    torch.manual_seed(5)
    return network(x)


def assert_gradients_agree(expected, found):
    total = torch.nn.utils.get_total_norm([p.grad for p in expected.parameters() if p.grad is not None])
    for theirs, ours in zip(expected.parameters(), found.parameters(), strict=True):
        assert (theirs.grad is None) == (ours.grad is None)
        if theirs.grad is not None:
            assert (theirs.grad - ours.grad).norm() <= 1e-10 * total
