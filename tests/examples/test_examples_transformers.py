"""The example with Trainer and LoRA, small."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, ByT5Tokenizer

from examples import transformers_lora
from tests.helpers import assert_same

pytestmark = pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set as true:UserWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)


@pytest.fixture
def example(monkeypatch):
    # a part of the texts is enough, and one worker's CPU all there is
    texts = dict(list(transformers_lora.docstrings().items())[::8])
    monkeypatch.setattr(transformers_lora, "docstrings", lambda: texts)
    return transformers_lora


def own(optimizer):
    return optimizer.companion.state_dict() if hasattr(optimizer, "companion") else {"p": optimizer.prototypes}


def test_texts_are_real_and_of_every_module():
    texts = transformers_lora.docstrings()
    assert set(texts.values()) == set(range(len(transformers_lora.MODULES)))
    assert len(texts) > 400
    assert any("argument" in text for text in texts)


@pytest.mark.parametrize("method", ["dcl", "dcp"])
def test_a_resumed_run_ends_as_the_whole_one(method, example, tmp_path, capsys):
    whole, optimizer = example.main(["--method", method, "--epochs", "2", "--out", str(tmp_path)])
    checkpoint = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[0]
    again, second = example.main(["--method", method, "--epochs", "2", "--resume", str(checkpoint)])
    assert_same(again, whole)
    assert_same(dict(own(second)), dict(own(optimizer)))
    out = capsys.readouterr().out
    assert f"{method}: accuracy" in out
    assert "trainable params: 4,616 " in out


def test_a_pretrained_model_is_loaded_and_its_frozen_weights_stay(example, tmp_path):
    torch.manual_seed(5)
    tokenizer = ByT5Tokenizer()
    tokenizer.save_pretrained(tmp_path)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=96, **size)
    pretrained = BertForSequenceClassification(config)
    pretrained.save_pretrained(tmp_path)
    model, optimizer = example.main(["--method", "dcl", "--model", str(tmp_path), "--epochs", "1"])
    name = "bert.embeddings.word_embeddings.weight"
    loaded = model.get_base_model().get_parameter(name)
    assert torch.equal(loaded, pretrained.get_parameter(name))
    assert optimizer.companion.get_base_model().get_parameter(name).data_ptr() == loaded.data_ptr()
