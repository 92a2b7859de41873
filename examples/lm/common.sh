# shellcheck shell=bash
# Shared by the recipes of this folder. A script sets HERE, its own folder, and UNITS, the kind of its tokens, and
# sources this file.

LM="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=examples/common.sh
source "$LM/../common.sh"

# Everything that depends on the tokens is in a folder named after them, so that bytes and pieces do not collide.
CHECKPOINTS=$(absolute "${CHECKPOINTS:-$HERE/checkpoints/$UNITS}")
RESULTS=$(absolute "${RESULTS:-$HERE/results/$UNITS}")
RAW=$DATA/raw
TEXT=$DATA/$UNITS/text
BIN=$DATA/$UNITS/bin

# ------------------------------------------------------------------------------------------------------ prepare.sh

# download URL...: one file, from the first address that works.
download() {
    local url name
    name=$(basename "$1")
    need_command curl "install it with your system's package manager, or put $name into $DOWNLOADS by hand"
    mkdir -p "$DOWNLOADS"
    # MIRROR replaces all addresses.
    [ -z "${MIRROR:-}" ] || set -- "$1"
    for url in "$@"; do
        if fetch "$url"; then return; fi
    done
    download_failed "$name"
}

# extract ARCHIVE NAME: writes a file of the archive to standard output.
extract() { "$PYTHON" "$LM/unzip.py" "$1" "$2"; }

segment() { "$PYTHON" "$EXAMPLES/wmt16_en_de/segment.py" "$@"; }

# One token per byte.
make_bytes() {
    local out=$1 split
    mkdir "$out"
    for split in train valid test; do
        say "writing the bytes of $split as numbers"
        "$PYTHON" "$LM/to_bytes.py" <"$RAW/$split.txt" >"$out/$split.txt"
    done
}

binarise() {
    fairseq preprocess --only-source \
        --trainpref "$TEXT/train.txt" --validpref "$TEXT/valid.txt" --testpref "$TEXT/test.txt" \
        --workers "$WORKERS" --destdir "$1" >&2
}

# -------------------------------------------------------------------------------------------------------- train.sh

need_data() { need_file "$BIN" "run prepare.sh first, with the same DATA and UNITS"; }

# train OPTIONS...: shared by all recipes, which set MAX_TOKENS (in one batch on one GPU), BATCH_TOKENS (in one update over
# all GPUs) and the variables of run_training. 400,000 updates are hundreds of epochs: only the last and the best
# checkpoint are kept.
train() {
    need_data
    run_training --max-tokens "$MAX_TOKENS" "$BATCH_TOKENS" \
        --task mega_language_modeling --criterion mega_lm_cross_entropy \
        --lr 5e-3 --clip-norm 0.25 --weight-decay 0.1 --no-epoch-checkpoints \
        "$@"
}

# ------------------------------------------------------------------------------------------- evaluate.sh, sweep.sh

# evaluate OPTIONS...: evaluates SUBSET as STREAMS streams in chunks of CHUNK tokens. Sets BITS, the total of
# all tokens, and RESULT, the common prefix of the result files.
evaluate() {
    local log options tokens per_token
    [[ $* != *decoder_chunk_size* ]] || die "decoder_chunk_size: give the chunk size with CHUNK=..."
    need_trained "$@"
    need_file "$RAW/$SUBSET.txt" "run prepare.sh first, with the same DATA, or name another SUBSET"
    begin_result "$SUBSET" "chunk$CHUNK" "streams$STREAMS" "$(checkpoint_word)" "$@"
    log=$RESULT.log.tmp
    override "{'decoder_chunk_size': $CHUNK}" "$@"
    options=(
        --user-dir "$(user_dir)" --path "$CHECKPOINT" --task mega_language_modeling --gen-subset "$SUBSET"
        --valid-block "splits:$STREAMS" --log-format simple
    )
    [ "$(count_gpus)" != 0 ] || options+=(--cpu)
    say "evaluating $CHECKPOINT on $SUBSET: $STREAMS streams, chunks of $CHUNK"
    fairseq eval_lm "$BIN" "${options[@]}" "${ARGUMENTS[@]}" 2>&1 | tee "$log" >&2
    tokens=$(sed -n 's/.*Evaluated \([0-9,]*\) tokens.*/\1/p' "$log" | tr -d ,)
    per_token=$(sed -n 's/.*Loss (base 2): \([0-9.]*\), .*/\1/p' "$log")
    [ -n "$per_token" ] || die "fairseq-eval-lm gave no loss: see $log."
    BITS="$per_token * $tokens"
}

# Bits of all tokens divided by the bytes of the text; the line ends that fairseq adds to bytes count as bits only.
bits_per_byte() { score "bits per byte" "$BITS / $(text_held | wc -c)"; }

# The text that the tokens hold: pieces have a blank for each run of white space.
text_held() { if [ "$UNITS" = bpe ]; then segment undo sentencepiece <"$TEXT/$SUBSET.txt"; else cat "$RAW/$SUBSET.txt"; fi; }

# Perplexity over words and line ends, as for a word-level language model, whatever the tokens are.
perplexity_per_word() { score "perplexity per word" "2 ^ ($BITS / $(count_words "$RAW/$SUBSET.txt"))"; }

# Counts in Python, which splits at the same white space as fairseq. The text may contain any bytes.
count_words() {
    local words='sum(len(line.split()) + 1 for line in open(sys.argv[1], encoding="utf-8", errors="surrogateescape"))'
    "$PYTHON" -c "import sys; print($words)" "$1"
}

# sweep OPTIONS...: perplexity over CHUNKS and STREAMS.
sweep() {
    need_trained "$@"
    [ "$(count_gpus)" != 0 ] || set -- --cpu "$@"
    "$PYTHON" -m mega_fairseq.cli sweep "$CHECKPOINT" "$BIN" --subset "$SUBSET" \
        --chunks "$CHUNKS" --streams "$STREAMS" --out "$RESULTS/sweep-$SUBSET" "$@"
}
