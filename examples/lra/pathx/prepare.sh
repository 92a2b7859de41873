#!/usr/bin/env bash
# Make Path-X, images of 128 x 128 pixels, for classification pixel by pixel. Run it again after an interruption: it
# continues. Arguments are passed to mega-fairseq prepare.
#
# Variables: DATA (data beside this script), SIZE (small: 200 images; full: as published, 200,000), SOURCE (none:
# generated; or the published folder pathfinder128).
#
# Writes to DATA/SIZE:
#     bin/    images and labels: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_pathx
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"

case $SIZE in
small) prepare pathfinder "$BIN" --size 128 --images 200 "$@" ;;
full)
    if [ -n "$SOURCE" ]; then set -- "$SOURCE" "$@"; else set -- --size 128 "$@"; fi
    prepare pathfinder "$BIN" "$@"
    ;;
esac
ready
