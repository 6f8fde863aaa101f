"""Noto scripts on fonts that the tests make, and on the real ones' letters where they are installed."""

import random
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

from examples.research.datasets import noto
from examples.research.datasets.archive import checksum, read, save
from examples.research.datasets.glyphs import distorted, plain
from examples.research.datasets.scripts import Letter, by_script, find_letters, largest, split, without_twins

GREEK, RUNES, OGHAM = range(0x3B1, 0x3B9), range(0x16A0, 0x16AC), range(0x1681, 0x1687)
EMPTY, TWIN, ABSENT = 0x3B1, 0x16A1, 0x3B2  # a letter without ink, one like the rune before, one that is .notdef


def box(width, height, dot):
    pen = TTGlyphPen(None)
    for left, bottom, right, top in ((100, 0, 100 + width, height), (100, height + 50, 150 + dot, height + 150)):
        pen.moveTo((left, bottom))
        for corner in ((left, top), (right, top), (right, bottom)):
            pen.lineTo(corner)
        pen.closePath()
    return pen.glyph()


def write_font(path, codes, wide=0):
    """Each letter is a box with a dot of its own width; 1 and A are there too."""
    codes = [*codes, ord("1"), ord("A")]
    names = {code: f"u{code:x}" for code in codes}
    glyphs = {name: box(300 + wide, 400, 20 * number) for number, name in enumerate(names.values())}
    glyphs[".notdef"] = box(500, 500, 0)
    if EMPTY in names:
        glyphs[names[EMPTY]] = TTGlyphPen(None).glyph()
        glyphs.pop(names[ABSENT])
        names[ABSENT] = ".notdef"
    if TWIN in names:
        glyphs[names[TWIN]] = glyphs[names[TWIN - 1]]
    font = FontBuilder(1000, isTTF=True)
    font.setupGlyphOrder(sorted(glyphs))
    font.setupCharacterMap(names)
    font.setupGlyf(glyphs)
    font.setupHorizontalMetrics(dict.fromkeys(glyphs, (1000, 0)))
    font.setupHorizontalHeader(ascent=800, descent=-200)
    font.setupNameTable({"familyName": path.stem, "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(path)


@pytest.fixture
def fonts(tmp_path):
    write_font(tmp_path / "NotoSansGreek-Regular.ttf", GREEK)
    write_font(tmp_path / "NotoSansGreek-Bold.ttf", GREEK, wide=110)
    write_font(tmp_path / "NotoSansRunic-Regular.ttf", RUNES, wide=35)
    write_font(tmp_path / "NotoSansOgham-Regular.ttf", OGHAM, wide=64)
    write_font(tmp_path / "NotoSansOgham-Thin.ttf", range(0x1681, 0x1699), wide=64)
    return tmp_path


def letters(text, script="Latn"):
    return [Letter(ord(character), script, ()) for character in text]


def codes(found):
    return "".join(chr(letter.code) for letter in found)


def test_letters_are_found_with_their_scripts_and_fonts(fonts):
    found = by_script(find_letters(fonts))
    assert {script: [letter.code for letter in some] for script, some in found.items()} == {
        "Grek": [code for code in GREEK if code != ABSENT],
        "Runr": list(RUNES),
        "Ogam": list(OGHAM),
        "Latn": [ord("A")],  # 1 is no letter
    }
    assert [path.stem for path in found["Grek"][0].fonts] == ["NotoSansGreek-Bold", "NotoSansGreek-Regular"]
    assert all(letter.fonts == (fonts / "NotoSansOgham-Regular.ttf",) for letter in found["Ogam"])
    with pytest.raises(ValueError, match="apt-get install -y fonts-noto-core fonts-noto-extra"):
        find_letters(fonts / "none")


def test_common_letters_belong_to_no_script():
    assert by_script([*letters("a"), *letters("ªx", "Zyyy")]) == {"Latn": letters("a")}


def test_twins_are_dropped():
    a, b, c = letters("abc")
    alpha, beta = letters("αβ", "Grek")
    pictures = [(a, b"1"), (alpha, b"1"), (b, b"2"), (c, b"2"), (beta, b"3"), (beta, b"4"), (b, b"5")]
    assert codes(without_twins(reversed(pictures))) == "bβ"  # a is alpha, c is b; beta only has two fonts


def test_forms_have_one_base():
    assert len({letter.base for letter in letters("eEéÉḗ")}) == 1
    assert len({letter.base for letter in letters("\u0628\ufe8f\ufe91", "Arab")}) == 1  # beh, isolated and initial
    assert len({letter.base for letter in letters("efg")}) == 3


def test_largest_scripts_and_varied_letters():
    groups = {"Latn": letters("aáàâbcd"), "Grek": letters("αβγ", "Grek"), "Runr": letters("ᚠᚡ", "Runr")}
    kept = largest(groups, scripts=2, least=3, most=4)
    assert {script: codes(some) for script, some in kept.items()} == {"Grek": "αβγ", "Latn": "abcd"}
    with pytest.raises(ValueError, match="fewer than scripts=3 have 3 letters"):
        largest(groups, scripts=3, least=3, most=4)


def test_split_keeps_forms_together():
    text = "aàáâbcçdeèéêëfghiìíîïjklmnñoòóôöpqrsştuùúûüvwxyýÿzž"
    parts = {part: codes(some) for part, some in split(letters(text)).items()}
    assert sorted("".join(parts.values())) == sorted(text)
    bases = {part: {letter.base for letter in letters(some)} for part, some in parts.items()}
    assert len(bases["train"] | bases["validation"] | bases["test"]) == sum(map(len, bases.values()))
    assert 0.25 * len(text) - 1 <= len(parts["test"]) <= 0.25 * len(text) + 5
    assert 0.15 * len(text) - 1 <= len(parts["validation"]) <= 0.15 * len(text) + 5
    assert parts == {part: codes(some) for part, some in split(letters(text)).items()}


def test_plain_pictures_are_centred_and_fitted(fonts):
    picture = plain(fonts / "NotoSansRunic-Regular.ttf", chr(RUNES[3]))
    assert (picture.shape, picture.dtype, picture.max()) == ((28, 28), np.uint8, 255)
    rows, columns = (np.flatnonzero(picture.max(axis) > 127) for axis in (1, 0))
    assert (rows[0], rows[-1]) == (3, 24)  # 22 pixels high
    # The box is 335 wide and 550 high with the gap and the dot.
    assert abs(picture[20].sum() / 255 - 22 * 335 / 550) < 0.3
    assert abs(columns[0] + columns[-1] - 27) <= 1


def test_letters_without_ink_have_no_picture(fonts):
    font = fonts / "NotoSansGreek-Regular.ttf"
    assert plain(font, chr(EMPTY)) is None
    assert distorted(font, chr(EMPTY), random.Random(0)) is None


def test_distorted_pictures_differ_and_repeat(fonts):
    font, character = fonts / "NotoSansRunic-Regular.ttf", chr(RUNES[3])
    pictures = [distorted(font, character, random.Random(seed)) for seed in range(30)]
    assert len({picture.tobytes() for picture in pictures}) == 30
    assert np.array_equal(pictures[4], distorted(font, character, random.Random(4)))
    ink, middles = plain(font, character).sum(), []
    for picture in pictures:
        assert 0.55 * ink < picture.sum() < 1.1 * ink  # 0.8 squared is 0.64
        weights = picture / picture.sum()
        middles.append([float((weights.sum(axis) * np.arange(28)).sum()) for axis in (1, 0)])
    assert np.abs(np.array(middles) - np.array(middles).mean(0)).max() < 1.5  # it turns about the middle


@pytest.fixture
def built(fonts, monkeypatch):
    monkeypatch.setattr(noto, "LEAST", 3)
    return noto.build(fonts, scripts=3)


def test_the_build(built, fonts):
    assert built["scripts"].tolist() == ["Grek", "Ogam", "Runr"]
    found = {part: set(built[f"{part}_codes"].tolist()) for part in noto.PARTS}
    assert found["train"] | found["validation"] | found["test"] == {*GREEK, *RUNES, *OGHAM} - {EMPTY, ABSENT, TWIN}
    assert sum(map(len, found.values())) == 8 + 12 + 6 - 3
    images = np.concatenate([built[f"{part}_images"] for part in noto.PARTS])
    assert images.shape[1:] == (28, 28)
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) == len(images) == 23 * noto.PICTURES
    for part in noto.PARTS:
        for label, code in zip(built[f"{part}_labels"], built[f"{part}_codes"], strict=True):
            assert code in (GREEK, OGHAM, RUNES)[label]
    assert checksum(noto.build(fonts, scripts=3)) == checksum(built)


def test_saved_and_read(built, tmp_path):
    path = tmp_path / "new" / "noto.npz"
    digest = save(built, path)
    again = read(path)
    assert {name: again[name].tolist() for name in again} == {name: built[name].tolist() for name in built}
    assert digest == checksum(again)
    assert [found.name for found in path.parent.iterdir()] == ["noto.npz"]
    changed = {**built, "train_labels": built["train_labels"][::-1]}
    assert checksum(changed) != digest
    np.savez(path, sha256=np.array(digest), **changed)
    with pytest.raises(ValueError, match="does not have the SHA-256 checksum"):
        read(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="build it: python -m"):
        read(path)


def test_an_interrupted_write_leaves_the_old_file(built, tmp_path, monkeypatch):
    path = tmp_path / "out" / "noto.npz"
    digest = save(built, path)

    def interrupted(file, **_):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(built, path)
    assert checksum(read(path)) == digest
    assert [found.name for found in path.parent.iterdir()] == ["noto.npz"]


def test_the_command(fonts, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(noto, "LEAST", 3)
    monkeypatch.setattr(noto.build, "__defaults__", (fonts, 3))
    noto.main(["--out", str(tmp_path / "o.npz"), "--fonts", str(fonts)])
    assert checksum(read(tmp_path / "o.npz")) in capsys.readouterr().out


@pytest.mark.skipif(not noto.DEBIAN.is_dir(), reason="needs fonts-noto-core and fonts-noto-extra")
def test_debians_fonts_have_a_hundred_scripts():
    found = by_script(find_letters(Path(noto.DEBIAN)))
    assert sum(len(some) >= noto.LEAST for some in found.values()) >= noto.SCRIPTS
    assert {"Latn", "Deva", "Cher", "Egyp"} < found.keys()
