"""Join passages of the same year to documents, and write their bytes as numbers, with their eras.

    python documents.py raw/train 4 train

reads raw/train.{txt,year,label} and writes train.input and train.label. Passages that do not fill a document are left
out.
"""

import sys
from itertools import groupby
from pathlib import Path


def main(source: str, count: int, target: str) -> None:
    columns = (Path(f"{source}.{name}").read_bytes().splitlines() for name in ("year", "label", "txt"))
    passages = sorted(zip(*columns), key=lambda passage: passage[0])
    inputs, labels = [], []
    for _, of_year in groupby(passages, key=lambda passage: passage[0]):
        of_year = list(of_year)
        for start in range(0, len(of_year) - count + 1, count):
            text = b" ".join(text for _, _, text in of_year[start : start + count])
            inputs.append(" ".join(map(str, text)))
            labels.append(of_year[start][1].decode())
    Path(f"{target}.input").write_text("\n".join(inputs) + "\n")
    Path(f"{target}.label").write_text("\n".join(labels) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
