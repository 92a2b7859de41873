"""Pictures as grey squares of 28 x 28 numbers, for classifiers of values.

    python squares.py pictures data      writes data/{train,valid,test}.npy and .label, from a folder for each label
    python squares.py new.png            prints the numbers of a picture, for mega-fairseq classify CHECKPOINT -

A tenth of the pictures each is held out for validation and test. Labels are the names of the folders, one word each.
The mean and deviation that are printed belong into the training.
"""

import argparse
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SIDE = 28


def square(path: Path) -> np.ndarray:
    """Grey values (SIDE * SIDE,) from 0 to 255, upright, on white if the picture is transparent."""
    try:
        picture = Image.open(path)
        picture.load()
    except (OSError, SyntaxError):  # Pillow's of damaged files
        sys.exit(f"{path} is no whole picture; move it away")
    if picture.mode == "F" or (picture.mode == "I" and picture.format != "PNG"):  # old versions open 16 bits as "I"
        sys.exit(f"{path} has 32 bits for a pixel, with no known white; save it with 8 or 16 bits")
    upright = ImageOps.exif_transpose(picture)
    if upright.mode.startswith("I"):  # 16 bits
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    if "A" in upright.mode or "transparency" in upright.info:
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
    return np.asarray(upright.convert("L").resize((SIDE, SIDE), Image.BILINEAR)).ravel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    args = parser.parse_args()
    if args.pictures.is_file():
        return print(*square(args.pictures))
    if args.out and args.out.exists() and any(args.out.iterdir()):
        sys.exit(f"{args.out} is not empty, and other pictures would be held out now; give a new folder")
    paths = sorted(args.pictures.glob("*/[!.]*"))
    if args.out is None or len(paths) < 3:
        sys.exit(f"{args.pictures}: a picture, or a folder of at least three pictures in folders by label, and OUT")
    for path in paths:
        if len(path.parent.name.split()) > 1:
            sys.exit(f"{path.parent}: a label is one word; rename the folder")
    squares = {path: square(path) for path in paths}
    random.Random(1).shuffle(paths)
    tenth = max(1, len(paths) // 10)
    args.out.mkdir(parents=True, exist_ok=True)
    for split, part in ("test", paths[:tenth]), ("valid", paths[tenth : 2 * tenth]), ("train", paths[2 * tenth :]):
        np.save(args.out / f"{split}.npy", [squares[path] for path in part])
        (args.out / f"{split}.label").write_text("".join(f"{path.parent.name}\n" for path in part))
    train = np.load(args.out / "train.npy") / 255
    print(f"--values-mean {train.mean():.3f} --values-deviation {train.std():.3f}")


if __name__ == "__main__":
    main()
