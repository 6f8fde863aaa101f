"""Peak memory of a few training steps, each method in a fresh process of its own, one at a time.

On the CPU the peak resident set, raw, and minus what the process held before the model was built: importing torch alone
takes hundreds of MiB, which would hide everything. On CUDA what torch's allocator handed out at most.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from benchmarks.methods import METHODS, start
from benchmarks.script import sgd
from benchmarks.setting import PRECISIONS, Setting
from benchmarks.workloads import WORKLOADS

STEPS = 5
ROOT = Path(__file__).parent.parent


def resident_peak() -> int:
    """The peak resident set of this process, in bytes.

    Linux hands ru_maxrss down from the process that started this one; VmHWM is this program's own.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def forget_resident_peak() -> None:
    """Let the peak start again from what is resident now, where Linux allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def used_by(work: Callable[[], object], setting: Setting | None = None) -> dict[str, int]:
    """Bytes in use at the peak of some work, before it, and the difference."""
    gc.collect()
    if setting is not None and torch.device(setting.device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(setting.device)
        before = torch.cuda.memory_allocated(setting.device)
        work()
        setting.synchronise()
        peak = torch.cuda.max_memory_allocated(setting.device)
    else:
        forget_resident_peak()
        before = resident_peak()
        work()
        peak = resident_peak()
    return {"peak_bytes": peak, "before_bytes": before, "used_bytes": peak - before}


def import_everything(package: str) -> None:
    """Import what will be imported anyway: torch fetches half of itself at the first step of an optimizer."""
    if package:
        import_module(package)
    model = nn.Linear(1, 1)
    optimizer = sgd(model.parameters())
    optimizer.zero_grad()
    model(torch.zeros(1, 1)).sum().backward()
    optimizer.step()


def ask(model: str, row: str, setting: Setting, threads: int) -> dict[str, int]:
    """Start a process for one method on one workload and read its answer.

    Raises:
        RuntimeError: the process failed.
    """
    words = ["--device", setting.device, "--precision", setting.precision, "--threads", str(threads)]
    words += ["--compile"] if setting.compiled else []
    line = [sys.executable, "-m", "benchmarks.memory", model, row, *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the memory of {row} on {model} could not be measured:\n{done.stderr}")
    figures: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(arguments: list[str]) -> None:
    """What the process does: import, look, train a few steps, look again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("model", choices=WORKLOADS)
    parser.add_argument("row")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    setting = Setting(options.device, options.precision, options.compile)
    row, work = METHODS[options.row], WORKLOADS[options.model]
    import_everything(work.package)
    print(json.dumps(used_by(lambda: start(row, work, setting, STEPS), setting)))


if __name__ == "__main__":
    main(sys.argv[1:])
