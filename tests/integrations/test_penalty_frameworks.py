"""``optimizer.penalty(...)`` where Lightning, Accelerate, transformers' Trainer or SAM run the loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_optimizer
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from tests.by_hand import (
    CLOSE,
    EACH,
    apart,
    assert_same_training,
    by_hand,
    end,
    term_of,
    train,
    train_by_closures,
    wrap,
)
from tests.helpers import batches, dropout_net, mlp
from tests.integrations.huggingface import arguments, sentences, text_classifier
from tests.integrations.lightning_modules import QUIET as LIGHTNINGS
from tests.integrations.lightning_modules import fit
from tests.integrations.trainer_by_hand import QUIET as TRAINERS
from tests.integrations.trainer_by_hand import Tape

BATCHES, PARTS = 7, 3  # an epoch's last accumulation has one batch


def loader(dtype: torch.dtype = torch.float64) -> DataLoader[tuple[Tensor, Tensor]]:
    """A generator of its own: the loader's seed would be drawn from dropout's stream otherwise."""
    return DataLoader(list(batches(BATCHES, dtype=dtype)), batch_size=None, generator=torch.Generator())


def trained_by_hand(variant: str, parts: int = 1, epochs: int = 1) -> Any:
    hand = by_hand(variant, dropout_net())
    torch.manual_seed(3)
    for _ in range(epochs):
        train(hand, batches(BATCHES), parts=parts)
    return hand


# ---- Lightning -------------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    """One loss for training and validation, with the term of ``self.optimizers()``."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.net, self.variant, self.validated = dropout_net(), variant, 0

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        z = self.net(x)
        return F.multi_margin_loss(z, y) + term_of(self.optimizers())(z, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        plain = F.multi_margin_loss(self.net(batch[0]), batch[1])
        assert self.loss(batch) == plain
        self.validated += 1

    def val_dataloader(self) -> Any:
        return loader()

    def configure_optimizers(self) -> Any:
        return wrap(self.variant, self.net)


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / PARTS)
        if (batch_idx + 1) % PARTS == 0 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings(*(mark.args[0] for mark in LIGHTNINGS))
@pytest.mark.parametrize(("kind", "parts"), [(Module, 1), (Module, PARTS), (Manual, PARTS)])
@EACH
def test_lightning_trains_as_the_loop_by_hand(variant: str, kind: type[Module], parts: int) -> None:
    module = kind(variant)
    options = {"accumulate_grad_batches": parts} if module.automatic_optimization else {}
    optimizer = fit(module, loader(), max_epochs=2, num_sanity_val_steps=2, **options)
    assert_same_training(optimizer, trained_by_hand(variant, parts, epochs=2), **CLOSE)
    assert module.validated >= 2 * BATCHES


# ---- Accelerate ------------------------------------------------------------------------------------------------------


def accelerated(variant: str, build: Any, companion: nn.Module | None = None, **options: Any) -> Any:
    """The script keeps the name of the wrapper: the prepared optimizer has torch.optim's methods alone."""
    accelerator, model = Accelerator(cpu=True, **options), build()
    ours = wrap(variant, model, **{} if companion is None else {"companion": companion})
    term = term_of(ours)
    data = loader(next(model.parameters()).dtype)
    call, optimizer, data = accelerator.prepare(model, ours, data)
    torch.manual_seed(3)
    for x, y in data:
        with accelerator.accumulate(call):
            z = call(x)
            accelerator.backward(F.multi_margin_loss(z, y) + term(z, y))
            optimizer.step()
            optimizer.zero_grad()
    return ours


@pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("parts", [1, PARTS])
@EACH
def test_accelerate_trains_as_the_loop_by_hand(variant: str, parts: int) -> None:
    ours = accelerated(variant, dropout_net, gradient_accumulation_steps=parts)
    assert_same_training(ours, trained_by_hand(variant, parts), **CLOSE)


@pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::DeprecationWarning:torch")
@EACH
def test_accelerates_copies_of_half_precision_logits_are_taken(variant: str) -> None:
    """What the script gets is a float32 copy of what the wrapped model returned."""
    narrow = partial(mlp, dtype=torch.float32)
    companions = [{"companion": narrow(3)} if variant == "dcl" else {} for _ in range(2)]
    ours = accelerated(variant, narrow, mixed_precision="bf16", **companions[0])
    hand = train(by_hand(variant, narrow(), **companions[1]), batches(BATCHES, dtype=torch.float32))
    for found, expected, start in zip(end(ours), end(hand), end(apart(variant)), strict=True):
        way = expected - start if len(start) else expected
        assert (found - expected).norm() < 4 * torch.finfo(torch.bfloat16).eps * way.norm()


# ---- transformers' Trainer -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(*TRAINERS, "ignore::FutureWarning:torch", "ignore::DeprecationWarning:torch")
@EACH
def test_trainers_compute_loss_serves_training_and_evaluation(variant: str, tmp_path: Any) -> None:
    model, theirs, tape = text_classifier(), text_classifier(), Tape()
    optimizer = wrap(variant, model)
    term = term_of(optimizer)

    class WithTerm(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs["labels"]
            output = model(input_ids=inputs["input_ids"])
            loss = F.multi_margin_loss(output.logits, labels) + term(output.logits, labels)
            return (loss, output) if return_outputs else loss

    trainer = WithTerm(
        model,
        arguments(tmp_path, eval_strategy="epoch"),
        data_collator=tape,
        train_dataset=sentences(),
        eval_dataset=sentences(8),
        optimizers=(optimizer, None),
        callbacks=[tape],
    )
    trainer.train()
    find = {"find": lambda output: output.logits} if variant == "dcl" else {}
    hand = by_hand(variant, theirs.train(), **find)
    rows = [(batch["input_ids"], batch["labels"]) for (batch,), _ in tape.updates(parts=1, epoch=6)]
    train(hand, rows, call=lambda words: theirs(input_ids=words).logits)
    assert len(rows) == optimizer.logs()["step"] == 12
    assert_same_training(optimizer, hand, rtol=1e-4, atol=1e-6)


# ---- SAM -------------------------------------------------------------------------------------------------------------


def sam(model: nn.Module) -> Any:
    return pytorch_optimizer.SAM(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, momentum=0.9)


@EACH
def test_sam_has_the_term_in_both_evaluations_and_the_first_is_learned_from(variant: str) -> None:
    runs = []
    for make in (wrap, by_hand):
        model = dropout_net()
        optimizer = make(variant, model, sam(model))
        torch.manual_seed(3)
        runs.append(train_by_closures(optimizer, batches(BATCHES), F.multi_margin_loss, twice=True))
    assert_same_training(*runs, **CLOSE)
