#!/usr/bin/env bash
# Prepare the shipped passages of State of the Union addresses, as bytes, to pre-train an encoder and to fine-tune it on
# their four eras.
#
# Variables: DATA (data beside this script), PASSAGES (1: passages of one year that are joined to a document; 4 give
# documents of 6,000 bytes).
#
# Writes to DATA:
#     raw/                  the archive's files
#     PASSAGES/input0/      documents, binarised: pre-train on these
#     PASSAGES/label/       their eras: fine-tune on both
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/encoder/common.sh
source "$HERE/common.sh"
no_arguments "$@"

unpack_passages() { unpack "$HERE/../lra/text/cls-sotu.tar.xz" "$1"; }

binarise() {
    local split text=$1.text name
    rm -rf "$text"
    mkdir -p "$text"
    for split in train valid test; do "$PYTHON" "$HERE/documents.py" "$RAW/$split" "$PASSAGES" "$text/$split"; done
    for name in input label; do
        fairseq preprocess --only-source \
            --trainpref "$text/train.$name" --validpref "$text/valid.$name" --testpref "$text/test.$name" \
            --workers "$WORKERS" --destdir "$1/${name/input/input0}" >&2
    done
    rm -r "$text"
}

step "$RAW" unpack_passages
step "$BIN" binarise
say "ready: pretrain.sh and finetune.sh read $BIN"
