"""`mega-fairseq convert`: turns a checkpoint of the released code into one that fairseq loads with this plugin."""

import argparse
import io
import os

import torch

from mega_fairseq.cli.files import write
from mega_fairseq.cli.refusal import Refusal
from mega_fairseq.cli.released_checkpoint import read


def run(arguments: argparse.Namespace) -> None:
    source, target = arguments.source, arguments.target
    _check_target(source, target, arguments.force)
    try:
        released = read(source)
        # Only now: this imports fairseq, and with it the plugin lets torch.load trust more classes.
        from mega_fairseq.cli.converted import convert

        converted = convert(released)
    except Refusal as refusal:
        raise Refusal(f"{source} {refusal}") from None
    buffer = io.BytesIO()  # torch.save straight into a file hides why a disk refused it
    torch.save(converted.state, buffer)
    write(target, buffer.getbuffer())
    print(f"{target}:", *converted.summary, sep="\n  ")


def _check_target(source: str, target: str, force: bool) -> None:
    """Before any work: what would otherwise be refused after it."""
    folder = os.path.dirname(target) or "."
    if os.path.isdir(target):
        raise Refusal(f"{target} is a folder; name a file in it")
    if not os.path.isdir(folder):
        raise Refusal(f"the folder {folder} of {os.path.basename(target)} does not exist; create it, or choose another")
    if not os.path.lexists(target):
        return
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise Refusal(f"{target} is also the input, whose optimizer state would be lost; give another name")
    if not force:
        raise Refusal(f"{target} exists; add --force to overwrite it, or give another name")
