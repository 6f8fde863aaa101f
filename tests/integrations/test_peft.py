"""PEFT's LoRA and frozen backbones: the companion shares what does not train, and costs only what does."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torchvision.models import resnet18

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.distances import mse
from dcl_optim.reference import dcl_step
from tests.helpers import assert_same
from tests.integrations.huggingface import CLASSES, sentences, text_classifier

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


class Logits(nn.Module):
    """Only the logits, as reference.py trains on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=words).logits


def lora(dropout: float = 0.0) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=dropout,
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
        init_lora_weights=False,  # both factors random, so that all of them have a gradient at once
        task_type="SEQ_CLS",
    )
    return get_peft_model(text_classifier(), config)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def data(steps: int = 5, size: int = 8):
    rows = sentences(steps * size)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        yield torch.stack([row["input_ids"] for row in part]), torch.stack([row["labels"] for row in part])


def train(model, optimizer, batches, **keywords) -> None:
    model.train()
    for words, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(input_ids=words, **keywords).logits, labels).backward()
        optimizer.step()


def pairs(model: nn.Module, companion: nn.Module):
    return zip(model.named_parameters(), companion.parameters(), strict=True)


def trained_size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_frozen_tensors_are_the_models_own_and_the_rest_is_apart():
    model = lora()
    optimizer = DCLOptimizer(sgd(model), model, weight=1.0)
    train(model, optimizer, data())
    for (name, theirs), ours in pairs(model, optimizer.companion):
        assert (ours.data_ptr() == theirs.data_ptr()) == (not theirs.requires_grad), name
    apart = [ours for (_, theirs), ours in pairs(model, optimizer.companion) if ours is not theirs]
    assert sum(ours.numel() for ours in apart) == trained_size(model)
    assert trained_size(model) < 0.1 * sum(p.numel() for p in model.parameters())


def test_the_saved_state_holds_the_trained_part_alone():
    model = lora()
    optimizer = DCLOptimizer(sgd(model), model, weight=1.0)
    train(model, optimizer, data())
    own = optimizer.state_dict()["dcl_optim.DCLOptimizer"]["forecaster"]
    assert own["model"].keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    tensors = [t for state in own["optimizer"]["state"].values() for t in state.values() if torch.is_tensor(t)]
    assert sum(t.numel() for t in tensors) == trained_size(model)
    file = io.BytesIO()
    torch.save(own, file)
    assert file.tell() < 9 * 4 * trained_size(model)  # of a tiny model the names are a good part


def test_equals_the_reference_and_leaves_frozen_weights_alone():
    model, by_hand = lora(), lora()
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    second = copy.deepcopy(by_hand)
    base, companions = sgd(by_hand), sgd(second)
    networks = Logits(by_hand).train(), Logits(second).train()
    for words, labels in data():
        dcl_step(*networks, base, companions, words, labels, F.cross_entropy, mse, weight=5.0)
    optimizer = DCLOptimizer(sgd(model), model, weight=5.0)
    train(model, optimizer, data())
    assert_same(dict(model.named_parameters()), dict(by_hand.named_parameters()), rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(optimizer.companion.parameters(), second.parameters(), strict=True):
        assert_same(ours, theirs, rtol=1e-4, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert name not in frozen or torch.equal(parameter, frozen[name])


def test_dropout_inside_the_adapters_is_replayed():
    model = lora(dropout=0.3)
    optimizer = DCLOptimizer(sgd(model), model, weight=1.0)
    train(model, optimizer, data(steps=1))
    assert optimizer.penalty == 0.0


def test_a_resumed_run_equals_the_uninterrupted_one():
    model, again = lora(), lora()
    optimizer = DCLOptimizer(sgd(model), model, weight=1.0)
    train(model, optimizer, data())
    second = DCLOptimizer(sgd(again), again, weight=1.0)
    again.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, data())
    train(again, second, data())
    assert_same(model, again)
    assert_same(optimizer.companion, second.companion)


def test_adapters_are_saved_and_merged_as_without_the_wrapper(tmp_path):
    model = lora()
    optimizer = DCLOptimizer(sgd(model), model, weight=1.0)
    train(model, optimizer, data())
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(text_classifier(), tmp_path)
    words, _ = next(data())
    model.eval()
    loaded.eval()
    with torch.no_grad():
        expected = model(input_ids=words).logits
        assert_same(loaded(input_ids=words).logits, expected, atol=1e-6)
        model.merge_adapter()
        assert_same(model(input_ids=words).logits, expected, atol=1e-5)
        model.unmerge_adapter()
        assert_same(model(input_ids=words).logits, expected, atol=1e-5)
        optimizer.detach()
        assert_same(model.merge_and_unload()(input_ids=words).logits, expected, atol=1e-5)


def test_prototypes_with_lora():
    model, by_hand = lora(), lora()
    optimizer = DCPOptimizer(sgd(model), model, weight=5.0, alpha=0.6)
    second = DCPOptimizer(sgd(by_hand), by_hand, CLASSES, weight=5.0, alpha=0.6)
    model.train()
    by_hand.train()
    for words, labels in data():
        optimizer.step(lambda words=words, labels=labels: model(input_ids=words, labels=labels).loss)
        second.set_targets(labels)
        second.step(lambda words=words, labels=labels: by_hand(input_ids=words, labels=labels).loss)
    assert_same(model, by_hand)
    assert_same(optimizer.state_dict(), second.state_dict())


@pytest.mark.parametrize("way", ["only the head in the optimizer", "all parameters in the optimizer"])
def test_a_linear_probe_of_a_convolutional_backbone(way):
    """Batch norm's buffers are the companion's own: they may move in training mode."""
    torch.manual_seed(0)
    model = resnet18(num_classes=CLASSES)
    model.requires_grad_(False)
    model.fc.requires_grad_(True)
    parameters = model.fc.parameters() if way.startswith("only") else model.parameters()
    optimizer = DCLOptimizer(torch.optim.SGD(parameters, lr=0.1), model, weight=1.0)
    assert [name for (name, theirs), ours in pairs(model, optimizer.companion) if ours is not theirs] == [
        "fc.weight",
        "fc.bias",
    ]
    saved = optimizer.state_dict()["dcl_optim.DCLOptimizer"]["forecaster"]["model"]
    buffers = {name for name, _ in model.named_buffers()}
    assert saved.keys() == {"fc.weight", "fc.bias"} | buffers
    x, y = torch.randn(4, 3, 32, 32), torch.randint(CLASSES, (4,))
    before = copy.deepcopy(optimizer.companion.fc)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not torch.equal(optimizer.companion.fc.weight, before.weight)
    assert not torch.equal(optimizer.companion.fc.weight, model.fc.weight)
