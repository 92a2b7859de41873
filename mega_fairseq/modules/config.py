"""The base class of all module configs: fields with help texts and option names, and checks of their values."""

from dataclasses import dataclass, field, fields
from typing import Any, Dict, Mapping, Optional, Sequence, Set, Type

from mega_fairseq.modules.normalization import BATCH_NORMS, NORMS
from mega_fairseq.modules.projection import INITS


def setting(
    default: Any,
    help: str,
    option: Optional[str] = None,
    fallback: Optional[str] = None,
    choices: Sequence[str] = (),
    only_with: Sequence[str] = (),
    unlimited: int = -1,
) -> Any:
    """A config field with its help text.

    `option` is the model option that sets it, as in "{side}_z_dim". An option of -1 or None stands for that of
    `fallback`, if given. If the default is None, the number `unlimited` in the option stands for None. `only_with` is
    another field, and those of its values with which this one has an effect.
    """
    about = {"help": help, "option": option, "fallback": fallback, "choices": tuple(choices)}
    return field(default=default, metadata={**about, "only_with": tuple(only_with), "unlimited": unlimited})


def inherited(config: "Type[ModuleConfig]", name: str, only_with: Sequence[str]) -> Any:
    """A field of a base class that has an effect only with some values of another field, as in `setting`."""
    (base,) = (f for f in fields(config) if f.name == name)
    return field(default=base.default, metadata={**base.metadata, "only_with": tuple(only_with)})


@dataclass(frozen=True)
class ModuleConfig:
    """Options of one module, checked when the config is created."""

    dim: int = field(metadata={"help": "width of the model", "option": "{side}_embed_dim"})
    norm: str = setting("layernorm", "kind of norm", "normalization_type", choices=NORMS)
    prenorm: bool = setting(True, "normalise the input instead of the output", "normalize_before")
    norm_affine: bool = setting(True, "learned scale and offset in the norm")
    dropout: float = setting(0.0, "dropout on the output", "dropout")
    feature_dropout: bool = setting(False, "drop whole channels instead of single entries", "feature_dropout")
    init: str = setting(
        "released", "weight initialisation: released, or scaled to the input width", "init", choices=INITS
    )
    # "encoder" or "decoder" for a config made from a model's options, which errors then name.
    side: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        self.check_positive("dim")
        for f in fields(self):
            choices, value = f.metadata.get("choices"), getattr(self, f.name)
            if choices and value not in choices:
                raise ValueError(f"{self.name(f.name)} is {value!r}; choose one of {', '.join(choices)}")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if f.type is float and not (is_number and 0.0 <= value < 1.0):
                raise ValueError(
                    f"{self.name(f.name)} is {value!r}; it must be a probability from 0 up to, but not including, 1"
                )
        unused = self.unused
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in unused and value != f.default:
                other, *values = f.metadata["only_with"]
                # "Leave it out" would not help where a preset has set a number.
                remedy = "leave it out" if f.default is False else f"set it to {self.written(f.default)}"
                raise ValueError(
                    f"{self.name(f.name)} is {value} and has no effect with {self.name(other)} {getattr(self, other)}; "
                    f"{remedy}, or choose {' or '.join(values)}"
                )

    def name(self, field_name: str) -> str:
        """The name for error messages: the command-line option, or the field itself."""
        option = self.options().get(field_name) if self.side else None
        return field_name if option is None else f"--{option.format(side=self.side)}".replace("_", "-")

    def written(self, value: Any) -> Any:
        """A value as a user would write it: None is -1 on the command line."""
        return -1 if value is None and self.side else value

    @classmethod
    def options(cls) -> Dict[str, str]:
        """Field names and the model options that set them."""
        return {f.name: f.metadata["option"] for f in fields(cls) if f.metadata.get("option")}

    @classmethod
    def option_names(cls, *sides: str) -> Set[str]:
        """The model options that set its fields in stacks of these names, directly or as a fallback."""
        patterns = (f.metadata.get(key) for f in fields(cls) for key in ("option", "fallback"))
        return {pattern.format(side=side) for pattern in patterns if pattern for side in sides}

    @classmethod
    def metadata(cls, name: str) -> Mapping[str, Any]:
        """What `setting` says of a field."""
        return next(f.metadata for f in fields(cls) if f.name == name)

    def check_positive(self, *names: str) -> None:
        check_positive(**{self.name(name): getattr(self, name) for name in names})

    def check_causal_norm(self) -> None:
        """Refuses norms whose statistics a causal layer may not use."""
        if self.norm in BATCH_NORMS:
            raise ValueError(
                f"{self.name('norm')} {self.norm!r} takes statistics over all positions, so that a causal layer would "
                "see the future; use layernorm, scalenorm or rmsnorm"
            )

    def check_heads(self, width: int, what: str) -> None:
        """Checks that the field `heads` divides a width."""
        self.check_positive("heads")
        if width % self.heads:
            raise ValueError(
                f"{self.name('heads')} is {self.heads} and does not divide the {what}, {width}; give a divisor of it"
            )

    def check_rotary(self) -> None:
        """Checks that the field `rotary_dims` fits into a head."""
        width, dims = self.dim // self.heads, self.rotary_dims
        if isinstance(dims, bool) or not isinstance(dims, int) or not 0 <= dims <= width or dims % 2:
            raise ValueError(
                f"{self.name('rotary_dims')} is {dims!r}; give an even number up to the width of a head, {width}"
            )

    @property
    def unused(self) -> Set[str]:
        """The fields that have no effect beside the values of other fields."""
        limited = {f.name: f.metadata["only_with"] for f in fields(self) if f.metadata.get("only_with")}
        return {name for name, (other, *values) in limited.items() if getattr(self, other) not in values}

    def set_default(self, name: str, value: Any) -> None:
        """Replaces 0 by a default that depends on other fields."""
        if getattr(self, name) == 0:
            object.__setattr__(self, name, value)


def check_positive(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
