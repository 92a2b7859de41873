#!/usr/bin/env bash
# Make ListOps, nested operations on digits, for fairseq. Run it again after an interruption: it continues. Arguments
# are passed to expressions.py.
#
# Variables: DATA (data beside this script), SIZE (small: 10,000 expressions of 50 to 200 symbols; full: as published,
# 96,000 of 501 to 1,999), SOURCE (none: generated; or the folder with the published basic_{train,val,test}.tsv).
#
# Writes to DATA/SIZE:
#     raw/    expressions and their values
#     bin/    binarised: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_listops
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"

case $SIZE in
small) set -- --train 10000 --valid 1000 --test 1000 --shortest 50 --longest 200 "$@" ;;
full) set -- ${SOURCE:+--source "$SOURCE"} "$@" ;;
esac
remember "$RAW" "the arguments '$*'"
step "$RAW" "$PYTHON" "$HERE/expressions.py" "$@"
step "$BIN" binarise
ready
