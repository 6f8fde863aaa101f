"""transformers.Trainer: the model computes its loss itself, from labels among its arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, default_data_collator

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import assert_same, cells
from tests.integrations.huggingface import (
    arguments,
    image_classifier,
    images,
    language_model,
    sentences,
    text_classifier,
    texts_to_continue,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set as true:UserWarning",
    "ignore::DeprecationWarning:torch",
    "ignore::FutureWarning:torch",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)
TASKS = {"text": (text_classifier, sentences), "image": (image_classifier, images)}
ROUNDING = {"rtol": 1e-4, "atol": 1e-6}


def wrap(variant: str, model: nn.Module, **options):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if variant == "plain":
        return base
    if variant == "dcl":
        return DCLOptimizer(base, model, **{"weight": 1.0} | options)
    return DCPOptimizer(base, model, **{"weight": 1.0, "alpha": 0.6} | options)


class Recorder:
    """Collates batches, and keeps them, so that a loop by hand can train on the same ones."""

    def __init__(self) -> None:
        self.batches: list[dict[str, torch.Tensor]] = []

    def __call__(self, rows):
        self.batches.append(default_data_collator(rows))
        return dict(self.batches[-1])


class Logs(TrainerCallback):
    """What the optimizer logged after each of its steps."""

    def __init__(self, optimizer) -> None:
        self.seen: list[dict[str, float]] = []
        self._optimizer = optimizer

    def on_optimizer_step(self, *args, **kwargs):
        self.seen.append(self._optimizer.logs())


def fitted(folder, variant, model, data, options=None, callbacks=(), **settings):
    optimizer, recorder = wrap(variant, model, **(options or {})), Recorder()
    trainer = Trainer(
        model,
        arguments(folder, **settings),
        data_collator=recorder,
        train_dataset=data,
        optimizers=(optimizer, None),
        callbacks=[make(optimizer) for make in callbacks],
    )
    trainer.train()
    return optimizer, recorder.batches, trainer


def by_hand(variant, model, batches, parts, factor):
    """The plain loop on the logits, the loss and its factor written out."""
    optimizer = wrap(variant, model, **({} if variant == "plain" else {"loss_scale": factor}))
    model.train()
    for index, batch in enumerate(batches, start=1):
        logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
        (nn.functional.cross_entropy(logits, batch["labels"]) * factor).backward()
        if index % parts == 0:
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def own(variant, optimizer):
    return dict(optimizer.companion.named_parameters()) if variant == "dcl" else {"prototypes": optimizer.prototypes}


@pytest.mark.parametrize("task", cells(TASKS, "image"))
def test_the_factor_of_accumulation_is_what_the_plain_run_has(task, tmp_path):
    """Which factor that is, is transformers' business, and differs between its models; the plain run tells it."""
    build, data = TASKS[task]
    _, batches, _ = fitted(tmp_path, "plain", plain := build(), data(), gradient_accumulation_steps=2)
    errors = {}
    for factor in (0.5, 1.0):
        by_hand("plain", expected := build(), batches, parts=2, factor=factor)
        errors[factor] = float((next(plain.parameters()) - next(expected.parameters())).detach().abs().max())
    factor = min(errors, key=errors.get)
    assert errors[factor] < 1e-5
    model, expected = build(), build()
    optimizer, batches, _ = fitted(tmp_path, "dcl", model, data(), gradient_accumulation_steps=2)
    assert optimizer.logs()["loss_scale"] == pytest.approx(factor, rel=1e-4)
    second = by_hand("dcl", expected, batches, parts=2, factor=factor)
    assert_same(model, expected, **ROUNDING)
    assert_same(own("dcl", optimizer), own("dcl", second), **ROUNDING)


@pytest.mark.parametrize("variant", cells(["dcl", "dcp"], "dcl"))
def test_bfloat16_whose_logits_come_out_as_a_converted_copy(variant, tmp_path):
    """The penalty acts: the run differs from the plain one as the float32 run does, to bfloat16's rounding."""
    moved = {}
    for bf16 in (False, True):
        models = {}
        for method in (variant, "plain"):
            models[method] = text_classifier()
            fitted(
                tmp_path, method, models[method], sentences(), {} if method == "plain" else {"weight": 30.0}, bf16=bf16
            )
        pairs = zip(models[variant].parameters(), models["plain"].parameters(), strict=True)
        moved[bf16] = torch.cat([(a - b).flatten() for a, b in pairs]).detach()
    likeness = nn.functional.cosine_similarity(moved[True], moved[False], dim=0)
    assert likeness > 0.8
    assert 0.8 < moved[True].norm() / moved[False].norm() < 1.25


@pytest.mark.parametrize("variant", cells(["dcl", "dcp"], "dcl"))
def test_a_compiled_model_trains_as_the_plain_one(variant, tmp_path):
    torch._dynamo.reset()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    model, expected = text_classifier(), text_classifier()
    # In a graph that holds both, nothing sees the gradient that the loss sends to the logits.
    labels = {"targets": "labels"} if variant == "dcp" else {}
    optimizer, _, _ = fitted(tmp_path, variant, model, sentences(), labels, **options)
    second, _, _ = fitted(tmp_path, variant, expected, sentences())
    assert_same(dict(model.named_parameters()), dict(expected.named_parameters()), **ROUNDING)
    mine, others = own(variant, optimizer), own(variant, second)
    assert_same(list(mine.values()), list(others.values()), **ROUNDING)


def test_dropout_is_replayed_and_zero_weight_is_the_plain_run(tmp_path):
    plain, model = text_classifier(dropout=0.2), text_classifier(dropout=0.2)
    fitted(tmp_path, "plain", plain, sentences())
    fitted(tmp_path, "dcl", model, sentences(), {"weight": 0.0})
    assert_same(model, plain)
    logs: list[Logs] = []
    fitted(tmp_path, "dcl", text_classifier(0.2), sentences(), callbacks=[lambda o: logs.append(Logs(o)) or logs[0]])
    assert logs[0].seen[0]["penalty"] == 0.0, "the companion is a copy and drops what the model drops"
    assert logs[0].seen[-1]["penalty"] > 0.0


@pytest.mark.parametrize("variant", cells(["dcl", "dcp"], "dcp"))
def test_a_language_models_micro_batches_weigh_by_their_words(variant, tmp_path):
    """Logits of shape (batch, time, words), shifted inside; the penalty covers every position (DCP: every labelled)."""
    logs: list[Logs] = []
    _, batches, _ = fitted(
        tmp_path,
        variant,
        language_model(),
        texts_to_continue(),
        {"class_dim": -1} if variant == "dcl" else {},
        callbacks=[lambda o: logs.append(Logs(o)) or logs[0]],
        gradient_accumulation_steps=2,
        num_train_epochs=1,
    )
    for step, log in enumerate(logs[0].seen):
        first, last = (batch["labels"] for batch in batches[2 * step : 2 * step + 2])
        predicted = int((last[:, 1:] != -100).sum())  # the first word is not predicted, but Trainer counts it
        counted = int((first != -100).sum() + (last != -100).sum())
        assert log["loss_scale"] == pytest.approx(predicted / counted, rel=1e-4)


def test_a_regression_head_gets_its_factor_from_the_models_own_loss(tmp_path):
    """One logit, squared error inside: nothing to read off the logits, all there is is output.loss."""
    data = sentences(labels=torch.linspace(-1, 1, 24))
    model, expected = text_classifier(classes=1), text_classifier(classes=1)
    optimizer, batches, _ = fitted(tmp_path, "dcl", model, data, gradient_accumulation_steps=2)
    factor = optimizer.logs()["loss_scale"]
    second = DCLOptimizer(
        torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), expected, loss_scale=factor, weight=1.0
    )
    expected.train()
    for index, batch in enumerate(batches, start=1):
        (expected(**batch).loss * factor).backward()
        if index % 2 == 0:
            second.step()
            second.zero_grad()
    assert_same(model, expected, **ROUNDING)
    assert_same(own("dcl", optimizer), own("dcl", second), **ROUNDING)


def test_label_smoothing_by_trainer(tmp_path):
    """Trainer then takes the labels away from the model and computes the loss on its logits."""
    logs: list[Logs] = []
    model = text_classifier(classes=6)
    fitted(
        tmp_path,
        "dcl",
        model,
        sentences(),
        callbacks=[lambda o: logs.append(Logs(o)) or logs[0]],
        label_smoothing_factor=0.1,
    )
    assert all(log["loss_scale"] == pytest.approx(1.0, rel=0.11) for log in logs[0].seen)
    assert len(logs[0].seen) == 12
