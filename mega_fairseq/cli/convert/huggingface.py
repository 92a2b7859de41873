"""Folders that `save_pretrained` of Hugging Face's Mega (transformers 4.40) writes, and our models: both directions.

Their options are in config.json, their tensors in model.safetensors or pytorch_model.bin.
"""

import json
import os
import reprlib
from dataclasses import Field, fields
from enum import Enum
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from fairseq.models import MODEL_DATACLASS_REGISTRY
from omegaconf import DictConfig
from torch import Tensor, nn

from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint import untrusted
from mega_fairseq.cli.checkpoint.build import empty_model, fill
from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.cli.convert.families import Family, Options, class_names
from mega_fairseq.cli.convert.names import translate, translate_back
from mega_fairseq.fairseq_options import ALWAYS, changes, typed
from mega_fairseq.models import MegaEncoderModel, MegaLanguageModel
from mega_fairseq.tasks.mega_classification import HEAD

WRITER = "save_pretrained"
CONFIG, SAFE, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
LONGEST = 2**31  # steps of a truncation, which torch could not count
POOLER = "pooler"  # the head that stands for MegaModel's pooler: its own layer and tanh, then an identity

# Words of Hugging Face's options and ours for them; the first of two is written back.
ACTIVATIONS = {name: name for name in ("silu", "relu", "gelu", "linear", "gelu_fast", "gelu_accurate")}
ACTIVATIONS.update(swish="silu", gelu_new="gelu_accurate", gelu_pytorch_tanh="gelu_accurate", quick_gelu="gelu_sigmoid")
NORMS = {"scalenorm": "scalenorm", "layernorm": "layernorm", "batchnorm": "batchnorm", "rmsnorm": "hf_rmsnorm"}
WORDS = {
    "activation": ACTIVATIONS,
    "attention_activation": {name: name for name in ("softmax", "laplace", "relu2")},
    "relative_positional_bias": {name: name for name in ("rotary", "simple")},
    "normalization_type": NORMS,
}
# All options of Hugging Face's with their defaults. The last two have a counterpart with this value only.
DEFAULTS = {
    "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256, "shared_representation_size": 64,
    "ema_projection_size": 16, "dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "nffn_activation_dropout_prob": 0.1, "use_feature_dropout": False, "normalize_before_mega": True,
    "activation": "silu", "attention_activation": "softmax", "relative_positional_bias": "rotary",
    "normalization_type": "scalenorm",
    "use_normalized_ffn": True, "nffn_hidden_size": 256, "normalize_before_ffn": True,
    "bidirectional": True, "is_decoder": False, "use_chunking": False, "chunk_size": -1, "truncation": None,
    "max_positions": 2048, "add_token_type_embeddings": False, "type_vocab_size": 2, "vocab_size": 30522,
    "tie_word_embeddings": True, "add_lm_hidden_dense_layer": True, "classifier_dropout": None,
    "norm_affine": True, "add_cross_attention": False, "pad_token_id": 1,
}  # fmt: skip
FIXED = ("add_cross_attention", "pad_token_id")
# Options of ours without effect there: a missing bias is written as zeros, and there is no norm after the last layer.
IGNORED = {"output_bias", "no_affine_final_norm"}

# Ends of the names of a layer's tensors, Hugging Face's and the released ones.
OF_LAYERS = {
    "ema_gate.damping_factor": "move.delta",
    "ema_gate.decay_factor": "move.alpha",
    "ema_gate.ema_expansion_matrix": "move.beta",
    "ema_gate.kernel_projection_matrix": "move.gamma",
    "ema_gate.residual_weight": "move.omega",
    "mega_layer.qk_weight": "mega_layer.gamma",
    "mega_layer.qk_bias": "mega_layer.beta",
    "rel_pos_bias.b_param": "rel_pos_bias.beta",
}
# Beginnings of the names of a model's tensors, Hugging Face's and ours.
OF_MODELS = {
    "embedding_layer.word_embeddings.": "{side}.embed_tokens.",
    "embedding_layer.token_type_embeddings.": "{side}.embed_types.",
    "layers.": "{side}.layers.",
}


class Kind(NamedTuple):
    """What one of Hugging Face's classes becomes."""

    names: Dict[str, str]  # of tensors that only this class has, as in OF_MODELS
    model: str = "mega_encoder"
    task: str = "masked_lm"
    criterion: str = "masked_lm"
    prefix: str = "mega."  # of the tensors that all classes have
    head: Optional[str] = None  # our name of a matrix that may be tied to the embeddings

    @property
    def side(self) -> str:
        return "decoder" if self.model == "mega_lm" else "encoder"

    def renamed(self) -> Dict[str, str]:
        common = {self.prefix + theirs: ours.format(side=self.side) for theirs, ours in OF_MODELS.items()}
        return {**common, **self.names}


KINDS = {
    "MegaForMaskedLM": Kind(
        {"dense.": "encoder.lm_head.dense.", "mlm_head.": "encoder.lm_head."}, head="encoder.lm_head.weight"
    ),
    "MegaForSequenceClassification": Kind(
        {"classifier.": f"classification_heads.{HEAD}."}, task="sentence_prediction", criterion="sentence_prediction"
    ),
    "MegaModel": Kind({"pooler.": f"classification_heads.{POOLER}."}, prefix=""),
    "MegaForCausalLM": Kind(
        {"dense.": "decoder.output_dense.", "lm_head.": "decoder.output_projection."},
        "mega_lm", "mega_language_modeling", "mega_lm_cross_entropy", head="decoder.output_projection.weight",
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------- reading


def read(folder: str) -> Tuple[Options, Dict[str, Tensor]]:
    """The options, complete and checked, and the tensors of a folder."""
    try:
        with open(os.path.join(folder, CONFIG), "rb") as file:
            config = json.load(file)
    except (OSError, RecursionError, ValueError):
        config = None
    if not isinstance(config, dict) or config.get("model_type") != "mega":
        raise UserError(f"contains no readable {CONFIG} of Hugging Face's Mega; give a folder that {WRITER} wrote")
    options = {**DEFAULTS, **config}
    _check(options)
    options["arch"] = options["architectures"][0]
    safe, pickled = (os.path.join(folder, name) for name in (SAFE, PICKLED))
    if os.path.isfile(safe):
        safetensors = _safetensors()
        try:
            tensors = safetensors.load_file(safe)
        except Exception:  # of several types
            raise UserError(f"contains a {SAFE} that is damaged or incomplete; copy or download it again") from None
    elif os.path.isfile(pickled):
        tensors = untrusted.load(pickled, WRITER)
    else:
        raise UserError(f"contains neither {SAFE} nor {PICKLED}; save the model in one file (max_shard_size)")
    tensors = untrusted.model_tensors({"model": tensors}, WRITER)
    untrusted.check_finite(tensors)
    return options, tensors


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise UserError(f"needs a package for {SAFE}; pip install safetensors") from None
    return safetensors.torch


def _check(options: Options) -> None:
    """Refuses options that have no counterpart."""
    archs = options.get("architectures")
    arch = archs[0] if isinstance(archs, list) and len(archs) == 1 else None
    if not isinstance(arch, str) or arch not in KINDS:
        raise _refusal("architectures", archs, f"give a {', '.join(KINDS)}")
    for name, default in DEFAULTS.items():
        value, number = options[name], default is None or isinstance(default, float)
        fits = isinstance(value, (int, float) if number else type(default)) and (
            isinstance(value, bool) == isinstance(default, bool)
        )
        if not (fits or value is default is None) or (name in FIXED and value != default):
            raise _refusal(name, value, f"it must be {'a number' if number else repr(default)}")
    for name, words in WORDS.items():
        if options[name] not in words:
            raise _refusal(name, options[name], f"give a model with {', '.join(words)}")
    causal = KINDS[arch].side == "decoder"
    for name, needed in (("is_decoder", causal), ("bidirectional", not causal)):
        if options[name] != needed:
            raise _refusal(name, options[name], f"a {arch} is converted with {needed} only")
    if causal and options["normalization_type"] == "batchnorm":
        raise _refusal("normalization_type", "batchnorm", "in a causal model, batchnorm would see the future")
    problem, labels = options.get("problem_type"), options.get("id2label")
    if problem not in (None, "single_label_classification"):
        raise _refusal("problem_type", problem, "a classifier has one class for each input")
    if arch == "MegaForSequenceClassification" and isinstance(labels, dict) and len(labels) == 1:
        raise _refusal("id2label", labels, "with one label, it is a regression")
    truncation = options["truncation"]
    if truncation is not None and not (type(truncation) is int and 0 < truncation < LONGEST):
        raise _refusal("truncation", truncation, f"it must be null or a number from 1 to {LONGEST - 1:,}")
    if options["chunk_size"] == 0 or (options["use_chunking"] and options["chunk_size"] < 0):
        raise _refusal("chunk_size", options["chunk_size"], "it must be positive for use_chunking")


def _refusal(name: str, value: Any, remedy: str) -> UserError:
    return UserError(f"has {reprlib.repr(value)} for the option {name}, which has no counterpart here; {remedy}")


def _counterparts(ours: Sequence[Field]) -> Dict[str, str]:
    """Those of our options that are made from one of Hugging Face's, and its name for each."""
    return {f.name: f.metadata["huggingface"] for f in ours if f.metadata.get("huggingface")}


def _reach(options: Options) -> int:
    """The reach R of position bias simple: of its table, only the first 2 R - 1 entries are read."""
    return options["chunk_size"] if options["chunk_size"] > 0 else options["max_positions"]


def _longest(options: Options) -> int:
    bounded = options["relative_positional_bias"] == "simple" and not options["use_chunking"]
    return _reach(options) if bounded else options["max_positions"]


def _numbered(classes: int) -> List[str]:
    """The names of classes without names, as transformers fills them in."""
    return [f"LABEL_{number}" for number in range(classes)]


class HuggingFace(Family):
    """A class of Hugging Face's; its options are those that `read` returns."""

    def __init__(self, options: Options):
        self.arch = options["architectures"][0]
        self.kind = KINDS[self.arch]
        self.model, self.task, self.criterion_name = self.kind.model, self.kind.task, self.kind.criterion
        self.labels = options.get("id2label")
        self.remarks: List[str] = []

    def model_options(self, options: Options, ours: Sequence[Field]) -> Dict[str, Any]:
        side, prenorm = self.kind.side, options["normalize_before_mega"]
        ffn, dropout = options["use_normalized_ffn"], options["classifier_dropout"]
        chosen = {}
        for name, theirs in _counterparts(ours).items():
            chosen[name] = WORDS[theirs][options[theirs]] if theirs in WORDS else options[theirs]
        chosen.update({  # where Hugging Face's has other values
            f"{side}_ffn_embed_dim": options["nffn_hidden_size"] if ffn else 0,
            f"{side}_chunk_size": options["chunk_size"] if options["use_chunking"] else -1,
            "truncation_length": options["truncation"] or 0, f"{side}_truncation_length": -1,
            "opposite_ffn_norm": ffn and options["normalize_before_ffn"] != prenorm,
            "no_final_norm": prenorm, "no_affine_norm": not options["norm_affine"],
            "token_types": options["type_vocab_size"] if options["add_token_type_embeddings"] else 0,
        })  # fmt: skip
        if side == "decoder":
            chosen.update(max_target_positions=_longest(options), no_scale_embedding=True, output_bias=True)
        else:
            chosen.update(max_positions=_longest(options), lm_head="none", untie_lm_head=False)
            chosen["pooler_dropout"] = options["hidden_dropout_prob"] if dropout is None else dropout
        if self.arch == "MegaForMaskedLM":
            chosen["lm_head"] = "tanh" if options["add_lm_hidden_dense_layer"] else "linear"
            chosen["untie_lm_head"] = not options["tie_word_embeddings"]
        return chosen

    def task_options(self, options: Options, tensors: Mapping[str, Tensor]) -> Dict[str, Any]:
        if self.task == "sentence_prediction":
            classes = len(tensors.get(f"classification_heads.{HEAD}.out_proj.weight", ()))
            return {"data": "data", "num_classes": classes, "init_token": 0, "max_positions": _longest(options)}
        chunked = self.kind.side == "decoder" and options["use_chunking"]  # segments are then multiples of the chunk
        return {"data": "data", "tokens_per_sample": 0 if chunked else _longest(options)}

    def task_state(self, model: nn.Module, task: DictConfig, labels: Optional[Sequence[str]]) -> Dict[str, Any]:
        names, classes = self.labels, task.get("num_classes", 0)
        stored: List[str] = []
        if classes and names is not None:
            numbers = list(map(str, range(classes)))
            if isinstance(names, dict) and sorted(names) == sorted(numbers):
                stored = [str(names[number]) for number in numbers]
            if len({*stored}) < classes:
                raise _refusal("id2label", names, f"it must give each of the {classes} classes its own name")
        if labels is not None:
            if stored not in ([], _numbered(classes)):
                raise UserError(f"has the names of its classes in {CONFIG}; leave --labels out")
            stored = class_names(labels, classes)
        return {"classes": stored} if stored else {}

    def changes(self, options: Options, task_state: Mapping[str, Any]) -> List[str]:
        ordered = ", ".join(task_state.get("classes", ()))
        order = f"classes in order: {ordered}; give --task sentence_prediction a dict.txt of labels in this order"
        return [*self.remarks, *[order] * bool(ordered)]

    def remark(self, cfg: Options) -> str:
        words = [f"--task={self.task}", f"--criterion={self.criterion_name}", f"--arch={self.model}"]
        given = [name for name in ("num_classes", "init_token") if name in cfg["task"]]
        words += [f"{typed(name)}={cfg['task'][name]}" for name in given]
        for field in fields(MODEL_DATACLASS_REGISTRY[self.model]):
            value = cfg["model"][field.name]
            if field.name != "_name" and str(value) != str(field.default):
                words.append(typed(field.name) if value is True else f"{typed(field.name)}={value}")
        further = "--required-batch-size-multiple 1 --restore-file OUT --reset-optimizer"
        return f"to train it further: {' '.join(words)} {further}"

    def tensors(self, options: Options, tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
        named, renamed = {}, self.kind.renamed()
        for name, tensor in tensors.items():
            for theirs, released in OF_LAYERS.items():
                if name.endswith(f".{theirs}"):
                    name = name[: -len(theirs)] + released
            begin = next((begin for begin in renamed if name.startswith(begin)), "")
            named[renamed.get(begin, "") + name[len(begin) :]] = tensor
        embedding, head = f"{self.kind.side}.embed_tokens.weight", self.kind.head
        if options["tie_word_embeddings"] and head in named:
            if embedding in named and not torch.equal(named[embedding], named[head]):
                self.remarks.append(
                    "embeddings and head differ though they are tied: as transformers, it has the head's"
                )
            named[embedding] = named.pop(head)
        if options["tie_word_embeddings"] and "decoder.output_projection.bias" in named:
            named["decoder.output_bias"] = named.pop("decoder.output_projection.bias")
        if embedding in named and len(named[embedding]) != options["vocab_size"]:
            raise UserError(
                f"has {options['vocab_size']!r} for the option vocab_size and embeddings of {len(named[embedding])} "
                "types, so it is damaged; get it again from its source"
            )
        ours, last = translate(named), 2 * _reach(options) - 1
        ours.update({n: t[:last].clone() for n, t in ours.items() if n.endswith("position_bias.weight")})
        dense = ours.get(f"classification_heads.{POOLER}.dense.weight")
        if dense is not None:
            identity = {"weight": torch.eye(len(dense), dtype=dense.dtype), "bias": dense.new_zeros(len(dense))}
            ours.update({f"classification_heads.{POOLER}.out_proj.{name}": t for name, t in identity.items()})
        return ours


# ------------------------------------------------------------------------------------------- writing


def to_huggingface(
    checkpoint: Checkpoint, labels: Optional[Sequence[str]] = None
) -> Tuple[Dict[str, Any], Dict[str, Tensor], List[str]]:
    """The options and tensors of a folder that transformers loads, and remarks. `labels` are names of classes."""
    model = empty_model(checkpoint)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones are two once filled
    fill(model, checkpoint.tensors)
    if type(model) not in (MegaEncoderModel, MegaLanguageModel):
        raise UserError(
            f"contains a {checkpoint.word('model')}, which Hugging Face's Mega does not have; give a mega_encoder or "
            "mega_lm"
        )
    (side,) = model.STACKS
    cfg = {name: value.value if isinstance(value, Enum) else value for name, value in vars(model.cfg).items()}
    arch = _arch(model)

    counterparts = _counterparts(fields(model.OPTIONS))
    others = {name for name, change in changes(model.OPTIONS).items() if change != ALWAYS}
    others -= counterparts.keys() | IGNORED
    fits = {field.name: cfg[field.name] == field.default for field in fields(model.OPTIONS) if field.name in others}
    fits["no_scale_embedding"] = cfg.get("no_scale_embedding", True)
    fits["no_final_norm"] = not cfg["normalize_before"] or cfg["no_final_norm"]
    worded = {ours: theirs for ours, theirs in counterparts.items() if theirs in WORDS}
    fits.update({ours: cfg[ours] in WORDS[theirs].values() for ours, theirs in worded.items()})
    if arch == "MegaForMaskedLM":
        fits.update(lm_head=cfg["lm_head"] in ("tanh", "linear"), pooling=True)  # without a head, nothing is pooled
    wrong = [f"{cfg[name]!r} for {typed(name)}" for name, fit in fits.items() if not fit]
    if wrong:
        raise UserError(
            f"has {', '.join(wrong)}, which Hugging Face's Mega does not have; give a model trained with other values"
        )
    options = {theirs: cfg[ours] for ours, theirs in counterparts.items()}
    for ours, name in worded.items():
        options[name] = next(theirs for theirs, word in WORDS[name].items() if word == cfg[ours])
    dense, tied = cfg.get("lm_head") == "tanh", not cfg.get("untie_lm_head")
    if side == "decoder":
        dense, tied = cfg["output_dense"], cfg["share_decoder_input_output_embed"]
    chunk, width, taps = (cfg[f"{side}_{name}"] for name in ("chunk_size", "ffn_embed_dim", "truncation_length"))
    taps = cfg["truncation_length"] if taps == -1 else taps
    reach = max(cfg["max_target_positions" if side == "decoder" else "max_positions"], chunk)
    options = {
        **DEFAULTS, **options,
        "use_normalized_ffn": bool(width), "nffn_hidden_size": width or DEFAULTS["nffn_hidden_size"],
        "normalize_before_ffn": cfg["normalize_before"] != cfg["opposite_ffn_norm"],
        "norm_affine": not cfg["no_affine_norm"],
        "bidirectional": side == "encoder", "is_decoder": side == "decoder",
        "use_chunking": chunk > 0, "chunk_size": chunk, "truncation": taps or None, "max_positions": reach,
        "add_token_type_embeddings": cfg["token_types"] > 0, "type_vocab_size": cfg["token_types"] or 2,
        "vocab_size": len(checkpoint.tensors[f"{side}.embed_tokens.weight"]), "tie_word_embeddings": tied,
        "add_lm_hidden_dense_layer": dense, "classifier_dropout": cfg.get("pooler_dropout"),
        "model_type": "mega", "architectures": [arch], "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    remarks, unnamed = [f"{arch}, {parameters:,} parameters"], False
    if arch == "MegaForSequenceClassification":
        (head,) = model.classification_heads.values()
        numbers = _numbered(head.out_proj.out_features)
        names = list(checkpoint.task_state.get("classes") or numbers)
        unnamed = names == numbers
        if unnamed and labels is not None:
            names = class_names(labels, len(numbers))
        elif unnamed:
            remarks.append(f"its classes are {', '.join(names)}: --labels gives their names")
        options["id2label"] = dict(enumerate(map(str, names)))
        options["label2id"] = {name: number for number, name in options["id2label"].items()}
    if labels is not None and not unnamed:
        raise UserError("has no classes without names; leave --labels out")
    if side == "encoder" and arch != "MegaForMaskedLM" and model.encoder.lm_head is not None:
        remarks.append(f"the language model head is left out, since {arch} has none")
    return options, _tensors(options, arch, checkpoint.tensors), remarks


def _arch(model: nn.Module) -> str:
    if isinstance(model, MegaLanguageModel):
        return "MegaForCausalLM"
    heads = list(model.classification_heads)
    if len(heads) > 1:
        raise UserError(f"has the heads {', '.join(heads)} and Hugging Face's Mega has one; give a model with one")
    if heads:
        (head,) = model.classification_heads.values()
        dense, out = head.dense.weight, head.out_proj
        if len(dense) != dense.size(1):
            raise UserError(
                f"has a head of width {len(dense)}, and Hugging Face's Mega one of the width of the model, "
                f"{dense.size(1)}; give another model"
            )
        identity = torch.equal(out.weight, torch.eye(*out.weight.shape)) and not out.bias.any()
        return "MegaModel" if heads == [POOLER] and identity else "MegaForSequenceClassification"
    return "MegaModel" if model.encoder.lm_head is None else "MegaForMaskedLM"


def _tensors(options: Options, arch: str, tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """The tensors by Hugging Face's names and in its layout."""
    kind = KINDS[arch]
    renamed = {ours: theirs for theirs, ours in kind.renamed().items()}
    stack = f"{kind.side}.layers."
    layers = {name: tensor for name, tensor in tensors.items() if name.startswith(stack)}
    ours = translate_back(layers, options["normalization_type"] == "scalenorm")
    ours.update({name: tensor for name, tensor in tensors.items() if name not in layers})
    written = {}
    for name, tensor in ours.items():
        if name == "decoder.output_bias":
            name = "decoder.output_projection.bias"
        elif name.startswith("classification_heads.") and arch == "MegaForSequenceClassification":
            name = ".".join(["classification_heads", HEAD, *name.split(".")[2:]])
        begin = next((begin for begin in renamed if name.startswith(begin)), None)
        if begin is None or name.startswith(f"classification_heads.{POOLER}.out_proj."):
            continue  # a language model head of another class, and what stands for the pooler
        if name == kind.head and options["tie_word_embeddings"]:
            continue
        name = renamed[begin] + name[len(begin) :]
        for theirs, released in OF_LAYERS.items():
            if name.endswith(f".{released}"):
                name = name[: -len(released)] + theirs
        if name.endswith(".rel_pos_bias.rel_pos_bias"):  # entries that are never read
            tensor = F.pad(tensor, (0, 2 * options["max_positions"] - 1 - len(tensor)))
        elif name.endswith(".rel_pos_bias.alpha"):
            written[name.replace("alpha", "_float_tensor")] = tensor.new_zeros(1)
        written[name] = tensor
    if arch == "MegaForCausalLM":
        written.setdefault(
            "lm_head.bias",
            written[f"{kind.prefix}embedding_layer.word_embeddings.weight"].new_zeros(options["vocab_size"]),
        )
    return written


def content(options: Dict[str, Any], tensors: Mapping[str, Tensor]) -> Dict[str, bytes]:
    """The files of a folder by name; the options come last, so that they mark a complete folder."""
    (dtype,) = {str(tensor.dtype).split(".")[-1] for name, tensor in tensors.items() if "word_embeddings" in name}
    config = json.dumps({**options, "torch_dtype": dtype}, indent=2, sort_keys=True) + "\n"
    separate = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return {SAFE: _safetensors().save(separate, {"format": "pt"}), CONFIG: config.encode()}
