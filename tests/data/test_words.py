"""Inputs that a model cannot read give one warning each, for one number from the device and then none."""

import pytest
import torch
from torch import Tensor

from mega_fairseq.data.words import check_words, warned
from tests.helpers.golden_models import PAD, dictionary
from tests.helpers.small_models import EOS

UNK = 3
GOOD, UNKNOWN, BLANK = [5, 6, EOS], [UNK, UNK, EOS], [PAD, PAD, EOS]


@pytest.fixture
def check(monkeypatch, caplog):
    """Checks rows, and returns the first words of new warnings and how many numbers were read."""
    warned.clear()
    read = []
    for name in ("__bool__", "__int__", "item", "tolist"):
        own = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, own=own: read.append(1) or own(self))

    def call(*rows, **options):
        caplog.clear()
        read.clear()
        check_words(torch.tensor(rows), dictionary(4), **options)
        return [message.split()[0] for message in caplog.messages], len(read)

    yield call
    warned.clear()


def test_each_kind_is_told_once(check):
    assert check(GOOD, GOOD, can_be_blank=False) == ([], 1)
    assert check(GOOD, BLANK, can_be_blank=False) == (["an"], 1)
    assert check(GOOD, BLANK, can_be_blank=False) == ([], 1)
    assert check(UNKNOWN, UNKNOWN, can_be_blank=False) == (["most"], 1)
    assert check(UNKNOWN, BLANK, can_be_blank=False) == ([], 0)


def test_blank_texts_are_told_only_where_they_matter(check):
    assert check(GOOD, BLANK) == ([], 1)
    assert check(UNKNOWN, UNKNOWN) == (["most"], 1)
    assert check(UNKNOWN, UNKNOWN) == ([], 0)
    assert check(GOOD, BLANK, can_be_blank=False) == (["an"], 1)
