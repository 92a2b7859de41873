"""`mega-fairseq prepare DATA`: the module of this folder with the name DATA makes the data.

Data that an algorithm defines can also be read from published files: then it is the module DATA_source. A module has
`settings(arguments)`, which checks options before anything is written, and `prepare(arguments, folder)`.
"""

import argparse
import importlib
import os
from functools import partial
from typing import Dict

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import write_figure
from mega_fairseq.cli.prepare.arrays import draw_examples
from mega_fairseq.cli.prepare.folder import Folder

PICTURES = ("digits", "image", "pathfinder", "pictures")  # data whose rows are square pictures


def run(arguments: argparse.Namespace) -> None:
    if arguments.workers is None:
        arguments.workers = os.cpu_count() or 1
    if arguments.workers < 1:
        raise UserError(f"--workers is {arguments.workers}; give a whole number of at least 1")
    if getattr(arguments, "seed", 0) < 0:
        raise UserError(f"--seed is {arguments.seed}; give a whole number of at least 0")
    name, settings = arguments.data, {"data": arguments.data}
    if arguments.source is not None:
        settings["source"] = os.path.abspath(arguments.source)
        if arguments.generator:
            name = f"{name}_source"
            _refuse_options({**arguments.generator, "seed": 1}, arguments)
    module = importlib.import_module(f"mega_fairseq.cli.prepare.{name}")
    folder = Folder(arguments.out, {**settings, **module.settings(arguments)})
    try:
        if folder.complete:
            remedy = "; remove it if the source has changed since" if "source" in settings else ""
            print(f"{arguments.out} is complete already{remedy}")
        else:
            module.prepare(arguments, folder)
        figure = os.path.join(arguments.out, "examples.png")
        if arguments.data in PICTURES and not os.path.exists(figure):
            write_figure(figure, partial(draw_examples, arguments.out))
    except KeyboardInterrupt:
        raise UserError("interrupted; the same command continues") from None
    finally:
        folder.release()


def _refuse_options(defaults: Dict[str, int], arguments: argparse.Namespace) -> None:
    for option, default in defaults.items():
        if getattr(arguments, option) != default:
            raise UserError(f"--{option} is for generated data; leave it out to read {arguments.source}")
