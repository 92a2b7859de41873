"""The options of released models that a converted checkpoint keeps.

They come from an untrusted file and fairseq evaluates some of them as Python, so the type of each is checked.
"""

import re
import reprlib
from typing import Any, Callable, Dict, Mapping, NamedTuple, Tuple

from mega_fairseq.cli import UserError

SIZES = ("embed_dim", "hidden_dim", "z_dim", "n_dim", "ffn_embed_dim", "layers", "chunk_size")
CUTOFF = "cutoff"  # None, or numbers separated by commas
PATH = "path"  # None, or any string
LENGTH = "length"  # None, or a number
STREAMS = "streams"  # splits:K or size:N
OPTIONAL = (CUTOFF, PATH, LENGTH)
FORMS = {CUTOFF: r"\d+(,\d+)*", STREAMS: r"(splits|size):\d+"}

Options = Dict[str, Any]


class Family(NamedTuple):
    """Released architectures that convert to the same model."""

    archs: Tuple[str, ...]
    model: str  # registered name
    task: str
    model_options: Mapping[str, Any]  # name -> kind
    task_options: Mapping[str, Any]
    embeddings: Tuple[str, ...]  # our tensor names, one for each dictionary of the task
    settle: Callable[[Options, Options], None]  # adapts the options of model and task where the release differs


COMMON = {
    **dict.fromkeys(("activation_fn", "attention_activation_fn", "normalization_type", "rel_pos_bias"), str),
    **dict.fromkeys(("normalize_before", "normalize_embedding", "no_scale_embedding", "feature_dropout"), bool),
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout", "activation_dropout"), float),
    "truncation_length": int,
    "adaptive_softmax_cutoff": CUTOFF,
    "adaptive_softmax_dropout": float,
    "share_decoder_input_output_embed": bool,
    **{f"decoder_{name}": int for name in SIZES},
    "decoder_embed_path": PATH,
}


def _settle_translation(model: Options, task: Options) -> None:
    if model["truncation_length"]:
        model["decoder_truncation_length"] = 0  # the release ignores it in generation


def _settle_language(model: Options, task: Options) -> None:
    model["truncation_length"] = 0  # the release ignores it in evaluation
    if model["max_target_positions"] is None:
        model["max_target_positions"] = task["tokens_per_sample"]
    if model["decoder_chunk_size"] != -1:
        task["tokens_per_sample"] = 0  # segments are multiples of the chunk
    # The release accepts these where there is nothing to tie.
    model["share_decoder_input_output_embed"] &= model["adaptive_softmax_cutoff"] is None
    model["tie_adaptive_proj"] &= model["tie_adaptive_weights"]


TRANSLATION = Family(
    archs=("mega", "mega_wmt_en_de", "mega_wmt_en_de_big"),
    model="mega_transformer",
    task="translation",
    model_options={
        **COMMON,
        **{f"encoder_{name}": int for name in SIZES},
        "encoder_embed_path": PATH,
        "share_all_embeddings": bool,
    },
    task_options={
        "data": PATH,
        **dict.fromkeys(("source_lang", "target_lang"), str),
        **dict.fromkeys(("left_pad_source", "left_pad_target"), bool),
        **dict.fromkeys(("max_source_positions", "max_target_positions"), int),
    },
    embeddings=("encoder.embed_tokens", "decoder.embed_tokens"),
    settle=_settle_translation,
)
LANGUAGE = Family(
    archs=(
        "mega_lm",
        "mega_lm_big",
        "mega_lm_adaptive_base",
        "mega_lm_adaptive_big",
        "mega_lm_wiki103",
        "mega_lm_enwik8_base",
        "mega_lm_enwik8_large",
    ),
    model="mega_lm",
    task="mega_language_modeling",
    model_options={
        **COMMON,
        "decoder_input_dim": int,
        "no_affine_final_norm": bool,
        "adaptive_input": bool,
        "adaptive_input_cutoff": CUTOFF,
        **dict.fromkeys(("adaptive_input_factor", "adaptive_softmax_factor"), float),
        **dict.fromkeys(("tie_adaptive_weights", "tie_adaptive_proj"), bool),
        "max_target_positions": LENGTH,
    },
    task_options={
        "data": PATH,
        **dict.fromkeys(("tokens_per_sample", "variant_block_multiple_min", "variant_block_multiple_max"), int),
        "valid_block": STREAMS,
    },
    embeddings=("decoder.embed_tokens",),
    settle=_settle_language,
)
FAMILIES = (TRANSLATION, LANGUAGE)
UNSUPPORTED = {"mega_lra": "classifiers", "mega_sc": "speech classifiers"}


def family_of(options: Mapping[str, Any]) -> Family:
    arch = _checked("arch", options.get("arch"), str)
    for family in FAMILIES:
        if arch in family.archs:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.archs)
    for prefix, what in UNSUPPORTED.items():
        if arch.startswith(prefix):
            raise UserError(
                f"has the architecture {reprlib.repr(arch)}, and {what} cannot be converted; give one of {known}"
            )
    raise UserError(f"has the architecture {reprlib.repr(arch)}, which is not a Mega model; give one of {known}")


def choose(options: Mapping[str, Any], kinds: Mapping[str, Any]) -> Dict[str, Any]:
    """Pick the options with these names and check their types."""
    missing = [name for name in kinds if name not in options]
    if missing:
        raise UserError(f"lacks the option {missing[0]}, so it is damaged; get it again from its source")
    return {name: _checked(name, options[name], kind) for name, kind in kinds.items()}


def _checked(name: str, value: Any, kind: Any) -> Any:
    if value is None and kind in OPTIONAL:
        return None
    if kind in FORMS:
        fits = isinstance(value, str) and re.fullmatch(FORMS[kind], value) is not None
    elif kind in (str, PATH):
        fits = _plain(value)
    else:
        if kind is float and type(value) is int:
            value = float(value)
        elif kind is bool and type(value) is str and value in ("True", "False"):
            value = value == "True"  # as given on a command line
        fits = type(value) is (int if kind is LENGTH else kind)
    if fits:
        return value
    raise UserError(
        f"has {reprlib.repr(value)} for the option {name}, which the released code never writes; "
        "get it again from its source"
    )


def _plain(value: Any) -> bool:
    """Whether this is a string without OmegaConf interpolation."""
    return isinstance(value, str) and "${" not in value
