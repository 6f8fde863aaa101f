"""Noto scripts: letters of 100 Unicode scripts drawn from the Noto fonts; the class is the script.

No letter, in none of its forms, is in two of training, validation and test, so a network has to learn what the letters
of a script have in common. Built without the internet from two Debian packages::

    apt-get install -y fonts-noto-core fonts-noto-extra && pip install fonttools pillow
    python -m examples.research.datasets.noto --out runs/data/noto-scripts.npz

With version 20201225-1 of the packages and Pillow 13.0 the checksum of the arrays is
e748a133687a06945649c29c17b45d1b61fe51241b05280adc4032889a0278c2.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from examples.research.datasets.archive import FILES, save, sizes
from examples.research.datasets.glyphs import distorted, plain
from examples.research.datasets.scripts import Letter, by_script, find_letters, largest, shuffled, split, without_twins
from examples.research.datasets.splits import PARTS

DEBIAN = Path("/usr/share/fonts/truetype/noto")
SCRIPTS, LEAST, MOST = 100, 30, 120
PICTURES = 4  # of each letter


def build(fonts: Path = DEBIAN, scripts: int = SCRIPTS) -> dict[str, np.ndarray]:
    """Draw the data set, the same one for the same fonts and Pillow.

    Returns:
        For each part ``part_images`` (count, 28, 28) uint8, ``part_labels`` (count,) int64 and ``part_codes``
        (count,) int32, the code points; and ``scripts``, the class names (ISO 15924).
    """
    candidates = {script: found for script, found in by_script(find_letters(fonts)).items() if len(found) >= LEAST}
    letters = without_twins(_plain_pictures([letter for found in candidates.values() for letter in found]))
    chosen = largest(by_script(letters), scripts, LEAST, MOST)
    rows: dict[str, list[tuple[np.ndarray, int, int]]] = {part: [] for part in PARTS}
    seen: set[bytes] = set()
    for label, script in enumerate(tqdm(sorted(chosen), desc="drawing", unit="script")):
        for part, members in split(chosen[script]).items():
            for letter in sorted(members, key=lambda letter: letter.code):
                for picture in _pictures(letter):
                    if picture.tobytes() not in seen:
                        seen.add(picture.tobytes())
                        rows[part].append((picture, label, letter.code))
    arrays = {"scripts": np.array(sorted(chosen))}
    for part, found in rows.items():
        images, labels, codes = zip(*found, strict=True)
        arrays[f"{part}_images"] = np.stack(images)
        arrays[f"{part}_labels"] = np.array(labels, np.int64)
        arrays[f"{part}_codes"] = np.array(codes, np.int32)
    return arrays


def _plain_pictures(letters: Sequence[Letter]) -> Iterator[tuple[Letter, bytes]]:
    for letter in tqdm(letters, desc="looking for twins", unit="letter"):
        for font in letter.fonts:
            picture = plain(font, chr(letter.code))
            if picture is not None:
                yield letter, picture.tobytes()


def _pictures(letter: Letter) -> Iterator[np.ndarray]:
    """As many fonts as there are, each in turn, every image distorted in its own way."""
    fonts = shuffled(letter.fonts, f"fonts {letter.code}")
    for number in range(PICTURES):
        font = fonts[number % len(fonts)]
        picture = distorted(font, chr(letter.code), random.Random(f"{letter.code} {number}"))
        if picture is not None:
            yield picture


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the file and print its sizes and checksum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=FILES["noto-scripts"], help="the file to write (default: %(default)s)"
    )
    parser.add_argument("--fonts", type=Path, default=DEBIAN, help="folder of the fonts (default: %(default)s)")
    options = parser.parse_args(arguments)
    arrays = build(options.fonts)
    digest = save(arrays, options.out)
    print(f"{options.out}: {len(arrays['scripts'])} scripts, {sizes(arrays)}\nSHA-256 of the arrays: {digest}")


if __name__ == "__main__":
    main()
