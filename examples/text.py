"""Text: which module of Python's library is a docstring from? With DCP and without (seconds on a laptop).

    python -m examples.text

The model is the mean of the embeddings of hashed words. It prints the accuracy on a third of the docstrings.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCPOptimizer
from dcl_optim.trial import accuracy, compare

MODULES = ("argparse", "configparser", "datetime", "inspect", "logging", "pathlib", "random", "socket", "statistics")
MODULES += ("subprocess", "tarfile", "threading", "typing", "unittest.mock", "zipfile")
WORDS, LENGTH = 4096, 40


def docstrings() -> tuple[Tensor, Tensor]:
    """Give the hashed words of each docstring, padded with 0, and the number of its module."""
    texts, labels = [], []
    for label, name in enumerate(MODULES):
        tree = ast.parse(inspect.getsource(importlib.import_module(name)))
        nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        own = {ast.get_docstring(node) or "" for node in nodes}
        for text in sorted(text for text in own if len(text) > 40):
            words = re.findall(r"[a-z]+", text.lower())[:LENGTH]
            hashed = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
            texts.append(hashed + [0] * (LENGTH - len(hashed)))
            labels.append(label)
    return torch.tensor(texts), torch.tensor(labels)


def train(weight: Any, seed: int, epochs: int = 20) -> float:
    """Return the accuracy on a third of the docstrings in percent; weight=0 is plain training."""
    torch.manual_seed(seed)
    x, y = docstrings()
    test, training = torch.randperm(len(y)).tensor_split([len(y) // 3])
    embedding = nn.EmbeddingBag(WORDS, 64, mode="mean", padding_idx=0)
    model = nn.Sequential(embedding, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(MODULES)))
    optimizer = DCPOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model, weight=weight)
    for _ in range(epochs):
        for rows in training[torch.randperm(len(training))].split(32):
            optimizer.zero_grad()
            z = model(x[rows])
            loss = F.cross_entropy(z, y[rows]) + optimizer.penalty(z, y[rows])
            loss.backward()
            optimizer.step()
    return accuracy(model, [(x[test], y[test])])


if __name__ == "__main__":
    print(compare(train, {"plain": 0, "DCP": "auto"}, seeds=5))
