"""What a reader needs to know about where a figure comes from."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

import dcl_optim


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


def machine() -> dict[str, str | int]:
    """Processor, cores, torch's threads, operating system."""
    return {"cpu": processor(), "cores": cores(), "threads": torch.get_num_threads(), "os": platform.platform()}


def versions() -> dict[str, str]:
    """Python, torch and the library."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "dcl_optim": dcl_optim.__version__,
    }
