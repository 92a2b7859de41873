#!/usr/bin/env bash
# Bits per byte and perplexity per word on the shipped corpus, whatever the tokens are: so UNITS=bytes and UNITS=bpe can
# be compared. Arguments are passed to fairseq-eval-lm.
#
# Variables: DATA, UNITS, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS), SUBSET (test,
# or valid), STREAMS (1: the subset is read as so many streams), CHUNK (512; training had 256), RESULTS (results/$UNITS
# beside this script), GPUS, PYTHON.
#
# It makes in RESULTS: a .log with all that fairseq says and a .txt with the scores, named after SUBSET, CHUNK, STREAMS,
# the checkpoint where it is not CHECKPOINTS' best, and the arguments.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=${UNITS:-bytes}
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

STREAMS=${STREAMS:-1}
CHUNK=${CHUNK:-512}
whole_numbers 1 STREAMS CHUNK

evaluate "$@"
keep_scores bits_per_byte perplexity_per_word
