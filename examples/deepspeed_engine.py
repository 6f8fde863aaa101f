"""DeepSpeed's engine with ZeRO: several processes, accumulation and a checkpoint, on scikit-learn's digits.

torchrun --nproc-per-node 2 -m examples.deepspeed_engine --stage 2 --dtype bfloat16
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dcl_optim import DCPOptimizer
from dcl_optim.trial import accuracy


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=range(4), default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/deepspeed"))
    options = parser.parse_args(arguments)
    deepspeed.init_distributed()
    torch.manual_seed(0)
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = (images / 16).to(getattr(torch, options.dtype))
    data = TensorDataset(images[:1350], labels[:1350])
    loader = DataLoader(data, 32, sampler=DistributedSampler(data), drop_last=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = DCPOptimizer(optimizer, model, process_group=dist.group.WORLD)
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": options.dtype == "bfloat16"},
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for epoch in range(20):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            z, y = engine(x.to(engine.device)), y.to(engine.device)
            engine.backward(nn.functional.cross_entropy(z.float(), y) + optimizer.penalty(z, y))
            engine.step()
    engine.save_checkpoint(str(options.checkpoint), tag="last")
    found = accuracy(engine, [(images[1350:], labels[1350:])])
    print(f"rank {dist.get_rank()}: {found:.1f} % of the test images, {optimizer.logs()}")
    return found


if __name__ == "__main__":
    main()
