#!/usr/bin/env bash
# Pre-train an encoder as a masked language model of bytes. Run it again to continue from the last checkpoint. Arguments
# are passed to fairseq-train after the recipe's own and override them.
#
# Variables: DATA, PASSAGES (as in prepare.sh), ARCH (mega_encoder_small; or roberta), SEED (1), CHECKPOINTS
# (checkpoints/PASSAGES/ARCH/SEED beside this script), LENGTH (1024: bytes of an example), UPDATES (1000), WARMUP (100),
# LR (4e-3), BATCH (8). RoBERTa must be pre-trained with the LENGTH of the fine-tuning.
#
# Writes to CHECKPOINTS: pretrained/, and pretrained.log.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/encoder/common.sh
source "$HERE/common.sh"

LENGTH=${LENGTH:-1024} UPDATES=${UPDATES:-1000} WARMUP=${WARMUP:-100} LR=${LR:-4e-3} BATCH=${BATCH:-8}
whole_numbers 1 LENGTH UPDATES WARMUP BATCH
BIN=$BIN/input0
mkdir -p "$CHECKPOINTS"
train pretrained --task masked_lm --criterion masked_lm --tokens-per-sample "$LENGTH" --sample-break-mode none "$@"
