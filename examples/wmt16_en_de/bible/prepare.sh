#!/usr/bin/env bash
# The shipped corpus, the Bible in English and German, made ready for fairseq. Call it again after an interruption:
# it goes on where it stopped.
#
# Variables: DATA (data beside this script), BPE (sentencepiece, subword-nmt or fastbpe), VOCABULARY (8000),
# CORPUS (bible-ende.tar.xz; or a folder with train, valid and test, each .en and .de), WORKERS (all processors),
# PYTHON.
#
# It makes in DATA:
#     raw/{train,valid,test}.{en,de}          the sentences as they are
#     plain/ (tok/ where not sentencepiece)   the words to segment, training pairs cleaned
#     $BPE/codes                              the segmentation (a sentencepiece model or BPE codes)
#     $BPE/text/                              the segmented words
#     $BPE/bin/                               binarised, with one dictionary for both languages: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-sentencepiece}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/../common.sh"

SHIPPED=$HERE/bible-ende.tar.xz
CORPUS=$(absolute "${CORPUS:-$SHIPPED}")
VOCABULARY=${VOCABULARY:-8000}
COVERAGE=1.0
# No limit: every piece goes into the dictionary.
DICTIONARY=-1
MAX_WORDS=150
MAX_RATIO=9
whole_numbers 1 VOCABULARY

copy_corpus() {
    local out=$1 split
    mkdir "$out"
    if [ -d "$CORPUS" ]; then
        for split in train valid test; do
            check_pair "$CORPUS/$split" "$CORPUS"
            cp "$CORPUS/$split".{en,de} "$out"
        done
        return
    fi
    need_command xz "install it with your system's package manager"
    tar -xJf "$CORPUS" -C "$out" --strip-components 1 ||
        die "$CORPUS is truncated or no archive: put a good one in its place."
    if [ "$CORPUS" = "$SHIPPED" ]; then
        check_pair "$out/train" "$CORPUS" 27017
        check_pair "$out/valid" "$CORPUS" 1015
        check_pair "$out/test" "$CORPUS" 986
    fi
}

need_segmentation
need_file "$CORPUS" "name an archive or a folder with CORPUS=..."
if [ -d "$CORPUS" ]; then corpus_files=("$CORPUS"/{train,valid,test}.{en,de}); else corpus_files=("$CORPUS"); fi
remember "$RAW" "a corpus with checksum $(cat "${corpus_files[@]}" | cksum | cut -d ' ' -f 1)"
step "$RAW" copy_corpus
prepare_from_raw
