"""What each process of a test of several runs: a small training by each method that processes share.

torchrun --nproc-per-node=2 -m examples.research.tests.paper_ranks FILES OUT
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from examples.research.configuration import Configuration
from examples.research.paper.images import load
from examples.research.paper.loop import Signals, train
from examples.research.paper.recipes import SETTINGS
from examples.research.paper.rows import Work
from examples.research.paper.session import Session, alone, connected
from examples.research.paper.training import Training

OURS = SETTINGS["package"]
METHODS = {
    "CE": ("plain", {}),
    "SAM": ("plain", {"rho": 0.05}),
    "DCL": ("dcl", OURS["dcl"]),
    "DCP": ("dcp", OURS["dcp"]),
}


def work(label: str) -> Work:
    """A training without batch norm, which sees the images of one process alone on a CPU."""
    method, options = METHODS[label]
    return Work(
        Configuration(
            "tiny-imagenet", "cnn-without-norm", method, 2, options, batch_size=8, lr=0.05, augmentation="basic"
        )
    )


def trained(session: Session) -> dict[str, Any]:
    """The weights of each method, and the losses of its epochs."""
    found: dict[str, Any] = {}
    for method in METHODS:
        one = Training(work(method), 0, session, load(work(method), session, 0))
        with Signals() as signals:
            train(one, session.out / f"{method}.pt", signals, lambda text: None)
        found[method] = {
            "weights": alone(one.method.main.network).state_dict(),
            "history": one.history,
            "losses": one.losses,
        }
    return found


if __name__ == "__main__":
    files, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    of_all = connected(partial(Session, data=files, out=out), "cpu")
    result = trained(of_all)
    if of_all.first:
        torch.save(result, out / "result.pt")
