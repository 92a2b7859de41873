"""`mega-fairseq prepare`: digits, splits, and what is refused."""

import os
from collections import Counter

import numpy as np

from mega_fairseq.cli import prepare as module
from mega_fairseq.cli.prepare import stratified

SPLITS = ("train", "valid", "test")


def rows(out):
    """All images of a folder and their labels."""
    names = [line for split in SPLITS for line in (out / f"{split}.label").read_text().split()]
    return list(zip(names, np.concatenate([np.load(out / f"{split}.npy") for split in SPLITS])))


# ------------------------------------------------------------------------------------------- digits


def test_digits_are_all_images_of_scikit_learn(tmp_path, cli):
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    expected = sorted(zip(map(str, labels), map(tuple, 15 * pixels.astype(int))))
    held_out = []
    for seed in (1, 2):
        out = tmp_path / f"out{seed}"
        assert cli("prepare", "digits", out, f"--seed={seed}")[0] == 0
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


# -------------------------------------------------------------------------------------------- files


def test_a_result_over_other_files_is_refused(tmp_path, refuses):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.txt").write_text("precious")
    for out in ("thesis", "thesis/thesis.txt", "thesis/thesis.txt/out"):
        refuses("prepare", "digits", tmp_path / out, words=[tmp_path / out])


def test_an_interrupted_preparation_leaves_nothing(tmp_path, cli, monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "draw_examples", interrupt)
    assert cli("prepare", "digits", tmp_path / "out")[0] == 130
    assert os.listdir(tmp_path) == []
