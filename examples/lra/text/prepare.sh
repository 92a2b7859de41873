#!/usr/bin/env bash
# Prepare bytes of text for classification. Run it again after an interruption: it continues.
#
# Variables: DATA (data beside this script), SIZE (small: the shipped passages of State of the Union addresses, of four
# eras, 3,200 of them for training; full: reviews of films, IMDB), SOURCE (for full: aclImdb_v1.tar.gz, or its folder).
#
# Writes to DATA/SIZE:
#     raw/    the archive's files (only small)
#     bin/    one document in a line, with labels: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_text
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"
no_arguments "$@"

unpack_passages() { unpack "$HERE/cls-sotu.tar.xz" "$1"; }

make_passages() {
    local split
    mkdir "$1"
    for split in train valid test; do
        cp "$RAW/$split.txt" "$1/$split.input"
        cp "$RAW/$split.label" "$1"
    done
}

case $SIZE in
small)
    step "$RAW" unpack_passages
    step "$BIN" make_passages
    ;;
full) make_published "$BIN" "aclImdb_v1.tar.gz or its folder" "$HERE/reviews.py" ;;
esac
ready
