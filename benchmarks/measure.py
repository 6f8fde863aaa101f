"""What is measured: time and memory of a training step; what it launches; what many classes cost."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from benchmarks import fake_device
from benchmarks.methods import METHODS, Build, Script, sgd, start
from benchmarks.workloads import MANY_CLASSES, PRECISIONS, WORKLOADS, Setting, Workload
from dcl_optim.trial.memory import peak_of
from dcl_optim.trial.timing import interleaved, is_accelerator, quartiles, ratios, seconds_per_step

Figures = dict[str, Any]

MOST_CLASSES = 2**14  # of DCPOptimizer, whose prototypes then take a GiB


def in_a_process(function: Callable[..., Any], *arguments: Any, threads: int | None = None) -> Any:
    """Call a function in a fresh process, which holds nothing but what it has imported.

    Args:
        function: of a module other than the script that runs.
        arguments: its arguments.
        threads: those of torch there; as many as here without.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (threads or torch.get_num_threads(),)) as pool:
        return pool.submit(function, *arguments).result()


# ---- time ------------------------------------------------------------------------------------------------------------


def steps(options: argparse.Namespace) -> Figures:
    """All networks; the memory after all times, lest its processes disturb them."""
    setting = Setting(options.device, options.precision)
    found = [{"model": model} | time(WORKLOADS[model], setting, options) for model in tqdm(options.models, "times")]
    weigh(found, setting)
    return {"setting": dataclasses.asdict(setting), "rounds": options.rounds, "steps": found}


def wide(options: argparse.Namespace) -> Figures:
    """All numbers of classes in both precisions."""
    cases = list(itertools.product(MANY_CLASSES.values(), PRECISIONS))
    found = [
        {"classes": work.classes, "precision": precision} | time(work, Setting(precision=precision), options)
        for work, precision in tqdm(cases, "numbers of classes")
    ]
    return {"rounds": options.rounds, "wide": found}


def time(work: Workload, setting: Setting, options: argparse.Namespace) -> Figures:
    """Time the methods against each other on one network."""
    device = torch.device(setting.device)
    takes = {name: start(METHODS[name], work, setting).step for name in allowed(work, options.methods)}
    count = steps_per_slot(takes, options.slot, device)
    times = interleaved(takes, options.rounds, count, device)
    return {
        "title": work.title,
        "batch_size": work.batch_size,
        "steps_per_slot": count,
        "rows": [row_of(name, times) for name in takes],
    }


def steps_per_slot(steps: Mapping[str, Callable[[], object]], slot_seconds: float, device: torch.device) -> int:
    """How many steps of the slowest take a time; all take as many steps, or their noise would differ."""
    slowest = max(seconds_per_step(step, 2, device) for step in steps.values())
    return max(1, round(slot_seconds / slowest))


def allowed(work: Workload, methods: Iterable[str]) -> list[str]:
    """The methods that a network's number of classes allows."""
    return [name for name in methods if "DCP" not in name or work.classes <= MOST_CLASSES]


def row_of(name: str, times: Mapping[str, list[float]]) -> Figures:
    """What a table has of a method's times."""
    milliseconds = [1e3 * seconds for seconds in times[name]]
    method, _, _ = name.partition(",")
    hand = f"{method}, by hand"
    return {
        "name": name,
        "milliseconds": quartiles(milliseconds),
        "ratio_to_plain": ratios(times[name], times["plain"]),
        "ratio_to_hand": ratios(times[name], times[hand]) if hand in times else None,
        "rounds_milliseconds": milliseconds,
    }


# ---- memory ----------------------------------------------------------------------------------------------------------

STEPS = 5


def weigh(found: list[Figures], setting: Setting) -> None:
    """Measure the peak memory of each method, one at a time."""
    pairs = [(figures, row) for figures in found for row in figures["rows"]]
    for figures, row in tqdm(pairs, "memory"):
        of = figures["model"], row["name"], setting
        # An accelerator's allocator counts what it gives; the resident set never gets smaller within a process.
        is_counted = is_accelerator(torch.device(setting.device))
        row["memory_bytes"] = memory_of(*of) if is_counted else in_a_process(memory_of, *of)
        row["memory_ratio_to_plain"] = row["memory_bytes"] / figures["rows"][0]["memory_bytes"]


def memory_of(model: str, method: str, setting: Setting) -> int:
    """Train a few steps, and give the bytes that they took at the peak, beyond those before the model was built.

    On the CPU this is the resident set: to import torch takes hundreds of MiB, which would hide everything. On an
    accelerator it is what torch's allocator handed out at most.
    """
    build, work, device = METHODS[method], WORKLOADS[model], torch.device(setting.device)
    import_everything()
    if is_accelerator(device):
        return peak_of(lambda: start(build, work, setting, STEPS), device) or 0
    return used_by(lambda: start(build, work, setting, STEPS))


def used_by(work: Callable[[], object]) -> int:
    """The peak resident set of some work beyond that before it."""
    gc.collect()
    with contextlib.suppress(OSError):  # let the peak start again from what is resident now, where Linux allows it
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident_peak()
    work()
    return resident_peak() - before


def resident_peak() -> int:
    """The peak resident set of this process, in bytes.

    Linux hands ru_maxrss down from the process that started this one; VmHWM is this program's own.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def import_everything() -> None:
    """Import what will be imported anyway: torch fetches half of itself at the first step of an optimizer."""
    with contextlib.suppress(ImportError):
        import torchvision  # noqa: F401
    model = nn.Linear(1, 1)
    optimizer = sgd(model.parameters())
    optimizer.zero_grad()
    model(torch.zeros(1, 1)).sum().backward()
    optimizer.step()


# ---- kernels ---------------------------------------------------------------------------------------------------------

SMALL = WORKLOADS["mlp-small"]  # its step on a GPU takes as long as its launches
FIRST, LAST = 20, 119  # the steps, counted from 1, whose kernels are averaged
LOOKS = 100  # the step of these that is left out of the waits: the package looks at some things once in 100 steps
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The criterion, and how many backward passes a step has.
LOSSES = {
    "hard labels": (nn.CrossEntropyLoss(), 1),
    "label smoothing 0.1": (nn.CrossEntropyLoss(label_smoothing=0.1), 1),
    "4 micro-batches": (nn.CrossEntropyLoss(), 4),
}


def kernels(options: argparse.Namespace) -> Figures:
    """All methods with each loss, in both dtypes of the logits."""
    if not fake_device.available():
        raise SystemExit(f"torch {torch.__version__} does not let Python register a device; install a newer one")
    cases = list(itertools.product(DTYPES, LOSSES, options.methods))
    return {"model": SMALL.title, "kernels": [kernel_row(*case) for case in tqdm(cases, "kernels")]}


def kernel_row(dtype: str, loss: str, method: str) -> Figures:
    """Count the kernels of a method on the fake device, and how often a step waits for it."""
    steps = count(METHODS[method], loss, dtype, LAST)[FIRST - 1 :]
    waits = [step.synchronizations for number, step in enumerate(steps, FIRST) if number != LOOKS]
    return {
        "dtype": dtype,
        "loss": loss,
        "method": method,
        "kernels": mean(step.kernels for step in steps),
        "waits": mean(waits),
    }


@dataclass(frozen=True)
class StepCounts:
    """Kernels and synchronizations of one step."""

    kernels: int
    synchronizations: int


def count(build: Build, loss: str, dtype: str, number: int) -> list[StepCounts]:
    """Count each of the first steps of a training run, whose batches are on the device before."""
    device = fake_device.register()
    model = SMALL.model().to(device, DTYPES[dtype])
    batches = [(x.to(device, DTYPES[dtype]), y.to(device)) for x, y in SMALL.batches()]
    criterion, micro_batches = LOSSES[loss]
    step = build(Script(model, batches, SMALL, criterion=criterion, micro_batches=micro_batches)).step
    found = []
    for _ in range(number):
        with fake_device.counted() as counts:
            step()
        found.append(StepCounts(counts.kernels.total(), counts.synchronizations.total()))
    return found
