"""What the killed processes do: train and save without end, from the last checkpoint on, as the scripts do.

The module is imported where the kills are sent from too, so it imports the scripts where they run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

EPOCHS = 100_000  # more than there is time for


@dataclass
class Board:
    """Shared memory: whether a save is under way, and how many this process has made.

    With ``limit`` it ends after so many, and then writes a name for each state that was saved to ``names``.
    """

    writing: Any
    saves: Any
    limit: int = EPOCHS
    names: Path | None = None

    def noted(self, save: Callable[..., None]) -> Callable[..., None]:
        """The same function, with its beginning and its end on the board."""

        def save_and_note(run: Any, path: Path) -> None:
            self.writing.value = 1
            save(run, path)
            self.writing.value = 0
            self.saves.value += 1
            if self.names:
                with self.names.open("a") as file:
                    file.write(fingerprint(torch.load(path, weights_only=True)) + "\n")
            if self.saves.value == self.limit:
                raise SystemExit

        return save_and_note


def example(folder: Path, board: Board) -> None:
    """examples/image_classification.py on a handful of images."""
    torch.set_num_threads(1)
    from examples import image_classification as script

    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(4, 1, 4, 4, generator=generator), torch.arange(4))
    path, epochs = folder / "run.pt", str(EPOCHS)
    options = script.parse(["--epochs", epochs, "--lr", "0.01", "--device", "cpu", "--batch-size", "4"])
    run = script.Run(options, data)
    script.Run.save = board.noted(script.Run.save)
    if path.exists():
        run.resume(path)
    while True:
        run.train_epoch()
        run.save(path)


def fingerprint(state: Any) -> str:
    """A name for all that a state holds, to the bit, but for the time that it took."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found.update(str((part.dtype, part.shape)).encode() + part.contiguous().numpy().tobytes())
        elif isinstance(part, dict):
            for key in sorted(part.keys() - {"seconds"}, key=str):
                found.update(repr(key).encode())
                add(part[key])
        elif isinstance(part, (list, tuple)):
            found.update(str(len(part)).encode())
            for item in part:
                add(item)
        else:
            found.update(repr(part).encode())

    add(state)
    return found.hexdigest()
