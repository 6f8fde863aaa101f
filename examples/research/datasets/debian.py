"""Debian sections: to which of 40 sections of the Debian archive a package belongs, from its one-line description.

The labels are the archive's own: imbalanced, and noisy, as a player written in Perl may be in sound or in perl. A row
is the TF-IDF of the description's words (:func:`tf_idf`), without the package's name. All packages that are built from
one source are in one of training, validation and test, no two descriptions have the same words, and a source gives one
row a section, since its packages repeat each other (:func:`choose`). Words that few texts have are left out after that,
so 281 of the 5,019 test rows equal a training row, 213 of them with its label. Built from the index that apt keeps::

    apt-get update && pip install scikit-learn
    python -m examples.research.datasets.debian --out runs/data/debian-sections.npz

The index is that of the release's ``main`` component, without updates and security updates, so it changes with point
releases only; another one gives other rows. With Debian 12.15 (bookworm, amd64, its Release file of 11 July 2026) and
scikit-learn 1.9 there are 14,782 training, 4,960 validation and 5,019 test rows, 2,504 words, and the checksum of the
arrays is 6cdf4cb6e1cf5a8193d31a2cceda99d57597ffa49e7ea0cef9b9cb2c72d3aadc.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.research.datasets.archive import FILES, save, sizes
from examples.research.datasets.splits import PARTS

LISTS = Path("/var/lib/apt/lists")
MAIN = re.compile(r".*_dists_[a-z]+_main_binary-\w+_Packages(\.[a-z0-9]+)?")
# Four say what a package is to the archive and not what it is about; 259 of localization's 357 packages are the
# language packs of three programs.
LEFT_OUT = ("debug", "localization", "metapackages", "oldlibs", "tasks")
LEAST = 100  # rows that a section needs
MOST = 1000  # rows of a section that are kept; without it five of the forty had 44 % of all rows
UNPACK = ("/usr/lib/apt/apt-helper", "cat-file")  # knows the compressions that apt keeps an index in
SHARES = (("test", 0.2), ("validation", 0.2))  # of the sources; training has the others
FREQUENT = 5  # training descriptions that a word has to be in


class Row(NamedTuple):
    """A package: its section, its source package and the words of its description."""

    section: str
    source: str
    words: str


def find_index(folder: Path = LISTS) -> Path:
    """The index of the main component in apt's folder.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = sorted(path for path in folder.glob("*_Packages*") if MAIN.fullmatch(path.name))
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} files in {folder} are the index of a Debian release; it must be one: apt-get update, or "
            "name the file by --packages"
        )
    return found[0]


def read_index(path: Path) -> list[Row]:
    """The packages of an index, by name; apt unpacks it where its name does not end with Packages.

    Raises:
        ValueError: the file cannot be read or has no packages.
    """
    try:
        text = path.read_text("utf-8") if path.name.endswith("Packages") else _unpacked(path)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"cannot read packages={path} ({error}); apt-get update, or unpack it as Packages") from error
    parser = HeaderParser()
    found = [parser.parsestr(paragraph) for paragraph in re.split(r"\n{2,}", text.strip())]
    packages = {fields["Package"]: fields for fields in found if "Package" in fields and "Section" in fields}
    if not packages:
        raise ValueError(f"packages={path} has no packages; it must be a Packages file of a Debian archive")
    rows = []
    for name in sorted(packages):
        fields = packages[name]
        source = fields.get("Source", name).split()[0]  # its version may follow
        line = fields.get("Description", "").split("\n")[0]
        rows.append(Row(fields["Section"], source, " ".join(re.findall(r"\w+", line.lower()))))
    return rows


def _unpacked(path: Path) -> str:
    return subprocess.run([*UNPACK, str(path)], check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def choose(rows: Iterable[Row]) -> list[Row]:
    """Rows that can be learned from, by section.

    Words that several sections share say nothing, so none of their rows is kept. Of a section's other rows with the
    same source or the same words the first is kept. A section needs LEAST rows, and a random MOST of them are kept.

    Raises:
        ValueError: fewer than two sections have LEAST rows.
    """
    useful = [row for row in rows if row.words and row.section not in LEFT_OUT]
    homes: dict[str, set[str]] = defaultdict(set)
    for row in useful:
        homes[row.words].add(row.section)
    taken: set[str | tuple[str, str]] = set()
    sections: dict[str, list[Row]] = defaultdict(list)
    for row in useful:
        if len(homes[row.words]) == 1 and row.words not in taken and row[:2] not in taken:
            taken |= {row.words, row[:2]}
            sections[row.section].append(row)
    kept = [found for section, found in sorted(sections.items()) if len(found) >= LEAST]
    if len(kept) < 2:
        raise ValueError(f"fewer than two sections of packages have {LEAST} rows; it must be the index of a release")
    return [row for found in kept for row in sorted(found, key=lambda row: _number(f"kept {row.source}"))[:MOST]]


def split(source: str) -> str:
    """The part of a source package, which depends on its name alone."""
    number = _number(f"part {source}")
    for part, share in SHARES:
        if number < share:
            return part
        number -= share
    return "train"


def _number(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def tf_idf(train: Sequence[str], texts: Iterable[Sequence[str]]) -> tuple[list[str], list[np.ndarray]]:
    """Words that are in FREQUENT training texts, and texts as rows of length 1 with a column for each such word.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError as error:
        raise ImportError("debian-sections is built with scikit-learn: pip install scikit-learn") from error
    vectorizer = TfidfVectorizer(token_pattern=r"\w+", min_df=FREQUENT).fit(train)
    return list(vectorizer.get_feature_names_out()), [
        vectorizer.transform(some).toarray().astype(np.float16) for some in texts
    ]


def build(packages: Path | None = None) -> dict[str, np.ndarray]:
    """Build the data set, the same one for the same index.

    Args:
        packages: the index, a Packages file; None: :func:`find_index`.

    Returns:
        For each part ``part_features`` (count, words) float16, ``part_labels`` (count,) int64, ``part_texts`` and
        ``part_sources`` (count,); and ``sections``, the class names, and ``words``, what the columns are.
    """
    rows = choose(read_index(packages or find_index()))
    sections = sorted({row.section for row in rows})
    parts = {part: [row for row in rows if split(row.source) == part] for part in PARTS}
    texts = {part: [row.words for row in found] for part, found in parts.items()}
    words, features = tf_idf(texts["train"], texts.values())
    arrays = {"sections": np.array(sections), "words": np.array(words)}
    for (part, found), values in zip(parts.items(), features, strict=True):
        arrays[f"{part}_features"] = values
        arrays[f"{part}_labels"] = np.array([sections.index(row.section) for row in found], np.int64)
        arrays[f"{part}_texts"] = np.array(texts[part])
        arrays[f"{part}_sources"] = np.array([row.source for row in found])
    return arrays


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the file and print its sizes and checksum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=FILES["debian-sections"], help="the file to write (default: %(default)s)"
    )
    parser.add_argument("--packages", type=Path, help=f"the index (default: the one of main in {LISTS})")
    options = parser.parse_args(arguments)
    arrays = build(options.packages)
    digest = save(arrays, options.out)
    counts = Counter(arrays["sections"][arrays["train_labels"]].tolist()).most_common()
    print(f"{options.out}: {len(arrays['sections'])} sections, {len(arrays['words'])} words, {sizes(arrays)}")
    print("training rows: " + ", ".join(f"{section} {count}" for section, count in counts))
    print(f"SHA-256 of the arrays: {digest}")


if __name__ == "__main__":
    main()
