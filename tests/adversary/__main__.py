"""``python -m tests.adversary SEED`` runs what CI runs of a seed, and prints what was read of the losses."""

import sys

from tests.adversary.loops import check
from tests.adversary.losses import COUNTS, count
from tests.adversary.test_adversary import CASES, LOOPS

seed = int(sys.argv[-1])
print(f"| loss | {' | '.join(COUNTS)} |\n| --- |{' --: |' * len(COUNTS)}")
for readable in (True, False):
    counts, faults = count(CASES, seed, readable)
    for kind, found in counts.items():
        print(f"| {kind} |", " | ".join(f"{found[name]:,}" for name in COUNTS), "|", flush=True)
    print(*faults, sep="\n", file=sys.stderr)
for interrupted in (True, False):
    check(LOOPS, seed, interrupted)
