#!/usr/bin/env bash
# Make Pathfinder, images of 32 x 32 pixels, for classification pixel by pixel. Run it again after an interruption: it
# continues. Arguments are passed to images.py.
#
# Variables: DATA (data beside this script), SIZE (small: 5,000 images; full: as published, 200,000), SOURCE (none:
# generated; or the published folder pathfinder32).
#
# Writes to DATA/SIZE:
#     bin/    images and labels: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_pathfinder
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"

if [ -n "$SOURCE" ]; then
    no_arguments "$@"
    make_published "$BIN" "the published folder" "$HERE/published.py"
else
    [ "$SIZE" = full ] || set -- --images 5000 "$@"
    remember "$BIN" "the arguments '$*'"
    step "$BIN" "$PYTHON" "$HERE/images.py" --size 32 --workers "$WORKERS" "$@"
fi
ready
