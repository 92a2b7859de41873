#!/usr/bin/env bash
# Prepare the shipped corpus, the Bible in English and German, for fairseq. Run it again after an interruption: finished
# steps are skipped.
#
# Variables: DATA (data beside this script), BPE (sentencepiece; or subword-nmt, fastbpe), VOCABULARY (8000), CORPUS
# (bible-ende.tar.xz; or a folder with train, valid and test, each .en and .de, and .docs if it has documents).
#
# Writes to DATA:
#     raw/{train,valid,test}.{en,de}     the original sentences; .docs: the chapter of each
#     plain/ (other segmentations: tok/) words to segment; training pairs are cleaned
#     $BPE/codes, $BPE/text/             sentencepiece model or BPE codes; segmented text
#     $BPE/bin/                          binarised, with a joined dictionary, and .docs: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-sentencepiece}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/../common.sh"
no_arguments "$@"

SHIPPED=$HERE/bible-ende.tar.xz
CORPUS=$(absolute "${CORPUS:-$SHIPPED}")
VOCABULARY=${VOCABULARY:-8000}
COVERAGE=1.0
# No limit: all pieces are in the dictionary.
DICTIONARY=-1
MAX_WORDS=150
MAX_RATIO=9
whole_numbers 1 VOCABULARY

copy_corpus() {
    local out=$1 split
    if [ -d "$CORPUS" ]; then
        mkdir "$out"
        for split in train valid test; do
            check_pair "$CORPUS/$split" "$CORPUS"
            cp "$CORPUS/$split".{en,de} "$out"
        done
        copy_docs "$CORPUS" "$out"
        return
    fi
    unpack "$CORPUS" "$out"
    if [ "$CORPUS" = "$SHIPPED" ]; then
        check_pair "$out/train" "$CORPUS" 27017
        check_pair "$out/valid" "$CORPUS" 1015
        check_pair "$out/test" "$CORPUS" 986
        unpack "${SHIPPED%.tar.xz}-documents.tar.xz" "$out/chapters"
        mv "$out"/chapters/*.docs "$out"
        rmdir "$out/chapters"
    fi
}

need_segmentation
need_file "$CORPUS" "name an archive or a folder with CORPUS=..."
if [ -d "$CORPUS" ]; then corpus_files=("$CORPUS"/{train,valid,test}.{en,de}); else corpus_files=("$CORPUS"); fi
[ ! -e "$CORPUS/train.docs" ] || corpus_files+=("$CORPUS"/{train,valid,test}.docs)
remember "$RAW" "a corpus with checksum $(cat "${corpus_files[@]}" | cksum | cut -d ' ' -f 1)"
step "$RAW" copy_corpus
prepare_from_raw
