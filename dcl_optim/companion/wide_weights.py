"""The float32 weights behind a network in half precision.

With alpha = 0.99 most steps of the companion are below the rounding of half precision, and would be lost: a companion
whose own weights are stepped stands still. So its optimizer steps weights of float32, and the network has their
rounding. Training in mixed precision keeps such weights for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


class WideWeights:
    """A weight of float32 for each parameter in half precision.

    The network's parameters are their rounding, unless the script has written to them.

    Args:
        parameters: of the network, of any dtype.

    Attributes:
        weights: the weights, by the parameters.

    Examples:
        >>> layer = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
        >>> wide = WideWeights(layer.parameters())
        >>> wide.behind(layer.weight).dtype
        torch.float32
        >>> _ = wide.behind(layer.weight).data.fill_(1.001)
        >>> wide.write_network()
        >>> layer.weight.tolist()
        [[1.0, 1.0]]
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        halves = [parameter for parameter in parameters if parameter.dtype in HALF]
        self.weights = {half: nn.Parameter(half.detach().float()) for half in halves}

    def behind(self, parameter: Tensor) -> Tensor:
        """The weight behind a parameter, or a parameter itself that has none."""
        return self.weights.get(parameter, parameter)

    def read_network(self) -> None:
        """Take what the script has written: a value that is not the rounding of its weight."""
        for half, weight in self.weights.items():
            is_rounding = half == weight.to(half)
            weight.data = torch.where(is_rounding, weight.data.to(half.device), half.detach().float())

    def write_network(self) -> None:
        """Round the weights into the network's parameters."""
        with torch.no_grad():
            for half, weight in self.weights.items():
                half.copy_(weight)

    def widen_gradients(self) -> None:
        """Before a step: move the gradients of the network's parameters to the weights."""
        self.read_network()
        for half, weight in self.weights.items():
            if half.grad is not None:
                weight.grad = half.grad.to(weight.dtype)
                half.grad = None
