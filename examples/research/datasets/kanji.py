r"""Kanji fonts: 150 common kanji drawn in the CJK fonts of Debian; the class is the kanji.

No font, and no other one of the same design or name, is in two of training, validation and test, so a network has to
learn what all forms of a kanji have in common. Fonts are grouped by the images themselves, see
:mod:`examples.research.datasets.faces`, and every chosen face has one image of each kanji. All that draw real kanji are
in: KanjiStrokeOrders with its small numbers and the cursive KouzanBrushFontSousyo too, most of whose kanji can be read.
Built without the internet from Debian packages (in bash)::

    apt-get install -y $(printf 'fonts-%s ' \
        aoyagi-kouzan-t aoyagi-soseki arphic-bkai00mp arphic-bsmi00lp arphic-gbsn00lp arphic-gkai00mp arphic-ukai \
        arphic-uming baekmuk cns11643-kai cns11643-sung dejima-mincho dotgothic16 hanazono horai-umefont \
        ipaexfont-gothic ipaexfont-mincho ipafont-gothic ipafont-mincho ipamj-mincho kanjistrokeorders kiloji klee \
        komatuna konatu kouzan-mouhitsu lxgw-wenkai migmix misaki mona monapo morisawa-bizud-gothic \
        morisawa-bizud-mincho motoya-l-cedar motoya-l-maruberi mplus nanum noto-cjk noto-cjk-extra \
        oradano-mincho-gsrr reggae sawarabi-gothic sawarabi-mincho seto smiley-sans takao-gothic takao-mincho \
        train umeplus umeplus-cl unfonts-core unfonts-extra vlgothic wqy-microhei wqy-zenhei \
        yozvox-yozfont-antique yozvox-yozfont-cute yozvox-yozfont-edu yozvox-yozfont-new-kana \
        yozvox-yozfont-standard-kana yusei-magic)
    pip install fonttools pillow
    python -m examples.research.datasets.kanji --out runs/data/kanji-fonts.npz

With their versions of Debian 12, no other CJK fonts installed, and Pillow 13.0 the checksum of the arrays is
36e1ca6ee8a4b621d4920869bcdaad1cb1aa25dd19f2cf6efdde93e85a52c9d3.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from examples.research.datasets.archive import FILES, save, sizes
from examples.research.datasets.faces import Face, drawings, find_faces, grouped, split
from examples.research.datasets.glyphs import distorted
from examples.research.datasets.splits import PARTS

DEBIAN = Path("/usr/share/fonts")
# The first 150 of the Japanese school's years 1 and 2 that all of these fonts have, the Chinese and Korean ones too.
KANJI = (
    "一右雨王音下火花九休玉金空月犬五口校左三山子四字耳七手十出女小上森人水正生夕石赤千川先早草足村大男竹"
    "中町天田土二日入年白八百文木本名目立力林六引羽何科夏家歌回海外角活丸岩汽弓牛京近兄形元言原古午後工公"
    "交光考行高合谷今才作算止市矢思寺自室社弱首秋春少色食心新西星晴切雪船前走多太台地池知茶朝直通弟店刀冬"
)
FACES = 4  # of each group of related fonts


def build(fonts: Path = DEBIAN, kanji: str = KANJI) -> dict[str, np.ndarray]:
    """Draw the data set, the same one for the same fonts and Pillow.

    Returns:
        For each part ``part_images`` (count, 28, 28) uint8, ``part_labels`` (count,) int64, and ``part_faces`` and
        ``part_groups`` (count,) int32, numbers in ``faces`` and ``groups``, the names; and ``kanji``, the class names.

    Raises:
        ValueError: the fonts are of too few designs.
    """
    found, images = [], []
    for face in tqdm(find_faces(fonts, kanji), desc="looking for twins", unit="face"):
        drawn = drawings(face, kanji)
        if drawn is not None:
            found.append(face)
            images.append(drawn)
    groups = grouped(found, images, FACES)
    parts = split(groups)
    if not all(parts.values()):
        raise ValueError(
            f"fonts={fonts} has fonts of {len(groups)} groups with all kanji, too few for three parts; "
            "install the packages named at the top of examples/research/datasets/kanji.py"
        )
    names = sorted(groups)
    faces = [number for name in names for number in groups[name]]
    arrays = {"kanji": np.array(list(kanji)), "groups": np.array(names)}
    arrays["faces"] = np.array([str(found[number]) for number in faces])
    for part, members in parts.items():
        rows = [
            (image, label, faces.index(number), names.index(name))
            for name in sorted(members)
            for number in groups[name]
            for label, image in enumerate(_images(found[number], kanji))
        ]
        pixels, labels, drawn_by, related_to = zip(*rows, strict=True)
        arrays[f"{part}_images"] = np.stack(pixels)
        arrays[f"{part}_labels"] = np.array(labels, np.int64)
        arrays[f"{part}_faces"] = np.array(drawn_by, np.int32)
        arrays[f"{part}_groups"] = np.array(related_to, np.int32)
    return arrays


def _images(face: Face, kanji: str) -> list[np.ndarray | None]:
    """One image of each kanji, distorted in its own way."""
    return [distorted(face.path, one, random.Random(f"{face} {one}"), face.number) for one in kanji]


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the file and print its sizes and checksum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=FILES["kanji-fonts"], help="the file to write (default: %(default)s)"
    )
    parser.add_argument("--fonts", type=Path, default=DEBIAN, help="folder of the fonts (default: %(default)s)")
    options = parser.parse_args(arguments)
    arrays = build(options.fonts)
    digest = save(arrays, options.out)
    groups = ", ".join(f"{len(np.unique(arrays[f'{part}_groups']))} {part}" for part in PARTS)
    print(f"{options.out}: {len(arrays['kanji'])} kanji, {sizes(arrays)}; groups of fonts: {groups}")
    print(f"SHA-256 of the arrays: {digest}")


if __name__ == "__main__":
    main()
