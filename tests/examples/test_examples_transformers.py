"""The example with Trainer and LoRA, small."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from examples import transformers_lora
from tests.helpers import assert_same

pytestmark = pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set as true:UserWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)


@pytest.fixture
def example(monkeypatch):
    # a part of the texts is enough, and one worker's CPU all there is
    train, test = transformers_lora.texts()
    monkeypatch.setattr(transformers_lora, "texts", lambda: (train[::8], test[::8]))
    return transformers_lora


def own(optimizer):
    return optimizer.companion.state_dict() if hasattr(optimizer, "companion") else {"p": optimizer.prototypes}


def test_texts_are_real_apart_and_of_every_module():
    train, test = transformers_lora.texts()
    assert {row["labels"] for row in train} == set(range(len(transformers_lora.MODULES)))
    assert len(train) > 2 * len(test) > 100
    whole = [
        {bytes(row["input_ids"].tolist()) for row in part if row["attention_mask"][-1] == 0} for part in (train, test)
    ]
    assert not whole[0] & whole[1]
    assert any(b"JSON" in text or b"argument" in text for text in whole[0])


@pytest.mark.parametrize("method", ["dcl", "dcp"])
def test_a_resumed_run_ends_as_the_whole_one(method, example, tmp_path, capsys):
    whole, optimizer = example.main(["--method", method, "--epochs", "2", "--out", str(tmp_path)])
    checkpoint = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[0]
    again, second = example.main(["--method", method, "--epochs", "2", "--resume", str(checkpoint)])
    assert_same(again, whole)
    assert_same(dict(own(second)), dict(own(optimizer)))
    out = capsys.readouterr().out
    assert f"{method}: test accuracy" in out
    assert ("the companion adds 4,616 parameters" in out) == (method == "dcl")


def test_a_pretrained_model_is_loaded_and_its_frozen_weights_stay(example, tmp_path):
    torch.manual_seed(5)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    pretrained = BertForSequenceClassification(BertConfig(vocab_size=256, max_position_embeddings=96, **size))
    pretrained.save_pretrained(tmp_path)
    model, optimizer = example.main(["--method", "dcl", "--model", str(tmp_path), "--epochs", "1"])
    name = "bert.embeddings.word_embeddings.weight"
    loaded = model.get_base_model().get_parameter(name)
    assert torch.equal(loaded, pretrained.get_parameter(name))
    assert optimizer.companion.get_base_model().get_parameter(name).data_ptr() == loaded.data_ptr()


def test_plain(example):
    _, optimizer = example.main(["--method", "plain", "--epochs", "1"])
    assert type(optimizer) is torch.optim.AdamW
