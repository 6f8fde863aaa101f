"""The faces of a folder's fonts that draw all of some characters, in groups of related designs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from examples.research.datasets.glyphs import plain
from examples.research.datasets.scripts import shuffled

COLLECTIONS = {".ttc", ".otc"}
SUFFIXES = {".ttf", ".otf", *COLLECTIONS}
ALIKE = 0.95  # cosine of two images from which they are nearly identical
TWINS = 0.45  # share of such characters in related faces; Debian's copies of a design have 0.9, most others below 0.4
SAME = 0.97  # mean cosine from which a face adds nothing to another
WORD = re.compile("[A-Z]*[a-z]+|[A-Z]+|.+")  # the first one of NanumGothic is Nanum, of BIZ UDGothic BIZ
SHARES = (("test", 0.25), ("validation", 0.25))  # of the faces; training has the others


@dataclass(frozen=True)
class Face:
    """One face of a font file: its number in it, 0 but in collections, and its names."""

    path: Path
    number: int
    family: str
    style: str

    @property
    def word(self) -> str:
        """What the family's name begins with, most often its maker's."""
        found = WORD.match(self.family)
        return found[0] if found else self.family

    def __str__(self) -> str:
        return f"{self.family} {self.style} ({self.path.name} {self.number})"


def find_faces(folder: Path, characters: str) -> list[Face]:
    """All faces below a folder that have every character, by file and number.

    Raises:
        ImportError: fontTools is not installed.
    """
    try:
        from fontTools.ttLib import TTCollection, TTFont, TTLibError
    except ImportError as error:
        raise ImportError("kanji-fonts is drawn with fontTools: pip install fonttools pillow") from error
    codes = {ord(character) for character in characters}
    found = []
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.is_symlink())
    for path in tqdm(paths, desc="reading fonts", unit="file"):
        with path.open("rb") as file:
            try:
                fonts: Any = (TTCollection if path.suffix.lower() in COLLECTIONS else TTFont)(file, lazy=True)
            except TTLibError:  # no font in spite of its name
                continue
            for number, font in enumerate(getattr(fonts, "fonts", [fonts])):
                if codes <= (font.getBestCmap() or {}).keys():  # fontTools leaves out what is mapped to .notdef
                    family, style = font["name"].getBestFamilyName(), font["name"].getBestSubFamilyName()
                    found.append(Face(path, number, family or path.stem, style or "Regular"))
    return found


def drawings(face: Face, characters: str) -> np.ndarray | None:
    """The undistorted images (count, 28, 28) of a face; None if one cannot be drawn, has no ink or is twice there."""
    images = []
    for character in characters:
        try:
            image = plain(face.path, character, face.number)
        except OSError:  # FreeType: the font's instructions are wrong
            return None
        if image is None:
            return None
        images.append(image)
    if len({image.tobytes() for image in images}) < len(images):  # boxes for characters that are not there
        return None
    return np.stack(images)


def likeness(images: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """For each two faces the share of characters that are nearly identical, and the mean cosine of their images."""
    stacked = np.stack(images, axis=1).astype(np.float64)  # sums of products of bytes are exact
    stacked = stacked.reshape(*stacked.shape[:2], -1)
    share = np.zeros((len(images), len(images)))
    mean = np.zeros_like(share)
    for drawn in stacked:
        products = drawn @ drawn.T
        norms = np.sqrt(products.diagonal())
        cosines = products / (norms[:, None] * norms)
        share += cosines > ALIKE
        mean += cosines
    return share / len(stacked), mean / len(stacked)


def related(faces: Sequence[Face], share: np.ndarray) -> list[list[int]]:
    """Numbers of the faces in groups: families whose names begin with one word, and those with a share of twins."""
    parents = list(range(len(faces)))

    def root(number: int) -> int:
        while parents[number] != number:
            number = parents[number]
        return number

    words: dict[str, int] = {}
    for number, face in enumerate(faces):
        parents[number] = root(words.setdefault(face.word, number))
    for one, other in zip(*np.nonzero(share >= TWINS), strict=True):
        parents[root(int(one))] = root(int(other))
    groups: dict[int, list[int]] = defaultdict(list)
    for number in range(len(faces)):
        groups[root(number)].append(number)
    return list(groups.values())


def unlike(group: Sequence[int], mean: np.ndarray, most: int) -> list[int]:
    """At most so many of a group's faces: the first, then always the one least like those; no nearly identical ones."""
    chosen = [group[0]]
    while len(chosen) < most:
        nearest = np.round(mean[np.ix_(group, chosen)].max(1), 6)
        if nearest.min() > SAME:
            break
        chosen.append(group[int(nearest.argmin())])
    return sorted(chosen)


def grouped(faces: Sequence[Face], images: Sequence[np.ndarray], most: int) -> dict[str, list[int]]:
    """Numbers of at most so many faces of each group, under its first family's name."""
    if not faces:
        return {}
    share, mean = likeness(images)
    return {faces[group[0]].family: unlike(group, mean, most) for group in related(faces, share)}


def split(groups: dict[str, list[int]]) -> dict[str, list[str]]:
    """Names of the groups for test, validation and training by their shares of the faces; only the names decide."""
    waiting = shuffled(sorted(groups), "kanji-fonts")
    faces = sum(map(len, groups.values()))
    parts: dict[str, list[str]] = {}
    for part, share in SHARES:
        parts[part] = []
        while waiting and sum(len(groups[name]) for name in parts[part]) < round(share * faces):
            parts[part].append(waiting.pop())
    parts["train"] = waiting
    return parts
