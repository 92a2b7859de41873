#!/usr/bin/env bash
# Train Mega on WikiText-103 as published. Run it again to continue from the last checkpoint. Arguments are passed to
# fairseq-train after the recipe's own and override them.
#
# Variables: DATA, CHECKPOINTS (checkpoints/words beside this script), ARCH (mega_lm_wt103), UPDATES (400000), WARMUP
# (24000), MAX_TOKENS (6144: in one batch on one GPU, the longest segment), BATCH_TOKENS (147456: in one update over all
# GPUs, 24 batches; gradients are accumulated as needed), PRECISION (auto; or fp32, fp16, bf16).
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=words
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

UPDATES=${UPDATES:-400000}
WARMUP=${WARMUP:-24000}
MAX_TOKENS=${MAX_TOKENS:-6144}
BATCH_TOKENS=${BATCH_TOKENS:-147456}
PRECISION=${PRECISION:-auto}
whole_numbers 0 WARMUP
whole_numbers 1 UPDATES MAX_TOKENS BATCH_TOKENS

# Chunks of 1024, adaptive input and softmax and all dropouts are the defaults of the architecture.
train --arch "${ARCH:-mega_lm_wt103}" \
    --variant-block-multiple-min 2 --variant-block-multiple-max 6 --valid-block splits:10 \
    "$@"
