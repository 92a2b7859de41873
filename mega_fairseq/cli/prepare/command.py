"""`mega-fairseq prepare DATA`: the module of this folder with the name DATA has `prepare(arguments)`."""

import argparse
import importlib
import os

from mega_fairseq.cli import UserError


def run(arguments: argparse.Namespace) -> None:
    if arguments.workers is None:
        arguments.workers = os.cpu_count() or 1
    if arguments.workers < 1:
        raise UserError(f"--workers is {arguments.workers}; give a whole number of at least 1")
    if arguments.seed < 0:
        raise UserError(f"--seed is {arguments.seed}; give a whole number of at least 0")
    importlib.import_module(f"mega_fairseq.cli.prepare.{arguments.data}").prepare(arguments)
