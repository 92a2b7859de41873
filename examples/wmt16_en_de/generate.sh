#!/usr/bin/env bash
# Translate newstest2014 with the averaged checkpoint and score it. Arguments are passed to fairseq-generate.
#
# Variables: DATA, CHECKPOINTS, BPE (as in prepare.sh), CHECKPOINT (averaged.pt in CHECKPOINTS), SUBSET (test, or
# valid), BEAM (5), LENPEN (0.5), MAX_TOKENS (8192), RESULTS (results beside this script), GPUS, WORKERS, PYTHON.
#
# It makes in RESULTS: generate.out (all that fairseq says), hypotheses.pieces, hypotheses.words (segmentation
# undone), hypotheses.txt (plain German), hypotheses.tok and reference.tok (Moses-tokenised), scores.txt.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-subword-nmt}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/common.sh"

SUBSET=${SUBSET:-test}
MAX_TOKENS=${MAX_TOKENS:-8192}
whole_numbers 1 MAX_TOKENS BEAM

# Every hyphen inside a word becomes a token of its own, marked as one, so that each part of a compound can match by
# itself. Many published results on this test set are given so; they are a little higher.
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
