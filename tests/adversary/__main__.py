"""``python -m tests.adversary SEED`` runs what CI runs of a seed, and prints what was read of the losses.

``python -m tests.adversary fitting SEED`` trains in half precision until the model fits, once in each setting.
"""

import sys

from tests.adversary import fitting
from tests.adversary.loops import check
from tests.adversary.losses import COUNTS, count
from tests.adversary.test_adversary import CASES, LOOPS

seed = int(sys.argv[-1])
if sys.argv[1] == "fitting":
    fitting.explore(seed)
    sys.exit()
print(f"| loss | {' | '.join(COUNTS)} |\n| --- |{' --: |' * len(COUNTS)}")
for readable in (True, False):
    counts, faults = count(CASES, seed, readable)
    for kind, found in counts.items():
        print(f"| {kind} |", " | ".join(f"{found[name]:,}" for name in COUNTS), "|", flush=True)
    print(*faults, sep="\n", file=sys.stderr)
for interrupted in (True, False):
    check(LOOPS, seed, interrupted)
