"""What Trainer does, written out in plain PyTorch: its micro-batches, factors on the loss, clipping and schedule."""

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, default_data_collator

from tests.integrations import wrap
from tests.integrations.huggingface import ROWS, arguments

# Third parties' own: pinned memory without a GPU, and what transformers and peft say to each other.
QUIET = (
    "ignore:'pin_memory' argument is set as true:UserWarning",
    "ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)


class Tape(TrainerCallback):
    """Collates, and keeps each update's micro-batches and random state, so that a loop by hand can repeat them."""

    def __init__(self):
        self._fetched, self.steps = [], []

    def __call__(self, rows):
        batch = default_data_collator(rows)
        if len(rows) == ROWS:  # an evaluation's batches have another size
            self._fetched.append(batch)
        return dict(batch)

    def on_step_begin(self, *args, **kwargs):
        self.steps.append(torch.get_rng_state())

    def updates(self, parts, epoch):
        """An epoch's last update takes what is left."""
        groups = []
        for start in range(0, len(self._fetched), epoch):
            batches = self._fetched[start : start + epoch]
            groups += [batches[i : i + parts] for i in range(0, len(batches), parts)]
        return list(zip(groups, self.steps, strict=True))


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def wrapped(method, model, **options):
    return wrap(method, sgd(model), model, **options)


def train(folder, model, optimizer, data, tape=None, kind=Trainer, **settings):
    """A user's script: only ``optimizer`` is ours."""
    tape = tape or Tape()
    resume = settings.pop("resume", None)
    trainer = kind(
        model,
        arguments(folder, **settings),
        data_collator=tape,
        train_dataset=data,
        optimizers=(optimizer, None),
        callbacks=[tape],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def items_of(batches):
    """Trainer's ``num_items_in_batch``: a language model's first word is not predicted."""
    labels = [batch["labels"] for batch in batches]
    return sum((part[..., 1:] if part.ndim > 1 else part).ne(-100).sum() for part in labels)


def repeat(model, optimizer, updates, clip, scheduler):
    """Trainer's loop around an optimizer of ours."""
    model.train()
    for batches, state in updates:
        torch.set_rng_state(state)
        for batch in batches:
            model(**batch, num_items_in_batch=items_of(batches)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
