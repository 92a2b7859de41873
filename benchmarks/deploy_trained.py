"""A trained translation model in PyTorch and in mega_runtime: BLEU, equal lines and CPU time, in float32 and int8.

    python benchmarks/deploy_trained.py CHECKPOINT DATA SOURCE REFERENCE --sentencepiece-model MODEL \\
        --name "Bible, lines" --json docs/deploy_trained.json
    ... --docs DATA/test.docs --window-tokens 1024 --name "Bible, windows"        as windows of documents
    ... --transformer CHECKPOINT                                                beside a Transformer in CTranslate2

DATA has the dictionaries, SOURCE and REFERENCE are text with as many lines. Times are of one run: of all lines in
batches, and of some lines one by one.
"""

import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

import sacrebleu
import sentencepiece
from fairseq.models.transformer import TransformerModel

from benchmarks.measure import Numbers, as_table, prepare_process, write_json
from benchmarks.translators import BEAM, FORMATS, converted, exported
from mega_fairseq.documents import document_borders, read_lines
from mega_fairseq.models import MegaTransformerModel
from mega_runtime import Translator

ALONE = 50  # lines that are translated one by one, too
BATCH = 1024  # tokens
Documents = List[List[str]]  # lines
Translate = Callable[[Documents], List[str]]


def systems(args: Namespace, folder: Path) -> Iterator[Tuple[str, Translate]]:
    """By name; each is loaded when it is its turn."""
    yield "PyTorch", in_pytorch(MegaTransformerModel, args.checkpoint, args)
    for number_format in FORMATS:
        out = folder / number_format
        exported(args.checkpoint, out, number_format, args.data, "--sentencepiece-model", args.sentencepiece_model)
        yield f"mega_runtime, {number_format}", in_runtime(Translator(out, batch_tokens=BATCH), args)
    if args.transformer is not None:
        yield "Transformer, PyTorch", in_pytorch(TransformerModel, args.transformer, args)
        for number_format in FORMATS:
            out = folder / f"transformer-{number_format}"
            converted(args.transformer, out, number_format, args.data)
            yield f"Transformer, CTranslate2, {number_format}", in_ctranslate2(out, number_format, args)


def in_pytorch(kind: type, checkpoint: Path, args: Namespace) -> Translate:
    """As fairseq-generate does."""
    words = {"bpe": "sentencepiece", "sentencepiece_model": str(args.sentencepiece_model)}
    hub = kind.from_pretrained(str(checkpoint.parent), checkpoint.name, str(args.data), **words)
    if args.docs is None:
        return lambda documents: hub.translate([line for lines in documents for line in lines], beam=BEAM)
    hub.task.cfg.valid_window_tokens = args.window_tokens
    return lambda documents: [line for lines in hub.translate_documents(documents, beam=BEAM) for line in lines]


def in_runtime(translator: Translator, args: Namespace) -> Translate:
    if args.docs is None:
        return lambda documents: [
            found.text for found in translator.translate([line for lines in documents for line in lines], beam=BEAM)
        ]
    translator.config["documents"]["window_tokens"] = args.window_tokens
    return lambda documents: [line for lines in translator.translate_documents(documents, beam=BEAM) for line in lines]


def in_ctranslate2(folder: Path, number_format: str, args: Namespace) -> Translate:
    """Each line alone."""
    import ctranslate2

    translator = ctranslate2.Translator(str(folder), compute_type=number_format, inter_threads=1, intra_threads=1)
    model = sentencepiece.SentencePieceProcessor(model_file=str(args.sentencepiece_model))

    def translate(documents: Documents) -> List[str]:
        pieces = [model.encode(line, out_type=str) for lines in documents for line in lines]
        found = translator.translate_batch(pieces, beam_size=BEAM, max_batch_size=BATCH, batch_type="tokens")
        return [model.decode(each.hypotheses[0]) for each in found]

    return translate


def measured(args: Namespace, folder: Path) -> Dict[str, Numbers]:
    """BLEU, lines as of the first system, and milliseconds per target token of each system."""
    sources, references = read_lines(args.source), read_lines(args.reference)
    borders = range(len(sources) + 1) if args.docs is None else document_borders(read_lines(args.docs), args.docs)
    documents = [sources[start:end] for start, end in zip(borders, borders[1:])]
    model = sentencepiece.SentencePieceProcessor(model_file=str(args.sentencepiece_model))
    found: Dict[str, Numbers] = {}
    first: List[str] = []
    for name, translate in systems(args, folder):
        start = time.process_time()
        lines = translate(documents)
        seconds = time.process_time() - start
        first = first or lines
        found[name] = {
            "BLEU": sacrebleu.corpus_bleu(lines, [references]).score,
            "lines as in PyTorch": sum(line == other for line, other in zip(lines, first)),
            "ms per token, in batches": 1000 * seconds / tokens(model, lines),
        }
        if args.docs is None:
            some = documents[:: max(1, len(documents) // ALONE)]
            start = time.process_time()
            lines = [line for document in some for line in translate([document])]
            found[name]["ms per token, one by one"] = 1000 * (time.process_time() - start) / tokens(model, lines)
        print(name, found[name], flush=True)
    return found


def tokens(model: sentencepiece.SentencePieceProcessor, lines: List[str]) -> int:
    """With the end of each line."""
    return sum(len(pieces) + 1 for pieces in model.encode(lines))


def markdown(found: Dict[str, Numbers]) -> str:
    columns, rows = list(next(iter(found.values()))), []
    for name, numbers in found.items():
        cells = (numbers[column] for column in columns)
        rows.append([name, *(f"{cell:,}" if isinstance(cell, int) else f"{cell:.2f}" for cell in cells)])
    return as_table(["", *columns], rows)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    for name in ("checkpoint", "data", "source", "reference"):
        parser.add_argument(name, type=Path, metavar=name.upper())
    parser.add_argument("--sentencepiece-model", type=Path, required=True, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="translate documents in windows; FILE has their ids")
    parser.add_argument("--window-tokens", type=int, default=1024, metavar="N")
    parser.add_argument("--transformer", type=Path, metavar="CHECKPOINT", help="with the same DATA")
    parser.add_argument("--name", default="model", help="of the table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the table to FILE")
    args = parser.parse_args()
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(args, Path(folder))
    print(f"\n{markdown(found)}")
    if args.json:
        write_json(args.json, {args.name: found})


if __name__ == "__main__":
    main()
