#!/usr/bin/env bash
# Make Path-X, images of 128 x 128 pixels, for classification pixel by pixel. Run it again after an interruption: it
# continues. Arguments are passed to images.py.
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

if [ -n "$SOURCE" ]; then
    no_arguments "$@"
    make_published "$BIN" "the published folder" "$HERE/../pathfinder/published.py"
else
    [ "$SIZE" = full ] || set -- --images 200 "$@"
    remember "$BIN" "the arguments '$*'"
    step "$BIN" "$PYTHON" "$HERE/../pathfinder/images.py" --size 128 --workers "$WORKERS" "$@"
fi
ready
