"""Check what the figures are drawn from: logits by method, the classes' names, the classes shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dcl_optim.metrics import top_non_target

Logits = Tensor | Mapping[str, Tensor]


def by_method(name: str, logits: Logits, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the logits of each method, and the labels, on the CPU; a single tensor is a method without a name.

    Raises:
        ValueError: there is no method, the shapes differ, or :mod:`dcl_optim.metrics` refuses logits or labels.
    """
    methods = {"": logits} if isinstance(logits, Tensor) else dict(logits)
    shapes = {method: tuple(values.shape) for method, values in methods.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"{name} has the shapes {shapes}; it must hold at least one method, all of the same (N, K)")
    for method, values in methods.items():
        _check(f"{name}[{method!r}]: " if method else "", values, labels)
    return {method: values.detach().cpu() for method, values in methods.items()}, labels.cpu()


def _check(place: str, logits: Tensor, labels: Tensor) -> None:
    try:
        top_non_target(logits, labels)
    except ValueError as error:
        raise ValueError(f"{place}{error}") from error


def names_of(classes: int, class_names: Sequence[str] | None) -> list[str]:
    """Return every class's name; its number by default."""
    names = [str(index) for index in range(classes)] if class_names is None else list(class_names)
    if len(names) != classes:
        raise ValueError(f"class_names has {len(names)} names; it must have {classes}, one for each class")
    return names


def classes_shown(classes: Sequence[int] | None, labels: Tensor, count: int, most: int) -> list[int]:
    """Check the given classes; by default return all that have samples, or ``most`` of them drawn at random.

    The draw is the same every time: figures of one task show the same classes.
    """
    present = labels.unique().tolist()
    if not present:
        raise ValueError("labels is empty; it must hold at least one sample")
    if classes is None:
        drawn = torch.randperm(len(present), generator=torch.Generator().manual_seed(0))[:most].tolist()
        return present if len(present) <= most else sorted(present[index] for index in drawn)
    if not classes or len(set(classes)) < len(classes) or not set(classes) <= set(present):
        raise ValueError(
            f"classes is {list(classes)}; it must hold different numbers in 0..{count - 1} of classes with samples, "
            "at least one"
        )
    return list(classes)
