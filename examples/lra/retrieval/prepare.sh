#!/usr/bin/env bash
# Prepare pairs of documents for classification. Run it again after an interruption: it continues.
#
# Variables: DATA (data beside this script), SIZE (small: pairs of the shipped passages of State of the Union addresses,
# of the same year or not, 3,200 for training; full: pairs of papers, AAN, of which one cites the other or not), SOURCE
# (for full: the folder with new_aan_pairs.{train,eval,test}.tsv).
#
# Writes to DATA/SIZE:
#     raw/    the archive's files (only small)
#     bin/    one document in a line, with labels: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_retrieval
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"
no_arguments "$@"

unpack_passages() { unpack "$HERE/../text/cls-sotu.tar.xz" "$1"; }

make_pairs() { "$PYTHON" "$HERE/pairs.py" "$RAW" "$1"; }

case $SIZE in
small)
    step "$RAW" unpack_passages
    step "$BIN" make_pairs
    ;;
full) make_published "$BIN" "the folder with new_aan_pairs.{train,eval,test}.tsv" "$HERE/papers.py" ;;
esac
ready
