#!/usr/bin/env bash
# Bits per byte on enwik8, with the state carried through long streams. Arguments are passed to fairseq-eval-lm.
#
# fairseq's loss in base 2 is bits per token. 1 token in 65,537 is an end of line that is none of the text's: what it
# takes is paid for by the bytes.
#
# Variables: DATA, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS), SUBSET (test, or
# valid), STREAMS (50: the subset is read as so many streams), CHUNK (4096; training had 2048), RESULTS (results/bytes
# beside this script), GPUS, PYTHON.
#
# It makes in RESULTS: a .log with all that fairseq says and a .txt with the scores, named after SUBSET, CHUNK, STREAMS,
# the checkpoint where it is not CHECKPOINTS' best, and the arguments.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=bytes
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

STREAMS=${STREAMS:-50}
CHUNK=${CHUNK:-4096}
whole_numbers 1 STREAMS CHUNK

evaluate "$@"
keep_scores bits_per_byte
