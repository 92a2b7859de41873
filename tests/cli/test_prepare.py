"""`mega-fairseq prepare`: digits, pictures of any format, splits, and what is refused."""

import os
from collections import Counter

import numpy as np
import pytest

from mega_fairseq.cli import prepare as module
from mega_fairseq.cli.main import main
from mega_fairseq.cli.prepare import stratified
from tests.helpers.commands import refused_by

SIDE = 6
SPLITS = ("train", "valid", "test")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows(out):
    """All images of a folder and their labels."""
    names = [line for split in SPLITS for line in (out / f"{split}.label").read_text().split()]
    return list(zip(names, np.concatenate([np.load(out / f"{split}.npy") for split in SPLITS])))


# ------------------------------------------------------------------------------------------- digits


def test_digits_are_all_images_of_scikit_learn(tmp_path):
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    expected = sorted(zip(map(str, labels), map(tuple, 15 * pixels.astype(int))))
    held_out = []
    for seed in (1, 2):
        out = tmp_path / f"out{seed}"
        assert main(["prepare", "digits", str(out), f"--seed={seed}"]) == 0
        assert [np.load(out / f"{split}.npy").shape for split in SPLITS] == [(1397, 64), (200, 64), (200, 64)]
        assert sorted((label, tuple(row.tolist())) for label, row in rows(out)) == expected
        assert max(Counter((out / "test.label").read_text().split()).values()) == 21
        held_out.append((out / "test.npy").read_bytes())
    assert held_out[0] != held_out[1]


# ------------------------------------------------------------------------------------------- splits


def test_splits_have_equal_shares_of_all_labels():
    labels = [number % 4 for number in range(400)]
    members = stratified(labels, (320, 40, 40), "seed")
    assert all(
        ((members == split) & (np.array(labels) == label)).sum() == size // 4
        for split, size in enumerate((320, 40, 40))
        for label in range(4)
    )
    few = stratified([number // 5 for number in range(500)], (400, 50, 50), "seed")  # one of each label is held out
    in_valid = {place // 5 for place in np.flatnonzero(few == 1)}
    assert 10 < len(in_valid & set(range(50))) < 40  # without an order of labels


# ----------------------------------------------------------------------------------------- pictures


@pytest.fixture
def pictures(tmp_path):
    """12 pictures of two labels: a colour each, so that a square of them has one value."""
    image = pytest.importorskip("PIL.Image")
    for number in range(12):
        folder = tmp_path / "pictures" / ("dark", "light")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("L", (5 + number, 9), 20 * number).save(folder / f"{number}.{('png', 'bmp', 'gif')[number % 3]}")
    return tmp_path / "pictures"


@pytest.fixture
def prepare(pictures, tmp_path, capsys):
    """Runs the command in this process; returns its exit code, stdout and stderr."""

    def run(*options, out="out"):
        words = ["prepare", "pictures", str(tmp_path / out), str(pictures), f"--side={SIDE}", "--workers=1", *options]
        return main(words), *capsys.readouterr()

    return run


def test_each_picture_is_in_one_split_with_its_label(prepare, tmp_path):
    code, said, errors = prepare()
    assert code == 0, errors
    assert "wrote train (10), valid (1), test (1)" in said
    images = rows(tmp_path / "out")
    assert all(len(row) == SIDE**2 and len(set(row.tolist())) == 1 for _, row in images)
    assert sorted((int(row[0]), label) for label, row in images) == [
        (20 * number, ("dark", "light")[number % 2]) for number in range(12)
    ]
    train = np.load(tmp_path / "out/train.npy") / 255
    assert f"--values-mean {train.mean():.3f} --values-deviation {train.std():.3f}" in said
    assert (tmp_path / "out/labels.txt").read_text() == "dark\nlight\n"
    prepare("--workers=2", out="again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_pictures_are_upright_on_white_and_grey(pictures, prepare, tmp_path):
    from PIL import Image

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


def film(path):
    from PIL import Image

    Image.new("L", (4, 4)).save(path, save_all=True, append_images=[Image.new("L", (4, 4), 9)])


def deep(path):
    from PIL import Image

    Image.new("I;16", (4, 4)).save(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda place: (place / "dark").rename(place / "dark\u200b"), ["rename"]),
        (lambda place: (place / "dark/more").mkdir(), ["dark/more"]),
        (lambda place: (place / "dark/a.png").write_text("a"), ["dark/a.png"]),
        (lambda place: (place / "dark/0.png").write_bytes((place / "dark/0.png").read_bytes()[:-30]), ["dark/0.png"]),
        (lambda place: deep(place / "dark/deep.png"), ["dark/deep.png"]),
        (lambda place: film(place / "dark/film.gif"), ["dark/film.gif"]),
        (lambda place: os.symlink("nowhere", place / "dark/link"), ["dark/link"]),
    ],
)
def test_bad_folders_and_files_are_refused_by_name(change, words, pictures, prepare, tmp_path):
    change(pictures)
    refused_by("prepare", prepare(), *words)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


def test_a_result_within_the_pictures_or_over_other_files_is_refused(pictures, prepare, tmp_path):
    refused_by("prepare", prepare(out="pictures/dark/out"), "pictures/dark/out")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.txt").write_text("precious")
    for out in ("thesis", "thesis/thesis.txt", "thesis/thesis.txt/out"):
        refused_by("prepare", prepare(out=out), tmp_path / out)
    assert contents(tmp_path / "thesis") == {"thesis.txt": b"precious"}


def test_an_interrupted_preparation_leaves_nothing(prepare, tmp_path, monkeypatch, pictures):
    def interrupt(side, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "grey_square", interrupt)
    assert prepare()[0] == 130
    assert os.listdir(tmp_path) == ["pictures"]
