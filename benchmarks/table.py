"""Print the Markdown tables of a results file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from benchmarks import results_file
from benchmarks.knobs import KNOBS

Figures = dict[str, Any]


def spread(figures: dict[str, float] | None) -> str:
    """Median and quartiles of a ratio."""
    if figures is None:
        return "–"
    return f"{figures['median']:.2f} ({figures['lower']:.2f}–{figures['upper']:.2f})"


def size(count: int) -> str:
    """Bytes for people."""
    if abs(count) >= 2**20:
        return f"{count / 2**20:.2f} MiB"
    return f"{count / 2**10:.1f} KiB" if count else "0"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """A Markdown table whose first columns are words and whose others are numbers."""
    rule = ["---" if index < words else "--:" for index in range(len(head))]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def _memory(row: Figures) -> list[str]:
    if "memory" not in row:
        return ["–", "–", "–"]
    memory = row["memory"]
    ratio = "1" if row["name"] == row["reference"] else f"{row['memory_ratio_to_plain']:.2f}"
    return [f"{memory['peak_bytes'] / 2**20:.0f}", f"{memory['used_bytes'] / 2**20:.0f}", ratio]


def _place(figures: Figures) -> str:
    return f"{figures['title']}, {figures['batch_size']}"


def summary(results: Figures) -> list[str]:
    """Every method's median time divided by plain training's, a line for each network: the README's table."""
    names = list(dict.fromkeys(row["name"] for figures in results["methods"] for row in figures["rows"]))
    rows = []
    for figures in results["methods"]:
        found = {row["name"]: row for row in figures["rows"]}
        ratios = [f"{found[name]['ratio_to_plain']['median']:.2f}" if name in found else "–" for name in names[1:]]
        rows.append([_place(figures), f"{found[names[0]]['milliseconds']['median']:.1f} ms", *ratios])
    return ["### Time of a step, divided by plain training's", "", *grid(("model, batch", *names), rows, 1)]


def methods(results: Figures) -> list[str]:
    """What each method costs on each network."""
    head = (
        "model, batch", "method", "ms per step", "× plain", "× handwritten", "peak, MiB", "used, MiB", "used, × plain",
        "parameters added", "state added",
    )  # fmt: skip
    rows = [
        [
            _place(figures) if row is figures["rows"][0] else "",
            row["name"],
            f"{row['milliseconds']['median']:.2f}",
            "1" if row["name"] == row["reference"] else spread(row["ratio_to_plain"]),
            spread(row["ratio_to_handwritten"]),
            *_memory(row),
            f"{row['parameters_added']:,}",
            size(row["state_bytes_added"]),
        ]
        for figures in results["methods"]
        for row in figures["rows"]
    ]
    return ["### Methods", "", *grid(head, rows, 2)]


def knobs(results: Figures) -> list[str]:
    """What each of DCLOptimizer's cost options costs, changes, and loses in the paper."""
    head = (
        "model, batch", "option", "changes", "paper, ResNet-18 on CIFAR-100", "× plain", "used, × plain", "state added"
    )  # fmt: skip
    rows = []
    for figures in results["knobs"]:
        shown = [row for row in figures["rows"] if row["name"] in KNOBS]
        for row in shown:
            knob = KNOBS[row["name"]]
            rows.append(
                [
                    _place(figures) if row is shown[0] else "",
                    row["name"],
                    knob.changes,
                    knob.accuracy,
                    spread(row["ratio_to_plain"]),
                    _memory(row)[2],
                    size(row["state_bytes_added"]),
                ]
            )
    notes = [
        "Each option by itself, divided by plain training on the same frozen parameters and in the same layout. What "
        "changes is against DCLOptimizer without the option. The paper's baseline is 79.6 % there (Table 6)."
    ]
    return ["### DCLOptimizer's cost options", "", *grid(head, rows, 4), "", *notes]


def growth(results: Figures) -> list[str]:
    """How the cost grows."""
    head = (
        "what grows",
        "size",
        "plain, ms",
        "DCL, × plain",
        "DCP, × plain",
        "DCL − handwritten, µs",
        "DCP − plain, µs",
    )
    rows = []
    for series in results["growth"]:
        for point in series["points"]:
            first = series["title"] if point is series["points"][0] else ""
            rows.append([first, f"{point['size']:,}", *_point(point)])
    kept = "does not return" if results.get("freed_memory_kept") else "returns"
    notes = [f"The benchmark {kept} freed memory to the operating system."]
    return ["### Growth", "", *grid(head, rows, 1), "", *notes]


def _point(point: Figures) -> list[str]:
    rows = {row["name"]: row for row in point["rows"]}
    wrapped = ("DCLOptimizer", "DCPOptimizer")
    return [
        f"{rows['plain']['milliseconds']['median']:.2f}",
        *(spread(rows[name]["ratio_to_plain"]) for name in wrapped),
        *(_microseconds(rows[name]["microseconds_added"]) for name in wrapped),
    ]


def _microseconds(figures: dict[str, float]) -> str:
    return f"{figures['median']:.0f} ({figures['lower']:.0f} to {figures['upper']:.0f})"


def kernels(results: Figures) -> list[str]:
    """Kernels and synchronizations of a step."""
    numbers = list(next((row["synchronizations"] for row in results["kernels"] if not row["refused"]), ()))
    waits = [f"step {number}" if number.isdigit() else number for number in numbers]
    head = ("dtype", "loss", "method", "kernels", *(f"waits, {text}" for text in waits))
    rows: list[list[str]] = []
    place = ("", "")
    for row in results["kernels"]:
        figures = ["refused", *["–"] * len(numbers)]
        if not row["refused"]:
            figures = [f"{row['kernels']:.1f}", *(f"{count:g}" for count in row["synchronizations"].values())]
        former, place = place, (row["dtype"], row["loss"])
        rows.append([*(place if place != former else ("", "")), row["method"], *figures])
    refusals = {(row["method"], row["loss"]): row["refused"] for row in results["kernels"] if row["refused"]}
    notes = [
        f"{results['model']}, batch 128. Kernels are the mean of steps 20 to 119. A wait is a synchronization; those "
        "of the other steps are the mean of steps 20 to 119 without step 100.",
        *(f"{method} refused {loss}: {textwrap.shorten(words, 150)}" for (method, loss), words in refusals.items()),
    ]
    return ["### Kernels of a step", "", *grid(head, rows, 3), *(line for note in notes for line in ("", note))]


def wide(results: Figures) -> list[str]:
    """Time and memory of a network whose logits are most of it."""
    head = ("classes", "precision", "method", "ms per step", "× plain", "× handwritten")
    rows = [
        [
            f"{point['classes']:,}" if row is point["rows"][0] else "",
            point["precision"] if row is point["rows"][0] else "",
            row["name"],
            f"{row['milliseconds']['median']:.1f}",
            "1" if row["name"] == "plain" else spread(row["ratio_to_plain"]),
            spread(row["ratio_to_handwritten"]),
        ]
        for point in results["wide"]
        for row in point["rows"]
    ]
    memory_head = ("classes, rows", "precision", "method", "peak over the start, MiB")
    memory_rows = [
        [f"{row['classes']:,} × {row['rows']:,}", row["precision"], row["name"], f"{row['used_bytes'] / 2**20:,.0f}"]
        for row in results["wide_memory"]
    ]
    notes = (
        f"MLP 64-128-classes, {results['batch']} rows. Handwritten is DCL or DCP, as the row is. Autocast is to "
        "bfloat16 around forward and loss, or around the forward alone, so that the loss gets bfloat16 logits."
    )
    memory = ["", *grid(memory_head, memory_rows, 3)] if memory_rows else []
    return ["### Many classes", "", *grid(head, rows, 3), *memory, "", notes]


def source(results: Figures) -> str:
    """Where the figures come from."""
    machine, versions, setting = results["machine"], results["versions"], results.get("setting")
    rounds = (
        f"Medians of {results['rounds']} interleaved rounds (quartiles in brackets; a ratio or a difference is taken "
        "within each round); "
        if "rounds" in results
        else ""
    )
    how = [setting["precision"], *(["compiled"] if setting["compiled"] else [])] if setting else []
    device = [machine["device"]] if "device" in machine else []
    place = [*device, machine["cpu"], f"{machine['cores']} cores, {machine['threads']} threads", *how, machine["os"]]
    peers = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "python")
    return (
        f"{rounds}{', '.join(place)}; Python {versions['python']}, {peers}; {results['date'][:10]}; "
        f"`{results['command']}`, {results['minutes']} minutes."
    )


SECTIONS = {"methods": methods, "knobs": knobs, "growth": growth, "kernels": kernels, "wide": wide}


def markdown(results: Figures) -> str:
    """Lay results out as the README shows them: the tables, then where the figures come from."""
    parts = [section(results) for part, section in SECTIONS.items() if results.get(part)]
    head = [summary(results)] if results.get("methods") else []
    return "\n".join([line for part in [*head, *parts] for line in [*part, ""]] + [source(results)])


def main(arguments: list[str]) -> None:
    """Read a results file and print its tables."""
    _, results = results_file.read("table", __doc__, arguments)
    print(markdown(results))
