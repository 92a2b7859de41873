"""`mega-fairseq user-dir`: where fairseq finds this package."""

import argparse
import os

import mega_fairseq


def run(arguments: argparse.Namespace) -> None:
    # Links stay as they are: fairseq compares the path with the package's own, letter by letter.
    print(os.path.abspath(mega_fairseq.__path__[0]))
