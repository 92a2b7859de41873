"""Text as bytes: each byte as its decimal number, separated by spaces, in lines of 65,536.

    python to_bytes.py < text > numbers

fairseq-preprocess then makes one token of each byte, and one end of line of each line: 1 token in 65,537 is none of
the text's. Lines end at a size, not at the text's own ends of line, which are bytes like all others.
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
