"""Small models, batches and comparisons that the tests share."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer

CLASSES, FEATURES = 5, 6


def mlp(seed: int = 0, width: int = 12, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES)).to(dtype)


def batch_norm_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, CLASSES))
    return nn.Sequential(*layers).double()


def dropout_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, CLASSES)).double()


MODELS = {"mlp": mlp, "batch_norm": batch_norm_net, "dropout": dropout_net}


def batches(
    steps: int, size: int = 16, seed: int = 1, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches for the same seed, independent of torch's global stream."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        yield x, torch.randint(CLASSES, (size,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, loss: Any = F.cross_entropy) -> None:
    """The plain loop, as every script has it."""
    for x, y in data:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | options))


def wrap(model: nn.Module, **options: Any) -> DCLOptimizer:
    return DCLOptimizer(sgd(model), model, **options)


def one(x_seed: int = 1) -> tuple[Tensor, Tensor]:
    """A single batch."""
    return next(iter(batches(1, seed=x_seed)))


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


def assert_same(first: Any, second: Any, **tolerance: float) -> None:
    """Compare two modules' or two nested states' tensors: bit for bit without a tolerance."""
    if isinstance(first, nn.Module):
        first, second = first.state_dict(), second.state_dict()
    if isinstance(first, Tensor):
        if tolerance:
            torch.testing.assert_close(first, second, **{"rtol": 0.0, "atol": 0.0} | tolerance)
        else:
            assert torch.equal(first, second), (first - second).abs().max()
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same(first[key], second[key], **tolerance)
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_same(a, b, **tolerance)
    else:
        assert first == second


def on_two_ranks(function: Callable[..., None], folder: Path, *args: Any) -> None:
    """Call function(rank, folder, *args) in two processes that are joined by gloo."""
    mp.spawn(_rank, (function, str(folder), args), nprocs=2)


def _rank(rank: int, function: Callable[..., None], folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    function(rank, Path(folder), *args)
    dist.barrier()  # a rank that leaves early can break the other's last reduction
    dist.destroy_process_group()
    # gloo's threads outlive the group where DDP was in it, and now and then abort the interpreter's exit, with any
    # optimizer (pytorch#179291)
    os._exit(0)
