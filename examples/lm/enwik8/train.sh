#!/usr/bin/env bash
# Train Mega on enwik8 as published. Run it again to continue from the last checkpoint. Arguments are passed to
# fairseq-train after the recipe's own and override them.
#
# Variables: DATA, CHECKPOINTS (checkpoints/bytes beside this script), ARCH (mega_lm_enwik8), UPDATES (400000), WARMUP
# (24000), MAX_TOKENS (8192: in one batch on one GPU, the longest segment), BATCH_TOKENS (65536: in one update over all
# GPUs, 8 batches; gradients are accumulated as needed), PRECISION (auto; or fp32, fp16, bf16).
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=bytes
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

UPDATES=${UPDATES:-400000}
WARMUP=${WARMUP:-24000}
MAX_TOKENS=${MAX_TOKENS:-8192}
BATCH_TOKENS=${BATCH_TOKENS:-65536}
PRECISION=${PRECISION:-auto}
whole_numbers 0 WARMUP
whole_numbers 1 UPDATES MAX_TOKENS BATCH_TOKENS

# Chunks of 2048 are the default of the architecture.
train --arch "${ARCH:-mega_lm_enwik8}" --dropout 0.1 \
    --variant-block-multiple-min 2 --variant-block-multiple-max 4 --valid-block splits:50 \
    "$@"
