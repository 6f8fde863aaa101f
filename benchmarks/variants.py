"""What some scripts do to model and data before there is an optimizer; plain training then does it too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.script import Script
from benchmarks.setting import Setting, channels_last
from benchmarks.workloads import Batches, Workload


def _as_it_is(model: nn.Module, batches: Batches) -> Batches:
    return batches


def _linear_probe(model: nn.Module, batches: Batches) -> Batches:
    """All but the last layer is frozen."""
    *_, last = (module for module in model.modules() if isinstance(module, nn.Linear))
    model.requires_grad_(False)
    last.requires_grad_(True)
    return batches


def _channels_last(model: nn.Module, batches: Batches) -> Batches:
    model.to(memory_format=torch.channels_last)
    return [(channels_last(x), y) for x, y in batches]


VARIANTS: dict[str, Callable[[nn.Module, Batches], Batches]] = {
    "": _as_it_is,
    "linear probe": _linear_probe,
    "channels last": _channels_last,
}


def write_script(work: Workload, setting: Setting, variant: str = "") -> Script:
    """Build the model and its data for a setting, in one of the variants; compiled last, as scripts do."""
    model = setting.model(work.model())
    batches = VARIANTS[variant](model, setting.batches(work.batches()))
    return Script(setting.compile(model), batches, work, setting)
