"""`mega-fairseq prepare pictures`: what becomes of pictures of any format, and what is refused."""

import os
import sys

import numpy as np
import pytest

from mega_fairseq.cli.main import main
from tests.helpers.commands import refused_by
from tests.helpers.prepared import contents

Image = pytest.importorskip("PIL.Image")
SIDE = 6


@pytest.fixture
def pictures(tmp_path):
    """12 pictures of two labels: a colour each, so that a square of them has one value."""
    for number in range(12):
        folder = tmp_path / "pictures" / ("dark", "light")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (5 + number, 9), 20 * number).save(folder / f"{number}.{('png', 'bmp', 'gif')[number % 3]}")
    return tmp_path / "pictures"


@pytest.fixture
def prepare(pictures, tmp_path, capsys):
    """Runs the command in this process; returns its exit code, stdout and stderr."""

    def run(*options, out="out"):
        words = ["prepare", "pictures", str(tmp_path / out), str(pictures), f"--side={SIDE}", *options]
        return main([*words, *([] if "--workers=2" in options else ["--workers=1"])]), *capsys.readouterr()

    return run


def rows(out):
    """All pictures of a folder and their labels."""
    names = [line for split in ("train", "valid", "test") for line in (out / f"{split}.label").read_text().split()]
    return list(zip(names, np.concatenate([np.load(out / f"{split}.npy") for split in ("train", "valid", "test")])))


def test_each_picture_is_in_one_split_with_the_name_of_its_folder(prepare, tmp_path):
    code, said, errors = prepare()
    assert code == 0, errors
    assert "wrote train (10), valid (1), test (1)" in said
    found = rows(tmp_path / "out")
    assert all(len(row) == SIDE**2 and len(set(row.tolist())) == 1 for _, row in found)
    assert sorted((int(row[0]), name) for name, row in found) == [(20 * n, ("dark", "light")[n % 2]) for n in range(12)]
    train = np.load(tmp_path / "out/train.npy") / 255
    assert f"train with --values-mean {train.mean():.3f} --values-deviation {train.std():.3f}" in said
    assert (tmp_path / "out/labels.txt").read_text() == "dark\nlight\n"


def test_a_label_with_dollars_is_drawn_as_it_is(pictures, prepare, tmp_path):
    (pictures / "dark").rename(pictures / "$_$")
    code, _, errors = prepare()
    assert code == 0, errors
    assert (tmp_path / "out/examples.png").exists()


def test_pictures_do_not_depend_on_the_number_of_workers(prepare, tmp_path):
    prepare()
    prepare("--workers=2", out="again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_pictures_are_upright_on_white_and_grey(pictures, prepare, tmp_path):
    for path in pictures.glob("*/*"):
        path.unlink()
    stripes = Image.fromarray(np.repeat(np.uint8([[0, 200]]), SIDE, 0).repeat(SIDE // 2, 1))
    tag = stripes.getexif()
    tag[0x0112] = 6  # to be turned by 90 degrees
    colour = Image.new("RGBA", (3, 4), (10, 200, 30, 255))
    for number in range(3):
        stripes.save(pictures / f"dark/{number}.png", exif=tag)
        colour.save(pictures / f"light/{number}.png")
    Image.new("RGBA", (3, 4), (0, 0, 0, 0)).save(pictures / "light/3.png")
    assert prepare()[0] == 0
    values = {(name, tuple(row)) for name, row in rows(tmp_path / "out")}
    upright = (0,) * (SIDE**2 // 2) + (200,) * (SIDE**2 // 2)
    (grey,) = set(np.asarray(colour.convert("RGB").convert("L")).flat)
    assert values == {("dark", upright), ("light", (grey,) * SIDE**2), ("light", (255,) * SIDE**2)}


def test_hidden_files_are_left_out_and_files_without_a_label_counted(pictures, prepare):
    (pictures / ".DS_Store").write_text("")
    (pictures / "dark/.DS_Store").write_text("")
    os.mkfifo(pictures / "dark/.fifo")
    (pictures / "readme.txt").write_text("")
    code, said, errors = prepare()
    assert code == 0, errors
    assert f"files outside of the labels' folders were left out: 1, first {pictures / 'readme.txt'}\n" in said


def remove_a_label(pictures):
    for path in (pictures / "dark").iterdir():
        path.unlink()
    (pictures / "dark").rmdir()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove_a_label, ["contains 1 folders", "give one for each label"]),
        (
            lambda pictures: (pictures / "dark").rename(pictures / "very dark"),
            ["name 'very dark'", "not one word", "rename"],
        ),
        (lambda pictures: (pictures / "dark").rename(pictures / "dark\u200b"), ["printable characters", "rename"]),
        (lambda pictures: os.rename(bytes(pictures / "dark"), bytes(pictures / "d") + b"\xe9"), ["not one word"]),
        (lambda pictures: (pictures / "empty").mkdir(), ["empty contains 0 pictures", "at least 3"]),
        (
            lambda pictures: (pictures / "dark/more").mkdir(),
            ["dark/more is a folder within a label's folder", "move its pictures to", "or away"],
        ),
        (
            lambda pictures: pictures.rename(pictures.parent / "elsewhere"),
            ["pictures is not a folder", "give a folder"],
        ),
        (lambda pictures: (pictures / "dark/a.png").write_text("a"), ["dark/a.png", "convert or remove it"]),
        (
            lambda pictures: (pictures / "dark/0.png").write_bytes((pictures / "dark/6.png").read_bytes()[:-30]),
            ["dark/0.png cannot be read as a picture", "convert or remove it"],
        ),
        (
            lambda pictures: Image.new("I;16", (4, 4)).save(pictures / "dark/deep.png"),
            ["dark/deep.png", "more than 8 bits a channel", "convert"],
        ),
        (
            lambda pictures: Image.new("L", (4, 4)).save(pictures / "dark/old.eps"),
            ["dark/old.eps is damaged or none of BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP; convert or remove it"],
        ),
        (
            lambda pictures: Image.new("L", (4, 4)).save(
                pictures / "dark/film.gif", save_all=True, append_images=[Image.new("L", (4, 4), 9)]
            ),
            ["dark/film.gif", "it has several frames", "convert or remove it"],
        ),
        (lambda pictures: os.symlink("nowhere", pictures / "dark/link"), ["dark/link is a link to nothing", "remove"]),
        (lambda pictures: os.mkfifo(pictures / "dark/fifo"), ["dark/fifo is a special file"]),
        (lambda pictures: os.symlink("loop", pictures / "dark/loop"), ["dark/loop is a link to nothing", "remove"]),
        (lambda pictures: os.symlink("loop", pictures / "loop"), ["pictures/loop is a link to nothing", "remove"]),
    ],
)
def test_bad_folders_and_files_are_refused_by_name(change, words, pictures, prepare):
    change(pictures)
    refused_by("prepare", prepare(), *words)


def test_a_result_within_the_folder_of_the_pictures_is_refused(pictures, prepare):
    for out in ("pictures", "pictures/dark/out"):
        refused_by("prepare", prepare(out=out), f"{out} is within the folder of the pictures; choose another")
    assert sorted(path.name for path in pictures.iterdir()) == ["dark", "light"]


def test_a_side_out_of_range_and_a_missing_pillow_are_refused(prepare, monkeypatch):
    for side in (0, 50_000):
        refused_by("prepare", prepare(f"--side={side}"), f"--side is {side}", "from 1 to 4,096")
    monkeypatch.setitem(sys.modules, "PIL", None)
    refused_by("prepare", prepare(), "Pillow", "pip install pillow")
