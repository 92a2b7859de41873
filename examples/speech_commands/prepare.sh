#!/usr/bin/env bash
# Prepare sounds of a second for classification sample by sample. Run it again after an interruption: it continues.
#
# Variables: DATA (data beside this script), SIZE (small: the ten words in four shipped synthetic voices, each clip in
# noise four times, 960 examples for training; full: recordings, Speech Commands), SOURCE (for full:
# speech_commands_v0.02.tar.gz, or its folder).
#
# Writes to DATA/SIZE:
#     raw/       the archive's files (only small)
#     bin/       samples, labels, and in `scaling` the mean and deviation of the samples: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_sc_raw
# shellcheck source=examples/lra/common.sh
source "$HERE/../lra/common.sh"
no_arguments "$@"

unpack_clips() { unpack "$HERE/cls-speech.tar.xz" "$1"; }

make_clips() { "$PYTHON" "$HERE/clips.py" "$RAW" "$1"; }

measure() { "$PYTHON" "$HERE/scaling.py" "$BIN/train.npy" >"$1"; }

case $SIZE in
small)
    step "$RAW" unpack_clips
    step "$BIN" make_clips
    ;;
full) make_published "$BIN" "speech_commands_v0.02.tar.gz or its folder" "$HERE/words.py" ;;
esac
step "$BIN/scaling" measure
ready
