#!/usr/bin/env bash
# Perplexity per token on the shipped corpus for several chunk sizes and numbers of streams. Arguments are passed to
# mega-fairseq sweep. Run it again to continue with the missing points.
#
# Variables: DATA, UNITS, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS), SUBSET (test;
# or valid), CHUNKS (64,128,256,512,1024,2048), STREAMS (100,10,1), RESULTS (results/$UNITS beside this script).
#
# Writes to RESULTS: sweep-$SUBSET.csv, .json and .png.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=${UNITS:-bytes}
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

CHUNKS=${CHUNKS:-64,128,256,512,1024,2048}
STREAMS=${STREAMS:-100,10,1}

sweep "$@"
