r"""Icons: color pictures of 64x64 pixels from the icon themes of Debian; the class is the icon's name.

A theme draws ``folder-music`` or ``printer`` in its own way. All themes of one artist or of one origin are in one of
training, validation and test (ORIGINS), so a network has to learn what all drawings of a printer have in common.
Which origin is in which part depends on its name alone (:func:`split`). Left out are icons of one color, such as
symbolic ones, and all but one of the pictures that are nearly equal (:func:`unrepeated`). Of two names that most
themes give one picture only one is a class (:func:`distinct`). The pictures are on white. Built from Debian packages
that need not be installed (in bash)::

    mkdir themes && cd themes
    apt-get download $(printf '%s-icon-theme ' adwaita breeze deepin elementary elementary-xfce faba faenza gnome \
        gnome-brave lxde mate moka numix obsidian oxygen paper papirus suru tango) gnome-colors-common \
        gnome-icon-theme-gartoon gnome-icon-theme-nuovo gnome-icon-theme-suede gnome-icon-theme-yasis mint-y-icons \
        numix-icon-theme-circle yaru-theme-icon
    for package in *.deb; do dpkg -x $package .; done
    cd ..
    apt-get install -y librsvg2-bin && pip install pillow
    python -m examples.research.datasets.icons --themes themes --out runs/data/icons.npz

With their versions of Debian 12, librsvg 2.54.7 and Pillow 13.0 there are 372 classes, 2,563 training, 176 validation
and 1,369 test pictures, and the checksum of the arrays is
ea047382226b9fce9a68e16a5de2c7dc3fa837667394ac7ada9a24d836592047. The rule of :func:`split` was chosen among a few for
the number of test pictures, before anything was trained.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from examples.research.datasets.archive import FILES, save, sizes
from examples.research.datasets.splits import PARTS

DEBIAN = Path("/usr/share/icons")
ORIGINS = {  # folders of the themes of one artist or team, and of those that began as copies of theirs
    "breeze": ("breeze",),
    "deepin": ("bloom", "bloom-classic", "Vintage", "Sea"),
    "elementary": ("elementary", "elementary-xfce"),
    "faenza": ("Faenza", "Obsidian"),
    "gartoon": ("gartoon",),
    "gnome": ("Adwaita", "gnome", "mate", "menta", "Tango", "gnome-colors-common", "gnome-brave"),
    "hewitt": ("Faba", "Moka", "Paper", "suru", "Yaru", "Mint-Y"),
    "numix": ("Numix", "Numix-Circle"),
    "nuovext": ("nuoveXT2",),
    "nuovo": ("Nuovo",),
    "oxygen": ("oxygen",),
    "papirus": ("Papirus",),
    "suede": ("Suede",),
    "yasis": ("yasis",),
}
SIZE = 64
LEAST = 32  # pixels of what is enlarged
COMMON = 6  # themes that draw a class
DRAWN = 5  # training pictures of a class
SYNONYMS = 0.5  # share of the themes with both names that give them one picture
FLAT = 8  # standard deviation of the opaque pixels' colors, of 255, below which an icon has one color
ALIKE = 0.05  # root mean square difference of two pictures of a class, seen at 16x16, of 1, up to which one is a copy
SAME = 0.005  # the same of pictures of two classes, which may differ by a letter
NO_PICTURES = re.compile(r"cursors|animations|symbolic|.*@.*")
NO_CLASS = re.compile(r".*(symbolic|-rtl|-ltr)")
BLOCK = 512  # pictures that are compared with all others at once
FOLDER_SIZE = re.compile(r"(\d+)(x\d+)?")


class Row(NamedTuple):
    """A theme's picture of a name."""

    part: str
    theme: str
    name: str
    path: Path


def find_themes(folder: Path) -> dict[str, Path]:
    """The folders of the themes of ORIGINS, wherever they are below a folder, by their names."""
    known = {theme for themes in ORIGINS.values() for theme in themes}
    found = {}
    for place, folders, files in os.walk(folder):
        if "index.theme" in files:
            folders.clear()
            if Path(place).name in known:
                found[Path(place).name] = Path(place)
    return found


def find_icons(theme: Path) -> dict[str, Path]:
    """A theme's best file for each name: the smallest of at least 64 pixels, else a drawing, else the largest."""
    best: dict[str, tuple[tuple[float, str], Path]] = {}
    for place, folders, files in os.walk(theme):
        folders[:] = [name for name in folders if not NO_PICTURES.fullmatch(name)]
        parts = Path(place).relative_to(theme).parts
        for file in files:
            name, kind = os.path.splitext(file)
            if kind not in (".png", ".svg") or NO_CLASS.fullmatch(name):
                continue
            pixels = _pixels(parts, kind)
            if pixels is None or pixels < LEAST:
                continue
            path = Path(place) / file
            rank = (pixels if pixels >= SIZE else 1e6 - pixels, str(path))
            if (name not in best or rank < best[name][0]) and path.is_file():
                best[name] = (rank, path.resolve())
    return {name: path for name, (_, path) in best.items()}


def _pixels(folders: Sequence[str], kind: str) -> float | None:
    """The size that a theme's folders name; a drawing that fits all sizes comes after the sizes from 64 on."""
    if "scalable" in folders:
        return 1e5 if kind == ".svg" else None
    sizes = [int(match[1]) for match in map(FOLDER_SIZE.fullmatch, folders) if match]
    return sizes[0] if sizes else None


def draw(path: Path) -> np.ndarray | None:
    """An icon (64, 64, 4) in the middle, whose colors are multiplied by their opacity; None for a broken file.

    Raises:
        ImportError: rsvg-convert is missing, which draws SVG.
    """
    try:
        if path.suffix == ".svg":
            tool = shutil.which("rsvg-convert")
            if tool is None:
                raise ImportError("icons are drawn with rsvg-convert: apt-get install librsvg2-bin")
            command = [tool, "--width", str(SIZE), "--height", str(SIZE), "--keep-aspect-ratio", str(path)]
            done = subprocess.run(command, check=True, capture_output=True)
            picture = Image.open(io.BytesIO(done.stdout))
        else:
            picture = Image.open(path)
        picture = picture.convert("RGBA").convert("RGBa")
    except (OSError, subprocess.CalledProcessError):
        return None
    scale = SIZE / max(picture.size)
    size = tuple(max(1, round(side * scale)) for side in picture.size)
    canvas = Image.new("RGBa", (SIZE, SIZE))
    canvas.paste(picture.resize(size, Image.Resampling.LANCZOS), tuple((SIZE - side) // 2 for side in size))
    return np.asarray(canvas)


def colorful(drawn: np.ndarray) -> bool:
    """Whether an icon has more than one color: symbolic icons have one."""
    opaque = drawn[drawn[..., 3] > 230][:, :3].astype(float)
    return len(opaque) > 0 and bool(opaque.std(0).max() >= FLAT)


def on_white(drawn: np.ndarray) -> np.ndarray:
    """The picture (3, 64, 64)."""
    whole = drawn[..., :3].astype(int) + 255 - drawn[..., 3:]
    return np.ascontiguousarray(whole.clip(0, 255).astype(np.uint8).transpose(2, 0, 1))


def split() -> dict[str, list[str]]:
    """The origins of each part: in alphabetical order every second is for training, the first other for validation."""
    ordered = sorted(ORIGINS)
    return {"train": ordered[1::2], "validation": ordered[:1], "test": ordered[2::2]}


def common(icons: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names that COMMON themes draw, first those that most origins and themes draw."""
    themes = Counter(name for found in icons.values() for name in found)
    origins: Counter[str] = Counter()
    for members in ORIGINS.values():
        origins.update({name for theme in members for name in icons.get(theme, ())})
    names = (name for name, count in themes.items() if count >= COMMON)
    return sorted(names, key=lambda name: (-origins[name], -themes[name], name))


def distinct(names: Sequence[str], pictures: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The names without those that are a word for an earlier one: most themes that have both give them one picture.

    Args:
        names: in their order.
        pictures: of each theme, the checksum of the picture of each name; other names may be among them.
    """
    together: Counter[tuple[str, str]] = Counter()
    equal: Counter[tuple[str, str]] = Counter()
    rank = {name: number for number, name in enumerate(names)}
    for found in pictures.values():
        groups: dict[str, list[str]] = defaultdict(list)
        for name in found.keys() & rank.keys():
            groups[found[name]].append(name)
        for group in groups.values():
            ordered = sorted(group, key=rank.__getitem__)
            equal.update((one, other) for at, one in enumerate(ordered) for other in ordered[at + 1 :])
    for found in pictures.values():
        together.update(pair for pair in equal if pair[0] in found and pair[1] in found)
    kept: list[str] = []
    for name in names:
        if not any(equal[one, name] >= SYNONYMS * max(1, together[one, name]) for one in kept):
            kept.append(name)
    return kept


def unrepeated(pictures: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Which pictures (count, 3, 64, 64) stay: the first of nearly equal ones, where two classes have to be nearer."""
    small = pictures.reshape(len(pictures), 3, 16, 4, 16, 4).mean((3, 5), dtype=np.float32)
    small = small.reshape(len(pictures), -1) / 255
    squares = (small**2).sum(1)
    keep = np.ones(len(pictures), bool)
    for begin in range(0, len(pictures), BLOCK):
        block = slice(begin, begin + BLOCK)
        distances = squares[block, None] + squares - 2 * small[block] @ small.T
        limits = np.where(labels[block, None] == labels, ALIKE, SAME)
        near = distances <= limits**2 * small.shape[1]
        for number, row in enumerate(near, begin):
            keep[number] = not (row[:number] & keep[:number]).any()
    return keep


def build(folder: Path = DEBIAN) -> dict[str, np.ndarray]:
    """Draw the data set, the same one for the same themes, librsvg and Pillow.

    Returns:
        For each part ``part_images`` (count, 3, 64, 64) uint8, ``part_labels`` (count,) int64 and ``part_themes``
        (count,) int32, numbers in ``themes``, the names; and ``icons``, the class names.

    Raises:
        ValueError: the themes have too few names in common.
        ImportError: rsvg-convert is missing.
    """
    places = find_themes(folder)
    files = {theme: find_icons(place) for theme, place in sorted(places.items())}
    names = set(common(files))
    drawn = _drawn({path for found in files.values() for name, path in found.items() if name in names})
    icons = {theme: {name: path for name, path in found.items() if path in drawn} for theme, found in files.items()}
    checksums = {path: hashlib.sha256(picture).hexdigest() for path, picture in drawn.items()}
    pictures = {theme: {name: checksums[path] for name, path in found.items()} for theme, found in icons.items()}
    rows = _rows(icons, distinct(common(icons), pictures))
    if rows:
        numbers = {name: number for number, name in enumerate(dict.fromkeys(row.name for row in rows))}
        labels = np.array([numbers[row.name] for row in rows])
        kept = unrepeated(np.stack([drawn[row.path] for row in rows]), labels)
        rows = [row for row, keep in zip(rows, kept, strict=True) if keep]
    counts = {part: Counter(row.name for row in rows if row.part == part) for part in PARTS}
    classes = sorted(name for name, count in counts["train"].items() if count >= DRAWN and counts["test"][name])
    rows = [row for row in rows if row.name in set(classes)]
    if len(classes) < 2 or {row.part for row in rows} != set(PARTS):
        raise ValueError(
            f"themes={folder} has {len(places)} of the themes, too few for two classes in three parts; unpack the "
            "packages named at the top of examples/research/datasets/icons.py"
        )
    themes = sorted({row.theme for row in rows})
    arrays = {"icons": np.array(classes), "themes": np.array(themes)}
    for part in PARTS:
        chosen = [row for row in rows if row.part == part]
        arrays[f"{part}_images"] = np.stack([drawn[row.path] for row in chosen])
        arrays[f"{part}_labels"] = np.array([classes.index(row.name) for row in chosen], np.int64)
        arrays[f"{part}_themes"] = np.array([themes.index(row.theme) for row in chosen], np.int32)
    return arrays


def _rows(icons: Mapping[str, Mapping[str, Path]], classes: Sequence[str]) -> list[Row]:
    """The icons of the classes: class after class, and of each one those for training first."""
    parts = [(part, theme) for part in PARTS for origin in split()[part] for theme in ORIGINS[origin]]
    return [
        Row(part, theme, name, icons[theme][name])
        for name in classes
        for part, theme in parts
        if name in icons.get(theme, ())
    ]


def _drawn(paths: Iterable[Path]) -> dict[Path, np.ndarray]:
    """The pictures of the files that can be drawn in more than one color."""
    ordered = sorted(paths)
    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        drawings = tqdm(pool.map(draw, ordered), total=len(ordered), desc="drawing", unit="icon", disable=None)
        for path, drawn in zip(ordered, drawings, strict=True):
            if drawn is not None and colorful(drawn):
                found[path] = on_white(drawn)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the file and print its sizes and checksum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILES["icons"], help="the file to write (default: %(default)s)")
    parser.add_argument("--themes", type=Path, default=DEBIAN, help="folder of the themes (default: %(default)s)")
    options = parser.parse_args(arguments)
    arrays = build(options.themes)
    digest = save(arrays, options.out)
    print(f"{options.out}: {len(arrays['icons'])} classes, {sizes(arrays)}")
    for part in PARTS:
        counts = Counter(arrays["themes"][arrays[f"{part}_themes"]].tolist())
        print(f"{part}: " + ", ".join(f"{theme} {count}" for theme, count in counts.most_common()))
    print(f"SHA-256 of the arrays: {digest}")


if __name__ == "__main__":
    main()
