"""`--retain-dropout`: dropout in generation, everywhere or in the modules that `--retain-dropout-modules` names.

The names are those of fairseq's Transformer: each has a counterpart here.
"""

import re
from typing import Sequence, Union

from torch import nn

NAMES = ("TransformerEncoder", "TransformerEncoderLayer", "TransformerDecoder", "TransformerDecoderLayer")
OF_FAIRSEQ = ("AdaptiveSoftmax",)  # fairseq's own module, which knows its name


def keep_dropout(stack: nn.Module, name: str, modules: Union[None, str, Sequence[str]]) -> None:
    """Keeps the dropout of an encoder or decoder: `name` is that of its embeddings, `name`Layer that of its layers.

    `modules` is a list, or as fairseq's command line passes it on, the text of one; None for all modules.
    """
    named = re.findall(r"\w+", modules) if isinstance(modules, str) else modules
    for module in named or ():
        if module not in (*NAMES, *OF_FAIRSEQ):
            raise ValueError(
                f"--retain-dropout-modules names {module!r}, which Mega models do not have; choose from "
                f"{', '.join((*NAMES, *OF_FAIRSEQ))}"
            )
    if named is None or name in named:
        stack.dropout_module.apply_during_inference = True
    if named is None or f"{name}Layer" in named:
        for layer in stack.layers:
            layer.dropout_module.apply_during_inference = True
