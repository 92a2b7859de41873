"""`mega-fairseq convert`: write a released checkpoint as one that fairseq loads with this plugin."""

import argparse
import io
import os

import torch

from mega_fairseq.cli import UserError
from mega_fairseq.cli.convert.conversion import convert
from mega_fairseq.cli.convert.released import read
from mega_fairseq.cli.output import write


def run(arguments: argparse.Namespace) -> None:
    source, target = arguments.source, arguments.target
    _check_target(source, target, arguments.force)
    try:
        converted = convert(read(source))
    except UserError as error:
        raise UserError(f"{source} {error}") from None
    buffer = io.BytesIO()  # torch.save into a file hides the reason for a failed write
    torch.save(converted.state, buffer)
    write(target, buffer.getbuffer())
    print(f"{target}:", *converted.summary, sep="\n  ")


def _check_target(source: str, target: str, force: bool) -> None:
    """Check before any work that the target can be written."""
    folder = os.path.dirname(target) or "."
    if os.path.isdir(target):
        raise UserError(f"{target} is a folder; give the name of a file in it")
    if not os.path.isdir(folder):
        raise UserError(
            f"the folder {folder} of {os.path.basename(target)} does not exist; create it or choose another"
        )
    if not os.path.lexists(target):
        return
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise UserError(f"{target} is also the input, and its optimizer state would be lost; give another name")
    if not force:
        raise UserError(f"{target} exists; add --force to overwrite it, or give another name")
