#!/usr/bin/env bash
# Translate the test set of the shipped corpus with the averaged checkpoint and score it with BLEU and chrF. Arguments
# are passed to fairseq-generate.
#
# Variables: DATA, BPE, CHECKPOINTS (as in train.sh), CHECKPOINT (averaged.pt in CHECKPOINTS), SUBSET (test; or valid),
# BEAM (5), LENPEN (1), MAX_TOKENS (4096), RESULTS (results/$BPE beside this script), WINDOW_TOKENS (none: for models of
# the task mega_document_translation, which translate chapters in windows of so many tokens).
#
# Writes to RESULTS: generate.out (fairseq's output), hypotheses.pieces, hypotheses.words (segmentation undone),
# hypotheses.txt (plain German), scores.txt.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-sentencepiece}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/../common.sh"

SUBSET=${SUBSET:-test}
MAX_TOKENS=${MAX_TOKENS:-4096}
whole_numbers 1 MAX_TOKENS BEAM WINDOW_TOKENS

translate --beam "${BEAM:-5}" --lenpen "${LENPEN:-1}" "$@"
keep "$RESULTS/scores.txt" score_detokenised
