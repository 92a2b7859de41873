"""`mega-fairseq options`: the options of this plugin's architectures and tasks, read from their dataclasses."""

import argparse
import difflib
import re
import shutil
import textwrap
from dataclasses import fields
from enum import Enum
from typing import Any, Dict, List, NamedTuple, Sequence, Type, get_type_hints

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
    return _plugin(MODEL_DATACLASS_REGISTRY)


def tasks() -> Dict[str, Config]:
    return _plugin(TASK_DATACLASS_REGISTRY)


def _plugin(registry: Dict[str, Config]) -> Dict[str, Config]:
    return {name: registry[name] for name in sorted(registry) if registry[name].__module__.startswith("mega_fairseq.")}


def options_of(config: Config) -> List[Option]:
    """The options that this dataclass adds to a command line; fields without help text belong to fairseq."""
    kinds, options = get_type_hints(config), []
    for field in fields(config):
        text, kind = field.metadata.get("help"), kinds[field.name]
        if text and field.name != "data":
            if isinstance(kind, type) and issubclass(kind, Enum):
                text += ": " + ", ".join(choice.value for choice in kind)
            default = re.sub(r"\$\{.*\.(\w+)\}", lambda other: _typed(other[1]), str(field.default))
            options.append(Option(_typed(field.name), default, text))
    return options


def _typed(name: str) -> str:
    return "--" + name.replace("_", "-")


def overview() -> str:
    """A line for each architecture and task."""
    rows = [["--arch", *SIZES, ""]]
    for name, config in architectures().items():
        side = "decoder" if hasattr(config, "decoder_layers") else "encoder"
        sizes = (f"{getattr(config, f'{side}_{size}'):,}" for size in SIZES.values())
        rows.append([name, *sizes, _about(MODEL_REGISTRY[name], config)])
    lines = [["--task", ""], *([name, _about(TASK_REGISTRY[name], config)] for name, config in tasks().items())]
    remark = "mega-fairseq options NAME lists the options of one of them, with their defaults."
    return "\n\n".join([_columns(rows), _columns(lines), remark])


def details(name: str, config: Config) -> str:
    """A line for each option, by the token mixers that have it; defaults that a preset changes are marked."""
    bases = [base for base in config.__mro__[1:] if base in architectures().values()]
    inherited = options_of(bases[-1]) if bases else options_of(config)
    mixers: Dict[str, List[str]] = {}
    sides = ("encoder", "decoder")
    for mixer, settings in MIXERS.items():
        for option in settings.option_names(*sides) - FeedForwardConfig.option_names(*sides):
            mixers.setdefault(_typed(option), []).append(mixer)
    groups: Dict[str, List[List[str]]] = {}
    for option in options_of(config):
        of_mixers = mixers.get(option.name, [])
        title = f"With the token mixer {', '.join(of_mixers)}:\n\n" if 0 < len(of_mixers) < len(MIXERS) else ""
        mark = "" if option in inherited else " *"
        row = [option.name, option.default + mark, option.help]
        groups.setdefault(title, [["option", "default", "meaning"]]).append(row)
    about = _about({**MODEL_REGISTRY, **TASK_REGISTRY}[name], config)
    note = " Defaults with * are set by this preset." if bases else ""
    return "\n\n".join([f"{name}: {about}{note}", *(title + _columns(rows) for title, rows in groups.items())])


def _about(registered: Any, config: Config) -> str:
    """The first line of the docstring of a preset's dataclass, or else of the model or task."""
    generated = config.__doc__.startswith(f"{config.__name__}(")
    return (registered if generated else config).__doc__.splitlines()[0]


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
