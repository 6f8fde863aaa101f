"""Where and how the networks run: device, precision, compiled or not."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.workloads import Batches

PRECISIONS = ("float32", "bf16-channels-last")


@dataclass(frozen=True)
class Setting:
    """A device, a precision and whether networks are compiled.

    ``bf16-channels-last`` is what a script on a recent GPU does: autocast to bfloat16 around forward and loss, weights
    in float32, images and convolutions in the channels-last layout.
    """

    device: str = "cpu"
    precision: str = "float32"
    compiled: bool = False

    @property
    def halved(self) -> bool:
        """Whether autocast to bfloat16 is on."""
        return self.precision == "bf16-channels-last"

    def model(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, in the layout."""
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.halved else model

    def batches(self, batches: Batches) -> Batches:
        """Move batches to the device, in the layout."""
        placed = [(x.to(self.device), y.to(self.device)) for x, y in batches]
        return [(channels_last(x), y) for x, y in placed] if self.halved else placed

    def compile(self, model: nn.Module) -> nn.Module:
        """Compile a model in place, if the setting says so."""
        if self.compiled:
            model.compile()
        return model

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """What forward and loss run in."""
        if self.halved:
            return torch.autocast(torch.device(self.device).type, torch.bfloat16)
        return contextlib.nullcontext()

    def synchronise(self) -> None:
        """Wait until the device has done what it was told; the CPU always has."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Pictures in the channels-last layout; other inputs as they are."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
