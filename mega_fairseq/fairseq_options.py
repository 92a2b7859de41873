"""Options of fairseq's commands: fields of dataclasses, and sections other than a model's own.

fairseq passes a model only its own section of the config, but that section remains part of the whole, and omegaconf's
interpolations can refer from any section to any other.
"""

import math
from argparse import Namespace
from dataclasses import field, fields, is_dataclass
from typing import Any, Dict, Optional, Type

import omegaconf
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import DictConfig, OmegaConf

UNBOUNDED = 1_000_000_000  # max_positions() of a model without a limit; fairseq needs a whole number
SECTIONS = [field.name for field in fields(FairseqConfig)]
# When a checkpoint may be loaded with another value of an option of its model.
ALWAYS = "always"  # from one training to the next too: weights keep their meaning
AFTER_TRAINING = "after training"
SAME_SHAPES = "same shapes"  # in a resumed training only if weights keep their shapes, or the optimizer would not fit
FILLED_IN = ("task", "criterion", "optimizer", "lr_scheduler")  # sections that are dataclasses only in training


def option(
    default: Any,
    help: Optional[str],
    least: Optional[float] = None,
    below: float = math.inf,
    needs: Optional[str] = None,
    change: Optional[str] = None,
    released: bool = False,
    huggingface: Optional[str] = None,
) -> Any:
    """A field of a dataclass of options; `check_ranges` refuses numbers that are not in [least, below).

    Without a help text, an interpolated option is one of another section, and no option of its own. `needs` is another
    option of a model, without which this one has no effect. `change` says when a checkpoint may be loaded with another
    value: ALWAYS, AFTER_TRAINING, with the SAME_SHAPES, or never. `released` options are in the released code too,
    and `huggingface` is the option of Hugging Face's Mega that this one is made from.
    """
    about = {"help": help, "least": least, "below": below, "needs": needs, "change": change}
    return field(default=default, metadata={**about, "released": released, "huggingface": huggingface})


def check_ranges(cfg: FairseqDataclass, options: Type[FairseqDataclass]) -> None:
    """Checks the numbers in `cfg` for which this dataclass states a range."""
    for f in fields(options):
        least, value = f.metadata.get("least"), getattr(cfg, f.name)
        if least is not None and not least <= value < f.metadata["below"]:
            limit = "" if f.metadata["below"] == math.inf else f" and below {f.metadata['below']}"
            raise ValueError(f"{typed(f.name)} is {value}; give a number of at least {least}{limit}")


def changes(options: Type[FairseqDataclass]) -> Dict[str, Optional[str]]:
    """When a checkpoint may be loaded with another value of each of these options of its model; None for never."""
    return {f.name: f.metadata.get("change") for f in fields(options) if f.metadata}  # fairseq's _name has none


def typed(name: str) -> str:
    """An option as on the command line."""
    return f"--{name.replace('_', '-')}"


def option_of_command(section: FairseqDataclass, name: str, default: Any = None) -> Any:
    """Returns the option or section called `name`, as in "checkpoint.save_dir", of the config that `section` is in."""
    if not isinstance(section, DictConfig):
        return default
    try:  # a list, since omegaconf 2.0 cannot add keys to a part of a config that is closed
        return OmegaConf.create([f"${{{name}}}"], parent=section)[0]
    # omegaconf 2.0 raises an AssertionError for an option of a section that is None.
    except (omegaconf.errors.OmegaConfBaseException, AssertionError):
        return default


def is_training(section: FairseqDataclass) -> bool:
    """Whether `section` is in the config of a training: not of another command, and not in a loaded checkpoint."""
    sections = (option_of_command(section, name) for name in FILLED_IN)
    return any(isinstance(each, DictConfig) and is_dataclass(OmegaConf.get_type(each)) for each in sections)


def all_options(section: FairseqDataclass) -> Namespace:
    """Returns the options of all sections of the config that `section` is in; its own take precedence."""
    options = {}
    for each in [*(option_of_command(section, name) for name in SECTIONS), section]:
        if isinstance(each, DictConfig):
            options.update(OmegaConf.to_container(each, resolve=True))
        elif each is not None:  # an optimizer without a dataclass, or options that no command gave
            options.update(vars(each))
    return Namespace(**options)
