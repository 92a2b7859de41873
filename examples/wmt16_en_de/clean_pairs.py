"""Remove training pairs that are empty, too long or too different in length, and print how many.

clean_pairs.py SOURCE TARGET CLEAN_SOURCE CLEAN_TARGET MAX_WORDS MAX_RATIO [DOCS CLEAN_DOCS]

A pair is removed if a side is empty, has more than MAX_WORDS words, or has more than MAX_RATIO times as
many words as the other. DOCS has the id of each pair's document; those of the other pairs are kept.
"""

import collections
import contextlib
import itertools
import sys

import lines


def fault(source: str, target: str, max_words: int, max_ratio: float) -> str:
    """Why this pair is removed; empty if it is kept."""
    short, long = sorted([len(source.split()), len(target.split())])
    if short == 0:
        return "empty"
    if long > max_words:
        return f"longer than {max_words} words"
    if long > max_ratio * short:
        return f"lengths differ by more than {max_ratio:g} times"
    return ""


def main() -> None:
    if len(sys.argv) not in (7, 9):
        sys.exit(__doc__)
    source_path, target_path, *clean_paths, max_words, max_ratio = sys.argv[1:7]
    paths, clean_paths = [source_path, target_path, *sys.argv[7:8]], [*clean_paths, *sys.argv[8:]]
    removed = collections.Counter()
    kept = 0
    with contextlib.ExitStack() as files:
        texts = [lines.clean(files.enter_context(lines.open_text(path))) for path in paths]
        clean = [files.enter_context(lines.open_text(path, "w")) for path in clean_paths]
        for number, (source, target, *ids) in enumerate(itertools.zip_longest(*texts), 1):
            if None in (source, target, *ids):
                sys.exit(f"error: {' and '.join(paths)} do not all have a line {number:,}: replace them.")
            reason = fault(source, target, int(max_words), float(max_ratio))
            if reason:
                removed[reason] += 1
                continue
            kept += 1
            for file, line in zip(clean, (source, target, *ids)):
                file.write(line + "\n")
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(removed.items()))
    total = sum(removed.values())
    print(f"cleaning removed {total:,} of {kept + total:,} pairs" + (f" ({reasons})" if reasons else ""))


if __name__ == "__main__":
    main()
