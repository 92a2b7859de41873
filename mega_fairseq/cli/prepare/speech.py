"""`mega-fairseq prepare speech`: which of ten words is said, from raw samples? (Speech Commands)"""

import argparse
import io
import wave
from typing import Dict, Optional, Sequence, Tuple

import numpy as np

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare.arrays import finish, row_type
from mega_fairseq.cli.prepare.folder import Folder, batches
from mega_fairseq.cli.prepare.source import Place, Source
from mega_fairseq.cli.prepare.splits import stratified

SOURCE = Source("speech_commands_v0.02", "speech_commands_v0.02.tar.gz")
LABELS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
CLIPS = 34_975  # of a whole second
SHARES = (0.7, 0.15)
SAMPLES = RATE = 16_000
ROW = row_type("<i2", SAMPLES)
PART = 100  # clips


def settings(arguments: argparse.Namespace) -> Dict[str, int]:
    return {"seed": arguments.seed}


def prepare(arguments: argparse.Namespace, folder: Folder) -> None:
    found = SOURCE.find(arguments.source, LABELS, ".wav", folder)
    clips = [(LABELS.index(word), place) for word, places in found.items() for place in places]
    folder.make(make_part, batches(clips, PART), arguments.workers, PART)
    labels = [label for path in folder.parts for label in np.fromfile(path, ROW)["label"]]
    if len(labels) != CLIPS:
        raise UserError(
            f"{arguments.source} has {len(labels):,} clips of {SAMPLES:,} samples instead of {CLIPS:,} in the folders "
            f"{', '.join(LABELS)}; {SOURCE.remedy}"
        )
    train, valid = (int(share * CLIPS) for share in SHARES)
    finish(folder, ROW, stratified(labels, (train, valid, CLIPS - train - valid), f"speech {arguments.seed}"), LABELS)
    print(f"left out {len(clips) - CLIPS:,} clips with fewer than {SAMPLES:,} samples, as published")
    print("the splits differ from the published ones, which depend on the order of files on a disk")


def make_part(clips: Sequence[Tuple[int, Place]]) -> bytes:
    """The clips of a whole second, as rows."""
    found = [(label, samples(place)) for label, place in clips]
    return b"".join(bytes([label]) + clip for label, clip in found if clip is not None)


def samples(place: Place) -> Optional[bytes]:
    """The samples of a clip; None if it is too short."""
    try:
        with wave.open(io.BytesIO(place.read())) as clip:
            found = (8 * clip.getsampwidth(), clip.getnchannels(), clip.getframerate())
            count, content = clip.getnframes(), clip.readframes(SAMPLES)
    except (wave.Error, EOFError, RuntimeError):  # for sizes beyond the file
        raise UserError(f"{place.name} is not a WAV file, or only a part of one; {SOURCE.remedy}") from None
    if found != (16, 1, RATE):
        bits, channels, rate = found
        raise UserError(
            f"{place.name} has {bits} bits, {channels} channels and {rate:,} samples a second instead of 16, 1 and "
            f"{RATE:,}; {SOURCE.remedy}"
        )
    if count > SAMPLES or len(content) != 2 * count:
        raise UserError(f"{place.name} is longer than a second, or only a part of a file; {SOURCE.remedy}")
    return content if count == SAMPLES else None
