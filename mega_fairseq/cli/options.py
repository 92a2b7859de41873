"""`mega-fairseq options`: the options of this plugin's architectures and tasks, read from their dataclasses."""

import argparse
import difflib
import re
from dataclasses import fields
from enum import Enum
from typing import Any, Dict, List, NamedTuple, Type, get_type_hints

from fairseq.dataclass import FairseqDataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - registers them
from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import table
from mega_fairseq.fairseq_options import typed

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
            default = re.sub(r"\$\{.*\.(\w+)\}", lambda other: typed(other[1]), str(field.default))
            options.append(Option(typed(field.name), default, text))
    return options


def overview() -> str:
    """A line for each architecture and task."""
    rows = [["--arch", *SIZES, ""]]
    for name, config in architectures().items():
        side = "decoder" if hasattr(config, "decoder_layers") else "encoder"
        sizes = (f"{getattr(config, f'{side}_{size}'):,}" for size in SIZES.values())
        rows.append([name, *sizes, _about(MODEL_REGISTRY[name], config)])
    lines = [["--task", ""], *([name, _about(TASK_REGISTRY[name], config)] for name, config in tasks().items())]
    remark = "mega-fairseq options NAME lists the options of one of them, with their defaults."
    return "\n\n".join([table(rows, left=5), table(lines, left=2), remark])


def details(name: str, config: Config) -> str:
    """A line for each option; defaults that a preset changes are marked."""
    bases = [base for base in config.__mro__[1:] if base in architectures().values()]
    inherited = options_of(bases[-1]) if bases else options_of(config)
    rows = [[o.name, o.default + ("" if o in inherited else " *"), o.help] for o in options_of(config)]
    about = _about({**MODEL_REGISTRY, **TASK_REGISTRY}[name], config)
    note = " Defaults with * are set by this preset." if bases else ""
    return f"{name}: {about}{note}\n\n" + table([["option", "default", "meaning"], *rows], left=3)


def _about(registered: Any, config: Config) -> str:
    """The first line of the docstring of a preset's dataclass, or else of the model or task."""
    generated = config.__doc__.startswith(f"{config.__name__}(")
    return (registered if generated else config).__doc__.splitlines()[0]
