# shellcheck shell=bash
# Shared by the recipes of this folder. A script sets HERE, its own folder, and BPE, and sources this file.

COMMON="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=examples/common.sh
source "$COMMON/../common.sh"

# --------------------------------------------------------------------------------------------------------- variables

case $BPE in
sentencepiece | subword-nmt | fastbpe) ;;
*) die "BPE=$BPE is unknown: use sentencepiece, subword-nmt or fastbpe." ;;
esac

# Everything that depends on the segmentation is in a folder named after it, so that several do not collide.
CHECKPOINTS=$(absolute "${CHECKPOINTS:-$HERE/checkpoints/$BPE}")
RESULTS=$(absolute "${RESULTS:-$HERE/results/$BPE}")
RAW=$DATA/raw
CODES=$DATA/$BPE/codes
TEXT=$DATA/$BPE/text
BIN=$DATA/$BPE/bin
# sentencepiece takes plain sentences, the other two take Moses-tokenised text.
if [ "$BPE" = sentencepiece ]; then WORDS=$DATA/plain; else WORDS=$DATA/tok; fi

# ------------------------------------------------------------------------------------------------------ prepare.sh

# check_pair PREFIX ORIGIN [LINES]: stops unless both languages exist and have the same number of lines, or LINES. The
# error says to replace ORIGIN.
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

# copy_docs FROM TO: the ids of documents, where the text has them.
copy_docs() {
    local split
    for split in train valid test; do
        [ ! -e "$1/$split.docs" ] || cp "$1/$split.docs" "$2"
    done
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

# The text to segment: Moses-tokenised unless BPE=sentencepiece, with cleaned training pairs and the ids of documents.
make_words() {
    local out=$1 split language docs=()
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
    copy_docs "$RAW" "$out"
    [ ! -e "$out/train.docs" ] || docs=("$out"/{train,clean}.docs)
    say "$("$PYTHON" "$COMMON/clean_pairs.py" "$out"/train.{en,de} "$out"/clean.{en,de} "$MAX_WORDS" "$MAX_RATIO" \
        ${docs[@]+"${docs[@]}"})"
    for language in en de ${docs:+docs}; do
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
    copy_docs "$WORDS" "$1"
}

# From the sentence pairs in RAW to binarised data. The recipe sets MAX_WORDS, MAX_RATIO, VOCABULARY, COVERAGE and
# DICTIONARY.
prepare_from_raw() {
    remember "$CODES" "VOCABULARY=$VOCABULARY"
    step "$WORDS" make_words
    step "$CODES" learn_codes
    step "$TEXT" make_text
    step "$BIN" binarise
    say "ready: train.sh reads $BIN"
}

# -------------------------------------------------------------------------------------------------------- train.sh

# train OPTIONS...: shared by both recipes, which set KEEP.
train() {
    need_file "$BIN" "run prepare.sh first, with the same DATA and BPE"
    run_training --max-tokens "$MAX_TOKENS" "$BATCH_TOKENS" --keep-last-epochs "$KEEP" \
        --task translation --source-lang en --target-lang de --share-all-embeddings \
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --clip-norm 1.0 \
        "$@"
}

# ----------------------------------------------------------------------------------------------------- generate.sh

# translate OPTIONS...: translates SUBSET and writes the translations, in the order of the source, to two files of
# RESULTS: hypotheses.pieces as generated, hypotheses.words with the segmentation undone.
translate() {
    local checkpoint options argument overrides='{}'
    refuse_subset "$@"
    for argument in "$@"; do
        case $argument in --remove-b* | --post-p*)
            die "$argument would undo the segmentation twice: leave it out, this script already undoes BPE=$BPE."
            ;;
        --quiet) die "--quiet hides the translations, which this script reads: leave it out." ;;
        esac
    done
    checkpoint=$(absolute "${CHECKPOINT:-$CHECKPOINTS/averaged.pt}")
    [ -n "${CHECKPOINT:-}" ] || [ ! "$CHECKPOINTS/checkpoint_last.pt" -nt "$checkpoint" ] ||
        die "$checkpoint does not exist or is older than the last checkpoint: run average.sh first," \
            "or name a checkpoint with CHECKPOINT=..."
    need_file "$checkpoint" "run average.sh first, or name a checkpoint with CHECKPOINT=..."
    need_file "$BIN" "run prepare.sh first, with the same DATA and BPE"
    claim_folder "$RESULTS"
    rm -f "$RESULTS/scores.txt" # of an earlier translation
    options=(
        --user-dir "$(user_dir)" --path "$checkpoint" --source-lang en --target-lang de
        ${WINDOW_TOKENS:+--window-tokens "$WINDOW_TOKENS"} --task "${WINDOW_TOKENS:+mega_document_}translation"
        --gen-subset "$SUBSET" --max-tokens "$MAX_TOKENS" --required-batch-size-multiple 1 --log-format simple
    )
    [ "$(count_gpus)" != 0 ] || options+=(--cpu)
    # Avoids the fast path of fairseq 0.12.2's Transformer, which fails under torch 2.
    ! "$PYTHON" -c 'import importlib.metadata as m; m.version("fairseq")' 2>/dev/null ||
        overrides="{'checkpoint_activations': True}"
    override "$overrides" "$@"
    say "translating $SUBSET with $checkpoint"
    fairseq generate "$BIN" "${options[@]}" "${ARGUMENTS[@]}" >"$RESULTS/generate.out"
    if [ -n "${WINDOW_TOKENS:-}" ]; then
        "$PYTHON" -m mega_fairseq.cli documents split "$RESULTS/generate.out" "$BIN/$SUBSET.docs" \
            --out "$RESULTS/hypotheses" >&2
    else
        sed -n 's/^H-//p' "$RESULTS/generate.out" | sort -n -k 1,1 | cut -f 3 >"$RESULTS/hypotheses.pieces"
    fi
    [ "$(count_lines "$RESULTS/hypotheses.pieces")" = "$(count_lines "$RAW/$SUBSET.de")" ] ||
        die "the number of translations differs from the number of sentences in $SUBSET: see $RESULTS/generate.out."
    "$PYTHON" "$COMMON/segment.py" undo "$BPE" <"$RESULTS/hypotheses.pieces" >"$RESULTS/hypotheses.words"
}

# BLEU and chrF of hypotheses.txt against the original reference, each with sacreBLEU's signature.
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
