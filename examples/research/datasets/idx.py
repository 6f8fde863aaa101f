"""The idx format of Fashion-MNIST's files."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from torch import Tensor

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where `apt-get install dataset-fashion-mnist` puts the files
IDX_BYTES = 0x08  # the idx format's code for unsigned bytes, the only type that these files have


def read_idx(path: Path) -> Tensor:
    """Read a gzipped idx file of unsigned bytes.

    Raises:
        ValueError: the file is missing, no gzip, no idx file of bytes, or has more or fewer values than it says.
    """
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (OSError, EOFError) as error:
        raise ValueError(
            f"cannot read {path} ({error}); install the Debian package dataset-fashion-mnist, pass --data=<folder of "
            "the four .gz files>, or --download"
        ) from error
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    if content[:3] != bytes((0, 0, IDX_BYTES)) or len(content) < start:
        raise ValueError(f"{path} is not an idx file of unsigned bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:]
    if values.numel() != torch.Size(shape).numel():
        raise ValueError(f"{path} says it holds {shape} values but has {values.numel()}")
    return values.reshape(shape)
