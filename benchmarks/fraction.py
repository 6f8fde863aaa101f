"""Time DCL with shares of the rows beside plain training, interleaved, in process time; and measure its peak memory.

python -m benchmarks.fraction cnn resnet18 --rounds 15 --steps 6
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from benchmarks.measure import import_everything, in_a_process, used_by
from benchmarks.methods import Build, companion_learning, plain, start
from benchmarks.workloads import WORKLOADS
from dcl_optim.trial.timing import interleaved, ratios

FRACTIONS = (1.0, 0.5, 0.25)
PLAIN = "plain"
MEMORY_STEPS = 5
BUILDS: dict[str, Build] = {PLAIN: plain} | {
    f"{share:g}": partial(companion_learning, companion_fraction=share) for share in FRACTIONS
}


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
        takes = {name: start(build, WORKLOADS[model], warm_up=3).step for name, build in BUILDS.items()}
        times = interleaved(takes, options.rounds, options.steps)
        bytes_of = {name: in_a_process(memory, model, name) for name in BUILDS}
        for name in list(BUILDS)[1:]:
            ratio = ratios(times[name], times[PLAIN])
            share = bytes_of[name] / bytes_of[PLAIN]
            times_plain = f"{ratio['median']:.2f} ({ratio['lower']:.2f} to {ratio['upper']:.2f}) times plain"
            print(f"{model}, companion_fraction={name}: {times_plain}, peak memory {share:.2f}", flush=True)


if __name__ == "__main__":
    main()
