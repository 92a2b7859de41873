#!/usr/bin/env bash
# Train on Pathfinder, on a CPU or on GPUs. Run it again to continue from the last checkpoint. Arguments are passed to
# fairseq-train after the recipe's own and override them. The small size shows that the recipe runs: so few updates do
# not suffice to learn this task.
#
# Variables: DATA, SIZE, SOURCE (as in prepare.sh), ARCH (mega_classifier_small; full: mega_lra_pathfinder, or
# mega_lra_pathfinder_chunk), CHECKPOINTS (checkpoints/$SIZE/$ARCH beside this script), and with small; full: UPDATES
# (300; 250000), WARMUP (60; 50000), LR (1e-2), BATCH (16; 128: images in one update over all GPUs), MAX_EXAMPLES
# (BATCH: images in one batch on one GPU), SAVE (100; each epoch: updates between checkpoints), PRECISION (fp32; or
# fp16, bf16).
#
# Writes to CHECKPOINTS: checkpoints, and train.log.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_pathfinder
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"

case $SIZE in
small)
    recipe UPDATES=300 WARMUP=60 LR=1e-2 BATCH=16 SAVE=100
    set -- "${VALUES[@]}" "$@"
    ;;
full) recipe UPDATES=250000 WARMUP=50000 LR=1e-2 BATCH=128 ;;
esac
train --input-kind values --values-mean 0.5 --values-deviation 0.5 --weight-decay 0.01 "$@"
