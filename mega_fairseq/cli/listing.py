"""`mega-fairseq options`: the options of this plugin's architectures and tasks, read from their dataclasses."""

import argparse
import difflib
import re
import shutil
import textwrap
from dataclasses import fields
from enum import Enum
from typing import Dict, List, NamedTuple, Sequence, Type, get_type_hints

from fairseq.dataclass import FairseqDataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - registers them
from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import table
from mega_fairseq.modules import MIXERS, FeedForwardConfig

Config = Type[FairseqDataclass]
SIZES = {"layers": "layers", "width": "embed_dim", "chunk": "chunk_size"}


class Option(NamedTuple):
    name: str  # as on the command line
    default: str
    help: str
    choices: List[str]


def run(arguments: argparse.Namespace) -> None:
    name, known = arguments.name, {**architectures(), **tasks()}
    if name is None:
        print(overview())
    elif name in known:
        print(details(name, known[name]))
    else:
        near = difflib.get_close_matches(name, known) or known
        raise UserError(f"mega_fairseq has no architecture or task {name!r}; choose one of {', '.join(near)}")


def architectures() -> Dict[str, Config]:
    return _own(MODEL_DATACLASS_REGISTRY)


def tasks() -> Dict[str, Config]:
    return _own(TASK_DATACLASS_REGISTRY)


def _own(registry: Dict[str, Config]) -> Dict[str, Config]:
    return {name: registry[name] for name in sorted(registry) if registry[name].__module__.startswith("mega_fairseq.")}


def options_of(config: Config) -> List[Option]:
    """The options that this dataclass adds to a command line; fields without help text belong to fairseq."""
    kinds, found = get_type_hints(config), []
    for field in fields(config):
        if field.metadata.get("help") and field.name != "data":
            kind, default = kinds[field.name], re.sub(r"\$\{.*\.(\w+)\}", r"--\1", str(field.default))
            choices = [choice.value for choice in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []
            found.append(Option(_typed(f"--{field.name}"), _typed(default), field.metadata["help"], choices))
    return found


def by_mixer(options: List[Option]) -> Dict[str, List[Option]]:
    """Options by the names of the mixers that have them: under "" those of the model or of all mixers."""
    sides = ("encoder", "decoder")
    owners: Dict[str, List[str]] = {}
    for mixer, config in MIXERS.items():
        for name in config.option_names(*sides) - FeedForwardConfig.option_names(*sides):
            owners.setdefault(_typed(f"--{name}"), []).append(mixer)
    groups: Dict[str, List[Option]] = {"": []}
    for option in options:
        mixers = owners.get(option.name, [])
        groups.setdefault("" if len(mixers) == len(MIXERS) else ", ".join(mixers), []).append(option)
    return groups


def _typed(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def overview() -> str:
    """A line for each architecture and task."""
    archs, lines = [["--arch", *SIZES, ""]], [["--task", ""]]
    for name, config in architectures().items():
        side = "decoder" if hasattr(config, "decoder_layers") else "encoder"
        sizes = (getattr(config, f"{side}_{size}") for size in SIZES.values())
        archs.append([name, *(f"{size:,}" for size in sizes), _about(name, config)])
    lines += [[name, _about(name, config)] for name, config in tasks().items()]
    remark = "mega-fairseq options NAME lists the options of one of them, with their defaults."
    return "\n\n".join([_columns(archs), _columns(lines), remark])


def details(name: str, config: Config) -> str:
    """A line for each option; defaults that a preset changes are marked."""
    bases = [base for base in config.__mro__[1:] if base in architectures().values()]
    inherited = options_of(bases[-1]) if bases else []
    note = " Defaults with * are set by this preset." if bases else ""
    parts = [f"{name}: {_about(name, config)}{note}"]
    for mixers, options in by_mixer(options_of(config)).items():
        rows = [["option", "default", "meaning"]]
        for option in options:
            choices = f": {', '.join(option.choices)}" if option.choices else ""
            own = bool(bases) and option not in inherited
            rows.append([option.name, option.default + " *" * own, option.help + choices])
        parts.append((f"With the token mixer {mixers}:\n\n" if mixers else "") + _columns(rows))
    return "\n\n".join(parts)


def _about(name: str, config: Config) -> str:
    """The first line of the docstring of a preset's dataclass, or else of the model or task."""
    generated = config.__doc__.startswith(f"{config.__name__}(")
    documented = {**MODEL_REGISTRY, **TASK_REGISTRY}[name] if generated else config
    return documented.__doc__.splitlines()[0]


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the last one wrapped to the width of the terminal."""
    terminal, lines = shutil.get_terminal_size((120, 24)).columns, []
    for start, row in zip(table([row[:-1] for row in rows], left=len(rows[0])).splitlines(), rows):
        indent = " " * (len(start) + 2)
        width = max(terminal, len(indent) + 40)
        text = textwrap.fill(
            row[-1], width, initial_indent=f"{start}  ", subsequent_indent=indent, break_on_hyphens=False
        )
        lines.append(text or start.rstrip())
    return "\n".join(lines)
