#!/usr/bin/env bash
# Train a model of this folder anew, on a CPU or on GPUs: train.sh bible-en-de (or addresses, digits). Run it again to
# continue from the last checkpoint. The card in the folder of each model says how long it takes.
#
# Variables: WORK (work beside this script: data and checkpoints, at most 1 GB), GPUS (0: on the CPU).
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
EXAMPLES=$HERE/../examples
NAME=${1:-}
export GPUS=${GPUS:-0} WORKERS=${WORKERS:-2}

bible() { # from one language to another
    local source=$1 target=$2 recipe=$EXAMPLES/wmt16_en_de/bible
    export DATA=$WORK/bible VOCABULARY=4000 ARCH=mega_transformer_tiny
    "$recipe/prepare.sh"
    train() {
        CHECKPOINTS=$WORK/$NAME/$1 "$recipe/train.sh" --source-lang "$source" --target-lang "$target" \
            --task mega_document_translation --window-tokens 1024 \
            --max-source-positions 4096 --max-target-positions 4096 \
            --encoder-chunk-size 128 --decoder-chunk-size 128 --rel-pos-bias rotary \
            --cross-attention-positions sentence --dropout 0.2 --attention-dropout 0 --activation-dropout 0 \
            --lr-scheduler polynomial_decay --total-num-update "$UPDATES" \
            --num-workers 0 --validate-interval 4 "${@:2}"
    }
    # The learning rate falls linearly: on single lines to 1e-3 or 3e-4, on windows to 0. --seed draws new windows.
    local last=$WORK/$NAME/lines/checkpoint_last.pt
    go_on() {
        train "$1" --finetune-from-model "$last" "${@:2}"
        last=$WORK/$NAME/$1/checkpoint_last.pt
    }
    UPDATES=3900 WARMUP=400 train lines --single-lines 1 --lr 5e-3 --end-learning-rate 1e-3
    if [ "$NAME" = bible-en-de ]; then
        UPDATES=4500 WARMUP=200 go_on more-lines --single-lines 1 --lr 4e-3 --end-learning-rate 3e-4 --seed 2
    fi
    UPDATES=800 WARMUP=50 go_on windows --lr 2e-3 --seed 3
    UPDATES=1000 WARMUP=30 go_on more-windows --lr 3e-3 --seed 4
    publish "$last" --data "$DATA/sentencepiece/bin" --sentencepiece-model "$DATA/sentencepiece/codes"
    cp "$DATA/sentencepiece/bin/dict.$source.txt" "$HERE/$NAME/dict.txt"
}

addresses() {
    local recipe=$EXAMPLES/lm/addresses
    export DATA=$WORK/addresses UNITS=bpe VOCABULARY=2000 CHECKPOINTS=$WORK/addresses/checkpoints
    "$recipe/prepare.sh"
    UPDATES=1500 "$recipe/train.sh" --dropout 0.1
    publish "$CHECKPOINTS/checkpoint_best.pt" --data "$DATA/bpe/bin" --sentencepiece-model "$DATA/bpe/codes"
    cp "$DATA/bpe/bin/dict.txt" "$HERE/$NAME/dict.txt"
}

digits() {
    local data=$WORK/digits user_dir device=()
    [ "$GPUS" != 0 ] || device=(--cpu)
    [ -e "$data" ] || mega-fairseq prepare digits "$data"
    user_dir=$(mega-fairseq user-dir)
    fairseq-train "$data" --user-dir "$user_dir" --save-dir "$data/checkpoints" "${device[@]}" --log-format simple \
        --task mega_classification --input-kind values --values-mean 0.287 --values-deviation 0.354 \
        --arch mega_classifier_small --criterion sentence_prediction --batch-size 32 --dropout 0.1 --clip-norm 1.0 \
        --normalization-type batchnorm --normalize-before --attention-activation-fn laplace --weight-decay 0.05 \
        --optimizer adam --adam-betas '(0.9, 0.98)' --lr 1e-2 --lr-scheduler polynomial_decay \
        --warmup-updates 50 --total-num-update 1000 --max-update 1000 --no-epoch-checkpoints
    publish "$data/checkpoints/checkpoint_best.pt"
}

# publish CHECKPOINT OPTIONS...: writes the exported folder and the checkpoint in half precision beside the card.
publish() {
    local checkpoint=$1 exported=$WORK/exported/$NAME
    mkdir -p "$WORK/exported" "$HERE/$NAME"
    mega-fairseq export "$checkpoint" "$exported" --force "${@:2}"
    cp "$exported"/* "$HERE/$NAME"
    python "$HERE/shrink.py" "$checkpoint" "$HERE/$NAME/checkpoint.pt"
}

WORK=${WORK:-$HERE/work}
mkdir -p "$WORK"
WORK=$(cd "$WORK" && pwd)
case $NAME in
bible-??-??) IFS=- read -r _ source target <<<"$NAME" && bible "$source" "$target" ;;
addresses | digits) $NAME ;;
*) echo "usage: train.sh bible-en-de (or bible-de-en, addresses, digits)" >&2 && exit 2 ;;
esac
