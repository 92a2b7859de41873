#!/usr/bin/env bash
# Prepare images for classification pixel by pixel. Run it again after an interruption: it continues.
#
# Variables: DATA (data beside this script), SIZE (small: the shipped part of Fashion-MNIST, 28 x 28 pixels, 2,600
# images for training; full: CIFAR-10 in grey, 32 x 32), SOURCE (for full: cifar-10-python.tar.gz, or its folder).
#
# Writes to DATA/SIZE:
#     bin/    images and labels: train on this
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_lra_image
# shellcheck source=examples/lra/common.sh
source "$HERE/../common.sh"
no_arguments "$@"

unpack_images() { unpack "$HERE/cls-fashion.tar.xz" "$1"; }

case $SIZE in
small) step "$BIN" unpack_images ;;
full) make_published "$BIN" "cifar-10-python.tar.gz or its folder" "$HERE/cifar.py" ;;
esac
ready
