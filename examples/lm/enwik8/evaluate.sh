#!/usr/bin/env bash
# Evaluate on enwik8: bits per byte, with the state carried through long streams. Arguments are passed to
# fairseq-eval-lm.
#
# Variables: DATA, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS), SUBSET (test; or
# valid), STREAMS (50: number of streams the subset is read as), CHUNK (4096; training used 2048), RESULTS
# (results/bytes beside this script).
#
# Writes to RESULTS: a .txt with the scores and a .log with fairseq's output, named after SUBSET, CHUNK, STREAMS, the
# arguments, and CHECKPOINT where it is not the default.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=bytes
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

STREAMS=${STREAMS:-50}
CHUNK=${CHUNK:-4096}
whole_numbers 1 STREAMS CHUNK

evaluate "$@"
keep_scores "$RESULT" bits_per_byte
