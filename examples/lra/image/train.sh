#!/usr/bin/env bash
# Train on images pixel by pixel, on a CPU or on GPUs. Run it again to continue from the last checkpoint. Arguments are
# passed to fairseq-train after the recipe's own and override them.
#
# Variables: DATA, SIZE, SOURCE (as in prepare.sh), ARCH (mega_classifier_small; full: mega_lra_image, or
# mega_lra_image_chunk), CHECKPOINTS (checkpoints/$SIZE/$ARCH beside this script), and with small; full: UPDATES (300;
# 180000), WARMUP (80; 9000), LR (1e-2), BATCH (20; 50: images in one update over all GPUs), MAX_EXAMPLES (BATCH: images
# in one batch on one GPU), SAVE (100; each epoch: updates between checkpoints), PRECISION (fp32; or fp16, bf16).
#
# Writes to CHECKPOINTS: checkpoints, and train.log.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_image
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"

case $SIZE in
small)
    recipe UPDATES=300 WARMUP=80 LR=1e-2 BATCH=20 SAVE=100
    set -- "${VALUES[@]}" --encoder-chunk-size 112 --max-positions 784 --truncation-length 784 --classifier-dim 320 \
        --values-mean 0.286 --values-deviation 0.353 "$@"
    ;;
full)
    recipe UPDATES=180000 WARMUP=9000 LR=1e-2 BATCH=50
    set -- --values-mean 0.48 --values-deviation 0.24 "$@"
    ;;
esac
train --input-kind values --weight-decay 0.02 "$@"
