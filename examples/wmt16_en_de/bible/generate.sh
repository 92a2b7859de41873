#!/usr/bin/env bash
# Translate the shipped corpus' test set with the averaged checkpoint and score it with sacreBLEU and chrF. Arguments
# are passed to fairseq-generate.
#
# Variables: DATA, CHECKPOINTS, BPE (as in prepare.sh), CHECKPOINT (averaged.pt in CHECKPOINTS), SUBSET (test, or
# valid), BEAM (5), LENPEN (1), MAX_TOKENS (4096), RESULTS (results beside this script), GPUS, WORKERS, PYTHON.
#
# It makes in RESULTS: generate.out (all that fairseq says), hypotheses.pieces, hypotheses.words (segmentation
# undone), hypotheses.txt (plain German), scores.txt.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-sentencepiece}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/../common.sh"

SUBSET=${SUBSET:-test}
MAX_TOKENS=${MAX_TOKENS:-4096}
whole_numbers 1 MAX_TOKENS BEAM

translate --beam "${BEAM:-5}" --lenpen "${LENPEN:-1}" "$@"
keep "$RESULTS/scores.txt" score_detokenised
