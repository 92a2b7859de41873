#!/usr/bin/env bash
# Perplexity on WikiText-103, with the state carried through long streams. Arguments are passed to fairseq-eval-lm.
#
# Variables: DATA, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS), SUBSET (test, or
# valid), STREAMS (10: the subset is read as so many streams), CHUNK (2048; training had 1024), RESULTS (results/words
# beside this script), GPUS, PYTHON.
#
# It makes in RESULTS: a .log with all that fairseq says and a .txt with the scores, named after SUBSET, CHUNK, STREAMS,
# the checkpoint where it is not CHECKPOINTS' best, and the arguments.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=words
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

STREAMS=${STREAMS:-10}
CHUNK=${CHUNK:-2048}
whole_numbers 1 STREAMS CHUNK

evaluate "$@"
keep_scores perplexity_per_word
