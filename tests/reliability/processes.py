"""Processes that start within milliseconds, from a server that has imported everything, and end at once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

LOADED = ["pytest", "tqdm", "sklearn.datasets", "dcl_optim", "torch.utils.data", "torch.optim.lr_scheduler"]
LOADED += ["tests.reliability.savers", "tests.reliability.long_run", "torch._dynamo"]


def server() -> ForkServerContext:
    """The context to start processes from; its server starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context
