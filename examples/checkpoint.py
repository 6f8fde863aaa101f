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


def random_states(loader: torch.Generator) -> dict[str, Any]:
    """Every random stream that training draws from: dropout's and the loader's."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "loader": loader.get_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_states(state: dict[str, Any], loader: torch.Generator) -> None:
    """Set them back."""
    torch.set_rng_state(state["torch"])
    loader.set_state(state["loader"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
