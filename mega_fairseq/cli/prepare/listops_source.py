"""`mega-fairseq prepare listops` from the published tables instead of the generator."""

import argparse
from typing import Any, Dict, List

from mega_fairseq.cli.prepare.folder import Folder
from mega_fairseq.cli.prepare.listops import value
from mega_fairseq.cli.prepare.tables import Table
from mega_fairseq.cli.prepare.tables import prepare as prepare_table

FILES = ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv")
ROWS = (96_000, 2_000, 2_000)


def settings(arguments: argparse.Namespace) -> Dict[str, Any]:
    return {}


def prepare(arguments: argparse.Namespace, folder: Folder) -> None:
    remedy = "give the folder with the published basic_{train,val,test}.tsv, or leave it out to generate other data"
    prepare_table(arguments, folder, Table(FILES, b"Source\tTarget", ROWS, ("label", "input"), convert, remedy))


def convert(row: List[bytes]) -> List[bytes]:
    if len(row) != 2:
        raise ValueError(f"has {len(row)} columns instead of 2")
    source, label = row
    symbols = [symbol for symbol in source.decode("latin1").split() if symbol not in ("(", ")")]
    try:
        found = b"%d" % value(symbols)
    except (LookupError, ValueError):
        raise ValueError("is not an expression of the 15 symbols") from None
    if label != found:
        raise ValueError(f"has the value {label[:20].decode(errors='replace')!r} instead of {found.decode()}")
    return [label, " ".join(symbols).encode()]
