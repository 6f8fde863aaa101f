"""The accuracy of a classifier, in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dcl_optim.pytorch.outputs import find_logits

__all__ = ["accuracy", "call"]


def accuracy(model: nn.Module, batches: Iterable[tuple[Any, Tensor]], *, ignore_index: int = -100) -> float:
    """Compute the share of labels that a model predicts, in percent.

    The model is in evaluation mode and without gradients meanwhile. Afterwards each of its modules is in the mode that
    it was in.

    Args:
        model: a classifier; its output has logits (N, K) or (N, K, d1, ...).
        batches: pairs (inputs, labels), such as a DataLoader, or a list with one pair. The inputs are a tensor, a tuple
            of positional arguments or a dict of keyword arguments of the model. The labels are class indices, (N,) or
            (N, d1, ...). Both are moved to the model's device.
        ignore_index: the label to leave out. Default -100, as in torch.

    Returns:
        Percent, 0 to 100.

    Raises:
        TypeError: labels are no class indices, or of another shape than the logits without their classes.
        ValueError: there are no labels.

    Examples:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
        >>> model = nn.Sequential(nn.Identity(), nn.Dropout(0.5))
        >>> accuracy(model, [(x, torch.tensor([0, 1, 0, 0]))])
        75.0
        >>> model.training
        True
    """
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    modes = [(module, module.training) for module in model.modules()]
    right = 0
    count = 0
    model.eval()
    try:
        with torch.no_grad():
            for inputs, labels in batches:
                targets = labels.to(device)
                predicted = find_logits(call(model, _moved(inputs, device))).argmax(1)
                if targets.is_floating_point() or targets.shape != predicted.shape:
                    raise TypeError(
                        f"labels must be class indices of shape {tuple(predicted.shape)}, got {tuple(targets.shape)} "
                        f"of {targets.dtype}; of one-hot labels pass labels.argmax(1), of a column labels.squeeze(1)"
                    )
                is_labeled = targets != ignore_index
                right += int(((predicted == targets) & is_labeled).sum())
                count += int(is_labeled.sum())
    finally:
        for module, mode in modes:
            module.training = mode
    if not count:
        raise ValueError("batches has no labels; it must have at least one, and an iterator gives its batches once")
    return 100 * right / count


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a tensor, a tuple of positional arguments or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def _moved(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _moved(value, device) for name, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(_moved(value, device) for value in inputs)
    return inputs.to(device) if isinstance(inputs, Tensor) else inputs
