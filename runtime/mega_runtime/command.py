"""The command `mega-runtime`: text from standard input, or a file, to standard output."""

import argparse
import io
import math
import os
import re
import sys
import time
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Iterable, Iterator, List, Optional, Sequence, TextIO, Union

import mega_runtime
from mega_runtime.classifier import Classifier
from mega_runtime.folder import Folder
from mega_runtime.language_model import LanguageModel
from mega_runtime.translator import Translator, in_order

NO_MEMORY = ("Failed to allocate memory", "bad_alloc")  # in errors of ONNX Runtime, which has no class for them


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where the options are listed."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists what there is\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # here, since only the parser of the whole line would say so, without the command's name
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def main(arguments: Optional[Sequence[str]] = None) -> int:
    if sys.stderr is None:  # closed, as by `2>&-`: what is printed to it would go to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print("mega-runtime: standard output is closed", file=sys.stderr)
        return 1
    args = parser().parse_args(arguments)
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # PYTHONUNBUFFERED: if a full disk cuts a write short, Python would not notice.
        sys.stdout = open(1, "w", 1, closefd=False)  # noqa: SIM115 - until the process ends
    sys.stdout.reconfigure(encoding="utf-8", errors="strict", newline="\n")
    try:
        args.run(args)
        sys.stdout.flush()
    except Exception as error:
        if isinstance(error, MemoryError) and not str(error) or any(words in str(error) for words in NO_MEMORY):
            error = MemoryError("out of memory")
        if not isinstance(error, (ValueError, OSError, FloatingPointError, MemoryError)):
            raise
        try:
            sys.stdout.flush()
        except OSError:  # a full disk, or a reader that has closed the pipe
            discard(sys.stdout)
        if isinstance(error, BrokenPipeError):  # as by `head`
            return 1
        less = "; lower --beam or --batch-tokens" if isinstance(error, MemoryError) and "beam" in args else ""
        print(f"mega-runtime {args.command}: {error}{less}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def discard(stream: TextIO) -> None:
    """Gives up what a stream could not write; Python would try again at its end, and end with another status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="mega-runtime", description="Runs models that mega-fairseq export wrote.")
    top.add_argument("--version", action="version", version=mega_runtime.__version__)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, about: str, run: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        command.add_argument("folder", metavar="FOLDER", help="folder that mega-fairseq export wrote")
        if run is not run_info:
            command.add_argument("--threads", type=int, default=1, metavar="N", help="of a search (default: 1)")
            command.add_argument("--input", metavar="FILE", help="read this file (default: standard input)")
        command.set_defaults(run=run)
        return command

    translate = add("translate", "translate each line", run_translate)
    units = translate.add_mutually_exclusive_group()
    units.add_argument(
        "--paragraphs", action="store_true", help="cut lines into sentences, and join their translations"
    )
    units.add_argument("--documents", action="store_true", help="blank lines separate documents, translated as a whole")
    for name, kind, about in (
        ("beam", int, "hypotheses that are followed at once"),
        ("lenpen", float, "above 1 favours longer translations"),
        ("unkpen", float, "taken from the score of each unknown word"),
        ("max-len-a", float, "a translation has at most a n + b tokens for n of the source"),
        ("max-len-b", int, "see --max-len-a"),
        ("min-len", int, "a translation has at least so many tokens"),
    ):
        translate.add_argument(f"--{name}", type=kind, metavar="N", help=f"{about} (default: that of the folder)")
    translate.add_argument("--nbest", type=int, default=1, metavar="N", help="hypotheses of each line (default: 1)")
    translate.add_argument("--scores", action="store_true", help="write the score and a tab before each translation")
    translate.add_argument("--pieces", action="store_true", help="input and output are split into pieces")
    translate.add_argument(
        "--batch-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="source tokens in a batch (default: 1024)",
    )
    translate.add_argument(
        "--buffer-size", type=int, metavar="N", help="lines read at once (default: 1000, and 1 from a terminal)"
    )

    write = add("continue", "continue the text of the input", run_continue)
    write.add_argument("--max-tokens", type=int, default=200, metavar="N", help="(default: %(default)s)")
    write.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 for the likeliest tokens")
    write.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens; 0 for all")
    write.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only tokens of this probability together")
    write.add_argument("--seed", type=int, default=1, metavar="N", help="(default: %(default)s)")
    write.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")

    add("score", "write the bits per token and the number of tokens of each line", run_score)
    add("classify", "write the class of each line, and its probability", run_classify)
    add("info", "print what a folder contains, after a check of its files", run_info)
    return top


# ------------------------------------------------------------------------------------------- commands


def run_translate(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in ("beam", "lenpen", "unkpen", "max_len_a", "max_len_b", "min_len")}
    options = {name: value for name, value in given.items() if value is not None}
    if args.buffer_size is None:
        args.buffer_size = 1 if args.input is None and os.isatty(0) else 1000
    translator = Translator(args.folder, args.threads, args.batch_tokens, args.buffer_size, args.pieces, **options)
    if not 1 <= args.nbest <= translator.options.beam:
        raise ValueError(f"--nbest is {args.nbest}; give a number from 1 to --beam, {translator.options.beam}")
    if (args.paragraphs or args.documents) and (args.nbest > 1 or args.scores):
        raise ValueError("--nbest and --scores cannot be combined with --paragraphs or --documents")
    lines = read_lines(args.input)
    if args.documents:
        written: Iterable[str] = _documents(translator, lines)
    elif args.paragraphs:
        written = translator.stream_paragraphs(lines)
    else:
        written = _lines(translator, lines, args)
    count, start, shown = 0, time.monotonic(), 0.0
    again = "\r" * sys.stderr.isatty()  # a terminal shows the count on one line that is written again
    for count, text in enumerate(written, 1):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        now = time.monotonic()
        if again and now - shown > 0.2:
            shown = now
            print(f"{again}{_counted(count, now - start)}", end="", file=sys.stderr, flush=True)
    try:
        print(f"{again}{_counted(count, time.monotonic() - start)}", file=sys.stderr)
    except OSError:  # of a full disk: all lines are written, and the count is none of them
        discard(sys.stderr)


def _counted(lines: int, seconds: float) -> str:
    return f"{lines:,} {'line' if lines == 1 else 'lines'} in {seconds:.1f} s"


def _lines(translator: Translator, lines: Iterator[str], args: argparse.Namespace) -> Iterator[str]:
    """Translations in the order of the lines, as soon as all before them are there."""
    read: List[List[str]] = []

    def each_read() -> Iterator[str]:
        for line in lines:
            read.append([line])
            yield line

    found = translator.stream(each_read())
    for _, (line,) in in_order((((line.number, 0), line) for line in found), read):
        best = (line.hypotheses + line.hypotheses[-1:] * args.nbest)[: args.nbest]  # a blank line has only one
        texts = (" ".join(each.pieces) if args.pieces else each.text for each in best)
        yield "\n".join(f"{each.score:.4f}\t{text}" if args.scores else text for each, text in zip(best, texts))


def _documents(translator: Translator, lines: Iterator[str]) -> Iterator[str]:
    """Translated lines in their order, as soon as all before them are there."""
    starts, read = [0], []

    def groups() -> Iterator[List[str]]:
        for _, group in groupby(lines, key=lambda line: not line.strip()):
            document = list(group)
            starts.append(starts[-1] + len(document))
            read.extend([line] for line in document)
            yield document

    found = translator.stream_documents(groups())
    for _, (text,) in in_order((((starts[number] + line, 0), text) for number, line, text in found), read):
        yield text


def run_continue(args: argparse.Namespace) -> None:
    model = LanguageModel(args.folder, args.threads)
    text = "\n".join(read_lines(args.input))
    options = (args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed, args.stop)
    parts = model.stream(text, *options)
    sys.stdout.write(text + next(parts, ""))  # after the check of the options
    sys.stdout.flush()
    for part in parts:
        sys.stdout.write(part)
        sys.stdout.flush()
    sys.stdout.write("\n")


@contextmanager
def errors_of(line: int) -> Iterator[None]:
    """Names the line of an error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"line {line:,}: {error}") from None


def run_score(args: argparse.Namespace) -> None:
    model = LanguageModel(args.folder, args.threads)
    for number, line in enumerate(read_lines(args.input), 1):
        with errors_of(number):
            score = model.score(line)
        print(f"{score.bits:.4f}\t{len(score.pieces)}", flush=True)


def run_classify(args: argparse.Namespace) -> None:
    model = Classifier(args.folder, args.threads)
    of_bytes = model.inputs["kind"] == "bytes"  # any, as in training
    for number, line in enumerate((read_bytes if of_bytes else read_lines)(args.input), 1):
        if not (line if of_bytes else line.strip()):
            print(flush=True)
            continue
        with errors_of(number):
            (prediction,) = model.predict([parsed(model, line)])
        print(f"{prediction.label}\t{prediction.probability:.4f}", flush=True)


def run_info(args: argparse.Namespace) -> None:
    folder = Folder(args.folder)
    config, inputs, text = folder.config, folder.config.get("inputs"), folder.config.get("text")
    size = sum((folder.path / name).stat().st_size for name in config["files"])
    about = {
        "kind": config["kind"],
        "format": f"{config['format']}, written by mega_fairseq {config['exporter']}",
        "weights": f"{config['number_format']}, {size / 1e6:.1f} MB in {len(config['files'])} files",
    }
    if inputs is not None:
        numbers = f" of type {inputs['number_type']}" if inputs["kind"] == "values" else ""
        most = f"at most {inputs['longest']:,}" if inputs["length"] is None else f"{inputs['length']:,}"
        about["inputs"] = f"{'pairs of ' * inputs['pairs']}{inputs['kind']}{numbers}, {most}"
        about["classes"] = ", ".join(config["classes"])
    if text is not None:
        sides = [side for side in ("source", "target") if side in text]
        if config.get("languages") is not None:  # of a translation model; earlier versions did not store them
            about["languages"] = " to ".join(config["languages"])
        about["text"] = f"{text['kind']}; types: " + ", ".join(f"{len(folder.types(text[s])):,} ({s})" for s in sides)
        if config["kind"] != LanguageModel.kind or config["decoder_chunk"] is None:  # chunks read any length
            about["limits"] = "tokens: " + ", ".join(f"{config['limits'][side]:,} ({side})" for side in sides)
        if config.get("documents") is not None:
            about["documents"] = f"in windows of at most {config['documents']['window_tokens']:,} tokens"
        if "search" in config:
            about["search"] = ", ".join(f"{name} {value:g}" for name, value in config["search"].items())
    lives = config.get("half_lives")  # which earlier versions did not store
    for name in ("median", "max") if lives else ():
        values = sorted(math.inf if row[name] is None else row[name] for row in lives)
        about[f"half-lives, {name}"] = f"{values[0]:,.1f} to {values[-1]:,.1f} tokens in {len(values)} EMAs"
    for name, value in about.items():
        print(f"{name:18} {value}")


def parsed(model: Classifier, line: Union[str, bytes]) -> Any:
    """The input of a line, or both of a pair, which a tab separates."""
    pairs, tab = model.inputs["pairs"], "\t" if isinstance(line, str) else b"\t"
    parts: List[Any] = line.split(tab) if pairs else [line]
    if model.inputs["kind"] == "values":
        kind = float if model.inputs["number_type"] == "float" else whole
        try:
            parts = [list(map(kind, part.split())) for part in parts]
        except ValueError:
            raise ValueError(f"a word is no {kind.__name__} number; give numbers, with blanks between them") from None
    return tuple(parts) if pairs else parts[0]


def whole(word: str) -> int:
    """Also of "5.0", as NumPy writes whole numbers."""
    number = float(word)
    if not number.is_integer():
        raise ValueError
    return int(number)


def read_lines(path: Optional[str]) -> Iterator[str]:
    """Lines of text, without a byte order mark."""
    for number, line in enumerate(read_bytes(path), 1):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise ValueError(f"line {number:,} is not UTF-8; convert the text, with iconv for instance") from None
        yield text[1:] if number == 1 and text.startswith("\ufeff") else text


def read_bytes(path: Optional[str]) -> Iterator[bytes]:
    """Lines without their ends (also of Windows), of a file or of standard input."""
    with open(0 if path is None else path, "rb", closefd=path is not None) as file:
        if path is None and os.name == "posix":
            os.set_blocking(0, True)  # otherwise, Python takes a pause of the writer for the end
        for line in file:
            yield re.sub(rb"\r?\n?\Z", b"", line)
