"""Write each byte of a text as its decimal number, separated by spaces, 65,536 per line.

    python to_bytes.py < text > numbers

fairseq-preprocess then makes one token of each byte and adds one line end per line: 1 token in 65,537 is not part of
the text. The text's own line ends are bytes like all others.
"""

import sys

LINE = 65_536


def main() -> None:
    while True:
        line = sys.stdin.buffer.read(LINE)
        if not line:
            return
        sys.stdout.write(" ".join(map(str, line)) + "\n")


if __name__ == "__main__":
    main()
