#!/usr/bin/env bash
# Train on Path-X, on a CPU or on GPUs. Run it again to continue from the last checkpoint. Arguments are passed to
# fairseq-train after the recipe's own and override them. The small size shows that the recipe runs: so few updates do
# not suffice to learn this task. The published warm-up is quadratic; fairseq has only a linear one.
#
# Variables: DATA, SIZE, SOURCE (as in prepare.sh), ARCH (mega_classifier_small; full: mega_lra_pathx, or
# mega_lra_pathx_chunk), CHECKPOINTS (checkpoints/$SIZE/$ARCH beside this script), and with small; full: UPDATES (40;
# 125000), WARMUP (10; 25000), LR (1e-2), BATCH (4; 128: images in one update over all GPUs), MAX_EXAMPLES (4; 2: images
# in one batch on one GPU), SAVE (20; each epoch: updates between checkpoints), PRECISION (fp32; or fp16, bf16).
#
# Writes to CHECKPOINTS: checkpoints, and train.log.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_pathx
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"

case $SIZE in
small)
    recipe UPDATES=40 WARMUP=10 LR=1e-2 BATCH=4 SAVE=20
    set -- "${VALUES[@]}" --max-positions 16384 "$@"
    ;;
full) recipe UPDATES=125000 WARMUP=25000 LR=1e-2 BATCH=128 MAX_EXAMPLES=2 ;;
esac
train --input-kind values --values-mean 0.5 --values-deviation 0.5 --weight-decay 0.01 "$@"
