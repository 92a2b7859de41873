"""`--retain-dropout`: dropout in generation, in all modules or in those of `--retain-dropout-modules`.

The names are those of fairseq's Transformer; each has a counterpart in Mega models.
"""

import re
from typing import Sequence, Union

from torch import nn

NAMES = ("TransformerEncoder", "TransformerEncoderLayer", "TransformerDecoder", "TransformerDecoderLayer")
OF_FAIRSEQ = ("AdaptiveSoftmax",)  # fairseq's own module, which checks the option itself


def keep_dropout(stack: nn.Module, name: str, modules: Union[None, str, Sequence[str]]) -> None:
    """Keeps the dropout of an encoder or decoder: `name` stands for its embeddings, `name`Layer for its layers.

    `modules` is a list, the text of a list as on fairseq's command line, or None for all modules.
    """
    named = re.findall(r"\w+", modules) if isinstance(modules, str) else modules
    for module in named or ():
        if module not in (*NAMES, *OF_FAIRSEQ):
            raise ValueError(
                f"--retain-dropout-modules has {module!r}, which Mega models lack; choose from "
                f"{', '.join((*NAMES, *OF_FAIRSEQ))}"
            )
    if named is None or name in named:
        stack.dropout_module.apply_during_inference = True
    if named is None or f"{name}Layer" in named:
        for layer in stack.layers:
            layer.dropout_module.apply_during_inference = True
