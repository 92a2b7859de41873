#!/usr/bin/env bash
# Prepare enwik8, the first 100 million bytes of a Wikipedia dump, for fairseq: download, unpack, split 90 : 5 : 5,
# write bytes as numbers, binarise. Run it again after an interruption: finished steps are skipped.
#
# Variables: DATA (data beside this script), MIRROR (a URL that holds enwik8.zip, in place of the addresses below),
# BYTES (100000000: size of the text).
#
# Writes to DATA:
#     downloads/enwik8.zip          put it here by hand if the links are dead
#     raw/{train,valid,test}.txt    the original text: 90, 5 and 5 million bytes
#     bytes/text/                   each byte as its number, 65,536 per line
#     bytes/bin/                    binarised: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=bytes
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"
no_arguments "$@"

ADDRESSES=(
    http://mattmahoney.net/dc/enwik8.zip
    https://data.deepai.org/enwik8.zip
    https://cs.fit.edu/~mmahoney/compression/enwik8.zip
)
ARCHIVE=$DOWNLOADS/enwik8.zip
BYTES=${BYTES:-100000000}
whole_numbers 1 BYTES

make_raw() {
    local out=$1 found part=$((BYTES / 20))
    mkdir "$out"
    say "unpacking $ARCHIVE"
    extract "$ARCHIVE" enwik8 >"$out/enwik8"
    found=$(wc -c <"$out/enwik8" | tr -d ' ')
    [ "$found" = "$BYTES" ] || die "enwik8 in $ARCHIVE has $found bytes where $BYTES are expected: replace it."
    head -c $((BYTES - 2 * part)) "$out/enwik8" >"$out/train.txt"
    tail -c $((2 * part)) "$out/enwik8" >"$out/rest"
    head -c $part "$out/rest" >"$out/valid.txt"
    tail -c $part "$out/rest" >"$out/test.txt"
    rm "$out/enwik8" "$out/rest"
}

remember "$RAW" "BYTES=$BYTES"
[ -e "$RAW" ] || [ -e "$ARCHIVE" ] || download "${ADDRESSES[@]}"
step "$RAW" make_raw
step "$TEXT" make_bytes
step "$BIN" binarise
say "ready: train.sh reads $BIN"
