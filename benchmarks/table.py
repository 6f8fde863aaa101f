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

Figures = dict[str, Any]


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """A Markdown table whose first columns are words and whose others are numbers."""
    rule = ["---" if index < words else "--:" for index in range(len(head))]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


WAYS = ("DCP, line", "DCP, term", "DCL, line", "DCL, term")
WEIGHED = ("DCP, line", "DCL, line")


def steps(results: Figures) -> list[str]:
    """Time and memory of a step over those of a plain one, a line for each network; the file has the quartiles."""
    columns = [(name, "time") for name in WAYS] + [(name, "memory") for name in WEIGHED]
    lines = []
    for figures in results["steps"]:
        rows = {row["name"]: row for row in figures["rows"]}
        plain = f"{rows['plain']['milliseconds']['median']:.1f}"
        ratios = [ratio(rows[name], what) if name in rows else "–" for name, what in columns]
        lines.append([f"{figures['title']}, {figures['batch_size']}", plain, *ratios])
    head = ["network, batch size", "plain, ms", *(f"{name}, {what}" for name, what in columns)]
    return grid(head, lines, 1)


def ratio(row: Figures, what: str) -> str:
    """The time or the memory of a method over that of plain training."""
    value = row["ratio_to_plain"]["median"] if what == "time" else row["memory_ratio_to_plain"]
    return f"{value:.2f}"


def over_by_hand(points: list[Figures]) -> list[str]:
    """The time of a step over that of the same method written into the loop, a line for each network."""
    lines = []
    for figures in points:
        found = {row["name"]: row["ratio_to_hand"] for row in figures["rows"]}
        ratios = [f"{found[name]['median']:.2f}" if found.get(name) else "–" for name in WAYS]
        place = f"{figures['title']}, {figures['batch_size']}"
        if "precision" in figures:  # of many classes, in both
            place += f", {figures['precision']}"
        lines.append([place, *ratios])
    return grid(["network, batch size", *(f"{name}, over by hand" for name in WAYS)], lines, 1)


def kernels(results: Figures) -> list[str]:
    """The kernels of a step, a column for each method."""
    methods = list(dict.fromkeys(row["method"] for row in results["kernels"]))
    lines: dict[tuple[str, str], list[str]] = {}
    for row in results["kernels"]:
        place = (row["dtype"], row["loss"])
        lines.setdefault(place, [*place]).append(f"{row['kernels']:.0f}")
    return grid(("logits", "loss", *methods), list(lines.values()), 2)


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
    machine, versions = results["machine"], results["versions"]
    rounds = ""
    if "rounds" in results:
        rounds = f"Medians of {results['rounds']} interleaved rounds; a ratio is taken within each round. "
    device = [machine["device"]] if "device" in machine else []
    precision = [results["setting"]["precision"]] if "setting" in results else []
    place = [*device, machine["cpu"], f"{machine['cores']} cores", f"threads: {machine['threads']}", *precision]
    packages = [f"{name} {version}" for name, version in versions.items()]
    return (
        f"{rounds}{', '.join([*place, machine['os'], *packages])}; {results['date'][:10]}; "
        f"`{results['command']}`, {results['minutes']} minutes."
    )


# ---- where figures come from -----------------------------------------------------------------------------------------


def processor() -> str:
    """The processor's name; platform.processor() is empty on most Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(threads: int, device: str = "cpu") -> dict[str, str | int]:
    """Processor, cores, threads that were used, operating system, and the accelerator's name where one is used."""
    accelerator = {"device": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}
    cores = os.cpu_count() or 1
    return {"cpu": processor(), "cores": cores, "threads": threads, "os": platform.platform()} | accelerator


def versions() -> dict[str, str]:
    """Python, torch, the library, and what the networks are taken from."""
    packages = [name for name in ("dcl_optim", "torchvision") if find_spec(name) is not None]
    own = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return own | {name: version(name) for name in packages}
