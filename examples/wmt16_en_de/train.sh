#!/usr/bin/env bash
# Train Mega on WMT'16 English-German as published. Call it again to go on from the last checkpoint; arguments are
# passed to fairseq-train behind the recipe's and override them.
#
# Variables: DATA, CHECKPOINTS, BPE (as in prepare.sh), ARCH (mega_transformer_base), UPDATES (500000),
# WARMUP (4000), MAX_TOKENS (8192, in one batch on one GPU), BATCH_TOKENS (65536, in one update over all GPUs: what
# they lack is made up by accumulating gradients), GPUS (all; 0 trains on the CPU), PRECISION (fp32, fp16 or bf16),
# KEEP (epochs whose checkpoints are kept for averaging: 10), PYTHON.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-subword-nmt}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/common.sh"

UPDATES=${UPDATES:-500000}
WARMUP=${WARMUP:-4000}
MAX_TOKENS=${MAX_TOKENS:-8192}
BATCH_TOKENS=${BATCH_TOKENS:-65536}
PRECISION=${PRECISION:-fp32}
KEEP=${KEEP:-10}
whole_numbers 0 WARMUP KEEP
whole_numbers 1 UPDATES MAX_TOKENS BATCH_TOKENS

# Post-norm, full attention, the simple relative bias and a hidden dropout of 0.1 are the architecture's own defaults:
# without them here, ARCH=transformer_wmt_en_de gives the Transformer to compare with.
train --arch "${ARCH:-mega_transformer_base}" \
    --lr 1e-3 --weight-decay 0.05 \
    --dropout 0.15 --attention-dropout 0.1 --activation-dropout 0.1 \
    "$@"
