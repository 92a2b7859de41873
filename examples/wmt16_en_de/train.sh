#!/usr/bin/env bash
# Train Mega on WMT'16 English-German as published. Run it again to continue from the last checkpoint. Arguments are
# passed to fairseq-train after the recipe's own and override them.
#
# Variables: DATA, BPE (as in prepare.sh), CHECKPOINTS (checkpoints/$BPE beside this script), ARCH
# (mega_transformer_base), UPDATES (500000), WARMUP (4000), MAX_TOKENS (8192: in one batch on one GPU), BATCH_TOKENS
# (65536: in one update over all GPUs; gradients are accumulated as needed), PRECISION (auto; or fp32, fp16, bf16), KEEP
# (10: epochs whose checkpoints are kept for averaging).
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-subword-nmt}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/common.sh"

UPDATES=${UPDATES:-500000}
WARMUP=${WARMUP:-4000}
MAX_TOKENS=${MAX_TOKENS:-8192}
BATCH_TOKENS=${BATCH_TOKENS:-65536}
PRECISION=${PRECISION:-auto}
KEEP=${KEEP:-10}
whole_numbers 0 WARMUP
whole_numbers 1 KEEP UPDATES MAX_TOKENS BATCH_TOKENS

# Post-norm, full attention, the simple relative bias and a hidden dropout of 0.1 are the defaults of the architecture.
# Since they are not repeated here, ARCH=transformer_wmt_en_de trains a Transformer for comparison.
train --arch "${ARCH:-mega_transformer_base}" \
    --lr 1e-3 --weight-decay 0.05 \
    --dropout 0.15 --attention-dropout 0.1 --activation-dropout 0.1 \
    "$@"
