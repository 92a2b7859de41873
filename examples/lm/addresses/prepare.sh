#!/usr/bin/env bash
# The shipped corpus, State of the Union addresses, made ready for fairseq. Call it again after an interruption: it goes
# on where it stopped.
#
# Variables: DATA (data beside this script), UNITS (bytes; or bpe: pieces of words), VOCABULARY (4000 pieces),
# CORPUS (lm-sotu.tar.xz; or a folder with train.txt, valid.txt and test.txt), WORKERS (all processors), PYTHON.
#
# It makes in DATA:
#     raw/{train,valid,test}.txt          the text as it is
#     bpe/codes                           a sentencepiece model (only with UNITS=bpe)
#     $UNITS/text/                        bytes as numbers, in lines of 65,536; or pieces
#     $UNITS/bin/                         binarised: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=${UNITS:-bytes}
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"

SHIPPED=$HERE/lm-sotu.tar.xz
CORPUS=$(absolute "${CORPUS:-$SHIPPED}")
VOCABULARY=${VOCABULARY:-4000}
CODES=$DATA/bpe/codes
whole_numbers 1 VOCABULARY

copy_corpus() {
    local out=$1 split found
    mkdir "$out"
    if [ -d "$CORPUS" ]; then
        cp "$CORPUS"/{train,valid,test}.txt "$out"
    else
        need_command xz "install it with your system's package manager"
        tar -xJf "$CORPUS" -C "$out" --strip-components 1 ||
            die "$CORPUS is truncated or no archive: put a good one in its place."
    fi
    for split in train valid test; do
        need_file "$out/$split.txt" "$CORPUS is incomplete"
        found=$(wc -c <"$out/$split.txt" | tr -d ' ')
        [ "$found" != 0 ] || die "$split.txt of $CORPUS is empty: put a good one in its place."
        say "$split: $found bytes, $(count_words "$out/$split.txt") words and ends of line"
    done
}

segment() { "$PYTHON" "$EXAMPLES/wmt16_en_de/segment.py" "$@"; }

# Every character of the training text gets a piece: 1.0 of them.
learn_codes() { segment learn sentencepiece "$1" "$VOCABULARY" 1.0 "$RAW/train.txt"; }

make_pieces() {
    local out=$1 split
    mkdir "$out"
    for split in train valid test; do
        say "segmenting $split"
        segment apply sentencepiece "$CODES" <"$RAW/$split.txt" >"$out/$split.txt"
    done
}

case $UNITS in bytes | bpe) ;; *) die "UNITS=$UNITS is unknown: say bytes or bpe." ;; esac
need_file "$CORPUS" "name an archive or a folder with CORPUS=..."
if [ -d "$CORPUS" ]; then
    for split in train valid test; do need_file "$CORPUS/$split.txt" "$CORPUS is incomplete"; done
    corpus_files=("$CORPUS"/{train,valid,test}.txt)
else
    corpus_files=("$CORPUS")
fi
remember "$RAW" "a corpus with checksum $(cat "${corpus_files[@]}" | cksum | cut -d ' ' -f 1)"
step "$RAW" copy_corpus
if [ "$UNITS" = bpe ]; then
    need_module sentencepiece "pip install sentencepiece"
    remember "$CODES" "VOCABULARY=$VOCABULARY"
    step "$CODES" learn_codes
    step "$TEXT" make_pieces
else
    step "$TEXT" make_bytes
fi
step "$BIN" binarise
say "ready: train.sh reads $BIN"
