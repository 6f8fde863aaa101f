"""Several processes, each with its part of every batch: DistributedDataParallel with a checkpoint after each epoch.

    torchrun --nproc-per-node 2 -m examples.distributed --epochs 5
    torchrun --nproc-per-node 2 -m examples.distributed --epochs 10 --resume

One process per GPU (nccl) where there are enough, else on the CPU (gloo). With as many processes as before, a resumed
run ends where an uninterrupted one does, on a CPU to the last bit.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.trial import accuracy


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("plain", "dcp", "dcl"), default="dcp")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/distributed.pt"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    return parser.parse_args(arguments)


def connect() -> torch.device:
    """Join the other processes; torchrun has told each its number."""
    local, processes = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= processes:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


class Run:
    """One process's part of the training."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        self.options, self.device, self.epoch = options, device, 0
        images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
        images = images.float() / 16
        self.test = [(images[1350:], labels[1350:])]
        data = TensorDataset(images[:1350], labels[:1350])
        self.sampler = DistributedSampler(data, shuffle=True, drop_last=True)
        self.loader = DataLoader(data, 32, sampler=self.sampler)  # in each process
        network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
        self.model = DistributedDataParallel(network)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if options.method == "dcp":
            optimizer = DCPOptimizer(optimizer, self.model)
        if options.method == "dcl":
            optimizer = DCLOptimizer(optimizer, self.model)
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def train_epoch(self) -> None:
        self.sampler.set_epoch(self.epoch)  # another order each epoch, and the same one in a resumed run
        for x, y in self.loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x.to(self.device)), y.to(self.device)).backward()
            self.optimizer.step()
        self.scheduler.step()
        self.epoch += 1

    def save(self) -> None:
        parts = {"model": self.model.module, "optimizer": self.optimizer, "scheduler": self.scheduler}
        state = {name: part.state_dict() for name, part in parts.items()}
        self.options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state | {"epoch": self.epoch}, self.options.checkpoint)

    def resume(self) -> None:
        state = torch.load(self.options.checkpoint, map_location=self.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.module.load_state_dict(state["model"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch = state["epoch"]


def train(options: argparse.Namespace, device: torch.device) -> Run:
    run = Run(options, device)
    if options.resume:
        run.resume()
    while run.epoch < options.epochs:
        run.train_epoch()
        if dist.get_rank() == 0:  # all ranks hold the same, the companion too
            run.save()
            print(f"epoch {run.epoch}: test accuracy {accuracy(run.model.module, run.test):.2f} %", flush=True)
    return run


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if not dist.is_torchelastic_launched():
        sys.exit("start it by: torchrun --nproc-per-node 2 -m examples.distributed")
    train(options, connect())
    dist.barrier()  # a rank that leaves early can break the others' last reduction
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
