"""What a results file says: where its figures come from, and its Markdown tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import dcl_optim
from dcl_optim.trial.memory import readable

Figures = dict[str, Any]


def spread(figures: dict[str, float] | None) -> str:
    """Median and quartiles of a ratio."""
    if figures is None:
        return "–"
    return f"{figures['median']:.2f} ({figures['lower']:.2f}–{figures['upper']:.2f})"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """A Markdown table whose first columns are words and whose others are numbers."""
    rule = ["---" if index < words else "--:" for index in range(len(head))]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def steps(results: Figures) -> list[str]:
    """What a step costs by each method on each network."""
    head = ("network, batch size", "method", "ms", "× plain", "× by hand", "RAM, × plain", "state added")
    rows = [
        [
            f"{figures['title']}, {figures['batch_size']}" if row is figures["rows"][0] else "",
            row["name"],
            f"{row['milliseconds']['median']:.2f}",
            spread(row["ratio_to_plain"]),
            spread(row["ratio_to_handwritten"]),
            f"{row['memory_ratio_to_plain']:.2f}" if "memory_ratio_to_plain" in row else "–",
            readable(row["state_bytes_added"]) if row["state_bytes_added"] else "0",
        ]
        for figures in results["steps"]
        for row in figures["rows"]
    ]
    return grid(head, rows, 2)


def kernels(results: Figures) -> list[str]:
    """The kernels of a step, a column for each method."""
    methods = list(dict.fromkeys(row["method"] for row in results["kernels"]))
    cells = {
        (row["dtype"], row["loss"], row["method"]): "refused" if row["refused"] else f"{row['kernels']:.0f}"
        for row in results["kernels"]
    }
    places = dict.fromkeys((dtype, loss) for dtype, loss, _ in cells)
    rows = [[*place, *(cells[(*place, method)] for method in methods)] for place in places]
    return grid(("logits", "loss", *methods), rows, 2)


def wide(results: Figures) -> list[str]:
    """The time of a step with many classes over that of a plain step, a column for each method."""
    methods = list(dict.fromkeys(row["name"] for point in results["wide"] for row in point["rows"]))
    lines = []
    for point in results["wide"]:
        found = {row["name"]: row for row in point["rows"]}
        ratios = [f"{found[name]['ratio_to_plain']['median']:.2f}" if name in found else "–" for name in methods[1:]]
        plain = f"{found['plain']['milliseconds']['median']:.1f}"
        lines.append([f"{point['classes']:,}", point["precision"], plain, *ratios])
    return grid(("classes", "precision", "plain, ms", *methods[1:]), lines, 2)


TABLES = {"steps": steps, "kernels": kernels, "wide": wide}


def source(results: Figures) -> str:
    """Where the figures come from."""
    machine, versions, setting = results["machine"], results["versions"], results.get("setting")
    rounds = (
        f"Medians of {results['rounds']} interleaved rounds (quartiles in parentheses; a ratio is taken within each "
        "round); "
        if "rounds" in results
        else ""
    )
    how = [setting["precision"], *(["compiled"] if setting["compiled"] else [])] if setting else []
    device = [machine["device"]] if "device" in machine else []
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    place = [*device, machine["cpu"], f"{machine['cores']} cores", threads, *how, machine["os"]]
    peers = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "python")
    return (
        f"{rounds}{', '.join(place)}; Python {versions['python']}, {peers}; {results['date'][:10]}; "
        f"`{results['command']}`, {results['minutes']} minutes."
    )


# ---- where figures come from -----------------------------------------------------------------------------------------

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


def machine(threads: int, device: str = "cpu") -> dict[str, str | int]:
    """Processor, cores, threads that were used, operating system, and the accelerator's name where one is used."""
    found: dict[str, str | int] = {
        "cpu": processor(),
        "cores": cores(),
        "threads": threads,
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
