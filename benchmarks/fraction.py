"""Time DCL with shares of the rows beside plain training, interleaved, in process time.

python -m benchmarks.fraction cnn --rounds 15 --steps 6
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch

from benchmarks.methods import Build, companion_learning, plain, start
from benchmarks.workloads import WORKLOADS

FRACTIONS = (1.0, 0.5, 0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each method in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    builds: dict[str, Build] = {"plain": plain}
    builds |= {f"{share:g}": partial(companion_learning, companion_fraction=share) for share in FRACTIONS}
    trainings = {name: start(build, WORKLOADS[options.model], warm_up=3) for name, build in builds.items()}
    times: dict[str, list[float]] = {name: [] for name in trainings}
    for number in range(options.rounds):
        for name in sorted(trainings, reverse=number % 2 == 1):
            begin = time.process_time()
            for _ in range(options.steps):
                trainings[name].step()
            times[name].append(time.process_time() - begin)
    for share in list(trainings)[1:]:
        ratios = [own / base for own, base in zip(times[share], times["plain"], strict=True)]
        least, median, most = statistics.quantiles(ratios, n=4)
        print(f"{options.model}, companion_fraction={share}: {median:.2f} ({least:.2f} to {most:.2f}) times plain")


if __name__ == "__main__":
    main()
