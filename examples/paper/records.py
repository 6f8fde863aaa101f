"""The results file: one line of JSON for each finished run, which is never trained again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import processor

PACKAGES = ("dcl-optim", "torch", "torchvision", "numpy", "scipy", "torchmetrics", "pytorch_optimizer")

# Finished runs are written to a folder that git ignores, and those of the repository are read in addition.
RESULTS, COMMITTED = Path("runs/results"), Path("docs/results")

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """Read a results file; none is an empty one.

    Raises:
        ValueError: a line is no record, and not the last one, which a crash may have cut.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    if lines and not _is_record(lines[-1]):
        lines.pop()
    wrong = next((number for number, line in enumerate(lines, 1) if not _is_record(line)), None)
    if wrong is not None:
        raise ValueError(f"{path}, line {wrong}: no record of a run; mend or delete the line")
    return [_by_argument(json.loads(line)) for line in lines]


def _by_argument(record: Record) -> Record:
    """Name the arguments that had another name, or none yet, when the record was written."""
    configuration = record.get("configuration", {})  # of examples.applications, which had no other alphas than today's
    if "preset" in configuration:
        configuration["weight"] = {None: None, "default": 0.1, "paper": 1.0}[configuration.pop("preset")]
    if "lora_lr" in configuration:  # of examples.applications.fine_tuning
        record["configuration"] = configuration = {"precision": "float32"} | configuration
    if "options" in configuration:  # of examples.paper, where it was always the paper's
        options = configuration["options"]
        if options.pop("preset", None):
            configuration["options"] = {"weight": 1.0, "alpha": 0.6} | options
        record["configuration"] = {"averages": [], "label_noise": 0.0, "precision": "float32"} | configuration
    return record


def _is_record(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True


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
