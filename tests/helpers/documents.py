"""Reads the code blocks of README, docs and examples, and writes docs/options.md."""

import re
import shlex
import sys
from pathlib import Path
from typing import Dict, List

from mega_fairseq.cli.listing import Option, architectures, by_mixer, options_of, tasks
from tests.helpers.commands import ROOT, fairseq

DOCUMENTS = sorted(
    path for places in ("*.md", "docs/*.md", "examples/**/*.md", "tests/**/*.md") for path in ROOT.glob(places)
)


def blocks(document: Path, language: str) -> List[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def commands(block: str) -> List[str]:
    """Each command of a shell block as one line, without its comment."""
    lines = (re.sub(r"(^|\s)#.*", "", line) for line in block.replace("\\\n", " ").splitlines())
    return [" ".join(line.split()) for line in lines if line.strip()]


def paste(
    document: Path, beginning: str, place: Path, replaced: Dict[str, str], more: Dict[str, List[str]]
) -> List[str]:
    """Runs fairseq's and our commands of one block in `place`, with other paths, and returns their outputs.

    The block is the one with a command that starts with `beginning`. `more`: further arguments, by name of the command.
    """
    (block,) = (block for block in blocks(document, "bash") if any(c.startswith(beginning) for c in commands(block)))
    replaced = {**replaced, '"$(mega-fairseq user-dir)"': shlex.quote(str(ROOT / "mega_fairseq"))}
    outputs = []
    for command in commands(block):
        for written, used in replaced.items():
            command = command.replace(written, used)
        name, *words = shlex.split(command)
        if re.match("fairseq-|mega-fairseq", name):
            outputs.append(fairseq(re.sub("^fairseq-", "", name), *words, *more.get(name, []), cwd=place))
    return outputs


# ------------------------------------------------------------------------------------------------ options

OPTIONS = """# Options

The options of the models and tasks: `--name` on the command line, `name` with underscores in hydra's YAML. Defaults
are those of the model without a preset. fairseq's `--help` does not list the options of an `--arch`;
`mega-fairseq options ARCH` does, with the defaults of a preset. Options that some [token mixers](mixers.md) do not have
are listed by mixer; one that the chosen mixer does not have is refused.
"""


def options_document() -> str:
    """The content of docs/options.md; `python -m tests.helpers.documents > docs/options.md` writes it."""
    archs = architectures()
    sections = {f"--arch {name}": archs[name] for name in ("mega_transformer", "mega_lm", "mega_classifier")}
    sections.update({f"--task {name}": config for name, config in tasks().items()})
    parts = [OPTIONS]
    for title, config in sections.items():
        parts.append(f"## `{title}`\n")
        for mixers, options in by_mixer(options_of(config)).items():
            heading = [f"### With the token mixer {mixers}\n"] if mixers else []
            lines = [*heading, "| option | default | meaning |", "|---|---|---|"]
            parts.append("\n".join([*lines, *map(_row, options), ""]))
    return "\n".join(parts)


def _row(option: Option) -> str:
    choices = f": {', '.join(f'`{choice}`' for choice in option.choices)}" if option.choices else ""
    default = f"`{option.default}`" if option.default.startswith("--") else option.default
    return f"| `{option.name}` | {default} | {option.help}{choices} |"


if __name__ == "__main__":
    sys.stdout.write(options_document())
