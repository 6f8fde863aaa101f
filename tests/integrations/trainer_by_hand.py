"""What Trainer does, written out in plain PyTorch: its micro-batches, factors on the loss, clipping and schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, default_data_collator, get_constant_schedule

from tests.integrations import wrap
from tests.integrations.huggingface import arguments

Batch = dict[str, Tensor]
Step = tuple[list[Batch], Tensor]  # the micro-batches of an update, and the random state that it starts from

# Third parties' own: pinned memory without a GPU, and what transformers and peft say to each other.
QUIET = (
    "ignore:'pin_memory' argument is set as true:UserWarning",
    "ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)


class Tape(TrainerCallback):
    """Collates, and keeps each update's micro-batches and random state, so that a loop by hand can repeat them."""

    def __init__(self, size: int = 4) -> None:
        self._size, self._fetched, self.steps = size, [], []

    def __call__(self, rows: list[Batch]) -> Batch:
        batch = default_data_collator(rows)
        if len(rows) == self._size:  # an evaluation's batches have another size
            self._fetched.append(batch)
        return dict(batch)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(torch.get_rng_state())

    def updates(self, parts: int, epoch: int) -> list[Step]:
        """An epoch's last update takes what is left."""
        groups: list[list[Batch]] = []
        for start in range(0, len(self._fetched), epoch):
            batches = self._fetched[start : start + epoch]
            groups += [batches[i : i + parts] for i in range(0, len(batches), parts)]
        return list(zip(groups, self.steps, strict=True))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def wrapped(method: str, model: nn.Module, **options: Any) -> Any:
    return wrap(method, sgd(model), model, **options)


def train(
    folder: Any,
    model: nn.Module,
    optimizer: Any,
    data: Any,
    tape: Tape | None = None,
    kind: type[Trainer] = Trainer,
    **settings: Any,
) -> Trainer:
    """A user's script: only ``optimizer`` is ours."""
    tape = tape or Tape()
    resume, keywords = settings.pop("resume", None), settings.pop("trainer", {})
    trainer = kind(
        model,
        arguments(folder, **settings),
        data_collator=tape,
        train_dataset=data,
        optimizers=(optimizer, None),
        callbacks=[tape],
        **keywords,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def items_of(batches: list[Batch]) -> Tensor:
    """Trainer's ``num_items_in_batch``: a language model's first word is not predicted."""
    labels = [batch["labels"] for batch in batches]
    return sum((part[..., 1:] if part.ndim > 1 else part).ne(-100).sum() for part in labels)


def loss_inside(model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
    return model(**batch, num_items_in_batch=items).loss


def repeat(
    model: nn.Module,
    optimizer: Any,
    updates: list[Step],
    *,
    loss_of: Callable[[nn.Module, Batch, Tensor], Tensor] = loss_inside,
    clip: float | None = None,
    scheduler: Any = None,
    autocast: bool = False,
) -> Any:
    """Trainer's loop around an optimizer of ours."""
    scheduler = scheduler or get_constant_schedule(optimizer)
    model.train()
    for batches, state in updates:
        torch.set_rng_state(state)
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = loss_of(model, batch, items_of(batches))
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return optimizer
