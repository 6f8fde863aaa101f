"""torchvision's models: one output, auxiliary ones beside it, dictionaries of dense logits, of losses."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torchvision.models import segmentation

from tests.reference import NEAR, assert_same_training, by_hand, term_of, wrap

CLASSES, IGNORED, SIZE = 4, 255, 32


def build(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


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


# A named tuple, a dictionary of two, and of one: how to build it, the loss, the main logits.
SEVERAL = {
    "googlenet": (
        lambda: torchvision.models.googlenet(num_classes=CLASSES, aux_logits=True, init_weights=False),
        googlenet_loss,
        lambda output: output.logits,
    ),
    "deeplab": (deeplab, segmentation_loss, lambda output: output["out"]),
    "lraspp": (lraspp, segmentation_loss, lambda output: output["out"]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_the_penalty_is_on_the_main_logits_only(name):
    make, loss_of, main = SEVERAL[name]
    x = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    y = torch.randint(CLASSES, (2,) if name == "googlenet" else (2, SIZE, SIZE))
    if y.ndim > 1:
        y[:, :5] = IGNORED
    trained = []
    for trains, way, more in ((wrap, "line", {}), (by_hand, "term", {"find": main})):
        optimizer = trains("dcl", build(make), companion=build(make, seed=1), **more)
        torch.manual_seed(5)
        output = optimizer.model(x)
        (loss_of(output, y) + term_of(optimizer, way)(main(output), y)).backward()
        optimizer.step()
        trained.append(optimizer)
    assert_same_training(*trained, **NEAR)
