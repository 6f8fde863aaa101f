"""Kanji fonts on fonts that the tests make, and the loader that reads what is built."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTCollection, TTFont

from examples.research import datasets
from examples.research.datasets import kanji
from examples.research.datasets.archive import checksum, read, save
from examples.research.datasets.faces import (
    Face,
    drawings,
    find_faces,
    grouped,
    likeness,
    related,
    split,
    unlike,
)
from examples.research.datasets.glyphs import distorted, plain
from examples.research.datasets.splits import PARTS

CHARACTERS = "一右雨"
FAMILIES = ("Aoi", "Beni", "Chika", "Doro", "Eiga", "Fuji")


def glyph(seed, bold=0):
    """A frame with five random strokes in it; bold ones are wider."""
    draws, pen = np.random.default_rng(seed), TTGlyphPen(None)
    strokes = [(0, 0, 60, 1000), (940, 0, 1000, 1000)]
    for left, bottom in draws.integers(100, 600, (5, 2)).tolist():
        wide, high = ((300, 40), (40, 300))[draws.integers(2)]
        strokes.append((left, bottom, left + wide, bottom + high))
    for left, bottom, right, top in strokes:
        pen.moveTo((left, bottom))
        for corner in ((left, top + bold), (right + bold, top + bold), (right + bold, bottom)):
            pen.lineTo(corner)
        pen.closePath()
    return pen.glyph()


def write_font(path, family, design=None, characters=CHARACTERS, style="Regular", bold=0, empty=False, tofu=False):
    """Write a font of a family that has the strokes of a design, by default the one of its name."""
    names = {ord(character): f"u{ord(character):x}" for character in characters}
    glyphs = {name: glyph([*(design or family).encode(), code], bold) for code, name in names.items()}
    glyphs[".notdef"] = glyph(0)
    first, second = names[ord(characters[0])], names[ord(characters[1])]
    if empty:
        glyphs[first] = TTGlyphPen(None).glyph()
    if tofu:
        glyphs[first] = glyphs[second]
    font = FontBuilder(1000, isTTF=True)
    font.setupGlyphOrder(sorted(glyphs))
    font.setupCharacterMap(names)
    font.setupGlyf(glyphs)
    font.setupHorizontalMetrics(dict.fromkeys(glyphs, (1000, 0)))
    font.setupHorizontalHeader(ascent=1100, descent=-200)
    font.setupNameTable({"familyName": family, "styleName": style})
    font.setupOS2()
    font.setupPost()
    path.parent.mkdir(exist_ok=True)
    font.save(path)


@pytest.fixture
def fonts(tmp_path):
    """Six families of different designs; Aoi is copied as Zen, and Beni has four weights."""
    folder = tmp_path / "fonts"
    for family in FAMILIES:
        write_font(folder / f"{family}.ttf", family)
    write_font(folder / "copy.otf", "Zen", design="Aoi")
    for number, bold in enumerate((40, 80, 160)):
        write_font(folder / f"Beni-{number}.ttf", "Beni", style=f"Bold{number}", bold=bold)
    return folder


def faces(*families):
    return [Face(kanji.DEBIAN / f"{family}.ttf", 0, family, "Regular") for family in families]


def test_faces_with_all_characters_are_found(fonts):
    write_font(fonts / "lacks.ttf", "Lacks", characters=CHARACTERS[:2])
    (fonts / "no.ttf").write_bytes(b"<html>")
    (fonts / "link.ttf").symlink_to(fonts / "Aoi.ttf")
    (fonts / "deep").mkdir()
    collection = TTCollection()
    collection.fonts = [TTFont(fonts / name) for name in ("lacks.ttf", "Fuji.ttf", "Eiga.ttf")]
    collection.save(fonts / "deep" / "both.TTC")
    found = [(face.path.name, face.number, face.family, face.style) for face in find_faces(fonts, CHARACTERS)]
    assert found == [
        ("Aoi.ttf", 0, "Aoi", "Regular"),
        *((f"Beni-{number}.ttf", 0, "Beni", f"Bold{number}") for number in range(3)),
        ("Beni.ttf", 0, "Beni", "Regular"),
        ("Chika.ttf", 0, "Chika", "Regular"),
        ("Doro.ttf", 0, "Doro", "Regular"),
        ("Eiga.ttf", 0, "Eiga", "Regular"),
        ("Fuji.ttf", 0, "Fuji", "Regular"),
        ("copy.otf", 0, "Zen", "Regular"),
        ("both.TTC", 1, "Fuji", "Regular"),
        ("both.TTC", 2, "Eiga", "Regular"),
    ]
    assert str(find_faces(fonts, CHARACTERS)[-1]) == "Eiga Regular (both.TTC 2)"


def test_a_face_of_a_collection_draws_its_own_characters(fonts):
    collection = TTCollection()
    collection.fonts = [TTFont(fonts / name) for name in ("Fuji.ttf", "Eiga.ttf")]
    collection.save(fonts / "both.ttc")
    for number, name in enumerate(("Fuji.ttf", "Eiga.ttf")):
        assert np.array_equal(plain(fonts / "both.ttc", "雨", number), plain(fonts / name, "雨"))
    assert not np.array_equal(plain(fonts / "Fuji.ttf", "雨"), plain(fonts / "Eiga.ttf", "雨"))


def test_faces_that_cannot_draw_all_characters_have_no_drawings(fonts, monkeypatch):
    write_font(fonts / "empty.ttf", "Empty", empty=True)
    write_font(fonts / "tofu.ttf", "Tofu", tofu=True)
    drawn = {face.path.name: drawings(face, CHARACTERS) for face in find_faces(fonts, CHARACTERS)}
    assert [name for name in drawn if drawn[name] is None] == ["empty.ttf", "tofu.ttf"]
    assert (drawn["Aoi.ttf"].shape, drawn["Aoi.ttf"].dtype) == ((3, 28, 28), np.uint8)
    assert np.array_equal(drawn["Aoi.ttf"][1], plain(fonts / "Aoi.ttf", CHARACTERS[1]))

    def broken(*_):
        raise OSError("invalid opcode")

    monkeypatch.setattr("examples.research.datasets.faces.plain", broken)
    assert drawings(find_faces(fonts, CHARACTERS)[0], CHARACTERS) is None


def test_likeness_counts_nearly_identical_images():
    one = np.zeros((2, 2, 2), np.uint8)
    one[:, 0] = 200  # both images are (1, 1, 0, 0)
    two = one.copy()
    two[0, 1, 0] = 200  # the first is (1, 1, 1, 0), its cosine is 2 / sqrt(6)
    three = one // 2
    share, mean = likeness([one, two, three])
    np.testing.assert_allclose(share, [[1, 0.5, 1], [0.5, 1, 0.5], [1, 0.5, 1]])
    other = (1 + 2 / 6**0.5) / 2
    np.testing.assert_allclose(mean, [[1, other, 1], [other, 1, other], [1, other, 1]])


def test_related_faces_share_images_or_the_first_word_of_their_names():
    found = faces("UnBatang", "Baekmuk Gulim", "Baekmuk Dotum", "IPAexGothic", "UnDotum", "TW-Kai", "Monapo", "明朝")
    share = np.eye(len(found))
    for one, other, value in ((2, 4, 0.46), (3, 6, 1.0), (5, 6, 0.44)):
        share[one, other] = share[other, one] = value
    groups = [[found[number].family for number in group] for group in related(found, share)]
    assert sorted(groups) == [
        ["IPAexGothic", "Monapo"],
        ["TW-Kai"],
        ["UnBatang", "Baekmuk Gulim", "Baekmuk Dotum", "UnDotum"],
        ["明朝"],
    ]


def test_the_first_word_of_a_name_ends_at_a_capital_letter():
    words = {
        "NanumBarunGothic": "Nanum",
        "BIZ UDGothic": "BIZ",
        "M PLUS 1": "M",
        "kiloji - B": "kiloji",
        "明朝 A": "明朝 A",
    }
    assert {face.family: face.word for face in faces(*words)} == words


def test_unlike_faces_are_chosen():
    mean = np.array(
        [
            [1.00, 0.90, 0.60, 0.98, 0.70],
            [0.90, 1.00, 0.50, 0.90, 0.95],
            [0.60, 0.50, 1.00, 0.60, 0.65],
            [0.98, 0.90, 0.60, 1.00, 0.70],
            [0.70, 0.95, 0.65, 0.70, 1.00],
        ]
    )
    assert unlike(range(5), mean, 2) == [0, 2]
    assert unlike(range(5), mean, 3) == [0, 2, 4]  # 1 is as like 0 as 0.9, 4 only as 0.7
    assert unlike(range(5), mean, 9) == [0, 1, 2, 4]  # 3 is nearly identical to 0
    assert unlike([3, 1], mean, 9) == [1, 3]


def test_groups_are_split_by_their_faces():
    groups = {f"group {number}": list(range(1 + number % 3)) for number in range(30)}
    parts = split(groups)
    assert sorted(name for names in parts.values() for name in names) == sorted(groups)
    sizes = {part: sum(len(groups[name]) for name in names) for part, names in parts.items()}
    assert sorted(sizes) == sorted(PARTS)
    assert all(15 <= sizes[part] <= 17 for part in ("test", "validation"))  # of 60, and no group is cut
    assert split(dict(reversed(groups.items()))) == parts
    assert split({"group": [0, 1, 2]}) == {"test": ["group"], "validation": [], "train": []}


def test_copies_are_in_one_group_and_no_group_has_too_many_faces(fonts):
    found = find_faces(fonts, CHARACTERS)
    images = [drawings(face, CHARACTERS) for face in found]
    groups = grouped(found, images, 3)
    assert sorted(groups) == sorted(FAMILIES)  # Zen is Aoi's
    assert [found[number].family for number in groups["Aoi"]] == ["Aoi"]  # an identical face adds nothing
    assert [found[number].family for number in groups["Beni"]] == ["Beni"] * 3
    assert len(grouped(found, images, 9)["Beni"]) == 4
    # Of a family with one copy, the other faces come along.
    write_font(fonts / "copy-bold.ttf", "Zen", design="elsewhere")
    found = find_faces(fonts, CHARACTERS)
    groups = grouped(found, [drawings(face, CHARACTERS) for face in found], 3)
    assert [found[number].path.name for number in groups["Aoi"]] == ["Aoi.ttf", "copy-bold.ttf"]


@pytest.fixture
def built(fonts):
    return kanji.build(fonts, CHARACTERS)


def test_the_build(built, fonts):
    assert built["kanji"].tolist() == list(CHARACTERS)
    assert built["groups"].tolist() == sorted(FAMILIES)
    found = {part: set(built[f"{part}_groups"].tolist()) for part in PARTS}
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 6
    assert all(found.values())
    assert Counter(name.split()[0] for name in built["faces"].tolist()) == {**dict.fromkeys(FAMILIES, 1), "Beni": 4}
    for part in PARTS:
        images, labels = built[f"{part}_images"], built[f"{part}_labels"]
        assert (images.shape[1:], images.dtype, labels.dtype) == ((28, 28), np.uint8, np.int64)
        assert set(Counter(labels.tolist()).values()) == {len(images) // 3}
        for image, label, face, group in zip(
            images, labels, built[f"{part}_faces"], built[f"{part}_groups"], strict=True
        ):
            name = built["faces"][face]
            family, _, file, _ = name.split()
            assert family == built["groups"][group]
            draws = random.Random(f"{name} {CHARACTERS[label]}")
            assert np.array_equal(image, distorted(fonts / file.strip("("), CHARACTERS[label], draws))
    images = np.concatenate([built[f"{part}_images"] for part in PARTS])
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) == len(images) == 9 * 3
    assert checksum(kanji.build(fonts, CHARACTERS)) == checksum(built)


def test_the_build_needs_three_groups(fonts, tmp_path):
    for family in FAMILIES[2:]:
        (fonts / f"{family}.ttf").unlink()
    with pytest.raises(ValueError, match="has fonts of 2 groups with all kanji, too few for three parts; install"):
        kanji.build(fonts, CHARACTERS)
    with pytest.raises(ValueError, match="has fonts of 0 groups with all kanji"):
        kanji.build(tmp_path / "none", CHARACTERS)


def test_the_command_writes_the_same_bytes_twice(fonts, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kanji.build, "__defaults__", (fonts, CHARACTERS))
    paths = [tmp_path / "one.npz", tmp_path / "other.npz"]
    for path in paths:
        kanji.main(["--out", str(path), "--fonts", str(fonts)])
    assert paths[0].read_bytes() == paths[1].read_bytes()
    out = capsys.readouterr().out
    assert checksum(read(paths[0], "kanji-fonts")) in out
    assert "3 kanji" in out


def test_the_loader(built, tmp_path):
    save(built, tmp_path / "kanji-fonts.npz")
    for folder in (tmp_path, tmp_path / "kanji-fonts.npz"):
        data = datasets.load("kanji-fonts", folder=folder)
        assert (data.name, data.classes, data.shape, data.augmentation) == ("kanji-fonts", 3, (1, 28, 28), "crop")
    assert data.class_names == tuple(CHARACTERS)
    train = built["train_images"] / 255
    for part in PARTS:
        x, y = (torch.cat(tensors) for tensors in zip(*data.fixed(part), strict=True))
        assert y.tolist() == built[f"{part}_labels"].tolist()
        expected = (built[f"{part}_images"] / 255 - train.mean()) / train.std(ddof=1)
        torch.testing.assert_close(x, torch.from_numpy(expected).float().unsqueeze(1))
    part = datasets.load("kanji-fonts", folder=tmp_path, train_size=6)
    labels = torch.cat([y for _, y in part.fixed("train")])
    assert Counter(labels.tolist()) == {0: 2, 1: 2, 2: 2}


def test_the_kanji():
    assert len(kanji.KANJI) == len(set(kanji.KANJI)) == 150
