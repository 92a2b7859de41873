#!/usr/bin/env bash
# Train a small Mega model on the shipped corpus, on a CPU or on GPUs. Run it again to continue from the last
# checkpoint. Arguments are passed to fairseq-train after the recipe's own and override them.
#
# Variables: DATA, UNITS (as in prepare.sh), CHECKPOINTS (checkpoints/$UNITS beside this script), ARCH (mega_lm_small),
# UPDATES (1500), WARMUP (150), MAX_TOKENS (4096: in one batch on one GPU), BATCH_TOKENS (4096: in one update over all
# GPUs), SAVE (250: updates between checkpoints), PRECISION (auto; or fp32, fp16, bf16).
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=${UNITS:-bytes}
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

UPDATES=${UPDATES:-1500}
WARMUP=${WARMUP:-150}
MAX_TOKENS=${MAX_TOKENS:-4096}
BATCH_TOKENS=${BATCH_TOKENS:-4096}
SAVE=${SAVE:-250}
PRECISION=${PRECISION:-auto}
whole_numbers 0 WARMUP
whole_numbers 1 UPDATES MAX_TOKENS BATCH_TOKENS SAVE

# Chunks of 256 and no dropout are the defaults of the architecture. An epoch of bytes is most of the training, so
# checkpoints are also saved within it.
train --arch "${ARCH:-mega_lm_small}" --lr 1e-2 \
    --variant-block-multiple-min 2 --variant-block-multiple-max 4 --valid-block splits:1 \
    --save-interval-updates "$SAVE" --keep-interval-updates 1 \
    "$@"
