"""`mega-fairseq prepare pictures`: your own pictures, in a folder for each label, as grey squares."""

import argparse
import io
import os
from functools import partial
from typing import Dict, List, Sequence, Tuple

import numpy as np

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare.arrays import finish, need_pillow, row_type
from mega_fairseq.cli.prepare.folder import Folder, batches
from mega_fairseq.cli.prepare.source import Place, files_in
from mega_fairseq.cli.prepare.splits import stratified

REMEDY = "give a folder with a folder of pictures for each label"
MOST_LABELS = 256  # a row has a byte for its label
PART = 100  # pictures
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # others, such as EPS, start other programs
LONGEST_SIDE = 4096  # of a square; a model reads its pixels one by one


def settings(arguments: argparse.Namespace) -> Dict[str, int]:
    if not 1 <= arguments.side <= LONGEST_SIDE:
        raise UserError(f"--side is {arguments.side}; give a whole number from 1 to {LONGEST_SIDE:,}")
    source, out = (os.path.join(os.path.realpath(path), "") for path in (arguments.source, arguments.out))
    if out.startswith(source):
        raise UserError(f"{arguments.out} is within the folder of the pictures; choose another folder")
    return {"side": arguments.side, "seed": arguments.seed}


def prepare(arguments: argparse.Namespace, folder: Folder) -> None:
    need_pillow()
    found = labelled(arguments.source)
    pictures = [(number, place) for number, places in enumerate(found.values()) for place in places]
    folder.make(partial(make_part, arguments.side), batches(pictures, PART), arguments.workers, PART, "picture")
    held_out = max(1, len(pictures) // 10)
    sizes = (len(pictures) - 2 * held_out, held_out, held_out)
    members = stratified([number for number, _ in pictures], sizes, f"pictures {arguments.seed}")
    finish(folder, row_type("u1", arguments.side**2), members, list(found))
    values = np.load(os.path.join(arguments.out, "train.npy"), mmap_mode="r")
    print(f"train with --values-mean {values.mean() / 255:.3f} --values-deviation {values.std() / 255:.3f}")


def labelled(source: str) -> Dict[str, List[Place]]:
    """The files of each label, sorted by name. Hidden files are left out."""
    if not os.path.isdir(source):
        raise UserError(f"{source} is not a folder; {REMEDY}")
    labels = _folders(_entries(source))
    if not 2 <= len(labels) <= MOST_LABELS:
        raise UserError(f"{source} contains {len(labels)} folders; give one for each label, 2 to {MOST_LABELS}")
    found = {}
    for label in labels:
        if label.split() != [label] or not label.isprintable():
            raise UserError(
                f"the folder's name {label!r}, the label, is not one word of printable characters; rename it"
            )
        place = os.path.join(source, label)
        entries, found[label] = _entries(place), _visible(place)
        inner = _folders(entries)
        if inner:
            raise UserError(
                f"{os.path.join(place, inner[0])} is a folder within a label's folder; move its pictures to {place}, "
                "or away"
            )
        special = [entry.path for entry in entries if not (entry.is_dir() or entry.is_file())]
        if special:
            raise UserError(f"{special[0]} is a special file; remove it")
        if len(found[label]) < 3:
            raise UserError(
                f"{os.path.join(source, label)} contains {len(found[label])} pictures; give at least 3, so that each "
                "split can have one"
            )
    outside = _visible(source)
    if outside:
        print(f"files outside of the labels' folders were left out: {len(outside):,}, first {outside[0].name}")
    return found


def _entries(path: str) -> List["os.DirEntry[str]"]:
    entries = [entry for entry in os.scandir(path) if not entry.name.startswith(".")]
    broken = [entry.path for entry in entries if not os.path.exists(entry.path)]
    if broken:
        raise UserError(f"{broken[0]} is a link to nothing; remove it")
    return entries


def _folders(entries: Sequence["os.DirEntry[str]"]) -> List[str]:
    return sorted(entry.name for entry in entries if entry.is_dir())


def _visible(path: str) -> List[Place]:
    return sorted(place for place in files_in(path) if not os.path.basename(place.name).startswith("."))


def make_part(side: int, pictures: Sequence[Tuple[int, Place]]) -> bytes:
    return b"".join(bytes([label]) + grey_square(place, side).tobytes() for label, place in pictures)


def grey_square(place: Place, side: int) -> np.ndarray:
    """(side, side) bytes: upright, on white where it is transparent, with both sides scaled to this length."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(place.read()), formats=FORMATS) as image:
            if getattr(image, "is_animated", False) and image.format != "MPO":  # cameras' JPEG, with a preview
                raise ValueError("it has several frames")
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith(("I", "F")):
                raise ValueError("it has more than 8 bits a channel")
            coloured = upright.convert("RGBA")
            paper = Image.new("RGBA", coloured.size, "white")
            paper.alpha_composite(coloured)
            return np.asarray(paper.convert("L").resize((side, side), Image.BILINEAR))
    except UnidentifiedImageError:
        raise UserError(f"{place.name} is damaged or none of {', '.join(FORMATS)}; convert or remove it") from None
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise UserError(f"{place.name} cannot be read as a picture ({error}); convert or remove it") from None
