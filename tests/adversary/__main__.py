"""``python -m tests.adversary SEED`` runs what CI runs of a seed, and prints what was read of the losses.

``python -m tests.adversary fitting SEED`` runs all trainings of a seed until the model fits, and prints what was read.
"""

import sys
from collections import Counter

from tests.adversary import fitting
from tests.adversary.loops import check
from tests.adversary.losses import COUNTS, count
from tests.adversary.test_adversary import CASES, LOOPS


def show(counts, names):
    for kind, found in counts.items():
        print(f"| {kind} |", " | ".join(f"{found[name]:,}" for name in names), "|", flush=True)


def head(what, names):
    print(f"| {what} | {' | '.join(names)} |\n| --- |{' --: |' * len(names)}")


seed = int(sys.argv[-1])
if "fitting" in sys.argv:
    head("setting", fitting.COUNTS)
    trainings = fitting.count(seed)
    show(trainings | {"**all**": sum(trainings.values(), Counter())}, fitting.COUNTS)
    sys.exit()
head("loss", COUNTS)
for readable in (True, False):
    counts, faults = count(CASES, seed, readable)
    show(counts, COUNTS)
    print(*faults, sep="\n", file=sys.stderr)
for interrupted in (True, False):
    check(LOOPS, seed, interrupted)
