"""Words to numbers, the classifier's padding, corpora split by file, and the whole application on a made library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from examples.research import records
from examples.research.applications import corpora
from examples.research.applications.comparison import main
from examples.research.applications.corpora import PACKAGES, docstrings, newsgroups, passages, split
from examples.research.applications.text import APPLICATION, ROWS, Classifier, Vocabulary

CPU = torch.device("cpu")
SMALL = {"vocabulary": 60, "length": 12, "width": 8, "layers": 1, "epochs": 2, "batch_size": 16, "lr": 1e-2}


@pytest.fixture
def library(tmp_path):
    """Ten packages of four files, each with a text of its own, one that all have, and a test that does not count."""
    for number, package in enumerate(PACKAGES):
        (tmp_path / package / "tests").mkdir(parents=True)
        (tmp_path / package / "tests" / "t.py").write_text('"""A test that says something of its own."""')
        for file in range(4):
            own = f"{package} file {file} says what nobody else in this library says"
            source = f'"""{own}"""\n# a comment that each of the files has in it\nx = {number}\n'
            (tmp_path / package / f"m{file}.py").write_text(source)
    return tmp_path


def trained(library, label, **settings):
    options = dict(APPLICATION.settings) | SMALL | {"folder": str(library), "part": "train"} | settings
    texts = []
    return APPLICATION.train(**options | dict(ROWS[label].options), seed=1, device=CPU, progress=texts.append), texts


def test_frequent_words_have_numbers():
    words = Vocabulary(["The cat_sat, the", "the cat"], size=5, length=4)  # the 3, cat 2, and of "," "_" sat the first
    assert words.numbers == {"the": 2, "cat": 3, ",": 4}
    assert words.encode(["Cat, mat the the", "a"]).tolist() == [[3, 4, 1, 2], [1, 0, 0, 0]]


def test_padding_changes_nothing_and_the_mean_is_over_words():
    torch.manual_seed(0)
    model = Classifier(20, 9, 3, 8, 2, dropout=0.0).double().train()
    numbers = torch.tensor([[5, 7, 2, 0, 0, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8, 9, 10, 11]])
    short = Classifier(20, 3, 3, 8, 2, dropout=0.0).double().train()
    state = model.state_dict()
    short.load_state_dict(state | {"places": state["places"][:3]})
    z = model(numbers)
    hidden = short.encoder(short.words(numbers[:1, :3]) + short.places)
    torch.testing.assert_close(z[:1], short.head(hidden.mean(1)), rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(numbers), z.detach(), rtol=1e-10, atol=1e-10)


def test_passages_are_docstrings_and_blocks_of_comments():
    source = '"""Module."""\n# one\n#   two\nx = 1  # no\ndef f():\n    """Of f.\n\n    More."""\n    # three\n'
    assert [" ".join(found.split()) for found in passages(source)] == ["Module.", "Of f. More.", "one two", "three"]


def test_files_fill_the_parts_by_their_shares():
    """By hand: 50 to train (83), 30 to test (120), 9 to validation (60), 8 there (113), 7 to train (95)."""
    sizes = {Path(name): size for name, size in zip("abcde", (9, 50, 7, 30, 8), strict=True)}
    chosen = {part: [path.name for path in paths] for part, paths in split(sizes).items()}
    assert chosen == {"train": ["b", "c"], "test": ["d"], "validation": ["a", "e"]}


def test_no_file_is_in_two_parts_and_no_text_twice(library):
    corpus = docstrings(str(library))
    texts = {part: corpus.parts[part][0] for part in corpus.parts}
    everything = [one for found in texts.values() for one in found]
    assert sum("nobody else" in found for found in everything) == 40
    assert sum("each of the files" in found for found in everything) == 1
    assert len(everything) == len(set(everything)) == 41
    for found, labels in corpus.parts.values():
        assert set(labels) == set(range(10))
        assert all("each" in one or one.startswith(PACKAGES[label]) for one, label in zip(found, labels, strict=True))


def test_a_package_that_is_missing_is_named(library):
    (library / "wsgiref" / "m0.py").unlink()
    (library / "wsgiref" / "m1.py").unlink()
    with pytest.raises(ValueError, match="wsgiref has 2 files"):
        docstrings(str(library))


def test_this_python_has_the_packages():
    root = Path(sysconfig.get_paths()["stdlib"])
    for package in PACKAGES:
        counts = [path for path in (root / package).rglob("*.py") if "test" not in path.parts and path.stat().st_size]
        assert len(counts) >= 3


def test_newsgroups(monkeypatch):
    asked = []

    def fetch(*, data_home, subset, remove):
        asked.append((data_home, subset, remove))
        count = 40 if subset == "train" else 6
        data = [f"{subset} {number}" for number in range(count)] + ["  \n"]
        return SimpleNamespace(data=data, target=np.arange(count + 1) % 2, target_names=["a", "b"])

    monkeypatch.setattr("sklearn.datasets.fetch_20newsgroups", fetch)
    corpus = newsgroups("there")
    assert asked == [("there", part, ("headers", "footers", "quotes")) for part in ("train", "test")]
    assert corpus.parts["test"] == ([f"test {number}" for number in range(6)], [0, 1] * 3)
    (train, labels), (held_out, _) = corpus.parts["train"], corpus.parts["validation"]
    assert len(held_out) == 6
    assert sorted(train + held_out) == sorted(f"train {number}" for number in range(40))
    assert all(int(found.split()[1]) % 2 == label for found, label in zip(train, labels, strict=True))


def test_newsgroups_that_cannot_be_fetched(monkeypatch):
    def fetch(**_):
        raise OSError("no network")

    monkeypatch.setattr("sklearn.datasets.fetch_20newsgroups", fetch)
    with pytest.raises(ValueError, match=r"folder=None: .*cannot be downloaded \(no network\)"):
        newsgroups(None)


def test_without_weight_the_rows_are_equal(library):
    """Dropout draws alike with the companion beside: with λ = 0 the runs agree to the last bit."""
    plain = trained(library, "plain")
    assert plain == trained(library, "plain")
    assert plain == trained(library, "DCL", weight=0.0) == trained(library, "DCP", weight=0.0)
    assert len({tuple(trained(library, label, weight=1e3)[1]) for label in ROWS}) == 3


def test_the_command(library, tmp_path, capsys):
    small = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    common = ["--seeds", "1", "--device", "cpu", "--folder", str(library), "--results", str(tmp_path / "results")]
    main(APPLICATION, "A test.", [*small, *common])
    scores = [record["score"] for record in records.read(tmp_path / "results" / "application-text.jsonl")]
    assert len(scores) == 3
    assert f"| DCP | {scores[2]:.2f} | {scores[2] - scores[0]:+.2f} |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(APPLICATION, "A test.", [*small, *common, "--data", "news"])
    assert f"data='news' is unknown; choose one of {', '.join(corpora.CORPORA)}" in capsys.readouterr().err
