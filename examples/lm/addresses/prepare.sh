#!/usr/bin/env bash
# Prepare the shipped corpus, State of the Union addresses, for fairseq. Run it again after an interruption: finished
# steps are skipped.
#
# Variables: DATA (data beside this script), UNITS (bytes; or bpe: subword pieces), VOCABULARY (4000 pieces), CORPUS
# (lm-sotu.tar.xz; or a folder with train.txt, valid.txt and test.txt).
#
# Writes to DATA:
#     raw/{train,valid,test}.txt    the original text
#     bpe/codes                     sentencepiece model (only with UNITS=bpe)
#     $UNITS/text/                  bytes as numbers, 65,536 per line; or pieces
#     $UNITS/bin/                   binarised: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=${UNITS:-bytes}
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"
no_arguments "$@"

SHIPPED=$HERE/lm-sotu.tar.xz
CORPUS=$(absolute "${CORPUS:-$SHIPPED}")
VOCABULARY=${VOCABULARY:-4000}
CODES=$DATA/bpe/codes
whole_numbers 1 VOCABULARY

copy_corpus() {
    local out=$1 split found
    if [ -d "$CORPUS" ]; then
        mkdir "$out"
        cp "$CORPUS"/{train,valid,test}.txt "$out"
    else
        unpack "$CORPUS" "$out"
    fi
    for split in train valid test; do
        need_file "$out/$split.txt" "$CORPUS is incomplete"
        found=$(wc -c <"$out/$split.txt" | tr -d ' ')
        [ "$found" != 0 ] || die "$split.txt of $CORPUS is empty: replace it."
        say "$split: $found bytes, $(count_words "$out/$split.txt") words and line ends"
    done
}

# Character coverage 1.0: every character of the training text gets a piece.
learn_codes() { segment learn sentencepiece "$1" "$VOCABULARY" 1.0 "$RAW/train.txt"; }

make_pieces() {
    local out=$1 split
    mkdir "$out"
    for split in train valid test; do
        say "segmenting $split"
        segment apply sentencepiece "$CODES" <"$RAW/$split.txt" >"$out/$split.txt"
    done
}

case $UNITS in bytes | bpe) ;; *) die "UNITS=$UNITS is unknown: use bytes or bpe." ;; esac
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
