# shellcheck shell=bash
# What the recipes of this folder share. A script sets HERE, its own folder, may set BPE, and sources this file.

COMMON="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# ---------------------------------------------------------------------------------------------------- speaking up

say() { printf '== %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

need_command() { command -v "$1" >/dev/null || die "'$1' is not installed: $2."; }

need_module() { "$PYTHON" -c "import $1" 2>/dev/null || die "$PYTHON has no module '$1': $2."; }

need_file() { [ -e "$1" ] || die "$1 is not there: $2."; }

# --------------------------------------------------------------------------------------------------- Python, fairseq

# The first Python that has fairseq and the plugin: PYTHON, one on PATH, the one that `make install` sets up.
find_python() {
    local python
    for python in ${PYTHON:+"$PYTHON"} python3 python "$COMMON/../../.venv/bin/python"; do
        if "$python" -c 'import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' \
            fairseq mega_fairseq 2>/dev/null; then
            command -v "$python"
            return
        fi
        [ "$python" != "${PYTHON:-}" ] || die "PYTHON=$PYTHON has no fairseq and mega_fairseq, or is no Python:" \
            "install them there as the repository's README says, or name another."
    done
    die "no Python here has fairseq and mega_fairseq: run 'make install' in the repository," \
        "or set PYTHON to one that has them."
}

# fairseq's commands, by module name: on PATH they may belong to another Python.
fairseq() {
    local tool=$1
    shift
    "$PYTHON" -m "fairseq_cli.$tool" "$@"
}

# The plugin's folder, for --user-dir: its own command knows it; where that is not installed, Python does.
user_dir() {
    "$(dirname "$PYTHON")/mega-fairseq" user-dir 2>/dev/null ||
        "$PYTHON" -c 'import importlib.util as u; print(u.find_spec("mega_fairseq").submodule_search_locations[0])'
}

# How many GPUs to use: GPUS, or all that torch sees.
count_gpus() { echo "${GPUS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}"; }

# ---------------------------------------------------------------------------------------- the choices of the caller

# Relative paths count from the folder that the script is called from.
absolute() { case $1 in /*) printf '%s\n' "$1" ;; *) printf '%s\n' "$PWD/$1" ;; esac; }

PYTHON=$(find_python)
WORKERS=${WORKERS:-$(getconf _NPROCESSORS_ONLN)}
case $BPE in
sentencepiece | subword-nmt | fastbpe) ;;
*) die "BPE=$BPE is unknown: say sentencepiece, subword-nmt or fastbpe." ;;
esac

# What depends on the segmentation has a folder of its name, so that several can stand side by side.
DATA=$(absolute "${DATA:-$HERE/data}")
CHECKPOINTS=$(absolute "${CHECKPOINTS:-$HERE/checkpoints/$BPE}")
RESULTS=$(absolute "${RESULTS:-$HERE/results/$BPE}")
RAW=$DATA/raw
CODES=$DATA/$BPE/codes
TEXT=$DATA/$BPE/text
BIN=$DATA/$BPE/bin
# sentencepiece takes sentences as they are, the other two want words that Moses has parted from punctuation.
if [ "$BPE" = sentencepiece ]; then WORDS=$DATA/plain; else WORDS=$DATA/tok; fi

# ------------------------------------------------------------------------------------------------------ prepare.sh

# step RESULT COMMAND...: have RESULT made, unless it is there. COMMAND is given a temporary path as its last
# argument, which becomes RESULT only when all went well: what was interrupted is done again, what is finished never.
step() {
    local result=$1
    shift
    if [ -e "$result" ]; then
        say "have $result"
        return
    fi
    say "making $result"
    mkdir -p "$(dirname "$result")"
    rm -rf "$result.tmp"
    "$@" "$result.tmp"
    mv "$result.tmp" "$result"
}

# remember RESULT CHOICES: what RESULT is made with. A step is skipped by the name of its result alone, so a call with
# other choices must not take it for its own. What was put there by hand has no note and is taken as it is.
remember() {
    local result=$1 choices=$2 note=$1.choices
    if [ ! -e "$result" ]; then
        mkdir -p "$(dirname "$result")"
        printf '%s\n' "$choices" >"$note"
    elif [ -e "$note" ] && [ "$(cat "$note")" != "$choices" ]; then
        die "$result was made with $(cat "$note"), not with $choices: name another folder with DATA=...," \
            "or remove $(dirname "$result")."
    fi
}

count_lines() { wc -l <"$1" | tr -d ' '; }

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

# train OPTIONS...: what the recipes have in common. UPDATES, WARMUP, MAX_TOKENS (on one GPU at a time),
# BATCH_TOKENS (in one update, over all GPUs), PRECISION and KEEP come from the recipe.
train() {
    local gpus devices options
    need_file "$BIN" "run prepare.sh first, with the same DATA and BPE"
    gpus=$(count_gpus)
    devices=$((gpus > 0 ? gpus : 1))
    options=(
        --user-dir "$(user_dir)" --save-dir "$CHECKPOINTS" --keep-last-epochs "$KEEP"
        --task translation --source-lang en --target-lang de --share-all-embeddings
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1
        --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8 --clip-norm 1.0
        --lr-scheduler polynomial_decay --power 1 --end-learning-rate 0
        --warmup-updates "$WARMUP" --total-num-update "$UPDATES" --max-update "$UPDATES"
        --max-tokens "$MAX_TOKENS" --update-freq $(((BATCH_TOKENS + MAX_TOKENS * devices - 1) / (MAX_TOKENS * devices)))
        # Any other value drops the last sentences of a batch, in validation too.
        --required-batch-size-multiple 1
        --distributed-world-size "$devices"
        --log-format simple --log-interval 100
    )
    if [ "$gpus" = 0 ]; then
        [ "$PRECISION" != fp16 ] || die "PRECISION=fp16 needs a GPU: use fp32 or bf16."
        options+=(--cpu)
    else
        # Where only one process reads the checkpoint, fairseq cannot hand it to the others under torch 2.6 and newer.
        options+=(--load-checkpoint-on-all-dp-ranks)
    fi
    case $PRECISION in
    fp32) ;;
    fp16 | bf16) options+=("--$PRECISION") ;;
    *) die "PRECISION=$PRECISION is unknown: say fp32, fp16 or bf16." ;;
    esac
    say "training in $CHECKPOINTS; it goes on from checkpoint_last.pt if that is there"
    fairseq train "$BIN" "${options[@]}" "$@"
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
    options=(
        --user-dir "$(user_dir)" --path "$checkpoint" --task translation --source-lang en --target-lang de
        --gen-subset "$SUBSET" --max-tokens "$MAX_TOKENS" --required-batch-size-multiple 1 --log-format simple
    )
    [ "$(count_gpus)" != 0 ] || options+=(--cpu)
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
