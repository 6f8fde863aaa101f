"""Where the trainings of a command run: the device, the processes, the folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PATIENCE = timedelta(days=1)  # that processes wait for the first one, which measures


@dataclass(frozen=True)
class Session:
    """Where the trainings run.

    Attributes:
        device: of this process.
        data: the folder of the data sets.
        out: the folder of checkpoints, weights, figures and results.
        workers: processes that load images.
        rank: number of this process.
        processes: how many share each batch.
        control: the group for decisions, on CPUs; None for one process.
        random_weights: begin with random weights instead of ImageNet's, to time a step.
        random_needs: begin with random weights instead of another training's, to try a step.
    """

    device: torch.device
    data: Path
    out: Path
    workers: int = 0
    rank: int = 0
    processes: int = 1
    control: Any = None
    random_weights: bool = False
    random_needs: bool = False

    @property
    def first(self) -> bool:
        """Whether this process measures, writes and reports."""
        return self.rank == 0

    def any(self, wish: bool) -> bool:
        """Whether any process wishes so; all get the same answer."""
        if self.control is None:
            return wish
        wishes = torch.tensor(int(wish))
        dist.all_reduce(wishes, dist.ReduceOp.MAX, group=self.control)
        return bool(wishes)

    def mean(self, value: float) -> float:
        """The mean of what the processes have."""
        if self.control is None:
            return value
        values = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(values, group=self.control)
        return float(values) / self.processes

    def wait(self) -> None:
        """Wait for the other processes."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def leave(self) -> None:
        """Part from the other processes."""
        if self.control is not None:
            dist.destroy_process_group()

    def parallel(self, network: nn.Module) -> nn.Module:
        """Let the processes train a network together; batch norm sees the whole batch where torch can do that."""
        if self.control is None:
            return network
        if self.device.type == "cuda":
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        return DistributedDataParallel(network)


def alone(network: nn.Module) -> nn.Module:
    """A network without what :meth:`Session.parallel` put around it."""
    inner: nn.Module = network.module if isinstance(network, DistributedDataParallel) else network
    return inner


def connected(make: Callable[..., Session], device: str) -> Session:
    """A session of all processes that torchrun started, or of this one alone."""
    if "LOCAL_RANK" not in os.environ:
        return make(device=torch.device(device))
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=PATIENCE)
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    return make(device=place, rank=dist.get_rank(), processes=dist.get_world_size(), control=control)
