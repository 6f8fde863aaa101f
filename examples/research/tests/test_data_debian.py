"""Debian sections on package indexes that the tests make."""

import gzip
import hashlib
import math
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from examples.research import datasets
from examples.research.datasets import debian
from examples.research.datasets.archive import checksum, read
from examples.research.datasets.debian import Row, choose, find_index, read_index, split, tf_idf
from examples.research.datasets.splits import PARTS

INDEX = """\
Package: zoo
Version: 1.0-1
Section: games
Description: Care for 3 animals - in C++
 The long description names other words.
 .
 Description: not a field.
Tag: game::strategy,
 interface::graphical

Package: libzoo1
Source: zoo-lib (1.0-1)
Description: Animals’ LIBRARY
Section: libs

Package: no-section
Description: left out


Package: silent
Section: games
"""


def test_an_index_is_read(tmp_path):
    (tmp_path / "Packages").write_text(INDEX, "utf-8")
    assert read_index(tmp_path / "Packages") == [
        Row("libs", "zoo-lib", "animals library"),
        Row("games", "silent", ""),
        Row("games", "zoo", "care for 3 animals in c"),
    ]


def test_apt_unpacks_what_is_compressed(tmp_path, monkeypatch):
    path = tmp_path / "x_Packages.gz"
    path.write_bytes(gzip.compress(INDEX.encode()))
    monkeypatch.setattr(debian, "UNPACK", ("gzip", "-dc"))
    assert [row.source for row in read_index(path)] == ["zoo-lib", "silent", "zoo"]
    path.write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"cannot read packages=.*x_Packages\.gz .*; apt-get update"):
        read_index(path)


def test_what_is_no_index(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read packages=.*Packages"):
        read_index(tmp_path / "Packages")
    (tmp_path / "Packages").write_text("Origin: Debian\nSuite: stable\n")
    with pytest.raises(ValueError, match="has no packages; it must be a Packages file"):
        read_index(tmp_path / "Packages")


def test_the_index_of_the_release_is_found(tmp_path):
    with pytest.raises(ValueError, match=r"0 files in .* it must be one: apt-get update, or name the file by --pack"):
        find_index(tmp_path)
    main = tmp_path / "deb.debian.org_debian_dists_bookworm_main_binary-amd64_Packages.lz4"
    for other in ("updates_main_binary-amd64", "security_main_binary-amd64", "backports_main_binary-amd64"):
        (tmp_path / f"deb.debian.org_debian_dists_bookworm-{other}_Packages.lz4").touch()
    for other in ("contrib_binary-amd64_Packages.lz4", "main_binary-amd64_Packages.diff_Index", "main_source_Sources"):
        (tmp_path / f"deb.debian.org_debian_dists_bookworm_{other}").touch()
    main.touch()
    assert find_index(tmp_path) == main
    main.with_suffix("").touch()
    with pytest.raises(ValueError, match="2 files in"):
        find_index(tmp_path)


def test_rows_that_are_chosen(monkeypatch):
    monkeypatch.setattr(debian, "LEAST", 2)
    kept = [Row("games", "a", "chess"), Row("games", "b", "draughts"), Row("libs", "c", "x"), Row("libs", "d", "y")]
    dropped = [
        Row("games", "a", "chess data"),  # a has a row in games
        Row("games", "e", "draughts"),  # b has the same words
        Row("libs", "e", "shared words"),
        Row("doc", "e", "shared words"),  # in two sections
        Row("libs", "f", ""),
        Row("oldlibs", "g", "first"),
        Row("oldlibs", "h", "second"),
        Row("mail", "i", "alone in its section"),
    ]
    assert sorted(choose(kept + dropped)) == kept
    other = Row("libs", "a", "z")  # the same source in another section, as libchess of chess
    assert sorted(choose([*kept, other])) == sorted([*kept, other])
    with pytest.raises(ValueError, match="fewer than two sections of packages have 2 rows"):
        choose(dropped)


def test_the_largest_sections_are_cut_at_random(monkeypatch):
    monkeypatch.setattr(debian, "LEAST", 2)
    monkeypatch.setattr(debian, "MOST", 300)
    rows = [Row("libs", f"lib{i:04}", f"words {i}") for i in range(2000)]
    rows += [Row("doc", "d", "manual"), Row("doc", "e", "guide")]
    found = choose(rows)
    assert Counter(row.section for row in found) == {"libs": 300, "doc": 2}
    numbers = [int(row.source[3:]) for row in found if row.section == "libs"]
    assert 900 < sum(numbers) / 300 < 1100
    assert choose(rows[::-1]) == found
    parts = Counter(split(row.source) for row in found if row.section == "libs")
    assert parts["train"] == pytest.approx(180, abs=30)  # which are kept says nothing of the part


def test_a_source_has_its_part_by_its_name_in_the_shares():
    for name in ("zlib", "perl", "0ad"):
        number = int(hashlib.sha256(f"part {name}".encode()).hexdigest()[:12], 16) / 16**12
        assert split(name) == ("test" if number < 0.2 else "validation" if number < 0.4 else "train")
    counts = Counter(split(f"package{i}") for i in range(5000))
    assert {part: round(count / 5000, 1) for part, count in counts.items()} == {
        "train": 0.6,
        "validation": 0.2,
        "test": 0.2,
    }


def test_tf_idf_by_hand(monkeypatch):
    monkeypatch.setattr(debian, "FREQUENT", 2)
    train = ["c library", "c library for r", "c", "rare"]
    words, (first, second) = tf_idf(train, [train, ["library unseen unseen", "for r", "c c library"]])
    assert words == ["c", "library"]  # in two training texts; "unseen" is in a test text only
    c, library = math.log(5 / 4) + 1, math.log(5 / 3) + 1
    one = np.array([c, library]) / math.hypot(c, library)
    two = np.array([2 * c, library]) / math.hypot(2 * c, library)
    np.testing.assert_allclose(first, [one, one, [1, 0], [0, 0]], atol=1e-3)
    np.testing.assert_allclose(second, [[0, 1], [0, 0], two], atol=1e-3)
    assert first.dtype == second.dtype == np.float16


def test_tf_idf_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    with pytest.raises(ImportError, match="debian-sections is built with scikit-learn: pip install scikit-learn"):
        tf_idf(["a"], [])


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Sixty sources of three packages each, and mail, which is in too few."""
    monkeypatch.setattr(debian, "LEAST", 20)
    packages = []
    for i in range(60):
        for suffix, section, words in (("1", "libs", "runtime"), ("-dev", "libdevel", "headers"), ("-doc", "doc", "")):
            text = f"{words} of thing{i}" + (f" only{split(f'src{i}')}" if suffix == "-dev" else "")
            packages.append(
                f"Package: lib{i}{suffix}\nSource: src{i}\nSection: {section}\nDescription: {text}\n Long\n .\n text.\n"
            )
    packages += [f"Package: mail{i}\nSection: mail\nDescription: mail number {i}\n" for i in range(19)]
    path = tmp_path / "Packages"
    path.write_text("\n".join(packages))
    return path


def test_the_build(index):
    built = debian.build(index)
    assert built["sections"].tolist() == ["doc", "libdevel", "libs"]
    assert sum(len(built[f"{part}_labels"]) for part in PARTS) == 180
    for part in PARTS:
        sources, labels, texts, features = (
            built[f"{part}_{what}"] for what in ("sources", "labels", "texts", "features")
        )
        assert {split(source) for source in sources} == {part}
        assert Counter(Counter(sources.tolist()).values()) == {3: len(labels) // 3}
        assert labels.tolist() == [1 if "headers" in text else 2 if "runtime" in text else 0 for text in texts]
        assert features.shape == (len(labels), len(built["words"]))
        expected = [[word in text.split() for word in built["words"]] for text in texts]
        assert ((features > 0) == np.array(expected)).all()
    assert built["words"].tolist() == ["headers", "of", "onlytrain", "runtime"]
    assert checksum(debian.build(index)) == checksum(built)


def test_the_command_and_what_is_loaded(index, tmp_path, capsys):
    path = tmp_path / "debian-sections.npz"
    debian.main(["--out", str(path), "--packages", str(index)])
    built, output = read(path), capsys.readouterr().out
    assert checksum(built) in output
    assert "3 sections, 4 words" in output
    first = path.read_bytes()
    debian.main(["--out", str(path), "--packages", str(index)])
    assert path.read_bytes() == first
    for folder in (path, tmp_path):
        data = datasets.load("debian-sections", folder=folder, train_size=30)
        assert (data.train_size(), data.classes, data.shape, data.augmentation) == (30, 3, (1, 1, 4), "none")
        assert tuple(data.class_names) == ("doc", "libdevel", "libs")
        assert [len(y) for part in PARTS for _, y in data.fixed(part)] == [
            30,
            len(built["validation_labels"]),
            len(built["test_labels"]),
        ]
    data = datasets.load("debian-sections", folder=path)
    (x, y), (train, _) = next(data.fixed("test")), next(data.fixed("train"))
    raw = {part: torch.from_numpy(built[f"{part}_features"]).double() for part in PARTS}
    expected = ((raw["test"] - raw["train"].mean()) / raw["train"].std()).float()
    torch.testing.assert_close(x, expected[:, None, None])
    assert y.tolist() == built["test_labels"].tolist()
    torch.testing.assert_close(train.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)


def test_load_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(
        ValueError, match=r"debian-sections from .*build it: python -m examples\.research\.datasets\.debi"
    ):
        datasets.load("debian-sections", folder=tmp_path)
    with pytest.raises(ValueError, match="augmentation='crop' is for images; debian-sections takes 'none'"):
        datasets.load("debian-sections", folder=tmp_path, augmentation="crop")
    with pytest.raises(ValueError, match="download=True is not possible for debian-sections"):
        datasets.load("debian-sections", download=True)
