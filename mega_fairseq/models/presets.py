"""Published sizes as data, each registered as a model of its own.

fairseq's named architectures do nothing under hydra, where a dataclass is filled in before the architecture function
is asked. A preset that is a dataclass with other defaults is the same on the command line, under hydra, in a resumed
run and in a checkpoint.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import field, fields, make_dataclass
from typing import Any, Dict, Type

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_CONFIG_REGISTRY, BaseFairseqModel, register_model


def register_with_presets(
    name: str, model: Type[BaseFairseqModel], config: Type[FairseqDataclass], presets: Dict[str, Dict[str, Any]]
) -> None:
    """Registers `model` as `name` with its `config`, and one subclass of both per preset with other defaults."""
    _register(name, model, config)

    def add_args(cls: Type[BaseFairseqModel], parser: ArgumentParser) -> None:
        """As for the model without a size: of a default of True fairseq makes a flag that says no."""
        gen_parser_from_dataclass(parser, config(), delete_default=True)

    types = {f.name: f for f in fields(config)}
    for preset, changes in presets.items():
        title = "".join(part.capitalize() for part in preset.split("_"))
        changed = [
            (key, types[key].type, field(default=value, metadata=types[key].metadata)) for key, value in changes.items()
        ]
        size = make_dataclass(f"{title}Config", changed, bases=(config,), namespace={"__module__": config.__module__})
        names = {"__module__": model.__module__, "__doc__": f"Preset {preset}.", "add_args": classmethod(add_args)}
        _register(preset, type(f"{title}Model", (model,), names), size)


def _register(name: str, model: Type[BaseFairseqModel], config: Type[FairseqDataclass]) -> None:
    register_model(name, dataclass=config)(model)
    ARCH_CONFIG_REGISTRY[name] = _plain_bf16


def _plain_bf16(args: Namespace) -> None:
    """Command-line `--bf16` sets `tpu` as well, and then asks for torch_xla: bfloat16 is not for TPUs alone."""
    if getattr(args, "bf16", False):
        args.tpu = False
