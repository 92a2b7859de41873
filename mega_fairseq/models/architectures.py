"""Registers the models with fairseq, each under its own name and under those of its presets.

A preset is a dataclass with other defaults than the model's own, so that it is the same with hydra, in a resumed run
and in a checkpoint. fairseq's architecture function, which hydra never calls, does the same for the command line.
"""

from argparse import Namespace
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Dict, Type

from fairseq.dataclass import FairseqDataclass
from fairseq.models import ARCH_CONFIG_REGISTRY, BaseFairseqModel, register_model

from mega_fairseq.models.mega_classifier import MegaClassifier, MegaClassifierConfig
from mega_fairseq.models.mega_encoder import MegaEncoderConfig, MegaEncoderModel
from mega_fairseq.models.mega_lm import MegaLanguageModel, MegaLMConfig
from mega_fairseq.models.mega_transformer import MegaTransformerConfig, MegaTransformerModel
from mega_fairseq.models.presets import CLASSIFIERS, ENCODERS, LANGUAGE_MODELS, TRANSLATION


def register(
    name: str, model: Type[BaseFairseqModel], config: Type[FairseqDataclass], presets: Dict[str, Dict[str, Any]]
) -> None:
    """Registers `model` as `name`, and under the name of each preset with its defaults."""
    for arch, values in presets.items():
        preset = _with_defaults(config, arch, **values)
        register_model(arch, dataclass=preset)(model)
        changed = {f.name: f.default for f in fields(preset) if f.default != getattr(config, f.name)}
        ARCH_CONFIG_REGISTRY[arch] = partial(_complete, config, changed)
    # fairseq makes a model's command-line options from the dataclass that it was registered with last. That must be
    # `config`: if a preset's default is True, fairseq would make a flag that switches the option off.
    register_model(name, dataclass=config)(model)
    ARCH_CONFIG_REGISTRY[name] = partial(_complete, config, {})


def _with_defaults(config: Type[FairseqDataclass], arch: str, __doc__: str, **values: Any) -> Type[FairseqDataclass]:
    """A subclass of a model's options with these defaults. It is pickled by its name in this module."""
    inherited = {f.name: f for f in fields(config)}
    namespace = {name: field(default=value, metadata=inherited[name].metadata) for name, value in values.items()}
    annotations = {name: inherited[name].type for name in values}
    namespace.update(__annotations__=annotations, __module__=__name__, __doc__=__doc__)
    name = "".join(map(str.capitalize, arch.split("_"))) + "Config"
    globals()[name] = dataclass(type(name, (config,), namespace))
    return globals()[name]


def _complete(config: Type[FairseqDataclass], defaults: Dict[str, Any], args: Namespace) -> None:
    """Sets options that were not given, and corrects fairseq's assumption that `--bf16` means a TPU."""
    if hasattr(config, "max_source_positions") and not isinstance(getattr(args, "max_source_positions", None), int):
        raise ValueError(  # or omegaconf misses this option of the task
            f"--arch {args.arch} translates, and --task {args.task} has no --max-source-positions; give --task "
            "translation, or another --arch (mega-fairseq options lists them)"
        )
    for name, value in defaults.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    if getattr(args, "bf16", False):
        args.tpu = False


register("mega_transformer", MegaTransformerModel, MegaTransformerConfig, TRANSLATION)
register("mega_lm", MegaLanguageModel, MegaLMConfig, LANGUAGE_MODELS)
register("mega_classifier", MegaClassifier, MegaClassifierConfig, CLASSIFIERS)
register("mega_encoder", MegaEncoderModel, MegaEncoderConfig, ENCODERS)
