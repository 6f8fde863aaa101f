"""A script as a user writes it. Pyright, strict, may object to nothing but three functions of torch that lack types."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, multi_margin_loss
from torch.optim.lr_scheduler import CosineAnnealingLR

from dcl_optim import DCLOptimizer, DCPOptimizer, __version__
from dcl_optim.distances import kl
from dcl_optim.trial import accuracy, compare

CLASSES, FEATURES = 3, 8


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(32, FEATURES), torch.randint(CLASSES, (32,))


def plain_loop(path: Path) -> dict[str, float]:
    """The loop with a scheduler, and a checkpoint that a second optimizer goes on from."""
    model = network()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = DCLOptimizer(
        base, model, weight=lambda t: min(0.5, t / 20), alpha=lambda t: (t - 1) / t, companion_fraction=1
    )
    scheduler = CosineAnnealingLR(optimizer, T_max=5)
    for _ in range(5):
        x, y = batch()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # pyright: ignore[reportUnknownMemberType]
        optimizer.step()
        scheduler.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    optimizer.detach()
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    resumed = DCLOptimizer(base, model, companion_fraction=1)
    resumed.load_state_dict(checkpoint["optimizer"])
    return resumed.logs()


def closure_loop() -> float:
    """``step(closure)``, the term, and a distance, a companion and its optimizer of the script's own."""
    model = network()
    optimizer = DCLOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        weight=lambda step: min(1.0, step / 1000),
        distance=lambda z, c: kl(z, c, temperature=2.0),
        companion=network(),
        companion_optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3),
        logits=lambda output: output,
        companion_fraction=1,
    )
    x, y = batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        z: Tensor = model(x)
        loss = cross_entropy(z, y) + optimizer.penalty(z)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        return loss

    loss: Tensor = optimizer.step(closure)
    companion: nn.Module = optimizer.companion
    parameters = sum(parameter.numel() for parameter in companion.parameters())
    return loss.item() + optimizer.logs()["penalty"] + parameters


def prototypes() -> Tensor:
    """DCP from the two arguments alone; then with the penalty as a term."""
    model, criterion = network(), nn.CrossEntropyLoss()
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = DCPOptimizer(base, model)
    x, y = batch()
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    optimizer.detach()
    optimizer = DCPOptimizer(base, model, num_classes=CLASSES, weight=lambda t: min(0.1, t / 40))

    def closure() -> Tensor:
        optimizer.zero_grad()
        z: Tensor = model(x)
        loss = multi_margin_loss(z, y) + optimizer.penalty(z, y, ignore_index=0)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        return loss

    optimizer.step(closure)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    return optimizer.prototypes


def gains() -> list[float]:
    def train(weight: float, seed: int) -> float:
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        model = network()
        optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, weight=weight)
        x, y = batch()
        z: Tensor = model(x)
        loss = cross_entropy(z, y) + optimizer.penalty(z, y)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        optimizer.step()
        return accuracy(model, [(x, y)])

    return compare(train, {"plain": 0.0, "DCP": 1.0}, seeds=2).gains("DCP", "plain")


def main(folder: Path) -> None:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    print(__version__, plain_loop(folder / "checkpoint.pt"), closure_loop(), prototypes().shape, gains())
