#!/usr/bin/env bash
# Evaluate on the shipped corpus: bits per byte and perplexity per word, which can be compared between UNITS=bytes and
# UNITS=bpe. Arguments are passed to fairseq-eval-lm.
#
# Variables: DATA, UNITS, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS), SUBSET (test;
# or valid), STREAMS (1: number of streams the subset is read as), CHUNK (512; training used 256), RESULTS
# (results/$UNITS beside this script).
#
# Writes to RESULTS: a .txt with the scores and a .log with fairseq's output, named after SUBSET, CHUNK, STREAMS, the
# arguments, and CHECKPOINT where it is not the default.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=${UNITS:-bytes}
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

STREAMS=${STREAMS:-1}
CHUNK=${CHUNK:-512}
whole_numbers 1 STREAMS CHUNK

evaluate "$@"
keep_scores "$RESULT" bits_per_byte perplexity_per_word
