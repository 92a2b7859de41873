#!/usr/bin/env bash
# Train on ListOps, on a CPU or on GPUs. Run it again to continue from the last checkpoint. Arguments are passed to
# fairseq-train after the recipe's own and override them.
#
# Variables: DATA, SIZE, SOURCE (as in prepare.sh), ARCH (mega_classifier_small; full: mega_lra_listops, or
# mega_lra_listops_chunk), CHECKPOINTS (checkpoints/$SIZE/$ARCH beside this script), and with small; full: UPDATES
# (1000; 90000), WARMUP (100; 3000), LR (3e-3; 1e-3), BATCH (32; 64: examples in one update over all GPUs), MAX_EXAMPLES
# (BATCH: examples in one batch on one GPU), SAVE (250; each epoch: updates between checkpoints), PRECISION (fp32; or
# fp16, bf16).
#
# Writes to CHECKPOINTS: checkpoints, and train.log.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_listops
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"

case $SIZE in
small) recipe UPDATES=1000 WARMUP=100 LR=3e-3 BATCH=32 SAVE=250 ;;
full) recipe UPDATES=90000 WARMUP=3000 LR=1e-3 BATCH=64 ;;
esac
train --weight-decay 0.01 "$@"
