#!/usr/bin/env bash
# Train on bytes of text, on a CPU or on GPUs. Run it again to continue from the last checkpoint. Arguments are passed
# to fairseq-train after the recipe's own and override them.
#
# Variables: DATA, SIZE, SOURCE (as in prepare.sh), ARCH (mega_classifier_small; full: mega_lra_text, or
# mega_lra_text_chunk), CHECKPOINTS (checkpoints/$SIZE/$ARCH beside this script), and with small; full: UPDATES (400;
# 25000), WARMUP (80; 10000), LR (4e-3), BATCH (16; 50: examples in one update over all GPUs), MAX_EXAMPLES (16; 25:
# examples in one batch on one GPU), SAVE (100; each epoch: updates between checkpoints), PRECISION (fp32; or fp16,
# bf16).
#
# Writes to CHECKPOINTS: checkpoints, and train.log.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_text
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"

# Longer documents are cut: to 1,024 positions with small, to 4,002 with full.
case $SIZE in
small)
    recipe UPDATES=400 WARMUP=80 LR=4e-3 BATCH=16 SAVE=100
    set -- --normalization-type scalenorm --classifier-dim 256 "$@"
    ;;
full) recipe UPDATES=25000 WARMUP=10000 LR=4e-3 BATCH=50 MAX_EXAMPLES=25 ;;
esac
train --input-kind bytes --shorten-method truncate --weight-decay 0.01 "$@"
