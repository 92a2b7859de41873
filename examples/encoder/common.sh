# shellcheck shell=bash
# Shared by the scripts of this folder, which set HERE and source this file.

# shellcheck source=examples/common.sh
source "$HERE/../common.sh"

PASSAGES=${PASSAGES:-1}
ARCH=${ARCH:-mega_encoder_small}
SEED=${SEED:-1}
whole_numbers 1 PASSAGES SEED
CHECKPOINTS=$(absolute "${CHECKPOINTS:-$HERE/checkpoints/$PASSAGES/$ARCH/$SEED}")
RAW=$DATA/raw
BIN=$DATA/$PASSAGES

# train FOLDER OPTIONS...: both trainings. Encoders of both kinds have 2 layers of width 64.
train() {
    local folder=$1 sizes=(--encoder-layers 2 --encoder-embed-dim 64 --max-positions "$LENGTH" --dropout 0.1)
    shift
    need_file "$BIN" "run prepare.sh first, with the same DATA and PASSAGES"
    case $ARCH in
    # Without workers, since fairseq's repeat the masks of the first epoch; Mega's encoder starts new ones.
    roberta*) sizes+=(--encoder-ffn-embed-dim 336 --encoder-attention-heads 4 --num-workers 0) ;;
    *) sizes+=(--encoder-hidden-dim 128 --encoder-ffn-embed-dim 128 --encoder-z-dim 32 --encoder-chunk-size 128) ;;
    esac
    CHECKPOINTS=$CHECKPOINTS/$folder
    PRECISION=fp32
    run_training --batch-size "$BATCH" "$BATCH" --arch "$ARCH" "${sizes[@]}" --lr "$LR" --clip-norm 1.0 \
        --weight-decay 0.01 --seed "$SEED" --no-epoch-checkpoints --log-format json \
        "$@" 2>&1 | tee -a "$CHECKPOINTS.log" >&2
}
