"""Recordings of ten words (Speech Commands), 16,000 samples each.

    words.py speech_commands_v0.02 OUT

The published split depends on the order of files on a disk. Here names are sorted, and 70, 15 and 15% of each word are
drawn at random. Clips of less than a second are left out, as published.
"""

import sys
import wave
from pathlib import Path
from typing import Optional

import numpy as np

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare import new_folder, run_program, stratified, write_arrays

LABELS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
CLIPS = 34_975  # of a whole second
SHARES = (0.7, 0.15)
SAMPLES = RATE = 16_000


def samples(path: Path) -> Optional[np.ndarray]:
    """The samples of a clip; None if it is too short."""
    try:
        with wave.open(str(path)) as clip:
            kind = 8 * clip.getsampwidth(), clip.getnchannels(), clip.getframerate()
            count, content = clip.getnframes(), clip.readframes(SAMPLES)
    except (wave.Error, EOFError, RuntimeError):  # for sizes beyond the file
        raise UserError(f"{path} is not a WAV file, or only a part of one; get it again") from None
    if kind != (16, 1, RATE) or count > SAMPLES or len(content) != 2 * count:
        raise UserError(
            f"{path} does not have 1 channel of at most {SAMPLES:,} samples of 16 bits, {RATE:,} a second; get it again"
        )
    return np.frombuffer(content, "<i2") if count == SAMPLES else None


def main(source: Path, out: Path) -> None:
    paths = [(label, path) for label, word in enumerate(LABELS) for path in sorted((source / word).glob("*.wav"))]
    whole = [(label, path) for label, path in paths if samples(path) is not None]
    if len(whole) != CLIPS:
        raise UserError(
            f"{source} has {len(whole):,} clips of {SAMPLES:,} samples instead of {CLIPS:,} in the folders "
            f"{', '.join(LABELS)}; give the folder speech_commands_v0.02"
        )
    labels = [label for label, _ in whole]
    train, valid = (int(share * CLIPS) for share in SHARES)
    members = stratified(labels, (train, valid, CLIPS - train - valid), "speech 1")
    with new_folder(str(out)) as folder:
        write_arrays(folder, (samples(path) for _, path in whole), labels, members, LABELS)
    print(f"left out {len(paths) - CLIPS:,} clips with fewer than {SAMPLES:,} samples, as published", file=sys.stderr)


if __name__ == "__main__":
    run_program(__doc__, main)
