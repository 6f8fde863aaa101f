"""What pyright has to flag: a misuse that it let pass would leave its comment unnecessary, which is an error too."""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

import torch
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.trial import compare


def constructors(model: nn.Module, base: torch.optim.Optimizer, name: str) -> None:
    DCLOptimizer(model, base)  # pyright: ignore[reportArgumentType]
    DCLOptimizer(base)  # pyright: ignore[reportCallIssue]
    DCLOptimizer(base, model, 0.1)  # pyright: ignore[reportCallIssue]
    DCLOptimizer(base, model, lambda_=0.1)  # pyright: ignore[reportCallIssue]
    DCLOptimizer(base, model, weight="0.1")  # pyright: ignore[reportArgumentType]
    DCLOptimizer(base, model, alpha=lambda: 0.5)  # pyright: ignore[reportArgumentType]
    DCLOptimizer(base, model, distance=lambda z: z.mean())  # pyright: ignore[reportArgumentType]
    DCLOptimizer(base, model, distance="l2")  # pyright: ignore[reportArgumentType]
    DCLOptimizer(base, model, preset="paper")  # pyright: ignore[reportCallIssue]
    DCLOptimizer(base, model, update="rows")  # pyright: ignore[reportCallIssue]
    DCLOptimizer(base, model, companion=nn.Linear)  # pyright: ignore[reportArgumentType]
    DCLOptimizer(base, model, companion_optimizer=base)  # pyright: ignore[reportArgumentType]
    DCLOptimizer(base, model, class_dim=-1)  # pyright: ignore[reportCallIssue]
    DCPOptimizer(base, model, update="row")  # pyright: ignore[reportArgumentType]
    DCPOptimizer(base, model, num_classes="10")  # pyright: ignore[reportArgumentType]
    DCPOptimizer(base, model, 10)  # pyright: ignore[reportCallIssue]


def use(optimizer: DCLOptimizer, prototypes: DCPOptimizer, z: Tensor) -> None:
    optimizer.step(targets=z)  # pyright: ignore[reportCallIssue]
    prototypes.step(lambda: z, targets=z)  # pyright: ignore[reportCallIssue]
    optimizer.step(z)  # pyright: ignore[reportArgumentType]
    optimizer.companion = nn.Linear(1, 1)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.load_state_dict([])  # pyright: ignore[reportArgumentType]
    optimizer.penalty(z, z, -100)  # pyright: ignore[reportCallIssue]
    prototypes.penalty(z)  # pyright: ignore[reportCallIssue]
    prototypes.penalty(z, z, -100)  # pyright: ignore[reportCallIssue]
    compare(z)  # pyright: ignore[reportArgumentType]
    optimizer.zero_gard()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    print(optimizer.prototypes)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
