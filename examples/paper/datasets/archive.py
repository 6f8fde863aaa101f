"""Arrays in one file with their checksum: what noto-scripts and debian-sections are saved in."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

FILE = Path("runs/data/noto-scripts.npz")
COMMAND = "python -m examples.paper.datasets.{} --out FILE"


def checksum(arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 of all arrays: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


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


def read(path: Path, data: str = "noto-scripts", module: str = "noto") -> dict[str, np.ndarray]:
    """Read what :func:`save` wrote.

    Args:
        path: of the file.
        data: name of the data set, for the errors.
        module: of this package, which builds it.

    Raises:
        ValueError: the file is missing, unreadable, or not what its checksum says.
    """
    command = COMMAND.format(module)
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # numpy, zipfile and zlib each have their own
        raise ValueError(f"cannot read {data} from folder={path} ({error}); build it: {command}") from error
    if str(arrays.pop("sha256", "")) != checksum(arrays):
        raise ValueError(
            f"folder={path} does not have the SHA-256 checksum it was saved with; build it anew: {command}"
        )
    return arrays
