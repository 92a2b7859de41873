"""The command line of `mega-fairseq`. A subcommand's code is imported only when that subcommand runs."""

import argparse
import importlib
import io
import os
import sys
from typing import Any, NoReturn, Optional, Sequence

import mega_fairseq
from mega_fairseq.cli import UserError, is_for_user
from mega_fairseq.cli.output import quiet_logging
from mega_fairseq.documents import SEPARATOR

# Symbolic links are kept: fairseq compares this path with the package's own as text.
USER_DIR = os.path.abspath(mega_fairseq.__path__[0])
OF_FAIRSEQ = ("train", "validate", "generate", "interactive", "eval-lm")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run one subcommand and return its exit code; errors for the user are printed on stderr."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    if words and words[0] in OF_FAIRSEQ:
        run_fairseq(*words)
    open_streams()
    args = parser().parse_args(words)
    try:
        args.run(args)
        sys.stdout.flush()
    except (UserError, ValueError) as error:
        if not is_for_user(error):
            raise
        text = "".join(c if c.isprintable() else "?" for c in str(error))  # a checkpoint may contain any name
        print(f"mega-fairseq {args.command}: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"mega-fairseq {args.command}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as `head` does
            print(f"mega-fairseq {args.command}: {error}", file=sys.stderr)
        finish_stdout()
        return 1
    return 0


def open_streams() -> None:
    """Replace streams that are closed or can lose data, and let stdout take any label and any name of a file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # PYTHONUNBUFFERED: if a full disk cuts a write short, Python would not notice.
        sys.stdout = open(1, "w", 1, encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115 - until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def finish_stdout() -> None:
    """Write what is left, or discard what cannot be written: Python would try it again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where the options are listed."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists what there is\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # here, since only the parser of the whole line would say so, without the command's name
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="mega-fairseq", description="Tools for the fairseq plugin mega_fairseq.")
    top.set_defaults(run=run_module)
    top.add_argument("--version", action="version", version=mega_fairseq.__version__)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, about: str, module: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        command.set_defaults(module=module or name)
        return command

    user_dir = add("user-dir", "print the folder for fairseq's --user-dir")
    user_dir.set_defaults(run=print_user_dir)
    add("doctor", "check packages, a short training, bf16 and GPU, and print a remedy for each problem")

    options = add("options", "list the architectures and tasks, or the options of one with their defaults")
    options.add_argument("name", metavar="ARCH", nargs="?", help="a name for --arch or --task (default: list them)")

    convert = add(
        "convert", "convert checkpoints of the authors' code, or from and to Hugging Face's Mega", "convert.command"
    )
    convert.add_argument(
        "source",
        metavar="IN",
        help="checkpoint of the released code, or folder that save_pretrained of Hugging Face's Mega wrote; code in it "
        "is not executed",
    )
    convert.add_argument("target", metavar="OUT", help="where to write the converted checkpoint")
    convert.add_argument(
        "--to-huggingface",
        action="store_true",
        help="IN is a mega_encoder or mega_lm of fairseq-train or convert: write OUT as a folder for transformers 4.40",
    )
    convert.add_argument(
        "--labels",
        metavar="FILE",
        help="of a classifier of text: label-bin/dict.txt of its training data, to store the names of its classes",
    )
    convert.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="of Hugging Face's Mega: its vocab.json (with merges.txt) or tokenizer.json, to write fairseq's dict.txt "
        "beside OUT; with --to-huggingface: dict.txt, to write vocab.json (and merges.txt) into OUT",
    )
    convert.add_argument("--force", action="store_true", help="overwrite OUT if it exists")

    sweep = add("sweep", "measure a trained mega_lm's perplexity at several chunk sizes and context lengths")
    sweep.add_argument("checkpoint", metavar="CHECKPOINT", help="a mega_lm that fairseq-train or convert wrote")
    sweep.add_argument("data", metavar="DATA", help="folder that fairseq-preprocess --only-source wrote")
    sweep.add_argument(
        "--chunks", metavar="C,...", help="chunk sizes of the attention, in tokens (default: the model's own)"
    )
    contexts = sweep.add_mutually_exclusive_group()
    contexts.add_argument("--streams", default="1", metavar="K,...", help="split the text into K streams (default: 1)")
    contexts.add_argument("--contexts", metavar="N,...", help="split the text into streams of N tokens")
    contexts.add_argument("--documents", choices=["line", "blank"], help="split the text at each line or blank line")
    sweep.add_argument("--subset", default="test", help="split of DATA to evaluate (default: %(default)s)")
    sweep.add_argument(
        "--out", default="sweep", metavar="PREFIX", help="write PREFIX.json, .csv and .png (default: %(default)s)"
    )
    sweep.add_argument("--force", action="store_true", help="discard the content of PREFIX.json and start again")
    sweep.add_argument(
        "--max-tokens", type=int, default=36000, metavar="N", help="tokens in a batch of streams (default: %(default)s)"
    )
    sweep.add_argument("--batch-size", type=int, metavar="N", help="streams in a batch (default: what fits)")
    sweep.add_argument("--cpu", action="store_true", help="do not use a GPU")

    inspect = add("inspect", "show a checkpoint's architecture, parameters, and half-lives of the EMA's states")
    inspect.add_argument("checkpoint", metavar="CHECKPOINT", help="a Mega model that fairseq-train or convert wrote")
    inspect.add_argument("--out", default="inspect", metavar="PREFIX", help="write PREFIX.json (default: %(default)s)")

    classify = add("classify", "print the class of each input, with its probability")
    classify.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a mega_classifier or mega_encoder of fairseq-train or convert"
    )
    classify.add_argument(
        "data", metavar="DATA", help="folder as for --task mega_classification; -: inputs are lines of standard input"
    )
    classify.add_argument("--subset", default="test", help="split of DATA to classify (default: %(default)s)")
    classify.add_argument(
        "--out", metavar="PREFIX", help="compare with the labels: write PREFIX.json and .png (default: print only)"
    )
    classify.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="inputs in a batch (default: %(default)s)"
    )
    classify.add_argument("--cpu", action="store_true", help="do not use a GPU")

    for name in OF_FAIRSEQ:
        add(name, f"run fairseq-{name} with this plugin, so without --user-dir")

    export = add("export", "write a trained model as a folder that mega_runtime runs without PyTorch and fairseq")
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="a Mega model that fairseq-train or convert wrote")
    export.add_argument("folder", metavar="FOLDER", help="a new folder")
    export.add_argument(
        "--format", choices=["float32", "int8"], default="int8", help="numbers of the weights (default: %(default)s)"
    )
    export.add_argument("--data", metavar="DATA", help="folder with the dictionaries (default: that of the training)")
    text = export.add_mutually_exclusive_group()
    text.add_argument("--sentencepiece-model", metavar="FILE", help="that segmented the text of the training")
    text.add_argument("--bytes", action="store_true", help="the tokens of a language model are the numbers of bytes")
    export.add_argument("--force", action="store_true", help="replace an exported FOLDER")

    prepare = add("prepare", "make the data set of a task")
    data = prepare.add_subparsers(dest="data", metavar="DATA", required=True)
    digits = data.add_parser("digits", help="handwritten digits of 8 x 8 pixels (scikit-learn), in .npy files")
    digits.add_argument("out", metavar="OUT", help="a new folder")
    documents = data.add_parser("documents", help="parallel text with the document of each line")
    documents.set_defaults(module="documents.sources")
    documents.add_argument("out", metavar="OUT", help="a new folder")
    documents.add_argument(
        "source",
        metavar="SOURCE",
        help="folder with train, valid and test, or with one text, from which whole documents are held out",
    )
    documents.add_argument(
        "--boundaries",
        choices=["ids", "blank", "wmt"],
        required=True,
        help="where documents end: where the ids in NAME.docs change, at blank lines, or as WMT's .xml or .sgm say",
    )
    documents.add_argument(
        "--separator", default=SEPARATOR, metavar="WORD", help="refuse text with this word (default: %(default)s)"
    )
    for each in (digits, documents):
        each.add_argument("--seed", type=int, default=1, metavar="N", help="for the splits (default: %(default)s)")

    actions = add("documents", "split translated documents into lines, or score them").add_subparsers(
        dest="action", metavar="ACTION", required=True
    )
    split = actions.add_parser("split", help="write a line of pieces for each line of the source")
    split.set_defaults(module="documents.translations")
    split.add_argument(
        "generated",
        metavar="GENERATED",
        help="output of fairseq-generate, without --quiet, --remove-bpe, --bpe and --tokenizer",
    )
    split.add_argument("docs", metavar="DOCS", help="the .docs of the split that was translated")
    split.add_argument("--out", required=True, metavar="PREFIX", help="write PREFIX.pieces and PREFIX.json")
    split.add_argument("--separator", default=SEPARATOR, metavar="WORD", help="of the task (default: %(default)s)")
    score = actions.add_parser("score", help="print BLEU and chrF of documents and of lines")
    score.set_defaults(module="documents.metrics")
    score.add_argument("hypothesis", metavar="HYP", help="translated lines, without subwords")
    score.add_argument("reference", metavar="REF", help="their references")
    score.add_argument("docs", metavar="DOCS", help="the document of each line")
    score.add_argument("--source", metavar="SRC", help="their sources, to count repeated lines (default: REF)")
    score.add_argument("--against", metavar="HYP2", help="another system: paired bootstrap over documents")
    score.add_argument(
        "--counts", metavar="FILE", help="of documents split (default: the .json beside HYP of the same name, if any)"
    )
    score.add_argument("--figure", metavar="FILE", help="draw s-BLEU by place in the document, as a .png")
    return top


def run_module(args: argparse.Namespace) -> None:
    with quiet_logging():
        importlib.import_module(f"mega_fairseq.cli.{args.module}").run(args)


def print_user_dir(args: argparse.Namespace) -> None:
    print(USER_DIR)


def run_fairseq(command: str, *words: str) -> NoReturn:
    """Become a command of fairseq: its output, exit code and signals, and the processes that it starts, are its own."""
    module = f"fairseq_cli.{command.replace('-', '_')}"
    os.execv(sys.executable, [sys.executable, "-m", module, "--user-dir", USER_DIR, *words])
