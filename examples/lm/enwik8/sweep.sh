#!/usr/bin/env bash
# Perplexity per byte on enwik8 against the length of chunks and of streams, as in the paper's section 4.4; its base-2
# logarithm is bits per byte. Arguments are passed to mega-fairseq sweep.
#
# Variables: DATA, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS), SUBSET (test, or
# valid), CHUNKS (1024,2048,4096,8192), STREAMS (200,100,50,20,10), RESULTS (results/bytes beside this script),
# GPUS, PYTHON.
#
# It makes in RESULTS: sweep-$SUBSET.csv, .json and .png. Called again it goes on with the points that are missing.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=bytes
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

CHUNKS=${CHUNKS:-1024,2048,4096,8192}
STREAMS=${STREAMS:-200,100,50,20,10}

sweep "$@"
