#!/usr/bin/env bash
# Prepare WikiText-103 for fairseq: download, unpack, binarise, and check each step against the known numbers. Run it
# again after an interruption: finished steps are skipped.
#
# Variables: DATA (data beside this script), MIRROR (a URL that holds the archive, in place of the addresses below),
# EXPECTED (expected.txt: what the archive must contain).
#
# Writes to DATA:
#     downloads/wikitext-103-v1.zip    put it here by hand if the links are dead
#     raw/{train,valid,test}.txt       the text: words separated by spaces, rare ones already <unk>
#     words/bin/                       binarised: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
UNITS=words
# shellcheck source=examples/lm/common.sh
source "$HERE/../common.sh"
no_arguments "$@"

ADDRESSES=(
    https://wikitext.smerity.com/wikitext-103-v1.zip
    https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip
)
ARCHIVE=$DOWNLOADS/wikitext-103-v1.zip
EXPECTED=$(absolute "${EXPECTED:-$HERE/expected.txt}")
# The archive's words are the tokens.
TEXT=$RAW

# expected ROW COLUMN
expected() { tr -d '\r' <"$EXPECTED" | awk -v row="$1" -v column="$2" '$1 == row {print $column}'; }

# check WHAT FOUND EXPECTED
check() {
    [ "$2" = "$3" ] ||
        die "$1: found $2 where $3 are expected. $ARCHIVE is a different archive, $DATA has files of an earlier one, or" \
            "$EXPECTED is wrong: remove or correct what is wrong."
}

make_raw() {
    local out=$1 split
    mkdir "$out"
    for split in train valid test; do
        say "unpacking $split"
        extract "$ARCHIVE" "$(expected $split 2)" >"$out/$split.txt"
        check "lines of $split" "$(count_lines "$out/$split.txt")" "$(expected $split 3)"
    done
}

# The counts are in the log of fairseq-preprocess.
make_bin() {
    local out=$1 split log=$1/preprocess.log
    binarise "$out"
    for split in train valid test; do
        check "tokens of $split" "$(sed -n "s|.*/$split.txt: .* sents, \([0-9]*\) tokens.*|\1|p" "$log")" \
            "$(expected $split 4)"
    done
    check "types of the dictionary" "$(sed -n 's/.*Dictionary: \([0-9]*\) types.*/\1/p' "$log" | tail -n 1)" \
        "$(expected types 2)"
}

need_file "$EXPECTED" "set EXPECTED to a table like expected.txt"
remember "$RAW" "a table of expectations with checksum $(cksum <"$EXPECTED" | cut -d ' ' -f 1)"
[ -e "$RAW" ] || [ -e "$ARCHIVE" ] || download "${ADDRESSES[@]}"
step "$RAW" make_raw
step "$BIN" make_bin
say "ready: train.sh reads $BIN"
