"""transformers.Trainer's own loop, held against the same loop by hand: bit for bit, and against the bare algorithm."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    get_linear_schedule_with_warmup,
)

from dcl_optim import DCPOptimizer
from tests.helpers import assert_same, every
from tests.integrations import EACH_METHOD, METHODS
from tests.integrations.huggingface import (
    LENGTH,
    WORDS,
    arguments,
    sentences,
    text_classifier,
    texts_to_continue,
)
from tests.integrations.trainer_by_hand import (
    QUIET,
    Tape,
    repeat,
    train,
    wrapped,
)
from tests.reference import assert_same_training, step_once_there_is_a_gradient, term_of

pytestmark = pytest.mark.filterwarnings(
    *QUIET,
    "ignore::DeprecationWarning:torch",
    "ignore::FutureWarning:torch",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)
EPOCH = 6  # micro-batches; no multiple of 4: an epoch's last update then has fewer
ROUNDING = {"rtol": 1e-4, "atol": 2e-6}


def language_model():
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"attention_dropout": 0.1, "use_cache": False}  # Trainer turns the cache off, which rounds differently
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **size, **more))


def dropping_text_classifier():
    return text_classifier(dropout=0.2)


TASKS = {
    "text": (dropping_text_classifier, sentences),
    "language": (language_model, texts_to_continue),
}


def pair(method, build, **options):
    """Two equal models with an optimizer each."""
    first, second = build(), build()
    return first, wrapped(method, first, **options), second, wrapped(method, second, **options)


def assert_same_run(model, optimizer, expected, second):
    assert_same(model, expected)
    assert_same(optimizer.state_dict(), second.state_dict())


@pytest.mark.parametrize(
    ("method", "task", "parts"),
    every(3, product(METHODS, TASKS, [1, 4])),
)
def test_trainer_is_the_hand_written_loop(method, task, parts, tmp_path):
    """Dropout, accumulation with a short last update, clipping and Trainer's linear schedule, all at once."""
    build, data = TASKS[task]
    model, optimizer, expected, second = pair(method, build, weight=2.0)
    tape = Tape()
    settings = {"gradient_accumulation_steps": parts, "max_grad_norm": 0.3, "lr_scheduler_type": "linear"}
    train(tmp_path, model, optimizer, data(), tape, warmup_steps=2, **settings)
    updates = tape.updates(parts, EPOCH)
    scheduler = get_linear_schedule_with_warmup(second, 2, len(updates))
    repeat(expected, second, updates, 0.3, scheduler)
    assert_same_run(model, optimizer, expected, second)
    assert second.logs()["step"] == len(updates) == (12 if parts == 1 else 4)


def with_term(optimizer, loss_of):
    """Trainer with the loss and the penalty outside of the model."""
    term = term_of(optimizer)

    class WithTerm(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            output = model(input_ids=inputs["input_ids"])
            loss = loss_of(output.logits, inputs["labels"]) + term(output.logits, inputs["labels"])
            return (loss, output) if return_outputs else loss

    return WithTerm


@EACH_METHOD
def test_a_compiled_model_hides_its_own_loss_from_the_line_and_trains_by_the_term(method, tmp_path):
    """In a graph that holds both, nothing sees the gradient that the loss sends to the logits."""
    torch._dynamo.reset()
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    model, optimizer, expected, second = pair(method, text_classifier)
    outside = with_term(optimizer, nn.functional.cross_entropy)
    train(tmp_path, model, optimizer, sentences(), kind=outside, **compiled)
    train(tmp_path, expected, second, sentences())
    assert_same_training(optimizer, second, **ROUNDING)
    hidden = text_classifier()
    with pytest.raises(RuntimeError, match=r"\.step found gradients, but no backward"):
        train(tmp_path, hidden, wrapped(method, hidden), sentences(), **compiled)


@pytest.mark.parametrize(("method", "task"), every(3, product(METHODS, ["text", "language"])))
def test_a_checkpoint_in_the_middle_of_an_epoch_resumes_bit_for_bit(method, task, tmp_path):
    build, data = TASKS[task]
    model, optimizer, again, second = pair(method, build)
    settings = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
    settings["gradient_accumulation_steps"] = 2
    train(tmp_path, model, optimizer, data(), **settings)
    torch.manual_seed(99)
    trainer = train(tmp_path, again, second, data(), resume=str(tmp_path / "checkpoint-2"), **settings)
    assert trainer.state.global_step == second.logs()["step"] == 6
    assert_same_run(again, second, model, optimizer)


# ---- a loss that Trainer computes on the model's logits --------------------------------------------------------------


@EACH_METHOD
def test_the_line_reads_trainers_own_label_smoothing(method, tmp_path):
    model = text_classifier()
    optimizer = wrapped(method, model, weight=2.0)
    train(tmp_path, model, optimizer, sentences(), Tape(), label_smoothing_factor=0.1)
    logs = optimizer.logs()
    assert (logs["skipped"], logs["penalty"] > 0) == (0, True)
    assert logs["loss_scale"] == pytest.approx(1.0, rel=1e-3)


# ---- other ways into Trainer ----------------------------------------------------------------------------------------


def token_classifier():
    torch.manual_seed(0)
    return BertForTokenClassification(text_classifier().config)


def labeled_words(number=24):
    """Rows of different numbers of labeled words."""
    rows = texts_to_continue(number)
    return [row | {"labels": row["labels"].where(row["labels"] < 0, row["labels"] % 3)} for row in rows]


PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
(DCP_TRAINER,) = re.findall(r"^```python\n(class DCPTrainer.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("build", "data"), [(text_classifier, sentences), (token_classifier, labeled_words)])
def test_the_pages_trainer_divides_loss_and_term_for_each_kind_of_model(build, data, tmp_path):
    """Four micro-batches an update, two in an epoch's last; Trainer leaves the division to models of the second kind,
    which do not divide either."""
    page = {"Trainer": Trainer, "DCPOptimizer": DCPOptimizer}
    exec(DCP_TRAINER, page)
    model, expected, tape = build(), build(), Tape()
    settings = {"learning_rate": 1e-2, "gradient_accumulation_steps": 4}
    trainer = page["DCPTrainer"](
        model, arguments(tmp_path, **settings), data_collator=tape, train_dataset=data(), callbacks=[tape]
    )
    trainer.train()
    second = DCPOptimizer(Trainer(expected, arguments(tmp_path, **settings)).create_optimizer(), expected)
    for batches, state in tape.updates(4, EPOCH):
        torch.set_rng_state(state)
        for batch in batches:
            z, y = expected(input_ids=batch["input_ids"]).logits.flatten(0, -2), batch["labels"].flatten()
            ((F.cross_entropy(z, y) + second.penalty(z, y)) / len(batches)).backward()
        step_once_there_is_a_gradient(second)
        second.zero_grad()
    assert second.logs()["step"] == 4
    assert_same_training(trainer.optimizer.optimizer, second, **ROUNDING)
    assert trainer.evaluate(data(4))["eval_loss"] > 0
    untrained = page["DCPTrainer"](build(), arguments(tmp_path), data_collator=Tape())
    assert untrained.evaluate(data(4))["eval_loss"] > 0
