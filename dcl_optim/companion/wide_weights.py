"""The float32 weights behind a network in half precision.

With alpha = 0.99 most steps of the companion are below the rounding of half precision, and would be lost: a companion
whose own weights are stepped stands still. So its optimizer steps weights of float32, and the network has their
rounding. Training in mixed precision keeps such weights for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dcl_optim.pytorch.internals import version
from dcl_optim.pytorch.ranks import local_parts

HALF = (torch.float16, torch.bfloat16)


class WideWeights:
    """A weight of float32 for each parameter in half precision.

    The network's parameters are their rounding, unless the script has written to them since.

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
        self._written = _written(self.weights)

    def behind(self, parameter: Tensor) -> Tensor:
        """The weight behind a parameter, or a parameter itself that has none."""
        return self.weights.get(parameter, parameter)

    def read_network(self) -> None:
        """Take what the script has written into parameters in half precision since they were last written here.

        A value that is not the rounding of its weight is the script's; to move the network is to write to it.
        """
        now = _written(self.weights)
        if now == self._written:
            return
        for half, weight in self.weights.items():
            is_rounding = half == weight.to(half)
            weight.data = torch.where(is_rounding, weight.data.to(half.device), half.detach().float())
        self._written = now

    def write_network(self) -> None:
        """Round the weights into the network's parameters."""
        _copy(self.weights.values(), self.weights)
        self._written = _written(self.weights)

    def widen_gradients(self) -> None:
        """Before a step: move the gradients of the network's parameters to the weights."""
        self.read_network()
        gradients = []
        wide = []
        for half, weight in self.weights.items():
            if half.grad is not None:
                gradients.append(half.grad)
                weight.grad = torch.empty_like(half.grad, dtype=weight.dtype)
                wide.append(weight.grad)
                half.grad = None
        _copy(gradients, wide)


def _written(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """How often each parameter was written to, and where its values are, which ``.data =`` changes."""
    return list(zip(map(version, parameters), map(Tensor.data_ptr, parameters), strict=True))


def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Copy tensors into others, whatever their dtype."""
    with torch.no_grad():
        into = local_parts(targets)  # torch copies no shards together
        if into:
            torch._foreach_copy_(into, local_parts(sources))
