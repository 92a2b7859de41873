#!/usr/bin/env bash
# Accuracy of a trained classifier of ListOps. Arguments are passed to fairseq-validate.
#
# Variables: DATA, SIZE, SOURCE, ARCH, CHECKPOINTS (as in train.sh), CHECKPOINT (checkpoint_best.pt in CHECKPOINTS),
# SUBSET (test; or valid, train), BATCH (16: examples at a time), RESULTS (results/$SIZE/$ARCH beside this script).
#
# Writes to RESULTS: .txt (accuracy and loss), .log (fairseq's output), .tsv (label and probability of each example),
# .json and .png (confusion matrix), named after SUBSET, the arguments, and CHECKPOINT where it is not the default; and
# curves.png (loss and accuracy over the updates).
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_listops
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"

evaluate "$@"
