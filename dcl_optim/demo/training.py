"""The demo's training: the same network from the same seed by plain SGD, label smoothing, DCP and DCL."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.demo.arguments import penalty_options
from dcl_optim.demo.digits import CLASSES, Images, load_digits, make_model, stratified_order
from dcl_optim.trial import accuracy
from dcl_optim.trial.memory import state_bytes
from dcl_optim.trial.progress import progress_of

METHODS = ("plain", "label smoothing", "DCP", "DCL")
COMPANION = "DCL's companion"  # a row with wrong labels
SHOWN = ("plain", "DCP", "DCL")  # beside the bar, which has 80 columns
BATCH_SIZE = 16

History = dict[str, Any]
Histories = dict[str, list[History]]  # for each method its runs


class Run:
    """One method's training from one seed, an epoch at a time."""

    def __init__(self, method: str, seed: int, train: Images, evaluation: Images, args: argparse.Namespace) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.model = make_model().to(args.device)
        smoothing = args.label_smoothing if method == "label smoothing" else 0.0
        self.criterion = nn.CrossEntropyLoss(label_smoothing=smoothing)
        self.optimizer = self._wrap(method, args)
        self.scheduler = CosineAnnealingLR(self.optimizer, args.epochs)
        self.train = train
        self.evaluation = evaluation
        self.history: History = {"seed": seed, "accuracy": [], "seconds": []}
        self.of_companion: list[float] = []  # its accuracies

    def _wrap(self, method: str, args: argparse.Namespace) -> Optimizer:
        base = SGD(self.model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
        options: dict[str, Any] = penalty_options(args)
        if method == "DCL":
            return DCLOptimizer(base, self.model, **options)
        if method == "DCP":
            return DCPOptimizer(base, self.model, num_classes=CLASSES, **options)
        return base

    def epoch(self) -> None:
        """Train one epoch and measure the model."""
        images, labels = self.train
        # Every method of a seed draws the same batches, whatever the others drew before it.
        epoch = len(self.history["seconds"])
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        order = torch.randperm(len(labels), generator=generator).to(labels.device)
        start = time.perf_counter()
        for batch in order.split(BATCH_SIZE):
            self.optimizer.zero_grad()
            self._loss(images[batch], labels[batch]).backward()
            self.optimizer.step()
        next(self.model.parameters()).flatten()[0].item()  # waits for the device
        self.history["seconds"].append(time.perf_counter() - start)
        self.scheduler.step()
        self._measure()

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch, with the penalty of the method."""
        logits = self.model(images)
        loss: Tensor = self.criterion(logits, labels)
        if isinstance(self.optimizer, DCPOptimizer):
            return loss + self.optimizer.penalty(logits, labels)
        if isinstance(self.optimizer, DCLOptimizer):
            return loss + self.optimizer.penalty(logits)
        return loss

    def _measure(self) -> None:
        self.model.eval()
        with torch.no_grad():
            images, labels = self.evaluation
            logits = self.model(images)
            self.history["accuracy"].append((logits.argmax(1) == labels).float().mean().item())
            if isinstance(self.optimizer, DCLOptimizer):
                self.of_companion.append(accuracy(self.optimizer.companion, [(images, labels)]) / 100)
            images, train_labels = self.train
            train_logits = self.model(images)
            finite = _finite(logits, labels) and _finite(train_logits, train_labels)
        self.history["diverged"] = not finite  # that of the last epoch stays
        self.model.train()

    def finish(self) -> History:
        """Return the history, with the parameters and bytes that the method adds to the model and its optimizer."""
        optimizer = self.optimizer
        companion = optimizer.companion.parameters() if isinstance(optimizer, DCLOptimizer) else ()
        self.history["parameters_added"] = sum(parameter.numel() for parameter in companion)
        self.history["bytes_added"] = state_bytes(optimizer)
        return self.history


def histories_of(runs: dict[str, Run], args: argparse.Namespace) -> dict[str, History]:
    """Return the finished histories, with wrong labels also that of the companion."""
    found = {method: run.finish() for method, run in runs.items()}
    if args.wrong_labels:
        found[COMPANION] = found["DCL"] | {"accuracy": runs["DCL"].of_companion}
    return found


def _with_wrong_labels(labels: Tensor, share: float, seed: int) -> Tensor:
    """Replace a share of the labels, as many in every seed, by other classes."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    found = labels.clone()
    found[wrong] = (labels[wrong] + torch.randint(1, CLASSES, wrong.shape, generator=generator)) % CLASSES
    return found


def _finite(logits: Tensor, labels: Tensor) -> bool:
    # Finite logits can overflow in the loss.
    return bool(logits.isfinite().all()) and math.isfinite(F.cross_entropy(logits, labels).item())


def train_seed(seed: int, args: argparse.Namespace, bar: Any) -> dict[str, History]:
    """Train all methods from one seed, alternating after every epoch so that a busy machine slows all of them.

    Args:
        seed: of the weights, the training images and the batches.
        args: the command line.
        bar: counts epochs: tqdm's bar, or lines.

    Returns:
        Each method's history.
    """
    pool, validation, test = load_digits()
    chosen = stratified_order(pool[1], seed)[: args.train_size]
    labels = _with_wrong_labels(pool[1][chosen], args.wrong_labels, seed)
    train = pool[0][chosen].to(args.device), labels.to(args.device)
    images, right_labels = validation if args.validation else test
    evaluation = images.to(args.device), right_labels.to(args.device)
    runs = {method: Run(method, seed, train, evaluation, args) for method in METHODS}
    for _ in range(args.epochs):
        for run in runs.values():
            run.epoch()
        last = {method: run.history["accuracy"][-1] for method, run in runs.items() if method in SHOWN}
        accuracies = ", ".join(f"{method} {100 * share:.1f}" for method, share in last.items())
        bar.set_postfix_str(f"seed {seed}, {accuracies} %")
        bar.update()
    return histories_of(runs, args)


def train_seeds(args: argparse.Namespace) -> Iterator[Histories]:
    """Train every seed; after each one yield the histories of all that are finished."""
    histories: Histories = {method: [] for method in METHODS}
    with progress_of("dcl-demo", args.seeds * args.epochs, "epochs") as bar:
        for seed in range(args.seeds):
            finished = train_seed(seed, args, bar)
            # New lists: what was yielded before does not change, with equally many runs of each method.
            histories = {method: [*histories.get(method, []), run] for method, run in finished.items()}
            yield histories
