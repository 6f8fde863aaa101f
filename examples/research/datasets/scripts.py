"""The letters of Unicode scripts that a folder of Noto fonts has, and which of them are for training and tests."""

from __future__ import annotations

import random
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

LETTER_CATEGORIES = ("Lu", "Ll", "Lt", "Lo")  # no modifier letters: they are small copies of other letters
NO_SCRIPTS = ("Zyyy", "Zinh", "Zzzz")  # common, inherited and unknown
STYLES = ("Regular", "Bold")
SHARES = (("test", 0.25), ("validation", 0.15))  # of a script's letters; training has the others
T = TypeVar("T")


@dataclass(frozen=True)
class Letter:
    """A code point, its script (ISO 15924) and the fonts that have it."""

    code: int
    script: str
    fonts: tuple[Path, ...]

    @property
    def base(self) -> str:
        """What it is a form of: without accents, lower case, no positional form. É, é and E are forms of e."""
        return unicodedata.normalize("NFKD", chr(self.code)).casefold()[0]


def find_letters(folder: Path) -> list[Letter]:
    """All letters that the regular fonts in a folder have, by code point.

    Raises:
        ImportError: fontTools is not installed.
        ValueError: the folder has no Noto fonts.
    """
    try:
        from fontTools import unicodedata as scripts
        from fontTools.ttLib import TTFont
    except ImportError as error:
        raise ImportError("noto-scripts is drawn with fontTools: pip install fonttools pillow") from error
    fonts: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(path for style in STYLES for path in folder.glob(f"Noto*-{style}.ttf")):
        with TTFont(path, lazy=True) as font:
            for code in font.getBestCmap():  # fontTools leaves out what is mapped to .notdef
                fonts[code].append(path)
    if not fonts:
        raise ValueError(f"fonts={folder} has no Noto*.ttf; apt-get install -y fonts-noto-core fonts-noto-extra")
    found = [Letter(code, scripts.script(chr(code)), tuple(paths)) for code, paths in sorted(fonts.items())]
    return [letter for letter in found if scripts.category(chr(letter.code)) in LETTER_CATEGORIES]


def by_script(letters: Iterable[Letter]) -> dict[str, list[Letter]]:
    """Letters under their script; what belongs to several scripts or none is left out."""
    groups: dict[str, list[Letter]] = defaultdict(list)
    for letter in letters:
        if letter.script not in NO_SCRIPTS:
            groups[letter.script].append(letter)
    return dict(groups)


def without_twins(pictures: Iterable[tuple[Letter, bytes]]) -> list[Letter]:
    """Drop letters that look exactly like another one: one of each script's is kept, none where scripts share it."""
    seen: dict[bytes, list[Letter]] = defaultdict(list)
    for letter, picture in pictures:
        seen[picture].append(letter)
    letters = {letter.code: letter for alike in seen.values() for letter in alike}
    for alike in seen.values():
        shared = len({letter.script for letter in alike}) > 1
        first = min(letter.code for letter in alike)
        for letter in alike:
            if shared or letter.code != first:
                letters.pop(letter.code, None)
    return [letters[code] for code in sorted(letters)]


def largest(groups: dict[str, list[Letter]], scripts: int, least: int, most: int) -> dict[str, list[Letter]]:
    """The scripts with the most letters, and at most ``most`` letters of each, from as many base letters as possible.

    Args:
        scripts: how many scripts to keep.
        least: letters that each must have.

    Raises:
        ValueError: fewer than ``scripts`` scripts have ``least`` letters.
    """
    ranked = sorted(groups, key=lambda script: (-len(groups[script]), script))[:scripts]
    if len(ranked) < scripts or len(groups[ranked[-1]]) < least:
        raise ValueError(
            f"fewer than scripts={scripts} have {least} letters in these fonts; "
            "apt-get install -y fonts-noto-core fonts-noto-extra"
        )
    return {script: _varied(groups[script], most) for script in sorted(ranked)}


def split(letters: Sequence[Letter]) -> dict[str, list[Letter]]:
    """One script's letters as test, validation and training; the forms of a base letter stay together."""
    forms = _forms(letters)
    waiting = shuffled(sorted(forms), letters[0].script)
    parts: dict[str, list[Letter]] = {}
    for part, share in SHARES:
        parts[part] = []
        while len(parts[part]) < round(share * len(letters)):
            parts[part] += forms[waiting.pop()]
    parts["train"] = [letter for base in waiting for letter in forms[base]]
    return parts


def shuffled(values: Iterable[T], seed: str) -> list[T]:
    """A copy in an order that only the seed decides."""
    order = list(values)
    random.Random(seed).shuffle(order)
    return order


def _forms(letters: Iterable[Letter]) -> dict[str, list[Letter]]:
    forms: dict[str, list[Letter]] = defaultdict(list)
    for letter in letters:
        forms[letter.base].append(letter)
    return dict(forms)


def _varied(letters: Sequence[Letter], most: int) -> list[Letter]:
    ranks = {letter.code: rank for alike in _forms(letters).values() for rank, letter in enumerate(alike)}
    order = sorted(shuffled(letters, letters[0].script), key=lambda letter: ranks[letter.code])
    return sorted(order[:most], key=lambda letter: letter.code)
