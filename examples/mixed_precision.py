"""Autocast, gradient scaler, accumulation, clipping and a schedule, on scikit-learn's digits (seconds on a laptop).

python -m examples.mixed_precision --method dcp --dtype float16 --accumulate 4
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.trial import accuracy

BATCH = 64
TRAIN_SIZE = 1350  # of 1,797
DTYPES = ("float32", "bfloat16", "float16")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("plain", "dcp", "dcl"), default="dcp")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--accumulate", type=int, choices=(1, 2, 4, 8), default=1, help="backwards for one step")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    return images.float() / 16, labels


def train(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    device, dtype, parts = torch.device(options.device), getattr(torch, options.dtype), options.accumulate
    images, labels = digits()
    data = TensorDataset(images[:TRAIN_SIZE], labels[:TRAIN_SIZE])
    loader = DataLoader(data, BATCH // parts, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    criterion = nn.CrossEntropyLoss()

    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    if options.method == "dcp":
        optimizer = DCPOptimizer(optimizer, model)
    if options.method == "dcl":
        optimizer = DCLOptimizer(optimizer, model)

    steps = options.epochs * (len(loader) // parts)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    scaler = torch.amp.GradScaler(device.type, enabled=options.dtype == "float16")
    for _ in range(options.epochs):
        for count, (x, y) in enumerate(loader, start=1):
            with torch.autocast(device.type, dtype, enabled=options.dtype != "float32"):
                loss = criterion(model(x.to(device)), y.to(device)) / parts
            scaler.scale(loss).backward()
            if count % parts:
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() >= scale:  # a smaller scale says that the step was skipped
                scheduler.step()
    return model


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    model = train(options)
    images, labels = digits()
    print(f"test accuracy {accuracy(model, [(images[TRAIN_SIZE:], labels[TRAIN_SIZE:])]):.2f} %")


if __name__ == "__main__":
    main()
