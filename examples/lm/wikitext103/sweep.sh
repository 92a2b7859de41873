#!/usr/bin/env bash
# Perplexity on WikiText-103 against the length of chunks and of streams, as in the paper's section 4.4. Arguments are
# passed to mega-fairseq sweep.
#
# Variables: DATA, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS), SUBSET (test, or
# valid), CHUNKS (512,1024,2048,3072), STREAMS (100,75,50,25,15,10,5), RESULTS (results/words beside this script),
# GPUS, PYTHON.
#
# It makes in RESULTS: sweep-$SUBSET.csv, .json and .png. Called again it goes on with the points that are missing.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=words
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

CHUNKS=${CHUNKS:-512,1024,2048,3072}
STREAMS=${STREAMS:-100,75,50,25,15,10,5}

sweep "$@"
