# shellcheck shell=bash
# Shared by the recipes of this folder and of speech_commands. A script sets HERE, its own folder, and PRESET, the
# architecture of the published recipe, and sources this file.

LRA="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=examples/common.sh
source "$LRA/../common.sh"

# Published data are of full size.
SIZE=${SIZE:-${SOURCE:+full}}
SIZE=${SIZE:-small}
case $SIZE in
small)
    [ -z "${SOURCE:-}" ] || die "SOURCE=$SOURCE is for SIZE=full: leave out one of them."
    ARCH=${ARCH:-mega_classifier_small}
    ;;
full) ARCH=${ARCH:-$PRESET} ;;
*) die "SIZE=$SIZE is unknown: use small or full." ;;
esac
SOURCE=${SOURCE:+$(absolute "$SOURCE")}
CHECKPOINTS=$(absolute "${CHECKPOINTS:-$HERE/checkpoints/$SIZE/$ARCH}")
RESULTS=$(absolute "${RESULTS:-$HERE/results/$SIZE/$ARCH}")
RAW=$DATA/$SIZE/raw
BIN=$DATA/$SIZE/bin

# ------------------------------------------------------------------------------------------------------ prepare.sh

# make_published RESULT FILES PROGRAM...: makes RESULT with a Python program, whose last arguments are SOURCE, a folder
# or its .tar.gz archive, and RESULT. FILES says what SOURCE has to be.
make_published() {
    local result=$1 files=$2 folder=$SOURCE
    shift 2
    [ -n "$SOURCE" ] || die "SIZE=full needs the published data: give SOURCE=..., $files."
    remember "$result" "the data of $SOURCE"
    if [ -f "$SOURCE" ]; then
        folder=$DATA/$SIZE/source
        [ -e "$result" ] || step "$folder" unpack_source
    fi
    step "$result" "$PYTHON" "$@" "$folder"
    rm -rf "$DATA/$SIZE/source"
}

unpack_source() {
    mkdir "$1"
    tar -xzf "$SOURCE" -C "$1" --strip-components 1 || die "$SOURCE is truncated or not a .tar.gz archive: replace it."
}

# The lines of RAW as fairseq's tokens.
binarise() {
    local out=$1 name
    mkdir "$out"
    for name in input label; do
        fairseq preprocess --only-source \
            --trainpref "$RAW/train.$name" --validpref "$RAW/valid.$name" --testpref "$RAW/test.$name" \
            --workers "$WORKERS" --destdir "$out/${name/input/input0}" >&2
    done
}

ready() { say "ready: train.sh reads $BIN"; }

# -------------------------------------------------------------------------------------------------------- train.sh

need_data() {
    need_file "$BIN" "run prepare.sh first, with the same DATA and SIZE"
}

# Options of the published architectures for real values that mega_classifier_small lacks; for the scripts.
# shellcheck disable=SC2034
VALUES=(--normalization-type batchnorm --normalize-before --attention-activation-fn laplace --dropout 0)

# recipe NAME=VALUE...: sets the variables that the user has not set, and checks them.
recipe() {
    local setting name
    for setting in "$@" PRECISION=fp32; do
        name=${setting%%=*}
        [ -n "${!name:-}" ] || printf -v "$name" %s "${setting#*=}"
    done
    MAX_EXAMPLES=${MAX_EXAMPLES:-$BATCH}
    whole_numbers 0 WARMUP
    whole_numbers 1 UPDATES BATCH MAX_EXAMPLES SAVE
}

# train OPTIONS...: shared by all recipes, after `recipe`. The log is in JSON, for curves.py.
train() {
    local devices share saving=(--no-epoch-checkpoints)
    need_data
    devices=$(count_gpus)
    devices=$((devices > 0 ? devices : 1))
    share=$(((BATCH + devices - 1) / devices))
    [ -z "${SAVE:-}" ] || saving+=(--save-interval-updates "$SAVE" --keep-interval-updates 1 --log-interval 10)
    mkdir -p "$CHECKPOINTS"
    run_training --batch-size $((MAX_EXAMPLES < share ? MAX_EXAMPLES : share)) "$BATCH" \
        --task mega_classification --criterion sentence_prediction --arch "$ARCH" --lr "$LR" --clip-norm 1.0 \
        --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --log-format json "${saving[@]}" \
        "$@" 2>&1 | tee -a "$CHECKPOINTS/train.log" >&2
}

# ----------------------------------------------------------------------------------------------------- evaluate.sh

# evaluate OPTIONS...: the scores of fairseq-validate, the predictions with their figure, and learning curves.
evaluate() {
    local log options device=() train_log
    BATCH=${BATCH:-16}
    whole_numbers 1 BATCH
    need_trained "$@"
    case $SUBSET in train | valid | test) ;; *) die "SUBSET=$SUBSET is unknown: use train, valid or test." ;; esac
    [ "$(count_gpus)" != 0 ] || device=(--cpu)
    begin_result "$SUBSET" "$(checkpoint_word)" "$@"
    log=$RESULT.log.tmp
    options=(
        --user-dir "$(user_dir)" --path "$CHECKPOINT" --task mega_classification --criterion sentence_prediction
        --valid-subset "$SUBSET" --batch-size "$BATCH" --required-batch-size-multiple 1 --log-format json
    )
    say "evaluating $CHECKPOINT on $SUBSET"
    fairseq validate "$BIN" "${options[@]}" ${device[@]+"${device[@]}"} "$@" 2>&1 | tee "$log" >&2
    ACCURACY=$(validated accuracy "$log")
    LOSS=$(validated loss "$log")
    [ -n "$ACCURACY" ] || die "fairseq-validate gave no accuracy: see $log."
    keep_scores "$RESULT" accuracy_in_percent bits_per_example
    if [ $# -gt 0 ]; then
        say "no predictions: they are made without arguments, by the model as it was trained"
    else
        "$PYTHON" -m mega_fairseq.cli classify "$CHECKPOINT" "$BIN" --subset "$SUBSET" --batch-size "$BATCH" \
            --out "$RESULT" ${device[@]+"${device[@]}"} >"$RESULT.tsv.tmp"
        mv "$RESULT.tsv.tmp" "$RESULT.tsv"
    fi
    train_log=$(dirname "$CHECKPOINT")/train.log
    [ ! -e "$train_log" ] || "$PYTHON" "$LRA/curves.py" "$train_log" "$RESULTS/curves.png"
}

# validated NAME LOG: a number of the last JSON object that fairseq-validate logged.
validated() { sed -n "s/.*\"${SUBSET}_$1\": \"\([0-9.]*\)\".*/\1/p" "$2" | tail -n 1; }

accuracy_in_percent() { score "accuracy, percent" "$ACCURACY"; }

bits_per_example() { score "loss, bits" "$LOSS"; }
