"""Presets: published sizes as data, each registered with fairseq as an architecture.

A preset is a dataclass with other defaults than the model's own, so that it is the same with hydra, in a resumed run
and in a checkpoint. fairseq's architecture function, which hydra never calls, does the same for the command line.
"""

from argparse import Namespace
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Callable, Dict, Type

from fairseq.dataclass import FairseqDataclass
from fairseq.models import ARCH_CONFIG_REGISTRY, BaseFairseqModel, register_model

Options = Type[FairseqDataclass]
PAIRWISE_TASKS = ("multilingual_translation", "multilingual_translation_latent_depth", "semisupervised_translation")


def preset(**defaults: Any) -> Callable[[Options], Options]:
    """Decorates a subclass of a model's options: the same options with these defaults."""

    def with_defaults(cls: Options) -> Options:
        inherited = {f.name: f for f in fields(cls)}
        cls.__annotations__ = {name: inherited[name].type for name in defaults}
        for name, value in defaults.items():
            setattr(cls, name, field(default=value, metadata=inherited[name].metadata))
        return dataclass(cls)

    return with_defaults


def register_with_presets(
    name: str, model: Type[BaseFairseqModel], config: Options, presets: Dict[str, Options]
) -> None:
    """Registers `model` as `name` with the options `config`, and under the name of each preset with its options."""
    # fairseq makes a model's command-line options from the dataclass that it was registered with last. That must be
    # `config`: if a preset's default is True, fairseq would make a flag that switches the option off.
    for arch, options in {**presets, name: config}.items():
        register_model(arch, dataclass=options)(model)
        own = {f.name: f.default for f in fields(options) if f.default != getattr(config, f.name)}
        ARCH_CONFIG_REGISTRY[arch] = partial(_complete, own)


def _complete(defaults: Dict[str, Any], args: Namespace) -> None:
    """Fills in options that were not given, and corrects fairseq's assumption that `--bf16` means a TPU."""
    _check(args)
    for name, value in defaults.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    if getattr(args, "bf16", False):
        args.tpu = False


def _check(args: Namespace) -> None:
    """Refuses tasks that would fail with a traceback after fairseq has read the data."""
    if getattr(args, "task", None) in PAIRWISE_TASKS:
        raise ValueError(
            f"--task {args.task} needs a model with an encoder and a decoder for each pair of languages; give "
            "--task translation_multi_simple_epoch, which trains one model on all pairs"
        )
