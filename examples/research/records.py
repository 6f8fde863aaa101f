"""The results file: one line of JSON for each finished run, which is never trained again.

In the repository the runs that choose values, on validation images, are together in one compressed file.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import platform
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import processor

PACKAGES = ("dcl-optim", "torch", "torchvision", "numpy", "scipy", "torchmetrics")

# Finished runs are written to a folder that git ignores, and those of the repository are read in addition.
RESULTS, COMMITTED = Path("runs/results"), Path("examples/research/results")

CHOICES = "choices.jsonl.xz"  # in COMMITTED; each line has the name of a results file, a tab and a record

BESIDE_ACCURACY = ("quality", "train_accuracy", "consistency", "perplexity")

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """Read a results file, and what the compressed file of its folder has of it; none is an empty one.

    Raises:
        ValueError: a line is no record, and not the last one, which a crash may have cut.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    if lines and not _is_record(lines[-1]):
        lines.pop()
    wrong = next((number for number, line in enumerate(lines, 1) if not _is_record(line)), None)
    if wrong is not None:
        raise ValueError(f"{path}, line {wrong}: no record of a run; mend or delete the line")
    return [json.loads(line) for line in (*lines, *_choices(path.parent).get(path.name, ()))]


def _choices(folder: Path) -> dict[str, list[str]]:
    """The lines that the compressed file of a folder has of each results file."""
    path = folder / CHOICES
    return _decompressed(path, path.stat().st_mtime_ns) if path.exists() else {}


@lru_cache(maxsize=1)
def _decompressed(path: Path, written: int) -> dict[str, list[str]]:
    """What a compressed file has, which is not decompressed again until it is written again."""
    found: dict[str, list[str]] = {}
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        name, record = line.split("\t")
        found.setdefault(name, []).append(record)
    return found


def _is_record(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True


def stripped(tree: Any) -> Any:
    """A record without what no table shows: the losses by epoch, which older ones have, and one of the averages."""
    if not isinstance(tree, dict):
        return tree
    return {name: stripped(part) for name, part in tree.items() if name not in ("losses", "EMA over 1000 steps")}


def publish(folder: Path, name: str) -> Path:
    """Write the stripped records of a file of both folders into the repository's, or into its compressed file."""
    found, path = [as_published(record) for record in finished(folder, name)], COMMITTED / name
    lines = [json.dumps(record) for record in found]
    if any(record["part"] == "test" for record in found):
        path.write_text("".join(f"{line}\n" for line in lines))
        return path
    files = _choices(COMMITTED) | {name: lines}
    text = "".join(f"{file}\t{line}\n" for file in sorted(files) for line in files[file])
    (COMMITTED / CHOICES).write_bytes(lzma.compress(text.encode()))
    path.unlink(missing_ok=True)
    return COMMITTED / CHOICES


def as_published(record: Record) -> Record:
    """A record for the repository; of runs on both parts, which choose values, the tables show accuracies alone."""
    found: Record = stripped(record)
    if found["part"] != "both":
        return found
    return {name: value for name, value in found.items() if name not in BESIDE_ACCURACY}


def fingerprint(contents: Any) -> str:
    """A name for what JSON can hold: another one where anything differs."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]


def identity(configuration: Record, seed: int, part: str) -> str:
    """What was run and measured, whatever a table calls it."""
    return json.dumps([configuration, seed, part], sort_keys=True)


def by_identity(paths: Iterable[Path]) -> dict[str, Record]:
    """The records of some experiments' files by their identity: experiments have runs in common."""
    found = [record for path in paths for record in read(path)]
    return {identity(record["configuration"], record["seed"], record["part"]): record for record in found}


def finished(folder: Path, name: str) -> list[Record]:
    """The records of a file that the repository has, and those of the same file in a folder, each run once."""
    found = read(COMMITTED / name) + read(folder / name)
    return list({_run(record): record for record in found}.values())


def nothing_to_do(name: str, runs: int, folder: Path) -> str:
    """Say that all runs of an experiment have results, and how to make them again."""
    return f"{name}: all {runs} runs have results in {COMMITTED} or {folder}; --fresh trains them again"


def _run(record: Record) -> str:
    return json.dumps([record["label"], record["seed"], record.get("configuration")], sort_keys=True)


def append(record: Record, path: Path) -> None:
    """Add a record, and drop what a crash has left of the last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes() if path.exists() else b""
    keep = whole.rfind(b"\n") + 1
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(keep)
        file.truncate()
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def circumstances(device: str, threads: int) -> Record:
    """Where and with what a run was made."""
    kind = torch.cuda.get_device_name(device) if device.startswith("cuda") else processor()
    return {
        "device": kind,
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
