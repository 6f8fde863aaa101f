"""Checkpoints that survive a crash while they are written, and that continue a run to the last bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write beside the target and rename: a reader finds the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")  # always the same: what a kill has left is written over
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's global generators that training on a device draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put the generators back to what :func:`random_state` gave."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"].cpu(), device)
