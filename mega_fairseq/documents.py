"""Files with a line per sentence, and `{split}.docs` beside them: line n is the id of the document of sentence n."""

import re
from pathlib import Path
from typing import List, Sequence, Union

SEPARATOR = "<sep>"  # between the lines of a window


def read_lines(path: Union[str, Path]) -> List[str]:
    """The lines of a UTF-8 file, with every run of white space, or of other line ends, replaced by one space."""
    lines: List[str] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise ValueError(
                    f"line {number:,} of {path} is not UTF-8; convert the file, with iconv for instance"
                ) from None
            text = " ".join(text.split())
            lines.append(lines[-1] if lines and lines[-1] == text else text)  # ids of documents share memory
    return lines


def separator_symbol(text: str) -> str:
    """The text if it may stand between lines."""
    if [text] != text.split():
        raise ValueError(f"--separator is {text!r}; give a symbol without spaces")
    return text


def split_window(tokens: str, separator: str) -> List[str]:
    """The lines of a window; other tokens may contain the separator."""
    return [line.strip() for line in re.split(rf"(?<!\S){re.escape(separator)}(?!\S)", tokens)]


def document_borders(ids: Sequence[str], source: Union[str, Path]) -> List[int]:
    """The first line of each document, a run of equal ids, and the number of lines; errors name `source`."""
    starts, known = [], set()
    for line, name in enumerate(ids):
        if not name:
            raise ValueError(f"line {line + 1:,} of {source} is blank; give the id of its document")
        if line and name == ids[line - 1]:
            continue
        if name in known:
            raise ValueError(
                f"line {line + 1:,} of {source} returns to document {name!r}, which has ended before; keep the lines "
                "of a document together, or give each document another id"
            )
        known.add(name)
        starts.append(line)
    return [*starts, len(ids)]
