"""Icons of themes that the tests draw, and the loader that reads what is built."""

import numpy as np
import pytest
import torch
from PIL import Image

from examples.research import datasets
from examples.research.datasets import icons
from examples.research.datasets.archive import read
from examples.research.datasets.splits import PARTS

THEMES = {
    "train": ("bloom", "bloom-classic", "Vintage", "Faenza", "gnome", "Numix"),
    "validation": ("breeze",),
    "test": ("Moka", "gartoon"),
}
ALL = (*THEMES["train"], *THEMES["validation"], *THEMES["test"])
NAMES = ("clock", "folder", "printer")


def picture(*words):
    """Sixteen colors in squares, other ones for other words."""
    draws = np.random.default_rng([*" ".join(words).encode()])
    return draws.integers(0, 256, (4, 4, 3), np.uint8).repeat(16, 0).repeat(16, 1)


def write(folder, theme, name, pixels, place="64x64/apps"):
    path = folder / "package" / "icons" / theme / place / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    (folder / "package" / "icons" / theme / "index.theme").touch()
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def themes(tmp_path):
    """Nine themes that draw three names, each in its own way."""
    for theme in ALL:
        for name in NAMES:
            write(tmp_path, theme, name, picture(theme, name))
    return tmp_path


def drawn(arrays):
    """The part, theme and name of each picture, and the picture."""
    return {
        (part, str(arrays["themes"][theme]), str(arrays["icons"][label])): image
        for part in PARTS
        for image, label, theme in zip(
            *(arrays[f"{part}_{what}"] for what in ("images", "labels", "themes")), strict=True
        )
    }


EVERYTHING = {(part, theme, name) for part, found in THEMES.items() for theme in found for name in NAMES}


def test_each_theme_gives_its_pictures_to_one_part(themes):
    (themes / "package" / "icons" / "Unknown" / "64x64").mkdir(parents=True)
    write(themes, "Unknown", "folder", picture("another"))
    arrays = icons.build(themes)
    assert arrays["icons"].tolist() == list(NAMES)
    found = drawn(arrays)
    assert found.keys() == EVERYTHING
    for (_, theme, name), image in found.items():
        np.testing.assert_array_equal(image.transpose(1, 2, 0), picture(theme, name))


def test_an_origin_is_in_one_part_by_its_name_alone():
    parts = icons.split()
    assert sorted(origin for found in parts.values() for origin in found) == sorted(icons.ORIGINS)
    assert parts["validation"] == ["breeze"]
    assert parts["train"][:2] == ["deepin", "faenza"]
    assert parts["test"][:2] == ["elementary", "gartoon"]
    themes = [theme for found in icons.ORIGINS.values() for theme in found]
    assert len(themes) == len(set(themes))


def test_of_the_same_picture_in_two_themes_the_first_part_has_it(themes):
    write(themes, "gartoon", "folder", picture("gnome", "folder"))
    nearly = picture("gnome", "clock").astype(int) + 2
    write(themes, "Moka", "clock", nearly.clip(0, 255).astype(np.uint8), "128x128/apps")
    (themes / "package/icons/Moka/64x64/apps/clock.png").unlink()
    assert drawn(icons.build(themes)).keys() == EVERYTHING - {("test", "gartoon", "folder"), ("test", "Moka", "clock")}


def test_another_word_for_a_picture_is_no_class(themes):
    """All themes give folder and index one picture, and three of nine printer and scanner."""
    for theme in ALL:
        write(themes, theme, "index", picture(theme, "folder"))
        word = "printer" if theme in THEMES["train"][:3] else "scanner"
        write(themes, theme, "scanner", picture(theme, word))
    assert drawn(icons.build(themes)).keys() == EVERYTHING  # three scanners are too few to learn from
    for theme in THEMES["train"][:2]:
        write(themes, theme, "scanner", picture(theme, "scanner"))
    scanners = {(part, theme, "scanner") for part, found in THEMES.items() for theme in found}
    assert drawn(icons.build(themes)).keys() == EVERYTHING | scanners - {("train", "Vintage", "scanner")}


def test_icons_of_one_color_and_symbolic_ones_are_left_out(themes):
    flat = np.zeros((64, 64, 4), np.uint8)
    flat[8:40, 8:40] = (40, 40, 40, 255)
    write(themes, "gnome", "folder", flat)
    for theme in ALL:
        for name in ("search-symbolic", "undo-rtl"):
            write(themes, theme, name, picture(theme, name))
        write(themes, theme, "undo", picture(theme, "undo"), "symbolic/actions/64")
    found = drawn(icons.build(themes))
    assert found.keys() == EVERYTHING - {("train", "gnome", "folder")}


def test_few_themes_or_training_pictures_make_no_class(themes):
    for theme in (*THEMES["train"], *THEMES["validation"]):
        write(themes, theme, "untested", picture(theme, "untested"))
    for theme in (*THEMES["train"][:4], *THEMES["test"]):
        write(themes, theme, "rare", picture(theme, "rare"))
    assert icons.build(themes)["icons"].tolist() == list(NAMES)


def test_the_smallest_file_of_64_pixels_is_taken_else_a_scalable_one_else_the_largest(tmp_path):
    places = ("scalable/apps", "apps/48", "256x256/apps", "64x64/apps", "32x32/apps", "24x24/apps", "96x96@2x/apps")
    for place in places:
        write(tmp_path, "gnome", "folder", picture(place), place)
    theme = icons.find_themes(tmp_path)["gnome"]
    vector = theme / "scalable/apps/folder.svg"
    vector.touch()
    best = []
    while "folder" in icons.find_icons(theme):
        best.append(icons.find_icons(theme)["folder"])
        best[-1].unlink()
    order = ("64x64/apps/folder.png", "256x256/apps/folder.png", "scalable/apps/folder.svg", "apps/48/folder.png")
    assert [str(path.relative_to(theme.resolve())) for path in best] == [*order, "32x32/apps/folder.png"]


def test_a_link_is_the_file_it_leads_to_and_a_broken_one_is_none(tmp_path):
    path = write(tmp_path, "gnome", "folder", picture("a"))
    path.with_name("directory.png").symlink_to("folder.png")
    path.with_name("lost.png").symlink_to("/nowhere.png")
    found = icons.find_icons(icons.find_themes(tmp_path)["gnome"])
    assert found == {"folder": path.resolve(), "directory": path.resolve()}


def test_pictures_are_on_white_and_in_the_middle(tmp_path):
    pixels = np.zeros((16, 32, 4), np.uint8)
    pixels[:, :] = (255, 0, 0, 128)
    image = icons.on_white(icons.draw(write(tmp_path, "gnome", "half", pixels)))
    assert image.shape == (3, 64, 64)
    assert (image[:, :16] == 255).all()
    assert (image[:, 48:] == 255).all()
    assert np.abs(image[:, 17:47].astype(int) - np.array([255, 127, 127])[:, None, None]).max() <= 1


def test_a_broken_file_is_no_picture(tmp_path):
    path = write(tmp_path, "gnome", "folder", picture("a"))
    path.write_bytes(b"nothing")
    assert icons.draw(path) is None


def test_without_the_tool_that_draws_svg_its_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImportError, match="apt-get install librsvg2-bin"):
        icons.draw(tmp_path / "folder.svg")


def test_a_folder_without_themes(tmp_path):
    with pytest.raises(ValueError, match=r"has 0 of the themes, .* packages named at the top of .*icons\.py"):
        icons.build(tmp_path)


def test_the_command_writes_what_the_loader_reads(themes, tmp_path, capsys):
    icons.main(["--themes", str(themes), "--out", str(tmp_path / "icons.npz")])
    out = capsys.readouterr().out
    assert "3 classes, 18 train, 3 validation, 6 test" in out
    assert "validation: breeze 3" in out
    arrays = read(tmp_path / "icons.npz", "icons")
    data = datasets.load("icons", folder=tmp_path)
    assert (data.class_names, data.shape, data.augmentation) == (NAMES, (3, 64, 64), "crop")
    x, y = next(data.fixed("test"))
    torch.testing.assert_close(x, torch.from_numpy(arrays["test_images"]) / 127.5 - 1)
    assert y.tolist() == arrays["test_labels"].tolist()


def test_a_crop_is_white_beyond_the_icon(themes, tmp_path):
    icons.main(["--themes", str(themes), "--out", str(tmp_path / "icons.npz")])
    data = datasets.load("icons", folder=tmp_path / "icons.npz")
    raw, generator = read(tmp_path / "icons.npz", "icons")["train_images"], torch.Generator().manual_seed(0)
    padded = np.pad(raw, ((0, 0), (0, 0), (4, 4), (4, 4)), constant_values=255) / 127.5 - 1
    for x, _, numbers in data.epoch(6, generator):
        for one, number in zip(x.numpy(), numbers.tolist(), strict=True):
            crops = [padded[number, :, top : top + 64, left : left + 64] for top in range(9) for left in range(9)]
            assert min(np.abs(one - crop).max() for crop in crops) < 1e-6


def test_few_of_each_class_are_drawn_by_the_seed(themes, tmp_path):
    icons.main(["--themes", str(themes), "--out", str(tmp_path / "icons.npz")])

    def drawn_by(seed, shots=2):
        data = datasets.load("icons", folder=tmp_path / "icons.npz")
        data.limit(shots, seed)
        return torch.cat([x for x, _ in data.fixed("train")]), torch.cat([y for _, y in data.fixed("train")])

    x, y = drawn_by(0)
    assert y.bincount().tolist() == [2, 2, 2]
    assert torch.equal(drawn_by(0)[0], x)
    assert not torch.equal(drawn_by(1)[0], x)
    assert len(drawn_by(0, 100)[1]) == 18
