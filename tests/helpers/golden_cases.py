"""Golden cases: outputs of reference implementations, read from .npz files, and our modules with their weights.

The prefix of a file's name gives the kind of a case; sizes, options and masks come from its config and arrays.
tests/golden/README.md describes the layout. The files are length-first, the tensors returned here batch-first.
"""

import json
import os
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import torch
from torch import Tensor, nn

from mega_fairseq.cli.convert.names import translate
from mega_fairseq.modules import (
    MIXERS,
    POSITION_BIASES,
    Block,
    DampedEMA,
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedCrossAttention,
    GatedCrossAttentionConfig,
    MovingAverageGatedAttention,
    NormalizedFeedForward,
    SequenceNorm,
)

FOLDER = Path(__file__).resolve().parents[1] / "golden"
VARIABLE = "MEGA_GOLDEN"  # folders to read instead of tests/golden, separated like those of PATH

# Prefix of a file name -> kind of case. The longest matching prefix applies, so mega_lm_ is not mega_.
KINDS = {
    "activations": "activations",
    "block_": "block",
    "cema_": "complex EMA",
    "case": "huggingface",  # read by tests/cli/test_convert_huggingface.py
    "cross_": "cross",
    "ema_": "ema",
    "log_probs": "evaluation",
    "lra_": "classifier",
    "mega_": "mega",
    "mega_lm_": "language model",
    "mega_model_": "translation model",
    "nffn_": "nffn",
    "norm_": "timestep norm",
    "relbias_": "relbias",
    "sc_": "classifier",
    "seqnorm_": "seqnorm",
    **dict.fromkeys(("aft_", "flash_", "gau_", "gmlp_", "mha_", "mhatw_", "mixer_", "sparse_"), "mixer"),
}

# Length-first in the files, batch-first here.
SEQUENCES = {"x", "query", "key", "cotangent", "y", "y_train", "y_full", "y_incremental", "y1", "ema_out"}
SEQUENCES |= {"step_raw", "step_ema", "onestep_ema"}

# The (released, our) prefix, inside other modules, of a module that was recorded alone.
PLACES = {
    "ema": ("move.", "ema."),
    "relbias": ("rel_pos_bias.", "position_bias."),
    "seqnorm": ("norm.", "norm."),
}

# The mixers other than Mega: their names, options and parameters where ours differ.
MIXER_NAMES = {"mha": "attention"}
MIXER_OPTIONS = {"position": "position_bias"}
MIXER_PARAMETERS = {"norm.": "norm.norm.", "position.": "position_bias."}
# Blocks: the feed-forward layer, whose reference has no biases and stores the scale of its norm minus 1.
BLOCK_PARAMETERS = {"ffn.norm.": "feed_forward.norm.norm.", "ffn.": "feed_forward.", "": "mixer."}


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    config: Dict[str, Any]
    parameters: Dict[str, Tensor]  # and buffers, by released name
    inputs: Dict[str, Tensor]
    outputs: Dict[str, Tensor]
    gradients: Dict[str, Tensor]  # of parameters, by released name
    input_gradients: Dict[str, Tensor]

    @property
    def padding(self) -> Optional[Tensor]:
        """(B, L) bool, True = pad; of the source in cross attention."""
        mask = self.inputs.get("key_padding_mask" if self.kind == "cross" else "padding_mask")
        return None if mask is None else mask.bool()

    @property
    def real(self) -> Tensor:
        """(B, L) bool, False = pad."""
        x = self.inputs["key" if self.kind == "cross" else "x"]
        return torch.ones(x.shape[:2], dtype=torch.bool) if self.padding is None else ~self.padding

    @property
    def causal(self) -> bool:
        return not self.config.get("bidirectional", False)

    @property
    def truncation(self) -> int:
        """Length of the EMA kernel, 0 for all taps."""
        return self.config.get("truncation") or 0

    @property
    def chunk_size(self) -> Optional[int]:
        size = self.config.get("chunk_size")
        return size if size is not None and size > 0 else None

    @property
    def segments(self) -> List[int]:
        """Lengths of the pieces in which a stream was recorded; single tokens if not specified."""
        if self.config.get("segments"):
            return list(self.config["segments"])
        return self.inputs["segments"].tolist() if "segments" in self.inputs else [1]

    @property
    def gradients_of_training(self) -> bool:
        """Whether its gradients come from a training pass, as in every case with a training output (batch norm)."""
        mode = self.config.get("grads_in")
        return "y_train" in self.outputs if mode is None else mode.startswith("train")


def paths() -> List[Path]:
    """Every .npz file in the golden folders and their subfolders."""
    folders = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name] or [FOLDER]
    return [path for folder in folders for path in sorted(folder.rglob("*.npz"))]


def kind_of(path: Path) -> Optional[str]:
    fitting = [prefix for prefix in KINDS if path.stem.startswith(prefix)]
    return KINDS[max(fitting, key=len)] if fitting else None


def cases(*kinds: str) -> List[Case]:
    return [load(path) for path in paths() if kind_of(path) in kinds]


@lru_cache(maxsize=None)
def load(path: Path) -> Case:
    groups: Dict[str, Dict[str, Tensor]] = {"param": {}, "in": {}, "out": {}, "grad": {}}
    with np.load(path) as file:
        config = json.loads(str(file["config_json"]))
        for key in file.files:
            group, _, name = key.partition("/")
            if name:
                groups[group][name] = torch.tensor(file[key])
    mark = "__input_"
    of_inputs = {n[len(mark) :]: t for n, t in groups["grad"].items() if n.startswith(mark)}
    return Case(
        name=path.stem,
        kind=kind_of(path),
        config=config,
        parameters=groups["param"],
        inputs=_batch_first(groups["in"]),
        outputs=_batch_first(groups["out"]),
        gradients={n: t for n, t in groups["grad"].items() if not n.startswith(mark)},
        input_gradients=_batch_first(of_inputs),
    )


def _batch_first(tensors: Dict[str, Tensor]) -> Dict[str, Tensor]:
    sequences = {name: t for name, t in tensors.items() if name in SEQUENCES and t.dim() == 3}
    return {**tensors, **{name: t.transpose(0, 1).contiguous() for name, t in sequences.items()}}


# -------------------------------------------------------------------------------------- names


def state_dict(case: Case) -> Dict[str, Tensor]:
    """The parameters and buffers of a case by our names."""
    tensors = _translated(case, case.parameters)
    if case.kind == "block":
        tensors["feed_forward.norm.norm.weight"] = tensors["feed_forward.norm.norm.weight"] + 1.0
        for name, weight in list(tensors.items()):
            if name.startswith("feed_forward.") and name.endswith(".weight") and ".norm." not in name:
                tensors[name.replace("weight", "bias")] = torch.zeros_like(weight[:, 0])
    return tensors


def released_gradients(case: Case) -> Dict[str, Tensor]:
    """The recorded gradients of a case by our names; fails if one has no parameter of ours."""
    recorded = {n: g for n, g in case.gradients.items() if n.rpartition(".")[2] != "_float_tensor"}
    # Translating names needs all parameters; the flags tell which of them have a recorded gradient.
    values = _translated(case, {**case.parameters, **recorded})
    flags = _translated(case, {n: torch.full(p.shape, n in recorded) for n, p in case.parameters.items()})
    found = {name: values[name] for name, flag in flags.items() if flag.all()}
    lost = sum(g.numel() for g in recorded.values()) - sum(g.numel() for g in found.values())
    assert lost == 0, f"{case.name}: {lost} gradient entries belong to no parameter of ours"
    return found


def _translated(case: Case, tensors: Dict[str, Tensor]) -> Dict[str, Tensor]:
    if case.kind in ("mixer", "block"):
        names = BLOCK_PARAMETERS if case.kind == "block" else MIXER_PARAMETERS
        names = {} if case.kind == "mixer" and case.config["mixer"] == "megalodon" else names
        return {_with_our_prefix(name, names): tensor for name, tensor in tensors.items()}
    released, ours = PLACES.get(case.kind, ("", ""))
    return {n[len(ours) :]: t for n, t in translate({released + n: t for n, t in tensors.items()}).items()}


def _with_our_prefix(name: str, prefixes: Dict[str, str]) -> str:
    for theirs, ours in prefixes.items():
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    return name


# -------------------------------------------------------------------------------------- modules


def build(case: Case, **changes: Any) -> nn.Module:
    """The module of a case in eval mode; `changes` replace some of its options."""
    module = BUILDERS[case.kind](case.config, changes)
    module.load_state_dict(state_dict(case))
    return module.eval()


def _ema(config: Dict[str, Any], changes: Dict[str, Any]) -> nn.Module:
    options = {"bidirectional": config.get("bidirectional", False), "truncation": config.get("truncation")}
    return DampedEMA(config["embed_dim"], config["ndim"], **{**options, **changes})


def _common(config: Dict[str, Any]) -> Dict[str, Any]:
    return {
        "dim": config["embed_dim"],
        "activation": config.get("activation", "silu"),
        "norm": config.get("norm_type", "layernorm"),
        "norm_affine": config.get("norm_affine", True),
        "prenorm": config.get("prenorm", True),
    }


def _attention(config: Dict[str, Any]) -> Dict[str, Any]:
    return {
        **_common(config),
        "shared_dim": config["zdim"],
        "attention": config.get("attention_activation", "softmax"),
        "position_bias": config.get("rel_pos_bias", "simple"),
        "max_positions": config["max_positions"],
    }


def _mega(config: Dict[str, Any], changes: Dict[str, Any]) -> nn.Module:
    causal = not config.get("bidirectional", False)
    assert config.get("causal_attn_mask", causal) == causal, "EMA and attention differ in direction"
    chunk_size = config.get("chunk_size")
    options = {
        **_attention(config),
        "value_dim": config["hdim"],
        "ndim": config["ndim"],
        "chunk_size": chunk_size if chunk_size is not None and chunk_size > 0 else None,
        "causal": causal,
        "truncation": config.get("truncation"),
    }
    return MovingAverageGatedAttention(GatedAttentionConfig(**{**options, **changes}))


def _block(config: Dict[str, Any], changes: Dict[str, Any]) -> nn.Module:
    activation = "swiglu" if config["swiglu"] else "silu"
    sizes = {"dim": config["dim"], "hidden_dim": config["ffn_dim"]}
    switches = {name: config[name] for name in ("two_hop", "rescale")}
    feed_forward = FeedForwardConfig(**sizes, activation=activation, **switches)
    return Block(_mixer(config, changes).config, feed_forward).double()


def _mixer(config: Dict[str, Any], changes: Dict[str, Any]) -> nn.Module:
    kind = MIXERS[MIXER_NAMES.get(config["mixer"], config["mixer"])]
    given = {MIXER_OPTIONS.get(name, name): value for name, value in config.items() if value is not None}
    known = {field.name for field in fields(kind)}
    if given.get("norm") == "timestep":
        del given["norm"]  # the only one of this mixer
    if "reach" in given:
        given["form"] = "local"
    if given.get("attention", "relu2") != "relu2":
        given.pop("scale", None)  # recorded, but without effect
    return kind(**{**{name: value for name, value in given.items() if name in known}, **changes}).build().double()


def _cross(config: Dict[str, Any], changes: Dict[str, Any]) -> nn.Module:
    return GatedCrossAttention(GatedCrossAttentionConfig(**{**_attention(config), **changes}))


def _nffn(config: Dict[str, Any], changes: Dict[str, Any]) -> nn.Module:
    options = {**_common(config), "hidden_dim": config["ffn_hidden_dim"]}
    return NormalizedFeedForward(FeedForwardConfig(**{**options, **changes}))


def _seqnorm(config: Dict[str, Any], changes: Dict[str, Any]) -> nn.Module:
    options = {"eps": config.get("eps", 1e-5), "affine": config.get("affine", True)}
    return SequenceNorm(config["norm_type"], config["embedding_dim"], **{**options, **changes})


def _relbias(config: Dict[str, Any], changes: Dict[str, Any]) -> nn.Module:
    released = {"SimpleRelativePositionalBias": "simple", "RotaryRelativePositionalBias": "rotary"}
    kind = POSITION_BIASES[released[config["module"]]]
    return kind(config.get("embed_dim", 1), config["max_positions"], False)


BUILDERS = {
    "block": _block,
    "cross": _cross,
    "ema": _ema,
    "mega": _mega,
    "mixer": _mixer,
    "nffn": _nffn,
    "relbias": _relbias,
    "seqnorm": _seqnorm,
}
