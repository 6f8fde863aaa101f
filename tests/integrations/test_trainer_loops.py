"""transformers.Trainer's own loop, held against the same loop by hand: bit for bit, and against the bare algorithm."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import LabelSmoother

from dcl_optim import DCLOptimizer
from tests.helpers import assert_same, cells
from tests.integrations.huggingface import (
    CLASSES,
    LENGTH,
    WORDS,
    arguments,
    image_classifier,
    images,
    sentences,
    text_classifier,
    texts_to_continue,
)
from tests.integrations.trainer_by_hand import QUIET, Tape, given, items_of, repeat, repeat_without_us, train, wrap

pytestmark = pytest.mark.filterwarnings(*QUIET)
METHODS = ("dcl", "dcp")
EPOCH = 6  # micro-batches; no multiple of 4: an epoch's last update then has fewer


def text_scores():
    return sentences(labels=torch.linspace(-1, 1, 24))


def language_model():
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"attention_dropout": 0.1, "use_cache": False}  # Trainer turns the cache off, which rounds differently
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **size, **more))


def dropping_text_classifier():
    return text_classifier(dropout=0.2)


def share_of_items(batch, items):
    return items_of([batch]) / items


def one(batch, items):
    return 1.0


# A model, its data, what it says about its logits, and the factor on its loss: ViT and Llama divide by all the items of
# an update, BERT takes the mean over its own micro-batch, and Trainer leaves both at that.
TASKS = {
    "text": (dropping_text_classifier, sentences, {}, one),
    "image": (image_classifier, images, {}, share_of_items),
    "language": (language_model, texts_to_continue, {"class_dim": -1}, share_of_items),
    "regression": (lambda: text_classifier(classes=1), text_scores, {}, one),
}


def own(optimizer):
    """What is ours, as it is saved."""
    return next(value for key, value in optimizer.state_dict().items() if key.startswith("dcl_optim"))


def assert_same_run(model, optimizer, expected, second):
    # The scale is read from fewer rows if labels are given.
    assert_same(model, expected, rtol=1e-4, atol=1e-6)
    assert_same(own(optimizer)["forecaster"], own(second)["forecaster"], rtol=1e-4, atol=1e-6)


def classes_of(task):
    return WORDS if task == "language" else CLASSES


def pair(method, build, classes=CLASSES, **options):
    """Two equal models with an optimizer each; what DCP reads in the first is given to the second."""
    first, second = build(), build()
    said = options | given(classes) if method == "dcp" else options
    return first, wrap(method, first, **options), second, wrap(method, second, **said)


@pytest.mark.parametrize(
    ("method", "task", "parts"),
    cells(
        [cell for cell in product(METHODS, TASKS, [1, 4]) if cell[:2] != ("dcp", "regression")],
        ("dcl", "text", 4),
        ("dcl", "image", 1),
        ("dcl", "regression", 4),
        ("dcp", "image", 4),
        ("dcp", "language", 4),
    ),
)
def test_trainer_is_the_hand_written_loop(method, task, parts, tmp_path):
    """Dropout, accumulation with a short last update, clipping and Trainer's linear schedule, all at once."""
    build, data, options, _ = TASKS[task]
    options = {} if method == "dcp" else options
    model, optimizer, expected, second = pair(method, build, classes_of(task), weight=2.0, **options)
    tape = Tape()
    settings = {"gradient_accumulation_steps": parts, "max_grad_norm": 0.3, "lr_scheduler_type": "linear"}
    train(tmp_path, model, optimizer, data(), tape, warmup_steps=2, **settings)
    updates = tape.updates(parts, EPOCH)
    scheduler = get_linear_schedule_with_warmup(second, 2, len(updates))
    repeat(expected, second, updates, clip=0.3, scheduler=scheduler)
    assert_same_run(model, optimizer, expected, second)
    assert second.logs()["step"] == len(updates) == (12 if parts == 1 else 4)


@pytest.mark.parametrize("task", cells(TASKS, "text", "language"))  # a mean of its own, a share of all the words
def test_trainer_with_the_wrapper_is_the_bare_algorithm(task, tmp_path):
    """No hook in sight in the second run: the penalty carries the factor that each model's loss has, and so does ω."""
    build, data, options, factor_of = TASKS[task]
    model, expected, plain, tape = build(), build(), build(), Tape()
    optimizer = wrap("dcl", model, weight=2.0, **options)
    train(tmp_path, model, optimizer, data(), tape, gradient_accumulation_steps=4)
    updates = tape.updates(4, EPOCH)
    companion = repeat_without_us(expected, updates, factor_of, weight=2.0)
    for ours, by_hand in ((model, expected), (optimizer.companion, companion)):
        assert_same(dict(ours.named_parameters()), dict(by_hand.named_parameters()), rtol=1e-4, atol=2e-6)
    repeat_without_us(plain, updates, factor_of, weight=0.0)
    assert max((a - b).abs().max() for a, b in zip(plain.parameters(), model.parameters(), strict=True)) > 1e-3


@pytest.mark.parametrize(
    ("method", "task"), cells(product(METHODS, ["text", "image"]), ("dcl", "text"), ("dcp", "image"))
)
def test_bf16_is_the_hand_written_loop_under_autocast(method, task, tmp_path):
    """Accelerate hands out a float32 copy of the logits, beside a loss that was taken from the originals."""
    build, data, options, _ = TASKS[task]
    model, optimizer, expected, second = pair(method, build, weight=2.0, **options)
    tape = Tape()
    train(tmp_path, model, optimizer, data(), tape, bf16=True, gradient_accumulation_steps=2)
    repeat(expected, second, tape.updates(2, EPOCH), autocast=True)
    assert_same_run(model, optimizer, expected, second)
    full, third, *_ = pair(method, build, weight=2.0, **options)
    repeat(full, third, tape.updates(2, EPOCH))
    assert any(not torch.equal(a, b) for a, b in zip(full.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(("method", "reentrant"), cells(product(METHODS, [False, True]), ("dcl", False), ("dcp", True)))
def test_gradient_checkpointing_with_dropout_changes_no_bit(method, reentrant, tmp_path):
    model, optimizer, expected, second = pair(method, dropping_text_classifier, weight=2.0)
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    train(tmp_path, model, optimizer, sentences(), **settings)
    train(tmp_path, expected, second, sentences())
    assert model.is_gradient_checkpointing
    assert_same_run(model, optimizer, expected, second)


@pytest.mark.parametrize("method", cells(METHODS, "dcl"))
def test_evaluation_during_training_changes_no_bit(method, tmp_path):
    """Without dropout: Trainer's evaluation draws from its stream, with us or without."""
    model, optimizer, expected, second = pair(method, text_classifier)
    keywords = {"eval_dataset": sentences(15)}
    settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 5}
    trainer = train(tmp_path, model, optimizer, sentences(), trainer=keywords, **settings)
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 6
    train(tmp_path, expected, second, sentences())
    assert_same_run(model, optimizer, expected, second)


@pytest.mark.parametrize(
    ("method", "task"), cells(product(METHODS, ["text", "language"]), ("dcl", "text"), ("dcp", "language"))
)
def test_a_checkpoint_in_the_middle_of_an_epoch_resumes_bit_for_bit(method, task, tmp_path):
    build, data, options, _ = TASKS[task]
    options = {} if method == "dcp" else options
    model, again = build(), build()
    optimizer, second = wrap(method, model, **options), wrap(method, again, **options)
    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "cosine",
        "gradient_accumulation_steps": 2,
    }
    train(tmp_path, model, optimizer, data(), **settings)
    torch.manual_seed(99)
    trainer = train(tmp_path, again, second, data(), resume=str(tmp_path / "checkpoint-2"), **settings)
    assert trainer.state.global_step == second.logs()["step"] == 6
    assert_same(again, model)
    assert_same(second.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("method", cells(METHODS, "dcl"))
def test_a_vision_transformer_resumes_bit_for_bit_when_it_is_built_from_the_checkpoint(method, tmp_path):
    """transformers 5.23 saves a ViT under other names than Trainer looks for when it resumes, with us and without."""
    model, settings = image_classifier(), {"save_strategy": "steps", "save_steps": 2}
    train(tmp_path, model, optimizer := wrap(method, model), images(), **settings)
    saved = str(tmp_path / "checkpoint-8")
    again = type(model).from_pretrained(saved)
    train(tmp_path, again, second := wrap(method, again), images(), resume=saved, **settings)
    assert second.logs()["step"] == 12
    assert_same(again, model)
    assert_same(second.state_dict(), optimizer.state_dict())


# ---- label smoothing ------------------------------------------------------------------------------------------------


def smoothed(model, batch, items):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    output = model(**inputs, num_items_in_batch=items)
    return LabelSmoother(0.1)(output, batch["labels"], num_items_in_batch=items)


def test_label_smoothing_is_the_hand_written_loop(tmp_path):
    """Trainer takes the labels away from the model and the loss from its logits."""
    model, optimizer, expected, second = pair("dcl", lambda: text_classifier(classes=6), weight=2.0)
    tape = Tape()
    train(tmp_path, model, optimizer, sentences(), tape, label_smoothing_factor=0.1)
    repeat(expected, second, tape.updates(1, EPOCH), loss_of=smoothed)
    assert_same_run(model, optimizer, expected, second)


def test_prototypes_read_the_labels_that_label_smoothing_takes_away_from_the_model(tmp_path):
    model, expected, tape = (text_classifier(classes=6), text_classifier(classes=6), Tape())
    optimizer, second = wrap("dcp", model, weight=2.0), wrap("dcp", expected, num_classes=6, weight=2.0)
    train(tmp_path, model, optimizer, sentences(), tape, label_smoothing_factor=0.1)

    def loss_of(model, batch, items):
        second.set_targets(batch["labels"])
        return smoothed(model, batch, items)

    repeat(expected, second, tape.updates(1, EPOCH), loss_of=loss_of)
    assert_same_run(model, optimizer, expected, second)


def test_a_keyword_that_label_smoothing_takes_away_from_the_model_is_missed(tmp_path):
    model = text_classifier()
    with pytest.raises(ValueError, match="targets='labels': the model was called without that keyword"):
        train(tmp_path, model, wrap("dcp", model, targets="labels"), sentences(), label_smoothing_factor=0.1)


def test_prototypes_read_the_labels_of_a_loss_function_that_trainer_is_given(tmp_path):
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    model, expected, tape = text_classifier(), text_classifier(), Tape()
    optimizer, second = (wrap("dcp", m) for m in (model, expected))
    keywords = {"compute_loss_func": lambda output, labels, **_: criterion(output.logits, labels)}
    train(tmp_path, model, optimizer, sentences(), tape, trainer=keywords)

    def loss_of(model, batch, items):
        return criterion(model(input_ids=batch["input_ids"], num_items_in_batch=items).logits, batch["labels"])

    repeat(expected, second, tape.updates(1, EPOCH), loss_of=loss_of)
    assert_same_run(model, optimizer, expected, second)
    assert not torch.equal(optimizer.prototypes, torch.zeros(CLASSES, CLASSES))


# ---- other ways into Trainer ----------------------------------------------------------------------------------------


class RegularizedTrainer(Trainer):
    """Keeps the optimizer that the arguments describe: its learning rate and its groups with and without decay."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = DCLOptimizer(super().create_optimizer(model), self.model, weight=1.0)
        return self.optimizer


def test_trainers_own_optimizer_can_be_wrapped_where_it_is_made(tmp_path):
    model, expected, tape = text_classifier(), text_classifier(), Tape()
    settings = {"weight_decay": 0.1, "learning_rate": 1e-2}
    trainer = RegularizedTrainer(
        model, arguments(tmp_path, **settings), data_collator=tape, train_dataset=sentences(), callbacks=[tape]
    )
    trainer.train()
    plain = Trainer(expected, arguments(tmp_path, **settings))
    second = repeat(expected, DCLOptimizer(plain.create_optimizer(), expected, weight=1.0), tape.updates(1, EPOCH))
    assert [group["weight_decay"] for group in second.companion_optimizer.param_groups] == [0.1, 0.0]
    assert_same_run(model, trainer.optimizer.optimizer, expected, second)


@pytest.mark.parametrize("method", cells(METHODS, "dcl"))
def test_train_called_twice_goes_on_with_the_same_companion(method, tmp_path):
    model, optimizer, expected, second = pair(method, text_classifier)
    tape = Tape()
    trainer = train(tmp_path, model, optimizer, sentences(), tape)
    trainer.train()
    assert optimizer.logs()["step"] == 4 * EPOCH
    repeat(expected, second, tape.updates(1, EPOCH))
    assert_same_run(model, optimizer, expected, second)


def test_the_hooks_by_which_transformers_collects_hidden_states_are_copied():
    """It puts them on once, when they are first asked for: a copy without them would give no hidden states."""
    model = text_classifier()
    words = torch.stack([row["input_ids"] for row in sentences(4)])
    states = model(input_ids=words, output_hidden_states=True).hidden_states
    companion = wrap("dcl", model).companion
    found = companion(input_ids=words, output_hidden_states=True).hidden_states
    assert_same(found, states)
    assert found[0] is not states[0]
