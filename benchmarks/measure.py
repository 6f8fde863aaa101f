"""What is measured: time, memory and state of a training step; what it launches; what many classes cost."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import fake_device
from benchmarks.methods import METHODS, Row, Script, Training, sgd, start
from benchmarks.workloads import MANY_CLASSES, WORKLOADS, Setting, Workload
from dcl_optim.trial.memory import peak_of
from dcl_optim.trial.timing import interleaved, is_accelerator, quartiles, ratios, seconds_per_step

Figures = dict[str, Any]

MOST_BYTES = 2**30  # of DCPOptimizer's prototypes
# What the estimates are made of. A slot is as long as a step of the dearest method at least.
DEAREST, MEAN = 2.5, 0.7  # times a plain step; times a slot
SECONDS_TO_START = 4.0  # of a process, until it has imported torch
SECONDS_TO_COUNT = 1.75  # of a method, all its steps


def reported(items: Sequence[Any], name_of: Callable[[Any], str]) -> Iterator[Any]:
    """Tell the person who waits where it is, before each item."""
    for number, item in enumerate(items, 1):
        print(f"{number} of {len(items)}: {name_of(item)}", file=sys.stderr, flush=True)
        yield item


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


# ---- time and state --------------------------------------------------------------------------------------------------


def steps(options: argparse.Namespace) -> Figures:
    """All networks; the memory after all times, lest its processes disturb them."""
    setting = Setting(options.device, options.precision, options.compile)
    models = reported(options.models, lambda model: f"times of {WORKLOADS[model].title}")
    found = [{"model": model} | time(WORKLOADS[model], setting, options) for model in models]
    if options.memory:
        weigh(found, setting)
    return {"setting": dataclasses.asdict(setting), "rounds": options.rounds, "steps": found}


def wide(options: argparse.Namespace) -> Figures:
    """All numbers of classes in both precisions."""
    settings = {"float32": Setting(), "autocast": Setting(precision="bf16-channels-last")}
    every = list(itertools.product(MANY_CLASSES.values(), settings))
    cases = reported(every, lambda case: f"times with {case[0].classes:,} classes, {case[1]}")
    found = [
        {"classes": work.classes, "precision": precision} | time(work, settings[precision], options)
        for work, precision in cases
    ]
    return {"rounds": options.rounds, "wide": found}


def time(work: Workload, setting: Setting, options: argparse.Namespace) -> Figures:
    """Time the methods against each other on one network."""
    device = torch.device(setting.device)
    trainings = {name: start(METHODS[name], work, setting) for name in allowed(work, options.methods)}
    takes = {name: training.step for name, training in trainings.items()}
    count = steps_per_slot(takes, options.slot, device)
    times = interleaved(takes, options.rounds, count, device)
    return {
        "title": work.title,
        "batch_size": work.batch_size,
        "parameters": sum(p.numel() for p in trainings["plain"].model.parameters()),
        "steps_per_slot": count,
        "rows": [
            row_of(METHODS[name], times) | {"state_bytes_added": training.bytes_added()}
            for name, training in trainings.items()
        ],
    }


def steps_per_slot(steps: Mapping[str, Callable[[], object]], slot_seconds: float, device: torch.device) -> int:
    """How many steps of the slowest take a time; all take as many steps, or their noise would differ."""
    slowest = max(min(seconds_per_step(step, 1, device) for _ in range(2)) for step in steps.values())
    return max(1, round(slot_seconds / slowest))


def allowed(work: Workload, methods: Iterable[str]) -> list[str]:
    """The methods that a network's number of classes allows."""
    return [name for name in methods if "DCP" not in name or 4 * work.classes**2 <= MOST_BYTES]


def row_of(row: Row, times: Mapping[str, list[float]]) -> Figures:
    """What a table has of a method's times."""
    own = times[row.name]
    milliseconds = [1e3 * seconds for seconds in own]
    return {
        "name": row.name,
        "milliseconds": quartiles(milliseconds),
        "ratio_to_plain": ratios(own, times["plain"]),
        "ratio_to_handwritten": ratios(own, times[row.by_hand]) if row.by_hand in times else None,
        "rounds_milliseconds": milliseconds,
    }


# ---- memory ----------------------------------------------------------------------------------------------------------

STEPS = 5


def weigh(found: list[Figures], setting: Setting) -> None:
    """Measure the peak memory of each method, one at a time."""
    pairs = [(figures, row) for figures in found for row in figures["rows"]]
    for figures, row in reported(pairs, lambda pair: f"memory of {pair[1]['name']} on {pair[0]['title']}"):
        of = figures["model"], row["name"], setting
        # An accelerator's allocator counts what it gives; the resident set never gets smaller within a process.
        is_counted = is_accelerator(torch.device(setting.device))
        row["memory"] = memory_of(*of) if is_counted else in_a_process(memory_of, *of)
        row["memory_ratio_to_plain"] = row["memory"]["used_bytes"] / figures["rows"][0]["memory"]["used_bytes"]


def memory_of(model: str, method: str, setting: Setting) -> dict[str, int]:
    """Train a few steps, and give the bytes in use at the peak, before the model was built, and the difference.

    On the CPU this is the resident set: to import torch takes hundreds of MiB, which would hide everything. On an
    accelerator it is what torch's allocator handed out at most.
    """
    row, work, device = METHODS[method], WORKLOADS[model], torch.device(setting.device)
    import_everything(work.package)
    if is_accelerator(device):
        return {"used_bytes": peak_of(lambda: start(row, work, setting, STEPS), device) or 0}
    return used_by(lambda: start(row, work, setting, STEPS))


def used_by(work: Callable[[], object]) -> dict[str, int]:
    """The peak resident set of some work, that before it, and the difference."""
    gc.collect()
    with contextlib.suppress(OSError):  # let the peak start again from what is resident now, where Linux allows it
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident_peak()
    work()
    peak = resident_peak()
    return {"peak_bytes": peak, "before_bytes": before, "used_bytes": peak - before}


def resident_peak() -> int:
    """The peak resident set of this process, in bytes.

    Linux hands ru_maxrss down from the process that started this one; VmHWM is this program's own.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def import_everything(package: str) -> None:
    """Import what will be imported anyway: torch fetches half of itself at the first step of an optimizer."""
    if package:
        import_module(package)
    model = nn.Linear(1, 1)
    optimizer = sgd(model.parameters())
    optimizer.zero_grad()
    model(torch.zeros(1, 1)).sum().backward()
    optimizer.step()


# ---- kernels ---------------------------------------------------------------------------------------------------------

SMALL = WORKLOADS["mlp-small"]  # its step on a GPU takes as long as its launches
FIRST, LAST = 20, 119  # the steps, counted from 1, whose kernels are averaged
ALONE = (1, 2, 3, 100)  # the steps that may synchronize: the package looks at some things once in 100 steps
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Loss:
    """What the script's loss is.

    Attributes:
        criterion: makes the loss module.
        micro_batches: backward passes for a step.
        mixed: whether the targets are mixup's distributions.
    """

    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss
    micro_batches: int = 1
    mixed: bool = False


LOSSES = {
    "hard labels": Loss(),
    "label smoothing 0.1": Loss(lambda: nn.CrossEntropyLoss(label_smoothing=0.1)),
    "class weights": Loss(lambda: nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, SMALL.classes))),
    "mixup": Loss(mixed=True),
    "4 micro-batches": Loss(micro_batches=4),
}


def kernels(options: argparse.Namespace) -> Figures:
    """All methods with each loss, in both dtypes of the logits."""
    if not fake_device.available():
        raise SystemExit(f"torch {torch.__version__} does not let Python register a device; install a newer one")
    fake_device.register()
    cases = list(itertools.product(DTYPES, LOSSES, options.methods))
    return {"model": SMALL.title, "kernels": [kernel_row(*case) for case in reported(cases, ", ".join)]}


def kernel_row(dtype: str, loss: str, method: str) -> Figures:
    """Count the kernels of a method on the fake device, or say that it refuses the loss."""
    build = METHODS[method].build
    row: Figures = {"dtype": dtype, "loss": loss, "method": method}
    row["refused"] = refusal(build, LOSSES[loss], DTYPES[dtype])
    if row["refused"]:
        return row
    found = dict(enumerate(count(build, LOSSES[loss], DTYPES[dtype], LAST), 1))
    averaged = [found[number].kernels for number in range(FIRST, LAST + 1)]
    others = [found[number].synchronizations for number in range(FIRST, LAST + 1) if number not in ALONE]
    row["kernels"] = sum(averaged) / len(averaged)
    row["synchronizations"] = {str(number): found[number].synchronizations for number in ALONE}
    row["synchronizations"]["others"] = sum(others) / len(others)
    return row


@dataclass(frozen=True)
class StepCounts:
    """Kernels and synchronizations of one step."""

    kernels: int
    synchronizations: int


def count(build: Callable[[Script], Training], loss: Loss, dtype: torch.dtype, number: int) -> list[StepCounts]:
    """Count each of the first steps of a training run."""
    step = build(write_script(loss, fake_device.register(), dtype)).step
    found = []
    for _ in range(number):
        with fake_device.counted() as counts:
            step()
        found.append(StepCounts(counts.kernels.total(), counts.synchronizations.total()))
    return found


def refusal(build: Callable[[Script], Training], loss: Loss, dtype: torch.dtype) -> str:
    """Why a method refuses a loss, as it says on the CPU; empty if it does not."""
    try:
        build(write_script(loss, fake_device.CPU, dtype)).step()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def write_script(loss: Loss, device: torch.device, dtype: torch.dtype) -> Script:
    """Build the model and its data; all batches are on the device before the first step."""
    batches = [
        (x.to(device, dtype), mixed(y).to(device, dtype) if loss.mixed else y.to(device)) for x, y in SMALL.batches()
    ]
    criterion = loss.criterion().to(device, dtype)
    model = SMALL.model().to(device, dtype)
    return Script(model, batches, SMALL, criterion=criterion, micro_batches=loss.micro_batches)


def mixed(labels: Tensor) -> Tensor:
    """Mixup's targets: 0.7 of a row's class and 0.3 of its neighbor's."""
    shares = F.one_hot(labels, SMALL.classes).float()
    return 0.7 * shares + 0.3 * shares.roll(1, 0)


# ---- how long all this takes -----------------------------------------------------------------------------------------


def seconds_of_steps(options: argparse.Namespace) -> float:
    """Estimate how long the table of steps takes, from a plain step of each network."""
    works = [WORKLOADS[model] for model in options.models]
    setting = Setting(options.device, options.precision)
    return sum(_seconds(work, setting, options, options.memory) for work in works)


def seconds_of_wide(options: argparse.Namespace) -> float:
    """Estimate how long the table of many classes takes: twice one precision."""
    return sum(2 * _seconds(work, Setting(), options, False) for work in MANY_CLASSES.values())


def seconds_of_kernels(options: argparse.Namespace) -> float:
    """Estimate how long the table of kernels takes."""
    return SECONDS_TO_COUNT * len(DTYPES) * len(LOSSES) * len(options.methods)


def _seconds(work: Workload, setting: Setting, options: argparse.Namespace, memory: bool) -> float:
    plain = seconds_per_step(start(METHODS["plain"], work, setting).step, 1, torch.device(setting.device))
    of_row = MEAN * (options.rounds + 2) * max(options.slot, DEAREST * plain)  # 2: to warm up, and to size the slots
    if memory:
        of_row += SECONDS_TO_START + MEAN * STEPS * DEAREST * plain
    return of_row * len(allowed(work, options.methods))
