"""Subword segmentation: one interface over sentencepiece, subword-nmt and fastBPE.

segment.py learn KIND MODEL SIZE COVERAGE FILE...   one vocabulary over all files
segment.py apply KIND MODEL < words > pieces
segment.py undo  KIND MODEL < pieces > words

KIND is sentencepiece, subword-nmt or fastbpe. A module is imported only where its kind is asked for.
"""

import io
import itertools
import re
import sys
from typing import Callable, List

import lines


def learn_sentencepiece(model: str, size: int, coverage: float, files: List[str]) -> None:
    import sentencepiece

    try:
        with open(model, "wb") as writer:
            sentencepiece.SentencePieceTrainer.train(
                input=files,
                model_writer=writer,
                model_type="bpe",
                vocab_size=size,
                character_coverage=coverage,
                max_sentence_length=1_000_000,  # sentencepiece leaves longer lines out: of paragraphs, some
                minloglevel=1,
            )
    except RuntimeError as error:
        sys.exit(f"error: VOCABULARY={size} does not suit this text: {advice(str(error))}")


def advice(complaint: str) -> str:
    """What sentencepiece's complaint about the vocabulary's size comes down to."""
    largest = re.search(r"too high .* <= (\d+)", complaint)
    least = re.search(r"required_chars\. \d+ vs (\d+)", complaint)
    if largest:
        return f"give {largest.group(1)} or less."
    return f"give {least.group(1)} or more, for its letters." if least else complaint


def learn_bpe(size: int, files: List[str]) -> List[str]:
    """Merges as lines "a b", the most frequent first."""
    from subword_nmt.learn_bpe import learn_bpe

    codes = io.StringIO()
    text = itertools.chain.from_iterable(lines.clean(lines.open_text(path)) for path in files)
    learn_bpe(text, codes, size)
    return codes.getvalue().splitlines()


def learn(kind: str, model: str, size: str, coverage: str, *files: str) -> None:
    if kind == "sentencepiece":
        return learn_sentencepiece(model, int(size), float(coverage), list(files))
    header, *merges = learn_bpe(int(size), list(files))
    # fastBPE wants no header and a count behind each merge; it uses only their order.
    codes = [f"{merge} 1" for merge in merges] if kind == "fastbpe" else [header, *merges]
    with lines.open_text(model, "w") as file:
        file.writelines(line + "\n" for line in codes)


def applier(kind: str, model: str) -> Callable[[str], str]:
    if kind == "sentencepiece":
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=model)
        return lambda line: " ".join(processor.encode(line, out_type=str))
    if kind == "fastbpe":
        import fastBPE

        bpe = fastBPE.fastBPE(model)
        return lambda line: bpe.apply([line])[0]
    from subword_nmt.apply_bpe import BPE

    return BPE(lines.open_text(model)).process_line


def undo(kind: str, line: str) -> str:
    if kind == "sentencepiece":
        return line.replace(" ", "").replace("\u2581", " ").strip()
    return re.sub("@@( |$)", "", line)


def main() -> None:
    action, kind, *rest = sys.argv[1:]
    if action == "learn":
        learn(kind, *rest)
    elif action == "apply":
        lines.write(map(applier(kind, *rest), lines.stdin()))
    elif action == "undo":
        lines.write(undo(kind, line) for line in lines.stdin())


if __name__ == "__main__":
    main()
