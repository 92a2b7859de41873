#!/usr/bin/env bash
# Perplexity on WikiText-103 for several chunk sizes and numbers of streams, as in the paper's section 4.4. Arguments
# are passed to mega-fairseq sweep. Run it again to continue with the missing points.
#
# Variables: DATA, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS), SUBSET (test; or
# valid), CHUNKS (512,1024,2048,3072), STREAMS (100,75,50,25,15,10,5), RESULTS (results/words beside this script).
#
# Writes to RESULTS: sweep-$SUBSET.csv, .json and .png.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=words
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

CHUNKS=${CHUNKS:-512,1024,2048,3072}
STREAMS=${STREAMS:-100,75,50,25,15,10,5}

sweep "$@"
