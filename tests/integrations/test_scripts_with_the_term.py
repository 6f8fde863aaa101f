"""Public kinds of training scripts with class weights or mixed labels, one of each loop, brought to the penalty term.

Each loop is the one of its source, small and seeded, and calls ``term`` in one line. It trains as the same loop does
with the penalty written out by hand in float64, and differs from the loop without it. The line alone refuses each of
them. docs/losses.md shows the line that changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import timm.data
import timm.loss
import timm.utils
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForTokenClassification, Trainer

from tests.helpers import CLASSES, FEATURES, dropout_net, sgd
from tests.integrations.huggingface import LENGTH, WORDS, arguments
from tests.integrations.lightning_modules import QUIET as LIGHTNINGS
from tests.integrations.lightning_modules import fit
from tests.integrations.timm_models import CLASSES as TIMM_CLASSES
from tests.integrations.timm_models import create, images
from tests.integrations.trainer_by_hand import QUIET as TRAINERS
from tests.integrations.trainer_by_hand import Tape
from tests.reference import CLOSE, EACH, assert_same_training, by_hand, term_of, wrap

REFUSED = r"(?s)different factors, as with class weights.*more than one class.*loss \+ optimizer\.penalty\(logits"
PER_CLASS = [20, 10, 6, 3, 2]  # a long tail
Term = Callable[..., Any]


def long_tailed(size: int = 8) -> DataLoader[tuple[Tensor, ...]]:
    """A generator of its own: the loader's seed would be drawn from dropout's stream otherwise."""
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(CLASSES).repeat_interleave(torch.tensor(PER_CLASS))
    x = torch.randn(len(y), FEATURES, generator=draw, dtype=torch.float64)
    return DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True, generator=draw)


# ---- timm's train.py with Mixup and SoftTargetCrossEntropy -----------------------------------------------------------


def timm_train_one_epoch(model: nn.Module, optimizer: Any, term: Term) -> None:
    mixup_fn = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=TIMM_CLASSES)
    train_loss_fn = timm.loss.SoftTargetCrossEntropy()
    accum_steps = 2
    np.random.seed(2)  # noqa: NPY002 - timm draws from the global state
    model.train()
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(images(8, size=6)):
        need_update = (batch_idx + 1) % accum_steps == 0
        input, target = mixup_fn(input, target)
        target = target.double()
        output = model(input)
        loss = train_loss_fn(output, target) + term(output, target)
        loss = loss / accum_steps
        loss.backward()
        if not need_update:
            continue
        timm.utils.dispatch_clip_grad(model.parameters(), value=1.0)
        optimizer.step()
        optimizer.zero_grad()


# ---- semantic segmentation with class weights and an auxiliary head (DeepLab) ----------------------------------------


class DeepLab(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.classifier = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=2, dilation=2), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(6, 4, 1)
        )
        self.aux_classifier = nn.Conv2d(6, 4, 1)
        self.double()

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        features = self.backbone(x)
        heads = {"out": self.classifier, "aux": self.aux_classifier}
        return OrderedDict(
            (name, F.interpolate(head(features), x.shape[-2:], mode="bilinear")) for name, head in heads.items()
        )


def segmentation(model: nn.Module, optimizer: Any, term: Term) -> None:
    draw = torch.Generator().manual_seed(1)
    weight = torch.tensor([0.2, 1.0, 2.0, 1.5], dtype=torch.float64)

    def criterion(inputs: dict[str, Tensor], target: Tensor) -> Tensor:
        losses = {name: F.cross_entropy(x, target, weight, ignore_index=255) for name, x in inputs.items()}
        return losses["out"] + 0.5 * losses["aux"] + term(inputs["out"], target, ignore_index=255)

    for _ in range(4):
        image = torch.randn(2, 3, 8, 8, generator=draw, dtype=torch.float64)
        target = torch.randint(4, (2, 8, 8), generator=draw)
        target[:, 0] = 255
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---- the plain loops -------------------------------------------------------------------------------------------------


class Script(NamedTuple):
    """A model, the loop that trains it, and where the logits are in its output."""

    build: Callable[[], nn.Module]
    loop: Callable[[nn.Module, Any, Term], None]
    find: Callable[[Any], Tensor] = lambda output: output


SCRIPTS = {
    "timm": Script(create, timm_train_one_epoch),
    "segmentation": Script(DeepLab, segmentation, lambda output: output["out"]),
}
ALL = pytest.mark.parametrize("name", SCRIPTS)


def run(name: str, make: Callable[[nn.Module], Any], way: str = "term") -> Any:
    script = SCRIPTS[name]
    model = script.build().train()
    optimizer = make(model)
    torch.manual_seed(3)
    script.loop(model, optimizer, term_of(optimizer, way))
    return optimizer


def hand_of(variant: str, model: nn.Module, find: Callable[[Any], Tensor]) -> Any:
    return by_hand(variant, model, **{"find": find} if variant == "dcl" else {})


def assert_apart(model: nn.Module, plain: nn.Module) -> None:
    """The penalty has changed what is trained by far more than rounding."""
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs) > 1e-4


@ALL
@EACH
def test_the_loop_with_the_term_trains_as_with_the_penalty_by_hand(variant: str, name: str) -> None:
    optimizer = run(name, lambda model: wrap(variant, model))
    hand = run(name, lambda model: hand_of(variant, model, SCRIPTS[name].find))
    assert_same_training(optimizer, hand, **CLOSE)
    assert optimizer.logs()["skipped"] == 0
    plain = SCRIPTS[name].build().train()
    torch.manual_seed(3)
    SCRIPTS[name].loop(plain, sgd(plain), lambda *args, **options: 0.0)
    assert_apart(optimizer.model, plain)


@ALL
@EACH
def test_the_line_alone_names_the_term(variant: str, name: str) -> None:
    with pytest.raises(RuntimeError, match=REFUSED):
        run(name, lambda model: wrap(variant, model), way="line")


# ---- token classification with class weights in a Trainer subclass ---------------------------------------------------

TAGS = 4
TAG_WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 3.0], dtype=torch.float64)


def token_classifier() -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=TAGS, **size, **dropout)
    return BertForTokenClassification(config).double()


def tagged(number: int = 24) -> list[dict[str, Tensor]]:
    """The first and the last word, and pieces of words, have no tag."""
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(1, WORDS, (number, LENGTH), generator=draw)
    labels = torch.randint(TAGS, (number, LENGTH), generator=draw)
    labels[:, [0, 4, -1]] = -100
    return [{"input_ids": row, "labels": tags} for row, tags in zip(words, labels, strict=True)]


def weighted_tags(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(weight=TAG_WEIGHTS)(logits.view(-1, TAGS), labels.view(-1))


def run_trainer(folder: Any, model: nn.Module, optimizer: Any, term: Term) -> Tape:
    tape = Tape()

    class WeightedTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            logits = outputs.logits
            loss = weighted_tags(logits, labels) + term(logits.transpose(1, 2), labels, returned=logits)
            return (loss, outputs) if return_outputs else loss

    trainer = WeightedTrainer(
        model,
        arguments(folder),
        data_collator=tape,
        train_dataset=tagged(),
        optimizers=(optimizer, None),
        callbacks=[tape],
    )
    trainer.train()
    return tape


@pytest.mark.filterwarnings(*TRAINERS, "ignore::FutureWarning:torch", "ignore::DeprecationWarning:torch")
@EACH
def test_a_trainer_with_weighted_tags_trains_as_with_the_penalty_by_hand(variant: str, tmp_path: Any) -> None:
    model, theirs, plain = token_classifier(), token_classifier().train(), token_classifier()
    optimizer = wrap(variant, model)
    tape = run_trainer(tmp_path, model, optimizer, term_of(optimizer))
    hand = hand_of(variant, theirs, lambda output: output.logits)
    term = term_of(hand)
    updates = tape.updates(parts=1, epoch=6)
    for (batch,), _ in updates:
        hand.zero_grad()
        logits, labels = theirs(input_ids=batch["input_ids"]).logits, batch["labels"]
        (weighted_tags(logits, labels) + term(logits.transpose(1, 2), labels, returned=logits)).backward()
        hand.step()
    assert len(updates) == optimizer.logs()["step"] == 12
    assert_same_training(optimizer, hand, rtol=1e-9, atol=1e-9)
    run_trainer(tmp_path, plain, sgd(plain), lambda *args, **options: 0.0)
    assert_apart(model, plain)


# ---- a Lightning module with a weighted loss -------------------------------------------------------------------------

PARTS = 2


class Weighted(pl.LightningModule):
    """Accumulates two batches; ``way`` is "term", "line" or "plain"."""

    def __init__(self, variant: str, way: str = "term") -> None:
        super().__init__()
        self.net, self.variant, self.way = dropout_net(), variant, way
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        z = self.net(x)
        term = term_of(self.optimizers(), "term" if self.way == "term" else "line")
        return self.criterion(z, y) + term(z, y)

    def configure_optimizers(self) -> Any:
        return sgd(self.net) if self.way == "plain" else wrap(self.variant, self.net)


def fit_weighted(variant: str, way: str = "term") -> Any:
    return fit(Weighted(variant, way), long_tailed(), max_epochs=2, accumulate_grad_batches=PARTS)


def weighted_by_hand(variant: str) -> Any:
    hand, criterion, data = by_hand(variant, dropout_net()), Weighted(variant).criterion, long_tailed()
    term, last = term_of(hand), len(data) - 1
    torch.manual_seed(3)
    for _epoch in range(2):
        for index, (x, y) in enumerate(data):
            z = hand.model(x)
            ((criterion(z, y) + term(z, y)) / PARTS).backward()
            if index % PARTS == PARTS - 1 or index == last:
                hand.step()
                hand.zero_grad()
    return hand


@pytest.mark.filterwarnings(*(mark.args[0] for mark in LIGHTNINGS))
@EACH
def test_a_weighted_module_trains_as_with_the_penalty_by_hand(variant: str) -> None:
    optimizer = fit_weighted(variant)
    assert_same_training(optimizer, weighted_by_hand(variant), **CLOSE)
    plain = Weighted(variant, "plain")
    fit(plain, long_tailed(), max_epochs=2, accumulate_grad_batches=PARTS)
    assert_apart(optimizer.model, plain.net)
