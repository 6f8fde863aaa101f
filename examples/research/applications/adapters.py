"""What of a pretrained network trains: all of it, or its head."""

from __future__ import annotations

from typing import Any

from torch import nn

METHODS = ("full", "linear probe")


def head_name(model: nn.Module) -> str:
    """The name of the last linear layer, which gives the logits."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]


def renew_head(model: nn.Module) -> None:
    """Draw the head anew, also where the pretrained one has as many classes."""
    head: Any = model.get_submodule(head_name(model))
    head.reset_parameters()


def adapt(model: nn.Module, method: str) -> nn.Module:
    """Freeze what the method does not train.

    Args:
        model: a network whose last linear layer is its head; it is changed in place.
        method: one of METHODS.

    Raises:
        ValueError: the method is unknown.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; choose one of {', '.join(METHODS)}")
    if method == "linear probe":
        model.requires_grad_(False)
        model.get_submodule(head_name(model)).requires_grad_(True)
    return model


def to_training_mode(model: nn.Module) -> None:
    """Put what trains into training mode and what is frozen into evaluation mode.

    In training mode a frozen batch norm would still move its running mean and variance, and the dropout inside a frozen
    module would disturb the features. A dropout beside the head has no parameters and stays on.
    """
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()
