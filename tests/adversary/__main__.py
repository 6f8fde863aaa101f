"""``python -m tests.adversary [seed]`` prints what was read of random losses, as docs/dev/reliability.md has it."""

import sys

import torch

from tests.adversary import SEED
from tests.adversary.losses import COUNTS, count
from tests.adversary.test_adversary import CASES

torch.set_num_threads(1)
seed, failed = int(sys.argv[1]) if len(sys.argv) > 1 else SEED, False
print(f"Seed {seed}:\n\n| loss | {' | '.join(COUNTS)} |\n| --- |{' --: |' * len(COUNTS)}")
for readable in (True, False):
    counts, faults = count(CASES, seed, readable)
    for kind, found in counts.items():
        print(f"| {kind} |", " | ".join(f"{found[name]:,}" for name in COUNTS), "|", flush=True)
    for case in faults:
        print(f"\n{case.script()}", file=sys.stderr)
    failed = failed or (readable and bool(faults))
sys.exit(failed)
