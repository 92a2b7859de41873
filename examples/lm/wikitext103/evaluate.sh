#!/usr/bin/env bash
# Evaluate on WikiText-103: perplexity per word, with the state carried through long streams. Arguments are passed to
# fairseq-eval-lm.
#
# Variables: DATA, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS), SUBSET (test; or
# valid), STREAMS (10: number of streams the subset is read as), CHUNK (2048; training used 1024), RESULTS
# (results/words beside this script).
#
# Writes to RESULTS: a .txt with the scores and a .log with fairseq's output, named after SUBSET, CHUNK, STREAMS, the
# arguments, and CHECKPOINT where it is not the default.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=words
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

STREAMS=${STREAMS:-10}
CHUNK=${CHUNK:-2048}
whole_numbers 1 STREAMS CHUNK

evaluate "$@"
keep_scores "$RESULT" perplexity_per_word
