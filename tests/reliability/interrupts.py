"""Press Ctrl-C in overlapped training, at random moments: ``python -m tests.reliability.interrupts 10000``.

A timer's signal handler raises in the main thread, and the loop goes on with the next batch, as in a notebook.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
import threading
from typing import Any

import torch
import torch.nn.functional as F

from tests.helpers import batches, mlp, wrap
from tests.test_executors import use_an_executor

HANGS_AFTER = 300  # seconds


class Interrupt(BaseException):
    pass


def strike(*signal_and_frame: Any) -> None:
    raise Interrupt


def training(count: int, seed: int) -> int:
    """Interrupt steps of training and single executors in turn; return how many struck."""
    chance, struck, step = random.Random(seed), 0, 0
    model = mlp()
    optimizer = wrap(model, overlap=True, strict=False)
    data = list(batches(8))
    previous = signal.signal(signal.SIGALRM, strike)
    try:
        while struck < count:
            step += 1
            if step % 100 == 1:
                faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
            x, y = data[step % len(data)]
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 3e-3))
                if step % 2:  # so that more of the interrupts strike in it
                    use_an_executor()
                else:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                struck += 1
                torch.set_grad_enabled(True)  # an interrupt inside no_grad may have left it off
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()
    optimizer.zero_grad()
    F.cross_entropy(model(data[0][0]), data[0][1]).backward()
    optimizer.step()
    optimizer.detach()
    return struck


def main(count: int, seeds: int = 5) -> None:
    torch.set_num_threads(2)
    sys.unraisablehook = lambda error: None  # interrupts in `__del__`, which Python drops
    struck = sum(training(count // seeds, seed) for seed in range(seeds))
    left = [thread for thread in threading.enumerate() if thread.name.startswith("dcl_optim")]
    print(f"{struck} interrupts, {len(left)} threads left, {torch.get_num_threads()} intra-op threads")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
