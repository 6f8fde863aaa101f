"""The idx format: what is read, and files that are broken."""

from __future__ import annotations

import gzip
import struct

import pytest
import torch

from examples.research.datasets.idx import read_idx


def test_the_last_dimension_changes_fastest(tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(bytes((0, 0, 8, 3)) + struct.pack(">3I", 2, 3, 4) + bytes(range(24))))
    assert torch.equal(read_idx(path), torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "dataset-fashion-mnist"),
        (b"not gzip", "cannot read"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x02\x01\x02")[:-9], "cannot read"),
        (gzip.compress(b"\0\0\x0d\x01\0\0\0\x01\x01"), "not an idx file of unsigned bytes"),
        (gzip.compress(b"\0\0\x08"), "not an idx file"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x03\x01\x02"), "says it holds"),
    ],
    ids=["missing", "no gzip", "cut off", "floats", "no header", "too short"],
)
def test_broken_idx_files(tmp_path, content, message):
    path = tmp_path / "labels.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(path)
