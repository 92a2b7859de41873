"""The types of a training in its checkpoints: fairseq compares only how many there are.

A new text often gives as many types in another order, since `fairseq-preprocess` sorts them by frequency and pads their
number.
"""

import hashlib
from typing import Any, Dict, Mapping

from fairseq.data import Dictionary

NAME = "types"  # of the entry in a task's state


def state_of(*dictionaries: Dictionary) -> Dict[str, Any]:
    """An entry for the state of a task."""
    text = "\n\n".join("\n".join(dictionary.symbols) for dictionary in dictionaries)
    return {NAME: hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()}


def check_types(state: Mapping[str, Any], data: str, *dictionaries: Dictionary) -> None:
    """Raises an error if a checkpoint's task had other types; earlier checkpoints and fairseq's tasks have no entry."""
    if state.get(NAME) not in (None, state_of(*dictionaries)[NAME]):
        raise other_dictionary(data)


def other_dictionary(data: str) -> ValueError:
    return ValueError(
        f"{data} has another dictionary than the training of this checkpoint; give the data of the training, or "
        "binarise yours with its dictionaries, as --srcdict and --tgtdict of fairseq-preprocess"
    )
