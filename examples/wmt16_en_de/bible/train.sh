#!/usr/bin/env bash
# Train a small Mega model on the shipped corpus, on a CPU or on GPUs. Run it again to continue from the last
# checkpoint. Arguments are passed to fairseq-train after the recipe's own and override them.
#
# Variables: DATA, BPE (as in prepare.sh), CHECKPOINTS (checkpoints/$BPE beside this script), ARCH
# (mega_transformer_tiny), UPDATES (3000), WARMUP (400), MAX_TOKENS (4096: in one batch on one GPU), BATCH_TOKENS
# (4096: in one update over all GPUs), PRECISION (auto; or fp32, fp16, bf16), KEEP (5: epochs whose checkpoints are kept
# for averaging).
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-sentencepiece}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/../common.sh"

UPDATES=${UPDATES:-3000}
WARMUP=${WARMUP:-400}
MAX_TOKENS=${MAX_TOKENS:-4096}
BATCH_TOKENS=${BATCH_TOKENS:-4096}
PRECISION=${PRECISION:-auto}
KEEP=${KEEP:-5}
whole_numbers 0 WARMUP
whole_numbers 1 KEEP UPDATES MAX_TOKENS BATCH_TOKENS

# The recipe of docs/translation.md for 30,000 pairs.
SCHEDULER=inverse_sqrt
train --arch "${ARCH:-mega_transformer_tiny}" \
    --lr 8e-3 --weight-decay 0.05 --dropout 0.2 \
    "$@"
