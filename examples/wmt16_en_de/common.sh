# shellcheck shell=bash
# What the recipes of this folder share. A script sets HERE, its own folder, may set BPE, and sources this file.

COMMON="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=examples/common.sh
source "$COMMON/../common.sh"

# ---------------------------------------------------------------------------------------- the choices of the caller

case $BPE in
sentencepiece | subword-nmt | fastbpe) ;;
*) die "BPE=$BPE is unknown: say sentencepiece, subword-nmt or fastbpe." ;;
esac

# What depends on the segmentation has a folder of its name, so that several can stand side by side.
CHECKPOINTS=$(absolute "${CHECKPOINTS:-$HERE/checkpoints/$BPE}")
RESULTS=$(absolute "${RESULTS:-$HERE/results/$BPE}")
RAW=$DATA/raw
CODES=$DATA/$BPE/codes
TEXT=$DATA/$BPE/text
BIN=$DATA/$BPE/bin
# sentencepiece takes sentences as they are, the other two want words that Moses has parted from punctuation.
if [ "$BPE" = sentencepiece ]; then WORDS=$DATA/plain; else WORDS=$DATA/tok; fi

# ------------------------------------------------------------------------------------------------------ prepare.sh

# check_pair PREFIX ORIGIN [LINES]: both languages are there, with equally many lines. ORIGIN is to blame if not.
check_pair() {
    local prefix=$1 origin=$2 expected=${3:-} language found
    for language in en de; do
        need_file "$prefix.$language" "$origin is incomplete"
        found=$(count_lines "$prefix.$language")
        [ "$found" = "${expected:=$found}" ] ||
            die "$prefix.$language has $found lines where $expected are expected: replace $origin."
    done
    [ "$expected" -gt 0 ] || die "$prefix.en and $prefix.de are empty: replace $origin."
}

need_segmentation() {
    if [ "$BPE" = sentencepiece ]; then
        need_module sentencepiece "pip install sentencepiece"
        return
    fi
    need_module sacremoses "pip install sacremoses"
    need_module subword_nmt "pip install subword-nmt"
    [ "$BPE" != fastbpe ] || need_module fastBPE \
        "pip install Cython setuptools wheel, then pip install --no-deps --no-build-isolation fastBPE==0.1.0"
}

# The words to segment: Moses-tokenised where the segmentation wants it, training pairs cleaned.
make_words() {
    local out=$1 split language
    mkdir "$out"
    for split in train valid test; do
        for language in en de; do
            if [ "$BPE" = sentencepiece ]; then
                cp "$RAW/$split.$language" "$out/$split.$language"
            else
                say "tokenising $split.$language"
                moses tokenize "$language" <"$RAW/$split.$language" >"$out/$split.$language"
            fi
        done
    done
    say "$("$PYTHON" "$COMMON/clean_pairs.py" "$out"/train.{en,de} "$out"/clean.{en,de} "$MAX_WORDS" "$MAX_RATIO")"
    for language in en de; do
        mv "$out/clean.$language" "$out/train.$language"
    done
}

moses() { "$PYTHON" "$COMMON/moses.py" "$1" "$2" "$WORKERS"; }

learn_codes() { "$PYTHON" "$COMMON/segment.py" learn "$BPE" "$1" "$VOCABULARY" "$COVERAGE" "$WORDS"/train.{en,de}; }

make_text() {
    local out=$1 split language
    mkdir "$out"
    for split in train valid test; do
        for language in en de; do
            say "segmenting $split.$language"
            "$PYTHON" "$COMMON/segment.py" apply "$BPE" "$CODES" <"$WORDS/$split.$language" >"$out/$split.$language"
        done
        check_pair "$out/$split" "$WORDS"
    done
}

binarise() {
    fairseq preprocess --source-lang en --target-lang de --joined-dictionary --nwordssrc "$DICTIONARY" \
        --trainpref "$TEXT/train" --validpref "$TEXT/valid" --testpref "$TEXT/test" \
        --workers "$WORKERS" --destdir "$1" >&2
}

# From the pairs in RAW to what fairseq trains on. The recipe has set MAX_WORDS, MAX_RATIO, VOCABULARY, COVERAGE
# and DICTIONARY.
prepare_from_raw() {
    remember "$CODES" "VOCABULARY=$VOCABULARY"
    step "$WORDS" make_words
    step "$CODES" learn_codes
    step "$TEXT" make_text
    step "$BIN" binarise
    say "ready: train.sh reads $BIN"
}

# -------------------------------------------------------------------------------------------------------- train.sh

# train OPTIONS...: what the recipes have in common. KEEP comes from the recipe, like what run_training asks for.
train() {
    need_file "$BIN" "run prepare.sh first, with the same DATA and BPE"
    run_training --keep-last-epochs "$KEEP" \
        --task translation --source-lang en --target-lang de --share-all-embeddings \
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --clip-norm 1.0 \
        "$@"
}

# ----------------------------------------------------------------------------------------------------- generate.sh

# translate OPTIONS...: the sentences of SUBSET, one translation a line and in order, into two files of RESULTS:
# hypotheses.pieces as the model makes them, hypotheses.words with the segmentation undone.
translate() {
    local checkpoint options
    checkpoint=$(absolute "${CHECKPOINT:-$CHECKPOINTS/averaged.pt}")
    [ -n "${CHECKPOINT:-}" ] || [ ! "$CHECKPOINTS/checkpoint_last.pt" -nt "$checkpoint" ] ||
        die "$checkpoint is older than the last checkpoint, or not there: run average.sh first," \
            "or name a checkpoint with CHECKPOINT=..."
    need_file "$checkpoint" "run average.sh first, or name a checkpoint with CHECKPOINT=..."
    need_file "$BIN" "run prepare.sh first, with the same DATA and BPE"
    mkdir -p "$RESULTS"
    rm -f "$RESULTS/scores.txt" # of what was translated before
    options=(
        --user-dir "$(user_dir)" --path "$checkpoint" --task translation --source-lang en --target-lang de
        --gen-subset "$SUBSET" --max-tokens "$MAX_TOKENS" --required-batch-size-multiple 1 --log-format simple
    )
    [ "$(count_gpus)" != 0 ] || options+=(--cpu)
    # A Transformer of fairseq 0.12.2 takes a fast path there, which fails under torch 2, and with this option another.
    ! "$PYTHON" -c 'import importlib.metadata as m; m.version("fairseq")' 2>/dev/null ||
        options+=(--model-overrides "{'checkpoint_activations': True}")
    say "translating $SUBSET with $checkpoint"
    fairseq generate "$BIN" "${options[@]}" "$@" >"$RESULTS/generate.out"
    sed -n 's/^H-//p' "$RESULTS/generate.out" | sort -n -k 1,1 | cut -f 3 >"$RESULTS/hypotheses.pieces"
    [ "$(count_lines "$RESULTS/hypotheses.pieces")" = "$(count_lines "$RAW/$SUBSET.de")" ] ||
        die "there is not one translation for each sentence of $SUBSET: see $RESULTS/generate.out."
    "$PYTHON" "$COMMON/segment.py" undo "$BPE" <"$RESULTS/hypotheses.pieces" >"$RESULTS/hypotheses.words"
}

# score_detokenised: BLEU and chrF against the untouched reference, on hypotheses.txt, by sacreBLEU, which says in
# its signature what it did.
score_detokenised() {
    local language=de
    if [ "$BPE" = sentencepiece ]; then
        cp "$RESULTS/hypotheses.words" "$RESULTS/hypotheses.txt"
    else
        need_module sacremoses "pip install sacremoses"
        moses detokenize $language <"$RESULTS/hypotheses.words" >"$RESULTS/hypotheses.txt"
    fi
    "$PYTHON" -m sacrebleu "$RAW/$SUBSET.$language" -i "$RESULTS/hypotheses.txt" -m bleu chrf -w 2 -f text
}
