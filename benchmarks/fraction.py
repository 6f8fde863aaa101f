"""Time DCL with shares of the rows beside plain training, interleaved, in process time; and measure its peak memory.

python -m benchmarks.fraction cnn resnet18 --rounds 15 --steps 6
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch

from benchmarks.measure import import_everything, in_a_process, used_by
from benchmarks.methods import Build, companion_learning, plain, start
from benchmarks.workloads import WORKLOADS

FRACTIONS = (1.0, 0.5, 0.25)
PLAIN = "plain"
MEMORY_STEPS = 5
BUILDS: dict[str, Build] = {PLAIN: plain} | {
    f"{share:g}": partial(companion_learning, companion_fraction=share) for share in FRACTIONS
}


def times(model: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """The process time of some steps of each method, round by round."""
    trainings = {name: start(build, WORKLOADS[model], warm_up=3) for name, build in BUILDS.items()}
    found: dict[str, list[float]] = {name: [] for name in trainings}
    for number in range(rounds):
        for name in sorted(trainings, reverse=number % 2 == 1):
            begin = time.process_time()
            for _ in range(steps):
                trainings[name].step()
            found[name].append(time.process_time() - begin)
    return found


def memory(model: str, name: str) -> int:
    """The bytes that a few steps take at the peak, in a process of its own."""
    import_everything()
    return used_by(lambda: start(BUILDS[name], WORKLOADS[model], warm_up=MEMORY_STEPS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", choices=WORKLOADS, nargs="+")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each method in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for model in options.models:
        measured = times(model, options.rounds, options.steps)
        bytes_of = {name: in_a_process(memory, model, name) for name in BUILDS}
        for name in list(BUILDS)[1:]:
            ratios = [own / base for own, base in zip(measured[name], measured[PLAIN], strict=True)]
            least, median, most = statistics.quantiles(ratios, n=4)
            share = bytes_of[name] / bytes_of[PLAIN]
            times_plain = f"{median:.2f} ({least:.2f} to {most:.2f}) times plain"
            print(f"{model}, companion_fraction={name}: {times_plain}, peak memory {share:.2f}", flush=True)


if __name__ == "__main__":
    main()
