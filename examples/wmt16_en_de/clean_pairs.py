"""Remove training pairs that are empty, too long or too different in length, and print how many.

clean_pairs.py SOURCE TARGET CLEAN_SOURCE CLEAN_TARGET MAX_WORDS MAX_RATIO

A pair is removed if a side is empty, has more than MAX_WORDS words, or has more than MAX_RATIO times as
many words as the other.
"""

import collections
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
    if len(sys.argv) != 7:
        sys.exit(__doc__)
    source_path, target_path, *clean_paths, max_words, max_ratio = sys.argv[1:]
    sources, targets = (lines.clean(lines.open_text(path)) for path in (source_path, target_path))
    removed = collections.Counter()
    kept = 0
    with lines.open_text(clean_paths[0], "w") as clean_source, lines.open_text(clean_paths[1], "w") as clean_target:
        for source, target in zip(sources, targets):
            reason = fault(source, target, int(max_words), float(max_ratio))
            if reason:
                removed[reason] += 1
                continue
            kept += 1
            clean_source.write(source + "\n")
            clean_target.write(target + "\n")
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(removed.items()))
    total = sum(removed.values())
    print(f"cleaning removed {total:,} of {kept + total:,} pairs" + (f" ({reasons})" if reasons else ""))


if __name__ == "__main__":
    main()
