"""Texts of some classes: what Python's library says of itself, and 20 Newsgroups."""

from __future__ import annotations

import ast
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.research.datasets.splits import PARTS, others, stratified

Texts = tuple[list[str], list[int]]  # and their labels

# What every Python from 3.10 on has, with three files each at least.
PACKAGES = (
    "asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "urllib", "wsgiref", "xml",
)  # fmt: skip
SHARES = {"train": 0.6, "test": 0.25, "validation": 0.15}
FEWEST_WORDS = 6
COMMENTS = re.compile(r"(?:^[ \t]*#.*\n?)+", re.MULTILINE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Corpus:
    """Texts in three parts.

    Attributes:
        names: what the labels 0, 1, ... mean.
        parts: texts and labels of ``train``, ``validation`` and ``test``.
    """

    names: tuple[str, ...]
    parts: dict[str, Texts]


def passages(source: str) -> Iterator[str]:
    """The docstrings of a Python file, and its comments: lines that follow each other are one."""
    yield from (ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED))
    yield from (re.sub(r"^[ \t]*#+", "", block, flags=re.MULTILINE) for block in COMMENTS.findall(source))


def split(sizes: dict[Path, int]) -> dict[str, list[Path]]:
    """Share files out by :data:`SHARES`: the largest first, each to the part that is the least full so far."""
    full, chosen = dict.fromkeys(SHARES, 0.0), {part: list[Path]() for part in SHARES}
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        part = min(SHARES, key=lambda part: full[part] / SHARES[part])
        full[part] += sizes[path]
        chosen[part].append(path)
    return chosen


def docstrings(folder: str | None) -> Corpus:
    """The docstrings and comments of Python's library by package, no file in two parts, no text twice.

    Args:
        folder: that has the folders :data:`PACKAGES`; None: the library of the Python that runs.

    Raises:
        ValueError: a package is missing or has not a file for each part.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    parts: dict[str, Texts] = {part: ([], []) for part in PARTS}
    for label, package in enumerate(PACKAGES):
        found = {path: new for path in _sources(root / package) if (new := _new_texts(path, seen))}
        if len(found) < len(PARTS):
            raise ValueError(
                f"folder={root}: {package} has {len(found)} files with docstrings or comments, and {len(PARTS)} parts "
                "need one each; install Python's whole library"
            )
        for part, files in split({path: len(new) for path, new in found.items()}).items():
            texts = [text for path in files for text in found[path]]
            parts[part][0].extend(texts)
            parts[part][1].extend([label] * len(texts))
    return Corpus(PACKAGES, parts)


def _sources(package: Path) -> list[Path]:
    """A package's files but its tests, which some installations lack."""
    paths = sorted(package.rglob("*.py"))
    return [path for path in paths if not {"test", "tests"} & set(path.relative_to(package).parts)]


def _new_texts(path: Path, seen: set[str]) -> list[str]:
    """What a file says that no file before it has said."""
    with tokenize.open(path) as file:
        texts = dict.fromkeys(" ".join(text.split()) for text in passages(file.read()))
    new = [text for text in texts if len(text.split()) >= FEWEST_WORDS and text not in seen]
    seen.update(new)
    return new


def newsgroups(folder: str | None) -> Corpus:
    """20 Newsgroups by date, without headers, footers and quotes; 15 % of the training posts are for validation.

    Args:
        folder: scikit-learn's, into which it downloads them if they are not there; None: ~/scikit_learn_data.

    Raises:
        ValueError: they are not there and cannot be downloaded.
    """
    from sklearn.datasets import fetch_20newsgroups

    parts: dict[str, Texts] = {}
    try:
        for part in ("train", "test"):
            found = fetch_20newsgroups(data_home=folder, subset=part, remove=("headers", "footers", "quotes"))
            rows = [row for row in zip(found.data, found.target.tolist(), strict=True) if row[0].strip()]
            parts[part] = ([text for text, _ in rows], [label for _, label in rows])
    except OSError as error:
        raise ValueError(f"folder={folder}: 20newsgroups are not there and cannot be downloaded ({error})") from error
    texts, labels = parts["train"]
    held_out = stratified(torch.tensor(labels), round(SHARES["validation"] * len(labels)), seed=0)
    for part, numbers in (("validation", held_out), ("train", others(len(labels), held_out))):
        parts[part] = ([texts[i] for i in numbers.tolist()], [labels[i] for i in numbers.tolist()])
    return Corpus(tuple(found.target_names), parts)


CORPORA: dict[str, Callable[[str | None], Corpus]] = {"docstrings": docstrings, "20newsgroups": newsgroups}
