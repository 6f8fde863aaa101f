"""Training loops in the shape that public scripts have, with the optimizer's line changed, or the term in the loss.

By the line DCP trains as by the term, which gets the labels; with weight=0 either method trains, both ways, bit for bit
as the plain script.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import assert_same, every
from tests.reference import assert_same_training, term_of

CLASSES, WORDS = 5, 11


def generator():
    return torch.Generator().manual_seed(1)


def images(number=8, size=8):
    draw = generator()
    return [
        (torch.randn(size, 1, 8, 8, generator=draw), torch.randint(CLASSES, (size,), generator=draw))
        for _ in range(number)
    ]


def texts(number=8, time=6, size=4):
    draw = generator()
    text = torch.randint(1, WORDS, (number, size, time + 1), generator=draw)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in text]


# ---- models ----------------------------------------------------------------------------------------------------------


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    )


class WordLanguageModel(nn.Module):
    """pytorch/examples, word_language_model: flattened log-probabilities, and the state that goes on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(WORDS, 8)
        self.rnn, self.decoder = nn.LSTM(8, 8), nn.Linear(8, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, WORDS), dim=1), hidden


# ---- scripts: each trains a model on its data; new are `wrap`, and `term`, which is 0 by the line --------------------


def evaluated(model, data):
    model.eval()
    with torch.no_grad():
        for x, _ in data[:2]:
            model(x)
    model.train()


def cifar(data, wrap, term):
    """kuangliu/pytorch-cifar."""
    model, criterion = convolutional(), nn.CrossEntropyLoss()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4), model)
    scheduler = CosineAnnealingLR(optimizer, T_max=2)
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            z = model(x)
            loss = criterion(z, y) + term(optimizer, z, y)
            loss.backward()
            optimizer.step()
        evaluated(model, data)
        scheduler.step()
    return model, optimizer


def word_language_model(data, wrap, term):
    """pytorch/examples, word_language_model/main.py, with an optimizer: the state is detached from batch to batch."""
    model, hidden = WordLanguageModel(), None
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.5), model)
    for x, y in data:
        optimizer.zero_grad()
        output, hidden = model(x, hidden)
        hidden = tuple(h.detach() for h in hidden)
        (F.nll_loss(output, y.view(-1)) + term(optimizer, output, y.view(-1))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    return model, optimizer


SCRIPTS = {
    "cifar": (cifar, images),
    "word language model": (word_language_model, texts),
}
VARIANTS = [DCLOptimizer, DCPOptimizer]


def run(name, make, way="line"):
    """The trained model, and the optimizer that ``make(base, model)`` gave."""
    script, data = SCRIPTS[name]
    batches = data()
    torch.manual_seed(2)
    return script(batches, make, lambda optimizer, z, labels: term_of(optimizer, way)(z, labels))


def plain(base, model):
    return base


CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("name", SCRIPTS)
def test_dcp_by_the_line_is_dcp_by_the_term(name):
    """The term gets the labels that the line reads."""

    def make(base, model):
        return DCPOptimizer(base, model, weight=1.0)

    model, optimizer = run(name, make)
    _, other = run(name, make, "term")
    assert_same_training(optimizer, other, **CLOSE)
    logs, others = ({key: value for key, value in o.logs().items() if key != "loss_scale"} for o in (optimizer, other))
    assert logs == pytest.approx(others, rel=max(CLOSE.values()))
    unchanged, _ = run(name, plain)
    with pytest.raises(AssertionError):
        assert_same(model, unchanged, **CLOSE)


@pytest.mark.parametrize(("variant", "name", "way"), every(3, itertools.product(VARIANTS, SCRIPTS, ["line", "term"])))
def test_with_weight_zero_each_script_is_the_plain_one_bit_for_bit(name, variant, way):
    model, _ = run(name, lambda base, model: variant(base, model, weight=0.0), way)
    unchanged, _ = run(name, plain)
    assert_same(model, unchanged)
