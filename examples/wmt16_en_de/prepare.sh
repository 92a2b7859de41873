#!/usr/bin/env bash
# WMT'16 English-German made ready for fairseq: download, check, clean, tokenise, segment, binarise. Call it again
# after an interruption: it goes on where it stopped.
#
# Variables: DATA (data beside this script), BPE (subword-nmt, fastbpe or sentencepiece), VOCABULARY (32000),
# SOURCES (sources.txt: what to download and how many lines to expect), MIRROR (a URL that has all archives under
# their names, in place of the places in SOURCES), WORKERS (all processors), PYTHON.
#
# It makes in DATA:
#     downloads/                              the archives; put them there by hand where a link is dead
#     raw/{train,valid,test}.{en,de}          the sentences as they are
#     tok/ (plain/ with sentencepiece)        the words to segment, training pairs cleaned
#     $BPE/codes                              the segmentation (BPE codes or a sentencepiece model)
#     $BPE/text/                              the segmented words
#     $BPE/bin/                               binarised, with one dictionary for both languages: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-subword-nmt}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/common.sh"

SOURCES=$(absolute "${SOURCES:-$HERE/sources.txt}")
VOCABULARY=${VOCABULARY:-32000}
# Web text has thousands of letters from everywhere: the rarest, one in ten thousand, become unknown to sentencepiece.
COVERAGE=0.9999
DICTIONARY=33000
# Pairs longer or more uneven than this are removed, as Moses' clean-corpus-n.perl does by default.
MAX_WORDS=80
MAX_RATIO=9
whole_numbers 1 VOCABULARY

rows() { grep -Ev '^ *(#|$)' "$SOURCES"; }

download() {
    local url dead=()
    need_command curl "install it with your system's package manager"
    mkdir -p "$DOWNLOADS"
    for url in $(rows | awk '{print $3}' | sort -u); do
        fetch "$url" || dead+=("$(basename "$url")")
    done
    [ ${#dead[@]} = 0 ] || dead_links "${dead[@]}"
}

# extract ARCHIVE NAME: a file of the archive as plain text.
extract() {
    local archive=$1 name=$2 members member
    members=$(tar -tzf "$archive") ||
        die "$archive is truncated or no archive: remove it and run this again, or put a good one in its place."
    member=$(grep -E "(^|/)${name//./\\.}\$" <<<"$members") ||
        die "$archive holds no file $name: it is another archive."
    if [ "${name%.sgm}" = "$name" ]; then
        tar -xzOf "$archive" "$member"
    else
        tar -xzOf "$archive" "$member" | LC_ALL=C sed -n '/<seg/{s|.*<seg[^>]*> *||;s| *</seg>.*||;p;}'
    fi
}

make_raw() {
    local out=$1 split lines url english german archive language
    mkdir "$out"
    while read -r split lines url english german; do
        archive=$DOWNLOADS/$(basename "$url")
        say "unpacking $archive"
        extract "$archive" "$english" >"$out/part.en"
        extract "$archive" "$german" >"$out/part.de"
        check_pair "$out/part" "$archive" "$lines"
        for language in en de; do
            # awk ends the last line where cat would join it to the next file's first.
            LC_ALL=C awk 1 <"$out/part.$language" >>"$out/$split.$language"
            rm "$out/part.$language"
        done
    done < <(rows)
    for split in train valid test; do
        check_pair "$out/$split" "$SOURCES"
        say "$split: $(count_lines "$out/$split.en") pairs"
    done
}

need_segmentation
need_file "$SOURCES" "name a table like sources.txt with SOURCES=..."
remember "$RAW" "a table of sources with checksum $(rows | cksum | cut -d ' ' -f 1)"
[ -e "$RAW" ] || download
step "$RAW" make_raw
prepare_from_raw
