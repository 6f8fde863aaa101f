"""Training by DeepSpeed's engine on a CPU: by the wrapper, and with the penalty written into the loss.

Processes of their own run this, since DeepSpeed keeps settings in globals.
"""

import logging
import os
import re
from itertools import product
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_fp32_param

from dcl_optim import DCLOptimizer, DCPOptimizer
from examples import deepspeed_engine
from tests.helpers import CLASSES, all_warnings, batches, matrices_and_others, mlp

STEPS, WEIGHT, ALPHA = 6, 0.5, 0.97
deepspeed.comm.torch.build_shm_op = lambda: None  # it would be compiled, for a minute; gloo reduces instead
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


class Prototypes:
    """DCP as dcl_optim/reference.py has it, with the sums over the ranks."""

    def __init__(self):
        self.values = torch.zeros(CLASSES, CLASSES)
        self.numbers = torch.zeros(CLASSES)
        self.batches = []

    def penalty(self, logits, y):
        z = logits.float()
        self.batches.append((z.detach(), y))
        radius = CLASSES / 2**0.5
        norms = torch.linalg.vector_norm(z - self.values[y], dim=1)
        near = norms.clamp(max=radius)
        distances = near * (2 * norms - near) / CLASSES
        return WEIGHT * (distances * self.numbers[y].clamp(0, 1)).sum() / len(y)

    @torch.no_grad()
    def step(self):
        z, y = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        rows = torch.bincount(y, minlength=CLASSES).float()
        moved = torch.zeros(CLASSES, CLASSES).index_add_(0, y, z - self.values[y])
        dist.all_reduce(rows)
        dist.all_reduce(moved)
        self.numbers = torch.where(rows > 0, ALPHA * self.numbers + rows, self.numbers)
        self.values += torch.where(rows > 0, 1 / self.numbers, 0.0)[:, None] * moved
        self.batches = []


def parameters(model, groups):
    """One group, or as most recipes have them: with weight decay, and biases without."""
    if groups == 1:
        return model.parameters()
    weights, biases = matrices_and_others(model)
    return [{"params": weights, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0.0}]


class Run:
    """An engine with its model, trained by the base alone, by the wrapper (line, term), or by hand."""

    def __init__(self, stage, dtype, way, groups=2, parts=1, clip=0.0, **options):
        self.stage, self.dtype, self.way, self.parts = stage, dtype, way, parts
        self.zero = options.pop("zero", {})
        self.model = mlp(dtype=torch.float32)
        optimizer = torch.optim.SGD(parameters(self.model, groups), lr=0.2, momentum=0.9)
        self.hand = Prototypes()
        if way in ("line", "term"):
            method = options.pop("method", DCPOptimizer)
            settings = {"weight": WEIGHT, "process_group": dist.group.WORLD} | options
            optimizer = method(optimizer, self.model, **settings)
        self.optimizer = optimizer
        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=self.config(clip))

    def config(self, clip):
        config = {
            "train_micro_batch_size_per_gpu": 16 // dist.get_world_size() // self.parts,
            "gradient_accumulation_steps": self.parts,
            "zero_optimization": {"stage": self.stage} | self.zero,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            "gradient_clipping": clip,
        }
        return config | ({"bf16": {"enabled": True, "check_grad_overflow": True}} if self.dtype == "bf16" else {})

    def train(self, first=0, last=STEPS, overflows=None):
        """Train on some of the batches. In one of them gradients may overflow: then nothing may learn from it."""
        for number, (x, y) in enumerate(batches(STEPS, dtype=torch.float32)):
            if first <= number < last:
                self.step(*(part.chunk(dist.get_world_size())[dist.get_rank()] for part in (x, y)), number == overflows)
        return self

    def step(self, x, y, overflows):
        x = x.bfloat16() if self.dtype == "bf16" else x
        parameter = next(self.model.parameters())
        handle = parameter.register_hook(lambda gradient: gradient * float("inf")) if overflows else None
        for inputs, labels in zip(x.chunk(self.parts), y.chunk(self.parts), strict=True):
            z = self.engine(inputs)
            self.engine.backward(F.cross_entropy(z.float(), labels) + self.term(z, labels))
            self.engine.step()
        if handle is not None:
            handle.remove()
            assert self.engine.skipped_steps == 1
            self.hand.batches = []
        elif self.way == "hand":
            self.hand.step()

    def term(self, z, y):
        """The penalty, where the script adds it."""
        if self.way == "hand":
            return self.hand.penalty(z, y)
        if self.way != "term":
            return 0.0
        return self.optimizer.penalty(z) if isinstance(self.optimizer, DCLOptimizer) else self.optimizer.penalty(z, y)

    def weights(self):
        parts = [safe_get_full_fp32_param(p) if self.stage == 3 else p for p in self.model.parameters()]
        return torch.cat([part.detach().float().flatten() for part in parts])

    def end(self):
        """What it has come to."""
        if self.way == "hand":
            return {"weights": self.weights(), "prototypes": self.hand.values.clone()}
        if self.way == "base":
            return {"weights": self.weights()}
        logs = {name: self.optimizer.logs()[name] for name in ("step", "skipped", "penalty")}
        return {"weights": self.weights(), "prototypes": self.optimizer.prototypes, "logs": logs}


def resumed(folder, *settings):
    """Train half of the batches, save, load in a run that has just begun, and train the other half."""
    Run(*settings).train(last=3).engine.save_checkpoint(str(folder), tag="half")
    run = Run(*settings)
    run.engine.load_checkpoint(str(folder), tag="half")
    return run.train(first=3).end()


def warnings_of(**options):
    """What is said of the ranks where a run begins."""
    with all_warnings() as caught:
        Run(1, "fp32", "term", **options).train(last=3)
    return [str(warning.message) for warning in caught if "process_group" in str(warning.message)]


def companion(stage, dtype, way):
    """Train by DCL, or give the error."""
    try:
        run = Run(stage, dtype, way, method=DCLOptimizer, alpha=0.9, companion_fraction=1).train()
    except ValueError as error:
        return str(error)
    return {"weights": run.weights(), "companion": run.optimizer.companion.state_dict()}


def cells(folder):
    """All runs, by name."""
    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            yield from of_stage(stage, dtype, folder)
        yield f"{stage} line", Run(stage, "fp32", "line").train().end()
        for way in ("hand", "term"):
            yield f"{stage} parts {way}", Run(stage, "fp32", way, parts=2, clip=0.5).train().end()
        zero = {"offload_optimizer": {"device": "cpu"}} if stage < 3 else {"sub_group_size": 20}
        yield f"{stage} further", Run(stage, "fp32", "term", zero=zero).train().end()
        for way in ("hand", "line", "term") if stage else ():  # stage 0 in float32 has no overflow
            yield f"{stage} overflow {way}", Run(stage, "bf16", way).train(overflows=2).end()
    yield "warnings auto", warnings_of(process_group="auto")
    yield "warnings none", warnings_of(process_group=None)
    yield "warnings given", warnings_of()


def of_stage(stage, dtype, folder):
    name = f"{stage} {dtype}"
    for groups, way in product((1, 2), ("hand", "term")):
        yield f"{name} {groups} {way}", Run(stage, dtype, way, groups).train().end()
    for way, options in (("base", {}), ("term", {"weight": 0})):
        yield f"{name} weight 0 {way}", Run(stage, dtype, way, **options).train().end()
    yield f"{name} resumed", resumed(folder / name, stage, dtype, "term")
    for way in ("line", "term"):
        yield f"{name} dcl {way}", companion(stage, dtype, way)


def worker(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    found = dict(cells(folder))
    if rank == 0:
        torch.save(found, folder / "found.pt")


def run_scripts(rank, folder):
    """Run the script of docs/frameworks.md, and the example."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(# train.py\nimport deepspeed\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    names = {}
    exec(script, names)
    accuracy = deepspeed_engine.main(["--dtype", "bfloat16", "--checkpoint", str(folder / "checkpoint")])
    if rank == 0:
        torch.save({"logs": names["optimizer"].logs(), "accuracy": accuracy}, folder / "found.pt")
