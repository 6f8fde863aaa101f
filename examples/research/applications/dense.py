"""A class for each pixel, without and with DCL and DCP.

    python -m examples.research.applications.dense                  # articles of Fashion-MNIST that overlap, in noise
    python -m examples.research.applications.dense --data voc --folder DIR \
        --network deeplabv3_resnet50 --train-size 10000

The logits are (B, K, H, W), the classes in dimension 1, where the wrappers expect them: each pixel is held to its
forecast, and the penalty is the mean over all pixels. Those that the loss ignores (VOC's borders) do not change the
factor on the loss. DCL holds them to the forecast like the others, as it knows no labels; DCP leaves them out. The
paper has no experiment of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from examples.research.applications import scenes
from examples.research.applications.comparison import Application, main
from examples.research.applications.loop import train_epochs
from examples.research.applications.optimizers import build_optimizer
from examples.research.applications.three_methods import ROWS
from examples.research.datasets.base import batches
from examples.research.datasets.splits import check_part


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with batch norm."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two levels down, and up again beside what was there (Ronneberger et al. 2015), for sides that 4 divides."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.fine, self.middle = block(channels, width), block(width, 2 * width)
        self.coarse = block(2 * width, 4 * width)
        self.to_middle, self.to_fine = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K, H, W) of images (B, C, H, W)."""
        fine = self.fine(x)
        middle = self.middle(F.max_pool2d(fine, 2))
        up = F.interpolate(self.coarse(F.max_pool2d(middle, 2)), scale_factor=2.0)
        up = F.interpolate(self.to_middle(torch.cat([middle, up], 1)), scale_factor=2.0)
        return self.head(self.to_fine(torch.cat([fine, up], 1)))


def build(network: str, channels: int, classes: int, width: int) -> nn.Module:
    """``unet``, or one of torchvision's for three channels, which gives {"out": logits}; random weights."""
    from torchvision.models import get_model, list_models, segmentation

    known = list_models(segmentation)
    if network == "unet":
        return UNet(channels, classes, width)
    if network not in known:
        raise ValueError(f"network={network!r} is unknown; choose one of unet, {', '.join(known)}")
    if channels != 3:
        raise ValueError(f"network={network!r} takes 3 channels, and these images have {channels}; choose 'unet'")
    return get_model(network, weights=None, weights_backbone=None, num_classes=classes)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    """A model's logits of images in bytes."""
    output = model(x.float() / 255)
    return output["out"] if isinstance(output, dict) else output


@torch.no_grad()
def predictions(model: nn.Module, x: Tensor, device: torch.device) -> Tensor:
    """The most probable class of each pixel, (B, H, W)."""
    model.eval()
    return torch.cat([logits(model, some.to(device)).argmax(1).cpu() for some in x.split(100)])


def mean_intersection_over_union(predicted: Tensor, labels: Tensor, classes: int) -> float:
    r"""The mean over the labels' classes of :math:`TP / (TP + FP + FN)`, counted over all pixels but ignored ones."""
    kept = labels != scenes.IGNORED
    pairs = torch.bincount(labels[kept] * classes + predicted[kept], minlength=classes**2)
    table = pairs.view(classes, classes).double()
    right, there, said = table.diag(), table.sum(1), table.sum(0)
    return float((right / (there + said - right))[there > 0].mean())


def train(
    *, method: str, data: str, folder: str | None, network: str, width: int, train_size: int, articles: int, size: int,
    epochs: int, batch_size: int, lr: float, weight_decay: float, weight: float, part: str,
    seed: int, device: torch.device, progress: Callable[[str], None],
) -> float:  # fmt: skip
    """Train one network; give its mean intersection over union in per cent on ``part`` after the last epoch."""
    found = scenes.read(data, folder=folder, train_size=train_size, articles=articles, size=size)
    x, y = found.parts["train"]
    torch.manual_seed(seed)
    model = build(network, x.shape[1], found.classes, width).to(device, memory_format=torch.channels_last)
    optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    criterion = nn.CrossEntropyLoss(ignore_index=scenes.IGNORED)
    # The one line that is new; for "dcp" it is DCPOptimizer(optimizer, model, weight=weight).
    optimizer = build_optimizer(method, optimizer, model, weight=weight)
    generator = torch.Generator().manual_seed(seed)

    def shuffled() -> Iterator[tuple[Tensor, Tensor]]:
        return ((x[index].to(device), y[index].to(device)) for index in batches(len(y), batch_size, generator))

    for epoch, loss in train_epochs(model, optimizer, epochs, shuffled, lambda x, y: criterion(logits(model, x), y)):
        progress(f"epoch {epoch}, loss {loss.item():.3f}")
    x, y = found.parts[check_part(part)]
    return 100 * mean_intersection_over_union(predictions(model, x, device), y, found.classes)


SETTINGS = {
    "data": "fashion-mnist",
    "folder": None,
    "network": "unet",
    "width": 8,
    "train_size": 1_000,
    "articles": 3,
    "size": 128,  # of VOC's squares
    "epochs": 10,
    "batch_size": 16,
    "lr": 3e-3,
    "weight_decay": 1e-2,
    "weight": 0.1,
    "part": "test",
}
APPLICATION = Application("dense", "mean IoU, %", train, ROWS, SETTINGS, {"train_size": (2,)})

if __name__ == "__main__":
    main(APPLICATION, __doc__)
