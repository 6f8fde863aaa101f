"""What a reader needs to know about where a figure comes from."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

import dcl_optim

OPTIONAL = ("torchvision",)


def processor() -> str:
    """The processor's name; platform.processor() is empty on most Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use, which a container may hold below the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine(device: str = "cpu") -> dict[str, str | int]:
    """Processor, cores, torch's threads, operating system, and the accelerator's name where one is used."""
    found: dict[str, str | int] = {
        "cpu": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "os": platform.platform(),
    }
    if torch.device(device).type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    return found


def versions() -> dict[str, str]:
    """Python, torch, the library, and what the networks are taken from."""
    own = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "dcl_optim": dcl_optim.__version__,
    }
    return own | {package: version(package) for package in OPTIONAL if find_spec(package) is not None}
