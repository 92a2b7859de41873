"""Subword segmentation: one interface to sentencepiece, subword-nmt and fastBPE.

segment.py learn KIND MODEL SIZE COVERAGE FILE...   learns one vocabulary for all files
segment.py apply KIND MODEL < words > pieces
segment.py undo  KIND < pieces > words

KIND is sentencepiece, subword-nmt or fastbpe. Only the module of that kind is imported.
"""

import io
import itertools
import os
import re
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Callable, List

import lines


def learn_sentencepiece(model: str, size: int, coverage: float, files: List[str]) -> None:
    import sentencepiece

    # With `input`, the model would contain the paths of the files.
    text = itertools.chain.from_iterable(lines.clean(lines.open_text(path)) for path in files)
    learned = io.BytesIO()  # written at the end, so that an error leaves no empty model
    with tempfile.TemporaryDirectory() as folder:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=text,
                model_writer=learned,
                model_type="bpe",
                vocab_size=max(size, 3),  # of less, it does not say what the text needs
                character_coverage=coverage,
                normalization_rule_tsv=blanks(folder),
                max_sentence_length=1_000_000,  # sentencepiece skips longer lines, for example paragraphs
                minloglevel=2,
            )
        except RuntimeError as error:
            sys.exit(f"error: {' '.join(files)}: {advice(size, str(error))}")
    with open(model, "wb") as file:
        file.write(learned.getvalue())


def blanks(folder: str) -> str:
    """A file of rules that make a blank of all white space, at which fairseq would split pieces, and keep the rest."""
    path = os.path.join(folder, "rules.tsv")
    with open(path, "w") as file:
        file.writelines(f"{code:X}\t20\n" for code in range(sys.maxunicode) if chr(code).isspace() and code != 32)
    return path


def advice(size: int, complaint: str) -> str:
    """sentencepiece's error message, or what size to give instead."""
    if "sentences_.empty()" in complaint:
        return "the text is empty."
    largest = re.search(r"too high .* <= (\d+)", complaint)
    least = re.search(r"required_chars\. \d+ vs (\d+)", complaint)
    if largest:
        return f"a vocabulary of {size} is too large for this text: give {largest.group(1)} or less."
    if least:
        return f"a vocabulary of {size} is too small for this text's characters: give {least.group(1)} or more."
    return complaint


def learn_bpe(size: int, files: List[str]) -> List[str]:
    """Merges as lines "a b", the most frequent first, after a header line."""
    from subword_nmt.learn_bpe import learn_bpe

    codes = io.StringIO()
    text = itertools.chain.from_iterable(lines.clean(lines.open_text(path)) for path in files)
    learn_bpe(text, codes, size)
    return codes.getvalue().splitlines()


def learn(kind: str, model: str, size: int, coverage: float, files: List[str]) -> None:
    for path in files:
        if not os.path.isfile(path):
            sys.exit(f"error: {path} does not exist")
    if kind == "sentencepiece":
        return learn_sentencepiece(model, size, coverage, files)
    header, *merges = learn_bpe(size, files)
    # fastBPE expects no header and a count after each merge, of which it only uses the order.
    codes = [f"{merge} 1" for merge in merges] if kind == "fastbpe" else [header, *merges]
    with lines.open_text(model, "w") as file:
        file.writelines(line + "\n" for line in codes)


def applier(kind: str, model: str) -> Callable[[str], str]:
    if not os.path.exists(model):
        sys.exit(f"error: {model} does not exist: make it first, with segment.py learn")
    if kind == "sentencepiece":
        import sentencepiece

        try:
            processor = sentencepiece.SentencePieceProcessor(model_file=model)
        except RuntimeError:
            sys.exit(f"error: {model} is not a model of sentencepiece")
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
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for action in ("learn", "apply", "undo"):
        arguments = actions.add_parser(action)
        arguments.add_argument("kind", choices=("sentencepiece", "subword-nmt", "fastbpe"))
        if action != "undo":
            arguments.add_argument("model")
    learned = actions.choices["learn"]
    learned.add_argument("size", type=int)
    learned.add_argument("coverage", type=float)
    learned.add_argument("files", nargs="+")
    args = parser.parse_args()
    if args.action == "learn":
        learn(args.kind, args.model, args.size, args.coverage, args.files)
    elif args.action == "apply":
        lines.write(map(applier(args.kind, args.model), lines.stdin()))
    else:
        lines.write(undo(args.kind, line) for line in lines.stdin())


if __name__ == "__main__":
    main()
