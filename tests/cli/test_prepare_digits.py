"""`mega-fairseq prepare digits`: the images of scikit-learn."""

import sys
from collections import Counter

import numpy as np

from mega_fairseq.cli import main as command
from tests.helpers.commands import refused_by

SPLITS = ("train", "valid", "test")


def test_digits_are_all_images_of_scikit_learn_in_splits_that_a_seed_draws(tmp_path):
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    expected = sorted(zip(map(tuple, 15 * pixels.astype(int)), labels.tolist()))
    held_out = []
    for seed in (1, 2):
        out = tmp_path / f"out{seed}"
        assert command.main(["prepare", "digits", str(out), "--workers=1", f"--seed={seed}"]) == 0
        images = {split: np.load(out / f"{split}.npy") for split in SPLITS}
        assert {split: (array.shape, array.dtype) for split, array in images.items()} == {
            split: ((size, 64), np.uint8) for split, size in zip(SPLITS, (1397, 200, 200))
        }
        names = {split: list(map(int, (out / f"{split}.label").read_text().split())) for split in SPLITS}
        rows = [row for split in SPLITS for row in zip(map(tuple, images[split].tolist()), names[split])]
        assert sorted(rows) == expected
        assert {split: max(Counter(names[split]).values()) for split in ("valid", "test")} == {"valid": 21, "test": 21}
        held_out.append(images["test"].tobytes())
    assert held_out[0] != held_out[1]


def test_digits_without_scikit_learn_say_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    code = command.main(["prepare", "digits", str(tmp_path / "out")])
    refused_by("prepare", (code, *capsys.readouterr()), "pip install scikit-learn")
    assert not (tmp_path / "out").exists()
