"""PEFT's methods and frozen backbones: the companion shares what does not train, and costs only what does."""

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PromptTuningConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from torch import nn

from tests.helpers import assert_same, train, wrap
from tests.integrations.huggingface import sentences, text_classifier
from tests.integrations.trainer_by_hand import QUIET, sgd
from tests.reference import train_by_hand

pytestmark = pytest.mark.filterwarnings(*QUIET)
WEIGHT = 5.0
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
PLACES = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
METHODS = {
    "LoRA with dropout": lambda: LoraConfig(r=2, use_rslora=True, lora_dropout=0.3, **PLACES),
    "DoRA": lambda: LoraConfig(r=2, use_dora=True, init_lora_weights=False, **PLACES),
    "AdaLoRA": lambda: AdaLoraConfig(init_r=4, target_r=2, total_step=20, tinit=1, tfinal=5, **PLACES),
    "VeRA": lambda: VeraConfig(r=4, **PLACES),
    "VBLoRA": lambda: VBLoRAConfig(r=2, num_vectors=16, vector_length=4, topk=2, **PLACES),
    "IA3": lambda: IA3Config(target_modules=["key", "dense"], feedforward_modules=["dense"]),
    "prompt tuning": lambda: PromptTuningConfig(num_virtual_tokens=2),
}


def adapted(method):
    torch.manual_seed(0)
    config = METHODS[method]()
    config.task_type = "SEQ_CLS"
    return get_peft_model(text_classifier(), config)


class Logits(nn.Module):
    """Only the logits, as reference.py trains on; virtual tokens need a mask to extend."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, words):
        return self.model(input_ids=words, attention_mask=torch.ones_like(words)).logits


def data(steps=5, size=8):
    """Eight words: room for virtual tokens among the model's ten positions."""
    rows = sentences(steps * size)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        yield torch.stack([row["input_ids"][:8] for row in part]), torch.stack([row["labels"] for row in part])


def assert_frozen_is_shared(model, companion):
    for (name, theirs), ours in zip(model.named_parameters(), companion.parameters(), strict=True):
        assert (ours.data_ptr() == theirs.data_ptr()) == (not theirs.requires_grad), name


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_the_bare_algorithm_and_shares_what_is_frozen(method):
    net, theirs, plain = (Logits(adapted(method)) for _ in range(3))
    frozen = {name: p.detach().clone() for name, p in net.named_parameters() if not p.requires_grad}
    optimizer = wrap(net, sgd(net), weight=WEIGHT)
    torch.manual_seed(7)
    train(net.train(), optimizer, data())
    torch.manual_seed(7)
    for ours, hand in zip(
        (net, optimizer.companion), train_by_hand(theirs.train(), sgd, data(), weight=WEIGHT), strict=True
    ):
        assert_same(dict(ours.named_parameters()), dict(hand.named_parameters()), **CLOSE)
    assert_frozen_is_shared(net, optimizer.companion)
    assert_same({name: p for name, p in net.named_parameters() if name in frozen}, frozen)
    torch.manual_seed(7)
    train(plain.train(), sgd(plain), data())
    assert max((a - b).abs().max() for a, b in zip(plain.parameters(), net.parameters(), strict=True)) > 1e-5
