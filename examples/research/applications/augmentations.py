"""Augmentations without and with DCL and DCP: crop and mirror, TrivialAugment, mixup and CutMix.

    python -m examples.research.applications.augmentations                  # small-cnn on 3,000 images of Fashion-MNIST
    python -m examples.research.applications.augmentations --data noto-scripts

The paper's Table 7 has the first two, on CIFAR-100 and ImageNet: ``python -m examples.paper augmentations``.

mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) come from torchvision. Their labels are soft. The penalty is a
term of the loss: DCL needs no labels, and DCP holds an image to its labels' mixture of prototypes. The step takes a
closure, with the wrappers as without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchvision.transforms import v2

from examples.research import networks
from examples.research.applications.classification import accuracy
from examples.research.applications.comparison import Application, Row, main
from examples.research.applications.optimizers import METHODS, build_optimizer, penalty
from examples.research.augmentations import seeded
from examples.research.datasets import load

MIXES = {"mixup": v2.MixUp, "cutmix": v2.CutMix}
Mix = Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]


def mixing(name: str, classes: int, alpha: float) -> Mix | None:
    r"""Mix each image of a batch with its neighbour, and their labels, in shares of Beta(alpha, alpha).

    Args:
        name: ``none``, or a key of :data:`MIXES`.
        classes: K; the mixed labels have the shape (B, K).
        alpha: of the Beta distribution, > 0; both papers take 1 on CIFAR.
    """
    if name != "none" and name not in MIXES:
        raise ValueError(f"mix={name!r} is unknown; choose one of none, {', '.join(MIXES)}")
    return None if name == "none" else MIXES[name](alpha=alpha, num_classes=classes)


def step(optimizer: Optimizer, model: nn.Module, criterion: nn.Module, x: Tensor, y: Tensor) -> float:
    """One step with a closure; gives the loss."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        z = model(x)
        loss: Tensor = criterion(z, y)
        (loss + penalty(optimizer, z, y)).backward()
        return loss

    return optimizer.step(closure).item()  # type: ignore[attr-defined,arg-type,no-any-return]


def train(
    *, method: str, augmentation: str | None, mix: str, data: str, folder: str | None, network: str, train_size: int,
    epochs: int, batch_size: int, lr: float, weight_decay: float, mix_alpha: float, weight: float, workers: int,
    part: str, seed: int, device: torch.device, progress: Callable[[str], None],
) -> float:  # fmt: skip
    """Train one network; give its accuracy in per cent on ``part`` after the last epoch."""
    place = None if folder is None else Path(folder)
    pictures = load(
        data, folder=place, train_size=train_size or None, augmentation=augmentation, workers=workers, seed=seed
    )
    mixed = mixing(mix, pictures.classes, mix_alpha)
    torch.manual_seed(seed)
    model = networks.build(network, pictures.classes, pictures.shape).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)
    # New are this line, for "dcp" DCPOptimizer(optimizer, model, weight=weight), and the term in step().
    optimizer = build_optimizer(method, optimizer, model, weight=weight)
    scheduler = CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs + 1):
        model.train()
        for x, y, _ in pictures.epoch(batch_size, generator):
            if mixed is not None:
                x, y = seeded(mixed, (x, y), int(torch.randint(2**62, (), generator=generator)))
            loss = step(optimizer, model, criterion, x.to(device), y.to(device))
        scheduler.step()
        progress(f"epoch {epoch}, loss {loss:.3f}")
    return accuracy(model, pictures.fixed(part), device)


AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "basic": {"augmentation": None, "mix": "none"},  # the data set's own: crop and mirror, but only crop for letters
    "TrivialAugment": {"augmentation": "trivial", "mix": "none"},
    "mixup": {"augmentation": None, "mix": "mixup"},
    "CutMix": {"augmentation": None, "mix": "cutmix"},
}
ROWS: dict[str, Row] = {}
for label, chosen in AUGMENTATIONS.items():
    ROWS[label] = Row(chosen | {"method": "plain"}, against=None if label == "basic" else "basic")
    for method in METHODS[1:] if chosen["mix"] != "none" else METHODS[1:2]:
        ROWS[f"{label}, {method.upper()}"] = Row(chosen | {"method": method}, against=label)

SETTINGS = {
    "data": "fashion-mnist",
    "folder": None,
    "network": "small-cnn",
    "train_size": 3_000,  # 0: all
    "epochs": 30,
    "batch_size": 128,
    "lr": 0.1,
    "weight_decay": 5e-4,
    "mix_alpha": 1.0,
    "weight": 0.1,
    "workers": 0,
    "part": "test",
}
BOUNDS = {"train_size": (0,), "workers": (0,)}
APPLICATION = Application("augmentations", "accuracy, %", train, ROWS, SETTINGS, BOUNDS)

if __name__ == "__main__":
    main(APPLICATION, __doc__)
