"""`mega-fairseq convert`: convert a checkpoint of the released code to one that fairseq loads with this plugin."""

import argparse
import io
import os
from typing import Any, Dict, List, Tuple

import torch
from fairseq.data import Dictionary
from torch import Tensor

from mega_fairseq.cli import UserError, errors_of
from mega_fairseq.cli.checkpoint import untrusted
from mega_fairseq.cli.convert.conversion import convert
from mega_fairseq.cli.output import check_file, write
from mega_fairseq.data.classification.labels import classes_of
from mega_fairseq.models.checkpoints import takes_names

WRITER = "the released code"


def run(arguments: argparse.Namespace) -> None:
    source, target = arguments.source, arguments.target
    check_file(target)
    if os.path.lexists(target):
        if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
            raise UserError(f"{target} is also the input, and its optimizer state would be lost; give another name")
        if not arguments.force:
            raise UserError(f"{target} exists; add --force to overwrite it, or give another name")
    labels = None if arguments.labels is None else read_labels(arguments.labels)
    with errors_of(source):
        state, summary = convert(*read(source), labels)
    buffer = io.BytesIO()  # torch.save into a file hides the reason for a failed write
    torch.save(state, buffer)
    write(target, buffer.getbuffer())
    print(f"{target}:", *summary, sep="\n  ")


def read(path: str) -> Tuple[Dict[str, Any], Dict[str, Tensor]]:
    """The options and tensors of the released checkpoint at `path`."""
    if not takes_names():  # numpy has renamed modules since the released checkpoints were written
        raise UserError(
            f"cannot be read by torch {torch.__version__} without executing code in it; convert it with torch 2.6 or "
            "newer (Python 3.11 or newer): the converted checkpoint loads here"
        )
    content = untrusted.load(path, WRITER)
    tensors = untrusted.model_tensors(content, WRITER)
    if content.get("cfg") is not None or not isinstance(content.get("args"), argparse.Namespace):
        raise UserError(
            "was not written by the released code, which stores its options under `args`; if this plugin wrote it, use "
            "it as it is"
        )
    untrusted.check_finite(tensors)
    return vars(content["args"]), tensors


def read_labels(path: str) -> List[str]:
    """The classes in a dictionary of labels that fairseq-preprocess wrote, in order."""
    try:
        classes = classes_of(Dictionary.load(path))
    except Exception:  # of many types, and with advice for training
        raise UserError(f"--labels is {path}, which is not a readable dictionary; give label-bin/dict.txt") from None
    return classes
