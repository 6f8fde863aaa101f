"""Print what a step sends to the other ranks, by the number of classes: python -m benchmarks.ranks

Calls and bytes of the reductions are counted in a fake process group, in which they do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer

CLASSES = (10, 100, 1_000, 10_000)
NETWORKS = {"ResNet-50": torchvision.models.resnet50, "ViT-B/16": torchvision.models.vit_b_16}
STEPS = 3  # the last one is counted: in the first one the companions are made equal
HEADER = "| K | DCP: calls | MB | of ResNet-50's gradient | of ViT-B/16's | DCL: calls | of the model's gradient |"


def bytes_of(model: nn.Module) -> int:
    """The bytes of a model's gradient."""
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


@contextmanager
def fake_ranks(number: int) -> Iterator[list[int]]:
    """A process group of a number of ranks; a list of the bytes of each reduction in it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes: list[int] = []

    def all_reduce(tensor: Tensor, *arguments: Any, **options: Any) -> None:
        sizes.append(tensor.numel() * tensor.itemsize)

    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        with mock.patch.object(dist, "all_reduce", all_reduce):
            yield sizes
    finally:
        dist.destroy_process_group()


def reductions(method: type[DCLOptimizer | DCPOptimizer], num_classes: int, ranks: int) -> tuple[list[int], int]:
    """The bytes of each reduction in one step of a linear model, and those of its gradient."""
    with fake_ranks(ranks) as sizes:
        model = nn.Linear(8, num_classes)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = method(base, model, process_group=dist.group.WORLD)
        for _ in range(STEPS):
            sizes.clear()
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(16, 8)), torch.randint(num_classes, (16,))).backward()
            optimizer.step()
        return list(sizes), bytes_of(model)


def rounded(value: float) -> str:
    """Two digits that count, and all before the point."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def row(num_classes: int) -> str:
    """One line of the table; the calls and bytes that a rank hands over do not depend on their number."""
    of_dcp, _ = reductions(DCPOptimizer, num_classes, ranks=2)
    of_dcl, gradient = reductions(DCLOptimizer, num_classes, ranks=2)
    with torch.device("meta"):
        shares = [sum(of_dcp) / bytes_of(network(num_classes=num_classes)) for network in NETWORKS.values()]
    figures = [f"{num_classes:,}", len(of_dcp), rounded(sum(of_dcp) / 1e6)]
    figures += [f"{rounded(100 * share)} %" for share in shares]
    figures += [len(of_dcl), f"{rounded(100 * sum(of_dcl) / gradient)} %"]
    return "| " + " | ".join(map(str, figures)) + " |"


def table() -> str:
    """The table of docs/scale.md."""
    return "\n".join([HEADER, "| --: " * HEADER.count(" |") + "|", *map(row, CLASSES)])


if __name__ == "__main__":
    torch.manual_seed(0)
    print(table())
