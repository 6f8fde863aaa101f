"""``python -m tests.adversary [seed]`` prints what was read of random losses, as docs/reliability.md has it."""

import sys
from collections import Counter

import torch

from tests.adversary import SEED
from tests.adversary.losses import COUNTS, KINDS, count
from tests.adversary.test_adversary import CASES

torch.set_num_threads(1)
seed = int(sys.argv[1]) if len(sys.argv) > 1 else SEED
print(f"Seed {seed}:\n\n| loss | {' | '.join(COUNTS)} |\n| --- |{' --: |' * len(COUNTS)}")
totals, faults = {True: Counter[str](), False: Counter[str]()}, []
for kind, loss in KINDS.items():
    found, wrong = count(kind, CASES, seed)
    totals[loss.readable].update(found)
    faults += wrong
    print(f"| {kind} |", " | ".join(f"{found[name]:,}" for name in COUNTS), "|")
for readable, found in totals.items():
    name = "all that can be read" if readable else "all others"
    print(f"| **{name}** |", " | ".join(f"{found[name]:,}" for name in COUNTS), "|")
print("".join(f"\n{case.script()}" for case in faults), end="")
sys.exit(bool(faults))
