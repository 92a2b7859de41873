#!/usr/bin/env bash
# Translate newstest2014 with the averaged checkpoint and score the translations. Arguments are passed to
# fairseq-generate.
#
# Variables: DATA, BPE, CHECKPOINTS (as in train.sh), CHECKPOINT (averaged.pt in CHECKPOINTS), SUBSET (test; or valid),
# BEAM (5), LENPEN (0.5), MAX_TOKENS (8192), RESULTS (results/$BPE beside this script).
#
# Writes to RESULTS: generate.out (fairseq's output), hypotheses.pieces, hypotheses.words (segmentation undone),
# hypotheses.txt (plain German), hypotheses.tok and reference.tok (Moses-tokenised), scores.txt.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-subword-nmt}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/common.sh"

SUBSET=${SUBSET:-test}
MAX_TOKENS=${MAX_TOKENS:-8192}
whole_numbers 1 MAX_TOKENS BEAM

# Makes every hyphen inside a word a separate token, so that the parts of a compound can match on their own. Many
# published results on this test set are computed like this; they are slightly higher.
split_compounds() { LC_ALL=C sed -E 's/([^[:space:]])-([^[:space:]])/\1 ##AT##-##AT## \2/g'; }

# bleu WHAT HYPOTHESES REFERENCE
bleu() {
    local line
    line=$(fairseq score --sys "$2" --ref "$3" | tail -n 1)
    printf '%-28s%s\n' "$1:" "$line"
}

score_tokenised() {
    local hypotheses=$RESULTS/hypotheses.tok reference=$RESULTS/reference.tok
    moses tokenize de <"$RAW/$SUBSET.de" >"$reference"
    if [ "$BPE" = sentencepiece ]; then
        moses tokenize de <"$RESULTS/hypotheses.txt" >"$hypotheses"
    else
        cp "$RESULTS/hypotheses.words" "$hypotheses"
    fi
    bleu "tokenised" "$hypotheses" "$reference"
    split_compounds <"$hypotheses" >"$hypotheses.split"
    split_compounds <"$reference" >"$reference.split"
    bleu "tokenised, compounds split" "$hypotheses.split" "$reference.split"
}

need_module sacremoses "pip install sacremoses"
translate --beam "${BEAM:-5}" --lenpen "${LENPEN:-0.5}" "$@"
keep "$RESULTS/scores.txt" score_detokenised score_tokenised
