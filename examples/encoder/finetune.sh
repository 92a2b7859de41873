#!/usr/bin/env bash
# Train a classifier of eras from the weights that pretrain.sh has written, or from scratch, and print its accuracy on
# the test set. Run it again to continue from the last checkpoint. Arguments are passed to fairseq-train after the
# recipe's own and override them.
#
# Variables: DATA, PASSAGES, ARCH, SEED, CHECKPOINTS (as in pretrain.sh), START (pretrained; or scratch), LENGTH (1024:
# bytes of a document, which is cut there), UPDATES (400), WARMUP (40), LR (2e-3), BATCH (16).
#
# Writes to CHECKPOINTS: from-START/, from-START.log, and from-START.txt: the accuracy.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/encoder/common.sh
source "$HERE/common.sh"

START=${START:-pretrained}
LENGTH=${LENGTH:-1024} UPDATES=${UPDATES:-400} WARMUP=${WARMUP:-40} LR=${LR:-2e-3} BATCH=${BATCH:-16}
whole_numbers 1 LENGTH UPDATES WARMUP BATCH
weights=$CHECKPOINTS/pretrained/checkpoint_last.pt
case $START in
pretrained)
    need_file "$weights" "run pretrain.sh first, or give START=scratch"
    set -- --finetune-from-model "$weights" "$@"
    ;;
scratch) ;;
*) die "START is '$START'; give pretrained or scratch." ;;
esac
mkdir -p "$CHECKPOINTS"
result=$CHECKPOINTS/from-$START
task=(--task sentence_prediction --criterion sentence_prediction)
train "from-$START" "${task[@]}" --num-classes 4 --init-token 0 --shorten-method truncate \
    --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric "$@"
device=()
[ "$(count_gpus)" != 0 ] || device=(--cpu)
fairseq validate "$BIN" --user-dir "$(user_dir)" --path "$result/checkpoint_best.pt" "${task[@]}" \
    --valid-subset test --batch-size "$BATCH" --required-batch-size-multiple 1 --log-format json \
    ${device[@]+"${device[@]}"} >"$result.test.log" 2>&1 || die "fairseq-validate failed: see $result.test.log."
sed -n 's/.*"test_accuracy": "\([0-9.]*\)".*/accuracy, percent: \1/p' "$result.test.log" | tail -n 1 | tee "$result.txt"
