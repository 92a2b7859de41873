"""The command `mega-fairseq`: one file a command, imported only when it is called."""

import argparse
import importlib
import os
import sys
from typing import Optional, Sequence

from mega_fairseq import __version__
from mega_fairseq.cli.refusal import Refusal


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs one command; what it refuses is one sentence on stderr and exit code 1."""
    chosen = parser().parse_args(arguments)
    try:
        importlib.import_module(f"mega_fairseq.cli.{chosen.command.replace('-', '_')}").run(chosen)
        sys.stdout.flush()
    except Refusal as refusal:
        print(f"mega-fairseq {chosen.command}: {refusal}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"mega-fairseq {chosen.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever reads has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="mega-fairseq", description="Small commands around the plugin mega_fairseq.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    about = "print the folder to give to fairseq's --user-dir"
    commands.add_parser("user-dir", help=about, description=about.capitalize() + ".")

    about = "say what will and will not work here: fairseq, torch, GPU, number formats, optional packages"
    commands.add_parser("doctor", help=about, description=about.capitalize() + ".")

    about = "turn a checkpoint of the authors' released code into one that fairseq loads with this plugin"
    convert = commands.add_parser("convert", help=about, description=about.capitalize() + ".")
    convert.add_argument("source", metavar="IN.pt", help="what the released code wrote; only read, and never executed")
    convert.add_argument("target", metavar="OUT.pt", help="where to write the converted checkpoint")
    convert.add_argument("--force", action="store_true", help="overwrite OUT.pt if it exists")

    about = "measure a trained mega_lm's perplexity at several attention chunks and context lengths"
    sweep = commands.add_parser("sweep", help=about, description=about.capitalize() + ".")
    sweep.add_argument("checkpoint", metavar="CHECKPOINT", help="a mega_lm that fairseq-train wrote")
    sweep.add_argument("data", metavar="DATA", help="the folder that fairseq-preprocess wrote")
    sweep.add_argument("--chunks", required=True, metavar="C,...", help="tokens that attend to each other")
    contexts = sweep.add_mutually_exclusive_group()
    contexts.add_argument("--streams", metavar="K,...", help="cut the text in K streams (default: 1)")
    contexts.add_argument("--contexts", metavar="N,...", help="cut it in streams of N tokens")
    contexts.add_argument("--documents", choices=["line", "blank"], help="cut it at each line, or at blank lines")
    sweep.add_argument("--subset", default="test", help="part of DATA to evaluate on (default: %(default)s)")
    sweep.add_argument(
        "--out", default="sweep", metavar="PREFIX", help="write PREFIX.json, .csv and .png (default: %(default)s)"
    )
    sweep.add_argument("--force", action="store_true", help="start anew, whatever PREFIX.json holds")
    sweep.add_argument(
        "--max-tokens", type=int, default=36000, metavar="N", help="tokens in a batch of streams (default: %(default)s)"
    )
    sweep.add_argument("--batch-size", type=int, metavar="N", help="streams in a batch (default: what fits)")
    sweep.add_argument("--cpu", action="store_true", help="leave a GPU alone")

    about = "show what a checkpoint holds: architecture, parameters, how far its averages reach, its position bias"
    inspect = commands.add_parser("inspect", help=about, description=about.capitalize() + ".")
    inspect.add_argument("checkpoint", metavar="CHECKPOINT", help="a Mega model that fairseq-train or convert wrote")
    inspect.add_argument(
        "--out", default="inspect", metavar="PREFIX", help="write PREFIX.json and .png (default: %(default)s)"
    )
    return top
