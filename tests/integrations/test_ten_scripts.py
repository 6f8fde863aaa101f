"""Ten public kinds of training scripts with class weights, mixed labels or another loss, brought to the penalty term.

Each loop is the one of its source, small and seeded, and calls ``term`` in one line. It trains as the same loop does
with the penalty written out by hand in float64, and differs from the loop without it. The line alone refuses each of
them. docs/losses.md shows the line that changes.
"""

from __future__ import annotations

import math
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
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchvision.transforms import v2
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


# ---- 1. timm's train.py with Mixup and SoftTargetCrossEntropy --------------------------------------------------------


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


# ---- 2. torchvision's references/classification with MixUp and CutMix in the collate function ------------------------


def torchvision_train_one_epoch(model: nn.Module, optimizer: Any, term: Term) -> None:
    mixup_cutmix = v2.RandomChoice([v2.MixUp(alpha=0.2, num_classes=3), v2.CutMix(alpha=1.0, num_classes=3)])
    draw = torch.Generator().manual_seed(1)
    pictures = torch.randn(24, 3, 8, 8, generator=draw, dtype=torch.float64)
    dataset = TensorDataset(pictures, torch.randint(3, (24,), generator=draw))
    data_loader = DataLoader(
        dataset,
        batch_size=6,
        shuffle=True,
        generator=draw,
        collate_fn=lambda batch: mixup_cutmix(*default_collate(batch)),
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    torch.manual_seed(4)  # with alpha=0.2 some batches are hardly mixed, but not the first one of this seed
    model.train()
    for _ in range(2):
        for image, target in data_loader:
            output = model(image)
            loss = criterion(output, target.double()) + term(output, target.double())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(8, 3)).double()


# ---- 3. class-balanced weights (Cui et al. 2019) ---------------------------------------------------------------------


def two_epochs(model: nn.Module, optimizer: Any, criterion: nn.Module, term: Term, clip: float = math.inf) -> None:
    """The loop of those scripts that have their own loss."""
    for _epoch in range(2):
        for x, y in long_tailed():
            optimizer.zero_grad()
            logits = model(x)
            loss = criterion(logits, y) + term(logits, y)
            loss.backward()
            if clip < math.inf:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def class_balanced(model: nn.Module, optimizer: Any, term: Term) -> None:
    beta = 0.9
    effective_num = 1.0 - np.power(beta, PER_CLASS)
    per_cls_weights = (1.0 - beta) / np.array(effective_num)
    per_cls_weights = per_cls_weights / np.sum(per_cls_weights) * len(PER_CLASS)
    two_epochs(model, optimizer, nn.CrossEntropyLoss(weight=torch.tensor(per_cls_weights)), term)


# ---- 4. LDAM with deferred re-weighting (Cao et al. 2019) ------------------------------------------------------------


class LDAMLoss(nn.Module):
    def __init__(self, cls_num_list: list[int], max_m: float = 0.5, weight: Any = None, s: float = 30.0) -> None:
        super().__init__()
        m_list = 1.0 / np.sqrt(np.sqrt(cls_num_list))
        self.m_list = torch.tensor(m_list * (max_m / np.max(m_list)))
        self.s, self.weight = s, weight

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        index = F.one_hot(target, x.shape[1]).bool()
        batch_m = self.m_list[target].view(-1, 1)
        output = torch.where(index, x - batch_m, x)
        return F.cross_entropy(self.s * output, target, weight=self.weight)


def ldam_drw(model: nn.Module, optimizer: Any, term: Term) -> None:
    for epoch in range(3):
        beta = (0.0, 0.9)[epoch // 2]  # the weights come in the last epoch
        per_cls_weights = (1.0 - beta) / (1.0 - np.power(beta, PER_CLASS))
        per_cls_weights = torch.tensor(per_cls_weights / np.sum(per_cls_weights) * len(PER_CLASS))
        criterion = LDAMLoss(PER_CLASS, weight=per_cls_weights, s=5.0)
        for x, y in long_tailed():
            output = model(x)
            loss = criterion(output, y) + term(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# ---- 5. focal loss (Lin et al. 2017) ---------------------------------------------------------------------------------


class FocalLoss(nn.Module):
    def __init__(self, gamma: float, alpha: list[float]) -> None:
        super().__init__()
        self.gamma, self.alpha = gamma, torch.tensor(alpha, dtype=torch.float64)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        logpt = F.log_softmax(input, dim=1).gather(1, target.view(-1, 1)).view(-1)
        pt = logpt.detach().exp()
        logpt = logpt * self.alpha.gather(0, target)
        return (-1 * (1 - pt) ** self.gamma * logpt).mean()


def focal(model: nn.Module, optimizer: Any, term: Term) -> None:
    two_epochs(model, optimizer, FocalLoss(gamma=2.0, alpha=[0.25, 0.5, 0.75, 1.0, 1.0]), term)


# ---- 6. semantic segmentation with class weights and an auxiliary head (DeepLab) -------------------------------------


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


# ---- 9. sample weights, by fastai's one_batch ------------------------------------------------------------------------


class Learner:
    """The batch is inputs, labels and a weight for each sample."""

    def __init__(self, model: nn.Module, opt: Any, loss_func: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.model, self.opt, self.loss_func = model, opt, loss_func

    def one_batch(self, xb: Tensor, yb: Tensor, wb: Tensor) -> None:
        pred = self.model(xb)
        loss = self.loss_func(pred, yb, wb)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()

    def fit(self, n_epoch: int) -> None:
        draw = torch.Generator().manual_seed(5)
        for _ in range(n_epoch):
            for xb, yb in long_tailed():
                self.one_batch(xb, yb, torch.rand(len(yb), generator=draw, dtype=torch.float64))


def sample_weights(model: nn.Module, optimizer: Any, term: Term) -> None:
    def loss_func(pred: Tensor, targ: Tensor, w: Tensor) -> Tensor:
        return (F.cross_entropy(pred, targ, reduction="none") * w).mean() + term(pred, targ)

    Learner(model, optimizer, loss_func).fit(2)


# ---- 10. symmetric cross-entropy for noisy labels (Wang et al. 2019) -------------------------------------------------


class SCELoss(nn.Module):
    def __init__(self, alpha: float, beta: float, num_classes: int) -> None:
        super().__init__()
        self.alpha, self.beta, self.num_classes = alpha, beta, num_classes

    def forward(self, pred: Tensor, labels: Tensor) -> Tensor:
        ce = F.cross_entropy(pred, labels)
        pred = F.softmax(pred, dim=1).clamp(min=1e-7, max=1.0)
        label_one_hot = F.one_hot(labels, self.num_classes).to(pred).clamp(min=1e-4, max=1.0)
        rce = -1 * torch.sum(pred * torch.log(label_one_hot), dim=1)
        return self.alpha * ce + self.beta * rce.mean()


def symmetric(model: nn.Module, optimizer: Any, term: Term) -> None:
    two_epochs(model, optimizer, SCELoss(alpha=0.1, beta=1.0, num_classes=CLASSES), term, clip=5.0)


# ---- the plain loops -------------------------------------------------------------------------------------------------


class Script(NamedTuple):
    """A model, the loop that trains it, and where the logits are in its output."""

    build: Callable[[], nn.Module]
    loop: Callable[[nn.Module, Any, Term], None]
    find: Callable[[Any], Tensor] = lambda output: output


SCRIPTS = {
    "timm": Script(create, timm_train_one_epoch),
    "torchvision": Script(convolutions, torchvision_train_one_epoch),
    "class-balanced": Script(dropout_net, class_balanced),
    "LDAM-DRW": Script(dropout_net, ldam_drw),
    "focal": Script(dropout_net, focal),
    "segmentation": Script(DeepLab, segmentation, lambda output: output["out"]),
    "sample weights": Script(dropout_net, sample_weights),
    "symmetric": Script(dropout_net, symmetric),
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


# With LDAM's factor on the logits training diverges on these rows, without the penalty too.
@pytest.mark.filterwarnings("ignore:the penalty of DCPOptimizer is .*, which is large")
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


# ---- 7. token classification with class weights in a Trainer subclass ------------------------------------------------

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


# ---- 8. a Lightning module with a weighted loss ----------------------------------------------------------------------

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
