"""What a training costs before it starts: the time of a step, measured, and the memory and disk that it takes."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.table import processor
from examples.research.configuration import Configuration
from examples.research.datasets.base import steps_per_epoch
from examples.research.datasets.listings import SIZES
from examples.research.methods import METHODS
from examples.research.networks.vision import LARGE
from examples.research.paper.images import Blank
from examples.research.paper.rows import Work
from examples.research.paper.session import Session, alone
from examples.research.paper.training import Training
from examples.research.records import fingerprint

STEPS = 10  # that are timed,
SECONDS = 1.0  # or as many as take so long
ON_GPU, LARGE_ON_GPU, ON_CPU = 128, 32, 4  # images of a timed batch; others are counted in proportion
LIKE = {32: "cifar100", 64: "tiny-imagenet", 224: "imagenet"}  # data of the same size, as the classes hardly matter


@dataclass(frozen=True)
class Price:
    """What a plain step of a network takes.

    Attributes:
        seconds: for an image.
        activations: bytes that the forward pass of an image keeps for the backward pass.
        weights: bytes of the network's parameters.
        slots: how many further numbers the optimizer keeps for each.
    """

    seconds: float
    activations: int
    weights: int
    slots: int


def price(work: Work, session: Session) -> Price:
    """Time plain steps of a training's network on random images, once for a device, and count bytes."""
    plain = _plain(work)
    path = session.out / "speed" / f"{fingerprint([plain.as_dict(), machine(session), torch.__version__])}.json"
    if path.exists():
        return Price(**json.loads(path.read_text()))
    found = _measured(plain, session)
    gc.collect()  # the hooks of a network refer to it
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(vars(found)))
    return found


def hours(work: Work, session: Session) -> float:
    """The time of a whole training, of the steps alone."""
    images = steps(work) * work.configuration.batch_size
    return price(work, session).seconds * passes(work) * images / session.processes / 3600


def steps(work: Work) -> int:
    """How many steps a training of the whole data set has."""
    chosen = work.configuration
    count = work.details["steps"] * chosen.batch_size if work.task == "fixmatch" else SIZES[chosen.data][1]
    return chosen.epochs * steps_per_epoch(count, chosen.batch_size)


def passes(work: Work) -> float:
    """How many plain steps one step takes: forward and backward passes in theory, a forward pass being a third."""
    method, options = work.configuration.method, work.configuration.options
    if "estimators" in options and method != "snapshot":
        return float(options["estimators"])
    return METHODS[method].cost + (1.0 if options.get("rho") else 0.0)


def memory(work: Work, session: Session) -> int:
    """Bytes on the device: weights, their gradients and the optimizer's, and the activations of a process's images."""
    found, method = price(work, session), work.configuration.method
    together = 2 if method in ("dcl", "dml") else 1  # networks whose activations are there at one time
    images = together * work.configuration.batch_size / session.processes
    memory = int(found.weights * (2 + found.slots) * _networks(work) + found.activations * images)
    if method == "saf":
        classes, count, _ = SIZES[work.configuration.data]
        memory += 3 * 4 * classes * count
    return memory


def disk(work: Work, session: Session) -> int:
    """Bytes of a checkpoint."""
    found = price(work, session)
    return int(found.weights * (1 + found.slots) * _networks(work))


def _networks(work: Work) -> int:
    options, method = work.configuration.options, work.configuration.method
    return int(options.get("estimators", 2 if method in ("dcl", "dml", "ps-kd") or work.task == "fixmatch" else 1))


def _plain(work: Work) -> Work:
    """The training without its method, and with a fixed value for what hardly changes the time of an image."""
    chosen = work.configuration
    fixed = {"method": "plain", "options": {}, "epochs": 1000, "lr": 0.0, "weight_decay": 0.0, "augmentation": None}
    plain = replace(chosen, **fixed, data=LIKE[Blank(chosen.data).shape[1]], batch_size=1)
    details = {**work.details, "labels": 40} if work.task == "fixmatch" else work.details
    needs = work.needs if work.task == "distill" else None
    return replace(work, configuration=plain, details=details, pretrained=False, needs=needs)


def _measured(plain: Work, session: Session) -> Price:
    chosen: Configuration = plain.configuration
    on_gpu = LARGE_ON_GPU if Blank(chosen.data).shape[1] >= LARGE else ON_GPU
    batch = on_gpu if session.device.type == "cuda" else ON_CPU
    blank = Blank(chosen.data)
    lonely = replace(session, rank=0, processes=1, control=None, random_weights=True, random_needs=True)
    training = Training(replace(plain, configuration=replace(chosen, batch_size=batch)), 0, lonely, blank)
    method, network = training.method, training.method.main.network
    network.train()
    x, y, index = _batch(plain, blank, batch)
    x, y = training._moved(x), y.to(session.device)
    kept: list[int] = []
    weights = {p.data_ptr() for p in network.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        method.step(x, y, index)
    begin, count = _now(session), 0
    while count < STEPS and _now(session) - begin < SECONDS:
        method.step(x, y, index)
        count += 1
    seconds = (_now(session) - begin) / count
    size = sum(p.numel() * p.element_size() for p in alone(network).parameters())
    return Price(seconds / batch, sum(kept) // batch, size, 1 if chosen.optimizer == "sgd" else 2)


def _batch(plain: Work, blank: Blank, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    views = 1 + 2 * plain.details["ratio"] if plain.task == "fixmatch" else 1
    x, y = blank.batch(batch * views)
    return x, y[:batch], torch.arange(batch)


def _now(session: Session) -> float:
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    return time.perf_counter()


def machine(session: Session) -> str:
    """The name of what the steps are timed on."""
    return torch.cuda.get_device_name(session.device) if session.device.type == "cuda" else processor()
