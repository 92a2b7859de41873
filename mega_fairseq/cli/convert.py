"""`mega-fairseq convert`: turns a checkpoint of the released code into one that fairseq loads with this plugin."""

import argparse
import contextlib
import io
import os
from typing import Any, Dict

import torch

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
    write(converted.state, target)
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


def write(state: Dict[str, Any], path: str) -> None:
    """All or nothing: `path` is untouched until the new file lies complete on the disk beside it."""
    buffer = io.BytesIO()  # torch.save straight into a file hides why a disk refused it
    torch.save(state, buffer)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise
    except OSError as error:
        raise Refusal(f"{path} was not written ({error.strerror}); make room, or choose another folder") from None
