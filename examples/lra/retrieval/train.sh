#!/usr/bin/env bash
# Train on pairs of documents, on a CPU or on GPUs. Run it again to continue from the last checkpoint. Arguments are
# passed to fairseq-train after the recipe's own and override them.
#
# Variables: DATA, SIZE, SOURCE (as in prepare.sh), ARCH (mega_classifier_small; full: mega_lra_retrieval, or
# mega_lra_retrieval_chunk), CHECKPOINTS (checkpoints/$SIZE/$ARCH beside this script), and with small; full: UPDATES
# (400; 91960), WARMUP (80; 10000), LR (3e-3), BATCH (16; 64: pairs in one update over all GPUs), MAX_EXAMPLES (16; 8:
# pairs in one batch on one GPU), SAVE (100; each epoch: updates between checkpoints), PRECISION (fp32; or fp16, bf16).
#
# Writes to CHECKPOINTS: checkpoints, and train.log.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_retrieval
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"

case $SIZE in
small)
    recipe UPDATES=400 WARMUP=80 LR=3e-3 BATCH=16 SAVE=100
    # Half a passage each, so that a pair has as many positions as a passage of the text recipe.
    set -- --pairs --normalization-type scalenorm --max-positions 512 "$@"
    ;;
full) recipe UPDATES=91960 WARMUP=10000 LR=3e-3 BATCH=64 MAX_EXAMPLES=8 ;;
esac
train --input-kind bytes --shorten-method truncate --weight-decay 0.04 "$@"
