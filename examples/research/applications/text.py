"""A small transformer that classifies text, without and with DCL and DCP.

    python -m examples.research.applications.text
    python -m examples.research.applications.text --data 20newsgroups --length 128 --epochs 10

The text at hand is Python's own: its library's docstrings and comments, which package are they from? The corpus depends
on the version of Python. What one file says is in one part only, so that a class is known by what its files have in
common. The paper has no experiment with text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from examples.research.applications.classification import accuracy
from examples.research.applications.comparison import Application, main
from examples.research.applications.corpora import CORPORA, Corpus
from examples.research.applications.loop import train_epochs
from examples.research.applications.optimizers import build_optimizer
from examples.research.applications.three_methods import ROWS
from examples.research.datasets.base import batches
from examples.research.datasets.splits import check_part

PADDING, UNKNOWN = 0, 1
WORD = re.compile(r"[a-z]+|[0-9]+|[^\sa-z0-9]")


class Vocabulary:
    """The most frequent words of some texts, in lower case; signs are words, names fall apart at underscores.

    Args:
        texts: of the training part.
        size: how many words to tell apart, padding and all unknown words among them.
        length: words a text; the rest of longer ones is cut off.
    """

    def __init__(self, texts: list[str], size: int, length: int) -> None:
        counts = Counter(word for text in texts for word in WORD.findall(text.lower()))
        words = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
        self.numbers, self.length = {word: number for number, word in enumerate(words, 2)}, length

    def encode(self, texts: list[str]) -> Tensor:
        """Numbers of words, (texts, length), padded at the end."""
        rows = torch.full((len(texts), self.length), PADDING)
        for row, text in zip(rows, texts, strict=True):
            numbers = [self.numbers.get(word, UNKNOWN) for word in WORD.findall(text.lower())[: self.length]]
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.long)
        return rows


class Classifier(nn.Module):
    """Embeddings of words and places, a transformer encoder, the mean over the words that are there, a linear layer."""

    def __init__(self, words: int, length: int, classes: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PADDING)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, classes)

    def forward(self, numbers: Tensor) -> Tensor:
        """Logits (B, K) of texts (B, length), which have a word at least."""
        empty = numbers == PADDING
        found = self.encoder(self.dropout(self.words(numbers) + self.places), src_key_padding_mask=empty)
        found = found.masked_fill(empty[:, :, None], 0.0).sum(1) / (~empty).sum(1, keepdim=True)
        return self.head(self.dropout(found))


def train(
    *, method: str, data: str, folder: str | None, vocabulary: int, length: int, width: int, layers: int,
    dropout: float, epochs: int, batch_size: int, lr: float, weight_decay: float, weight: float, part: str,
    seed: int, device: torch.device, progress: Callable[[str], None],
) -> float:  # fmt: skip
    """Train one network; give its accuracy in per cent on ``part`` after the last epoch."""
    if data not in CORPORA:
        raise ValueError(f"data={data!r} is unknown; choose one of {', '.join(CORPORA)}")
    corpus: Corpus = CORPORA[data](folder)
    texts, labels = corpus.parts["train"]
    words = Vocabulary(texts, vocabulary, length)
    x, y = words.encode(texts).to(device), torch.tensor(labels, device=device)
    torch.manual_seed(seed)
    model = Classifier(vocabulary, length, len(corpus.names), width, layers, dropout).to(device)
    optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    criterion = nn.CrossEntropyLoss()
    # The one line that is new; for "dcp" it is DCPOptimizer(optimizer, model, weight=weight).
    optimizer = build_optimizer(method, optimizer, model, weight=weight)
    generator = torch.Generator().manual_seed(seed)

    def shuffled() -> Iterator[tuple[Tensor, Tensor]]:
        return ((x[index], y[index]) for index in batches(len(y), batch_size, generator))

    for epoch, loss in train_epochs(model, optimizer, epochs, shuffled, lambda x, y: criterion(model(x), y)):
        progress(f"epoch {epoch}, loss {loss.item():.3f}")
    texts, labels = corpus.parts[check_part(part)]
    x, y = words.encode(texts), torch.tensor(labels)
    return accuracy(model, zip(x.split(500), y.split(500), strict=True), device)


SETTINGS = {
    "data": "docstrings",
    "folder": None,
    "vocabulary": 4_000,
    "length": 48,
    "width": 64,
    "layers": 2,
    "dropout": 0.1,
    "epochs": 15,
    "batch_size": 64,
    "lr": 2e-3,
    "weight_decay": 1e-2,
    "weight": 0.1,
    "part": "test",
}
APPLICATION = Application("text", "accuracy, %", train, ROWS, SETTINGS, {"vocabulary": (3,), "dropout": (0, 1)})

if __name__ == "__main__":
    main(APPLICATION, __doc__)
