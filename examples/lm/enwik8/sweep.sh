#!/usr/bin/env bash
# Perplexity per byte on enwik8 for several chunk sizes and numbers of streams, as in the paper's section 4.4; its
# base-2 logarithm is bits per byte. Arguments are passed to mega-fairseq sweep. Run it again to continue with the
# missing points.
#
# Variables: DATA, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS), SUBSET (test; or
# valid), CHUNKS (1024,2048,4096,8192), STREAMS (200,100,50,20,10), RESULTS (results/bytes beside this script).
#
# Writes to RESULTS: sweep-$SUBSET.csv, .json and .png.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=bytes
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

CHUNKS=${CHUNKS:-1024,2048,4096,8192}
STREAMS=${STREAMS:-200,100,50,20,10}

sweep "$@"
