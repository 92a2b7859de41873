"""Families of released architectures: how the options of each become those of a model and a task of this package."""

import reprlib
from dataclasses import Field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from omegaconf import DictConfig
from torch import Tensor, nn

from mega_fairseq.cli import UserError
from mega_fairseq.cli.convert.names import translate
from mega_fairseq.models.embedding import types_of

Options = Mapping[str, Any]


class Family:
    """Released architectures that convert to the same model. Options are of the release, if not said otherwise."""

    archs: Tuple[str, ...]
    model: str  # registered name
    task: str
    criterion_name: str
    task_names: Tuple[str, ...]  # options of the task that the release has too
    names: Mapping[str, str] = {}  # the model's options with another name in the release
    values: Mapping[str, Mapping[str, str]] = {}  # values of the model's options that are other words in the release
    lacking: Tuple[str, ...] = ()  # released options that some of these architectures do not have

    def model_options(self, options: Options, ours: Sequence[Field]) -> Dict[str, Any]:
        """Those of our options of the model that the release has, and their values."""
        chosen = {}
        for field in ours:
            released = self.names.get(field.name, field.name)
            if released in options:
                value, words = options[released], self.values.get(field.name, {})
                chosen[field.name] = words.get(value, value) if isinstance(value, str) else value
            elif field.metadata.get("released") and field.name not in self.lacking:
                # Our default may give another function.
                raise UserError(f"lacks the option {released}, so it is damaged; get it again from its source")
        return chosen

    def task_options(self, options: Options, tensors: Mapping[str, Tensor]) -> Dict[str, Any]:
        """Options of the task. Tensors have our names."""
        return {name: options[name] for name in self.task_names if name in options}

    def criterion(self, options: Options) -> Dict[str, Any]:
        """The criterion for fairseq-validate."""
        return {"_name": self.criterion_name}

    def tensors(self, options: Options, tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
        """The tensors by our names and in our layout."""
        return translate(tensors)

    def settle(self, model: DictConfig, task: DictConfig, options: Options) -> None:
        """Adapts our options where the release differs."""

    def task_state(self, model: nn.Module, task: DictConfig, labels: Optional[Sequence[str]]) -> Dict[str, Any]:
        """What the task stores in checkpoints. `labels` are names of classes that the user gave."""
        if labels is not None:
            raise UserError("has no classes with names; leave --labels out")
        return {}

    def changes(self, options: Options, task_state: Mapping[str, Any]) -> List[str]:
        """Where the converted model differs from the released one."""
        return []

    def remark(self, cfg: Options) -> str:
        """What a user who trains the model needs to know. `cfg` is its configuration here."""
        return (
            "the optimizer's state and counters are dropped, since they belong to the released tensors: continue "
            "training with --finetune-from-model or --restore-file and the options of the converted model"
        )


class _Translation(Family):
    archs = ("mega", "mega_wmt_en_de", "mega_wmt_en_de_big")
    model, task = "mega_transformer", "translation"
    task_names = (
        *("data", "source_lang", "target_lang", "left_pad_source", "left_pad_target"),
        *("max_source_positions", "max_target_positions"),
    )

    def criterion(self, options: Options) -> Dict[str, Any]:
        name = options.get("criterion")
        if name == "label_smoothed_cross_entropy":
            return {"_name": name, **{key: options[key] for key in ("label_smoothing",) if key in options}}
        return {"_name": "adaptive_loss" if name == "adaptive_loss" else "cross_entropy"}

    def settle(self, model: DictConfig, task: DictConfig, options: Options) -> None:
        if model.truncation_length:
            model.decoder_truncation_length = 0  # the release ignores it in generation

    def changes(self, options: Options, task_state: Mapping[str, Any]) -> List[str]:
        taps = options.get("truncation_length")
        return _all_taps("the decoder's EMA", f"--truncation-length {taps} --decoder-truncation-length 0", taps)


class _Language(Family):
    archs = (
        *("mega_lm", "mega_lm_big", "mega_lm_adaptive_base", "mega_lm_adaptive_big", "mega_lm_wiki103"),
        *("mega_lm_enwik8_base", "mega_lm_enwik8_large"),
    )
    model, task, criterion_name = "mega_lm", "mega_language_modeling", "mega_lm_cross_entropy"
    task_names = (
        *("data", "tokens_per_sample", "variant_block_multiple_min", "variant_block_multiple_max", "valid_block"),
    )

    def model_options(self, options: Options, ours: Sequence[Field]) -> Dict[str, Any]:
        chosen = super().model_options(options, ours)
        if chosen["max_target_positions"] is None:
            chosen["max_target_positions"] = options.get("tokens_per_sample")
        return chosen

    def settle(self, model: DictConfig, task: DictConfig, options: Options) -> None:
        model.truncation_length = 0  # the release ignores it in evaluation
        if model.decoder_chunk_size != -1:
            task.tokens_per_sample = 0  # segments are multiples of the chunk
        # The release accepts these also if there is nothing to tie.
        model.share_decoder_input_output_embed &= model.adaptive_softmax_cutoff is None
        model.tie_adaptive_proj &= model.tie_adaptive_weights

    def changes(self, options: Options, task_state: Mapping[str, Any]) -> List[str]:
        return _all_taps("the EMA", "--truncation-length 0", options.get("truncation_length"))


def _all_taps(ema: str, option: str, taps: Any) -> List[str]:
    remark = f"{ema} keeps all its taps ({option}): the release used {taps} in training, but all in evaluation"
    return [remark] if taps else []


class _Classification(Family):
    archs = (
        *("mega_lra_listop", "mega_lra_imdb", "mega_lra_aan", "mega_lra_cifar10", "mega_lra_pf32", "mega_lra_pf128"),
        *("mega_sc_raw", "mega_sc_raw_base", "mega_sc_raw_big", "sc_raw"),
    )
    model, task, criterion_name = "mega_classifier", "mega_classification", "sentence_prediction"
    task_names = ("data", "max_positions")
    names = {
        "normalization_type": "norm_type",
        "normalize_before": "encoder_normalize_before",
        "hidden_dropout": "act_dropout",
        "activation_dropout": "act_dropout",
        "encoder_z_dim": "z_dim",
        "encoder_n_dim": "n_dim",
        "encoder_chunk_size": "chunk_size",
        "pooling": "sen_rep_type",
        "classifier_dim": "classifier_out_dim",
    }
    values = {"pooling": {"mp": "mean", "cls": "first"}}
    lacking = ("encoder_embed_path", "normalize_embedding")  # those of speech have no normalize_embedding

    def model_options(self, options: Options, ours: Sequence[Field]) -> Dict[str, Any]:
        activation = options.get("classifier_activation_fn")
        if activation != "gelu":
            raise UserError(
                f"has {reprlib.repr(activation)} for the option classifier_activation_fn, which cannot be converted; "
                "give a model with gelu"
            )
        return super().model_options(options, ours)

    def task_options(self, options: Options, tensors: Mapping[str, Tensor]) -> Dict[str, Any]:
        common = super().task_options(options, tensors)
        if "encoder.embed_tokens.bias" not in tensors:
            # The release puts <CLS>, the last type, in front if that is the position that it reads.
            first = types_of(tensors, "encoder.embed_tokens") - 1 if options.get("sen_rep_type") == "cls" else None
            return {**common, "input_kind": "tokens", "shorten_method": "truncate", "init_token": first}
        # Images and speech: the latter have neither of these options.
        normalization = options.get("pixel_normalization") if "input_type" in options else (0, 1)
        mean, deviation = (0.5, 0.5) if normalization is None else normalization
        return {**common, "input_kind": "values", "values_mean": mean, "values_deviation": deviation}

    def settle(self, model: DictConfig, task: DictConfig, options: Options) -> None:
        model.pairs = options.get("classifier_in_dim") == 2 * model.encoder_embed_dim
        if not model.classifier_layers:
            model.classifier_dim = 0  # the release has the width of its input there

    def task_state(self, model: nn.Module, task: DictConfig, labels: Optional[Sequence[str]]) -> Dict[str, Any]:
        heads = list(model.classification_heads.values())
        if len(heads) != 1:
            raise UserError(
                f"contains {len(heads)} heads in place of 1, so it is damaged; get it again from its source"
            )
        classes = heads[0].out.out_features
        if task.input_kind == "values":
            super().task_state(model, task, labels)
            return {"classes": [str(number) for number in range(classes)]}
        return {} if labels is None else {"classes": class_names(labels, classes)}

    def changes(self, options: Options, task_state: Mapping[str, Any]) -> List[str]:
        if task_state:
            return [f"classes in order: {', '.join(task_state['classes'])}"]
        return ["the order of the classes is not stored and is that of the data folder: --labels stores it"]


def class_names(labels: Sequence[str], classes: int) -> List[str]:
    """The names that the user gave, if there is one for each class."""
    if len(labels) != classes:
        raise UserError(
            f"has {classes} classes and --labels names {len(labels)}; give label-bin/dict.txt of the data that the "
            "model was trained on"
        )
    return list(labels)


TRANSLATION, LANGUAGE, CLASSIFICATION = _Translation(), _Language(), _Classification()
FAMILIES = (TRANSLATION, LANGUAGE, CLASSIFICATION)


def family_of(options: Options) -> Family:
    for family in FAMILIES:
        if options.get("arch") in family.archs:
            return family
    known = ", ".join(arch for family in FAMILIES for arch in family.archs)
    raise UserError(
        f"has the architecture {reprlib.repr(options.get('arch'))}, which cannot be converted; give one of {known}"
    )
