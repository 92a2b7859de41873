"""`mega-fairseq prepare documents`: parallel text with documents, from three formats to lines and `{split}.docs`."""

import argparse
import html
import os
import re
from itertools import zip_longest
from pathlib import Path
from random import Random
from statistics import median
from typing import Dict, List, NamedTuple, Set, Tuple

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare import SPLITS, new_folder, write_lines
from mega_fairseq.documents import document_borders, read_lines, separator_symbol

WMT = (".xml", ".sgm")
TAGS = re.compile(r"<(doc|srcset|refset|tstset|src|ref|hyp)\b([^>]*)>|<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.I)
ATTRIBUTE = r"([\w:]+)\s*=\s*[\"']([^\"']*)"
SECTION = re.compile(r"<!--.*?-->|<!\[CDATA\[(.*?)\]\]>", re.DOTALL)  # a comment, or text that has no entities


class Documents(NamedTuple):
    """Sentence pairs, and the document of each."""

    ids: List[str]
    sides: Dict[str, List[str]]  # the lines of each language


def run(arguments: argparse.Namespace) -> None:
    separator = separator_symbol(arguments.separator)
    splits = {name: read(name, files, arguments.boundaries) for name, files in find_files(arguments).items()}
    borders = {name: document_borders(documents.ids, f"the ids of {name}") for name, documents in splits.items()}
    for name, documents in splits.items():
        for language, lines in documents.sides.items():
            for number, line in enumerate(lines, 1):
                if separator in line:
                    raise UserError(
                        f"line {number:,} of {name}.{language} (without blank lines) contains {separator}, which will "
                        "separate the lines of a document; remove it, or choose another --separator"
                    )
    if not set(splits) <= set(SPLITS):
        ((name, documents),) = splits.items()
        splits = hold_out(documents, borders[name], arguments.seed)
    homes: Dict[str, str] = {}
    for split, documents in splits.items():
        for name in documents.ids:
            if homes.setdefault(name, split) != split:
                raise UserError(f"document {name!r} is in {homes[name]} and in {split}; keep it in one of them")
    with new_folder(arguments.out) as folder:
        for split, documents in splits.items():
            write_lines(os.path.join(folder, f"{split}.docs"), documents.ids)
            for language, lines in documents.sides.items():
                write_lines(os.path.join(folder, f"{split}.{language}"), lines)
    for split, documents in splits.items():
        report(split, documents)
    train = set(zip(*splits["train"].sides.values())) if "train" in splits else set()
    for split in [split for split in splits if split != "train"]:
        pairs = list(zip(*splits[split].sides.values()))
        print(f"{split} shares {sum(pair in train for pair in pairs):,} of its {len(pairs):,} lines with train")


def find_files(arguments: argparse.Namespace) -> Dict[str, List[Path]]:
    """The files of each split, or of one text without splits."""
    folder, wmt = Path(arguments.source), arguments.boundaries == "wmt"
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of the texts")
    found: Dict[str, List[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith(".") and wmt == (path.suffix in WMT):
            found.setdefault(re.split("[.-]", path.name)[0] if wmt else path.stem, []).append(path)
    if not found or not set(found) <= set(SPLITS) and len(found) > 1:
        raise UserError(
            f"{folder} contains texts named {', '.join(found) or 'nothing'}; give the files of train, valid and test, "
            "or of one text, from which whole documents are held out"
        )
    return {name: found[name] for name in (*SPLITS, *found) if name in found}


# ------------------------------------------------------------------------------------------- formats


def read(name: str, files: List[Path], boundaries: str) -> Documents:
    if boundaries == "wmt":
        return read_wmt(name, files)
    texts = [path for path in files if path.suffix != ".docs"]
    if len(texts) != 2 or boundaries == "ids" and len(files) != 3:
        docs = f" and {name}.docs" * (boundaries == "ids")
        raise UserError(
            f"{files[0].parent} has {', '.join(path.name for path in files)}; give {name}.LANGUAGE in two "
            f"languages{docs}"
        )
    sides = {path.suffix[1:]: read_lines(path) for path in texts}
    for number, pair in enumerate(zip_longest(*sides.values(), fillvalue=""), 1):
        if bool(pair[0]) != bool(pair[1]):
            raise UserError(
                f"line {number:,} is blank or missing in {texts[bool(pair[0])]} and has text in "
                f"{texts[not pair[0]]}; give as many lines in both, with blank ones at the same places"
            )
    if boundaries == "blank":
        return at_blank_lines(name, sides)
    ids_path = next(path for path in files if path.suffix == ".docs")
    ids = read_lines(ids_path)
    counts = [len(lines) for lines in (ids, *sides.values())]
    if len(set(counts)) > 1:
        raise UserError(
            f"{ids_path}, {texts[0]} and {texts[1]} have {', '.join(f'{n:,}' for n in counts)} lines; give one id for "
            f"each sentence pair (line {min(counts) + 1:,} is the first without)"
        )
    document_borders(ids, ids_path)
    (first, _) = sides.values()
    if "" in first:
        raise UserError(f"line {first.index('') + 1:,} of {texts[0]} is blank; remove it from all three files")
    return Documents(ids, sides)


def at_blank_lines(name: str, sides: Dict[str, List[str]]) -> Documents:
    """Documents that blank lines separate, numbered from 1."""
    ids, kept, number, blank = [], [], 0, True
    for line, text in enumerate(next(iter(sides.values()))):
        if text:
            number += blank
            ids.append(f"{name} {number}")
            kept.append(line)
        blank = not text
    return Documents(ids, {language: [lines[line] for line in kept] for language, lines in sides.items()})


def read_wmt(name: str, files: List[Path]) -> Documents:
    """One .xml file with both languages, or one .sgm file for each, as WMT publishes its test sets."""
    segments: Dict[str, List[Tuple[str, str]]] = {}  # of each language: document and text
    for path in files:
        document, language, others = "", "", 0
        complete: Set[str] = set()  # languages of this document
        markup = SECTION.sub(lambda found: html.escape(found[1] or ""), "\n".join(read_lines(path)))
        for tag, attributes, text in TAGS.findall(markup):
            tag = tag.lower()
            values = {key.lower(): value for key, value in re.findall(ATTRIBUTE, attributes)}
            if tag == "doc":
                document = " ".join(html.unescape(values.get("docid") or values.get("id", "")).split())
                complete = set()
            elif tag:
                language = values.get("trglang" if tag == "refset" else "srclang" if tag == "srcset" else "lang", "")
                if language == "any":  # in sources of newstest
                    language = path.with_suffix("").suffix[1:]
                if tag in ("tstset", "hyp") or tag in ("src", "ref") and language in complete:
                    language = ""  # of a system, or another reference
                complete.add(language)
            elif language:
                segments.setdefault(language, []).append((document, " ".join(html.unescape(text).split())))
            else:
                others += 1
        if others:
            print(f"{path}: {others:,} segments of further references, or of systems, were left out")
    if len(segments) != 2:
        raise UserError(
            f"{', '.join(map(str, files))} have segments in {len(segments)} languages ({', '.join(segments)}); give "
            f"{name}.xml, or {name}-src.LANGUAGE.sgm and {name}-ref.LANGUAGE.sgm"
        )
    for number, (one, other) in enumerate(zip_longest(*segments.values(), fillvalue=("", "")), 1):
        if one[0] != other[0] or not one[1] or not other[1]:
            raise UserError(
                f"segment {number:,} of {name}, of document {one[0] or other[0]!r}, is missing or empty in one "
                "language, or the documents differ; give the same segments in both"
            )
    (pairs, _) = segments.values()
    sides = {language: [text for _, text in segments[language]] for language in sorted(segments)}
    return Documents([document for document, _ in pairs], sides)


# ------------------------------------------------------------------------------------- splits and report


def hold_out(documents: Documents, borders: List[int], seed: int) -> Dict[str, Documents]:
    """Whole documents at random, a twentieth for validation and as many for the test; their order stays."""
    total = len(borders) - 1
    if total < 3:
        raise UserError(
            f"the text has {total} documents; give at least 3, one for each split, or files of train, valid and test"
        )
    order = list(range(total))
    Random(f"documents {seed}").shuffle(order)
    share = max(1, total // 20)
    parts = {"train": order[2 * share :], "valid": order[:share], "test": order[share : 2 * share]}
    splits = {}
    for split, chosen in parts.items():
        lines = [line for number in sorted(chosen) for line in range(*borders[number : number + 2])]
        sides = {language: [side[line] for line in lines] for language, side in documents.sides.items()}
        splits[split] = Documents([documents.ids[line] for line in lines], sides)
    return splits


def report(split: str, documents: Documents) -> None:
    borders = document_borders(documents.ids, split)
    print(f"{split}: {len(borders) - 1:,} documents, {len(documents.ids):,} lines")
    for language, lines in documents.sides.items():
        words = [len(line.split()) for line in lines]
        sums = [sum(words[start:stop]) for start, stop in zip(borders, borders[1:])]
        line, document = (f"{median(counts or [0]):,.0f} (at most {max(counts or [0]):,})" for counts in (words, sums))
        print(f"  words in {language}: {line} in a line, {document} in a document")
