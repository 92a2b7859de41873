"""What torch.load creates from a checkpoint once the plugin is imported: arrays of numbers, and nothing of numpy."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import mega_fairseq.models  # noqa: F401 - torch.load may then read what fairseq saves


def loaded(content):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Call:
    """In a pickle, the result of a call, with a state."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


FUNCTION = np.zeros(1).__reduce__()[0]
EMPTY = (FUNCTION, (np.ndarray, (0,), b"b"))
OBJECT = Call(np.dtype, ("O", False, True))
# numpy believes that numbers of this type are objects: the bytes of an array become their addresses.
FIELDS = Call(np.dtype, ("f8", False, True), (3, "|", None, ("a",), {"a": (OBJECT, 0)}, 8, 8, 0))
FLOATS = Call(np.dtype, ("f8", False, True), (3, "<", None, None, None, -1, -1, 0))


@pytest.mark.parametrize(
    "forged",
    [
        Call(*EMPTY, (1, (1,), FIELDS, False, b"A" * 8)),
        Call(*EMPTY, (1, (1,), OBJECT, False, [1])),
        Call(*EMPTY, (1, (1,), "O", False, b"A" * 8)),
        Call(*EMPTY, (1, (1,), Call(np.dtype, ("f8", False, True), (3, ">", None)), False, b"A" * 8)),
        Call(*EMPTY, (1, (1 << 40,), FLOATS, False, b"A" * 8)),
        Call(*EMPTY, (1, (-1, 0), FLOATS, False, b"A" * 8)),
        Call(np.float64().__reduce__()[0], (OBJECT, b"A" * 8)),
        Call(np.float64().__reduce__()[0], (FIELDS, b"A" * 8)),
    ],
    ids=["fields", "objects", "name", "byte order", "more than there is", "negative", "number", "number of fields"],
)
def test_forged_arrays_are_refused(forged):
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        loaded({"extra_state": forged})


def test_an_array_cannot_be_filled_twice():
    """A tensor may share its memory, which numpy would free."""
    array = loaded(np.array([1, 2]))
    with pytest.raises(pickle.UnpicklingError, match="twice"):
        array.__setstate__((1, (0,), None, False, b""))


ARRAYS = {
    "counts": np.array([78, 30, 1, 0]),
    "sums": np.array([0.1, np.inf, -0.0]),
    "single": np.array([[1, 2], [3, 4], [5, 6]], dtype=np.float32),
    "by columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "no dimension": np.array(3),
    "number": np.float64(0.1),
    "whole number": np.int64(-7),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_numbers_are_loaded_and_saved_again_as_they_were(name):
    saved, again = ARRAYS[name], loaded(loaded(ARRAYS[name]))
    elsewhere = [pickle.loads(pickle.dumps(again, protocol)) for protocol in (2, 4, 5)]
    for found in (again, copy.deepcopy(again), *elsewhere):
        assert (found.dtype, found.shape) == (saved.dtype, saved.shape)
        assert found.tobytes() == saved.tobytes()
        assert (found + saved).tobytes() == (saved + saved).tobytes()
    assert {type(found) for found in elsewhere} == {type(saved)}
