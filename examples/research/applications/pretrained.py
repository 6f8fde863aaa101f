"""The weights that fine-tuning starts from: trained here once, torchvision's, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD

from examples.research import networks
from examples.research.applications import scripts_split
from examples.research.applications.classification import placed
from examples.research.applications.loop import Progress, fit
from examples.research.checkpoint import save_atomically
from examples.research.datasets import archive
from examples.research.networks.weights import lites
from examples.research.records import fingerprint

FOLDER = Path("runs/applications")
RECIPE: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
BATCH_SIZE = 128


def find(
    data: str,
    folder: str | None,
    network: str,
    weights: str | None,
    epochs: int,
    device: torch.device,
    progress: Progress,
) -> Path:
    """The file of pretrained weights, made or fetched if it is not there.

    Raises:
        ValueError: there is no way to come by weights for these settings.
    """
    if weights:
        return Path(weights)
    if network in ON_IMAGENET:
        return ON_IMAGENET[network]()
    if data == scripts_split.NAME:
        return on_scripts(folder, network, epochs, device, progress)
    raise ValueError(
        f"network={network!r} has no pretrained weights for data={data!r}; pass weights=FILE, or choose "
        f"network={' or '.join(map(repr, ON_IMAGENET))}"
    )


def on_scripts(folder: str | None, network: str, epochs: int, device: torch.device, progress: Progress) -> Path:
    """Train on the 90 scripts, unless a file with these settings and images is there: its name is their checksum."""
    arrays = scripts_split.read(folder)
    recipe: dict[str, Any] = {"network": network, "epochs": epochs, "batch": BATCH_SIZE}
    recipe |= RECIPE | {"pictures": archive.checksum(arrays), "held out": str(scripts_split.HELD_OUT)}
    path = FOLDER / f"{network}-{fingerprint(recipe)}.pt"
    if not path.exists():
        data = scripts_split.split(arrays, held_out=False)
        torch.manual_seed(0)
        model = placed(networks.build(network, data.classes, data.shape), device)
        optimizer = SGD(model.parameters(), **RECIPE)
        fit(model, optimizer, data, epochs, BATCH_SIZE, 0, lambda text: progress(f"pretraining, {text}"))
        save_atomically({name: tensor.cpu() for name, tensor in model.state_dict().items()}, path)
    return path


def torchvisions() -> Path:
    """torchvision's ImageNet weights of EfficientNet-B0 in torch.hub's cache, fetched if they are not there."""
    from torchvision.models import EfficientNet_B0_Weights

    weights = EfficientNet_B0_Weights.IMAGENET1K_V1
    try:
        weights.get_state_dict(progress=False, check_hash=True)
    except OSError as error:
        raise ValueError(
            f"weights=None: cannot fetch {weights.url} ({error}); pass that file as weights=FILE"
        ) from error
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name


# What finds the ImageNet weights of a network, by its name.
ON_IMAGENET = {"efficientnet-b0": torchvisions, "efficientnet-lite0": lites}
