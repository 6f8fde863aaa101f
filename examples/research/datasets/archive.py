"""Arrays in one file with their checksum: what the data sets that are built here are saved in."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from examples.research.datasets.splits import PARTS

MODULES = {
    "noto-scripts": "noto",
    "kanji-fonts": "kanji",
    "debian-sections": "debian",
}  # that build the file
FILES = {name: Path(f"runs/data/{name}.npz") for name in MODULES}


def checksum(arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 of all arrays: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def sizes(arrays: dict[str, np.ndarray]) -> str:
    """How many samples each part has, in words."""
    return ", ".join(f"{len(arrays[f'{part}_labels'])} {part}" for part in PARTS)


def save(arrays: dict[str, np.ndarray], path: Path) -> str:
    """Write the arrays and their checksum, which is returned; an interrupted write leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = checksum(arrays)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, sha256=np.array(digest), **arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return digest


def read(path: Path, name: str = "noto-scripts") -> dict[str, np.ndarray]:
    """Read what :func:`save` wrote of a data set.

    Raises:
        ValueError: the file is missing, unreadable, or not what its checksum says.
    """
    command = f"python -m examples.research.datasets.{MODULES[name]} --out FILE"
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except Exception as error:  # numpy, zipfile and zlib each have their own
        raise ValueError(f"cannot read {name} from folder={path} ({error}); build it: {command}") from error
    if str(arrays.pop("sha256", "")) != checksum(arrays):
        raise ValueError(
            f"folder={path} does not have the SHA-256 checksum it was saved with; build it anew: {command}"
        )
    return arrays
