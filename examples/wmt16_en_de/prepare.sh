#!/usr/bin/env bash
# Prepare WMT'16 English-German for fairseq: download, check, clean, tokenise, segment, binarise. Run it again after an
# interruption: finished steps are skipped.
#
# Variables: DATA (data beside this script), BPE (subword-nmt; or fastbpe, sentencepiece), VOCABULARY (32000), SOURCES
# (sources.txt: what to download and how many lines to expect), MIRROR (a URL that holds all archives of SOURCES).
#
# Writes to DATA:
#     downloads/                         archives; put them here by hand if a link is dead
#     raw/{train,valid,test}.{en,de}     the original sentences
#     tok/ (sentencepiece: plain/)       words to segment; training pairs are cleaned
#     $BPE/codes, $BPE/text/             BPE codes or sentencepiece model; segmented text
#     $BPE/bin/                          binarised, with a joined dictionary: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-subword-nmt}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/common.sh"
no_arguments "$@"

SOURCES=$(absolute "${SOURCES:-$HERE/sources.txt}")
VOCABULARY=${VOCABULARY:-32000}
# Web text contains thousands of different characters: the rarest (1 in 10,000 of the text) become unknown to sentencepiece.
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
    [ ${#dead[@]} = 0 ] || download_failed "${dead[@]}"
}

# extract ARCHIVE NAME: writes a file of the archive as plain text to standard output.
extract() {
    local archive=$1 name=$2 members member
    members=$(tar -tzf "$archive") ||
        die "$archive is truncated or not an archive: remove it and run this again, or replace it."
    member=$(grep -E "(^|/)${name//./\\.}\$" <<<"$members") ||
        die "$archive contains no file $name: replace it with the right archive."
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
            # Unlike cat, awk adds a missing newline at the end of a file.
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
need_file "$SOURCES" "set SOURCES to a table like sources.txt"
remember "$RAW" "a table of sources with checksum $(rows | cksum | cut -d ' ' -f 1)"
[ -e "$RAW" ] || download
step "$RAW" make_raw
prepare_from_raw
