"""Small translation models, language models and classifiers with random weights, and inputs for them."""

from argparse import Namespace
from dataclasses import fields
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from fairseq.models.transformer import TransformerModel, base_architecture
from hypothesis import strategies as st
from torch import Tensor

from mega_fairseq.models import (
    MegaClassifier,
    MegaClassifierConfig,
    MegaEncoderConfig,
    MegaEncoderModel,
    MegaLanguageModel,
    MegaLMConfig,
    MegaTransformerConfig,
    MegaTransformerModel,
)
from mega_fairseq.models.decoder import STATE
from mega_fairseq.modules import EXAMPLES, MIXERS
from mega_fairseq.tasks import MegaDocumentTranslationConfig, MegaDocumentTranslationTask
from tests.helpers.golden_models import PAD, classification, dictionary, task
from tests.helpers.parameters import perturbed

TYPES, EOS = 40, 2  # size of the dictionary, end of sentence
SIZES = {"layers": 2, "embed_dim": 16, "hidden_dim": 24, "z_dim": 8, "n_dim": 4, "ffn_embed_dim": 20}


def _sizes(side: str, mixer: str) -> Dict[str, int]:
    others = {"layers", "embed_dim", "ffn_embed_dim"}
    return {f"{side}_{name}": size for name, size in SIZES.items() if mixer == "mega" or name in others}


def mixer_of(name: str) -> str:
    """The name in MIXERS of EXAMPLES[name]."""
    return next(mixer for mixer, config in MIXERS.items() if type(EXAMPLES[name]) is config)


def mixer_options(name: str, *sides: str) -> Dict[str, Any]:
    """The options of a model that give the mixers of these sides the settings of EXAMPLES[name], but for its width."""
    options = {}
    for f in fields(EXAMPLES[name]):
        option, value = f.metadata.get("option"), getattr(EXAMPLES[name], f.name)
        if option and f.name != "dim" and (value != f.default or f.name == "chunk_size"):
            options.update({option.format(side=side): -1 if value is None else value for side in sides})
    return options


# ------------------------------------------------------------------------------------------------ translation


SENTENCES, BEAMS = 3, 3
SEPARATORS = (5, 6)  # between lines of a source and of a target
SEPARATOR = TYPES - 1  # that of `documents_task`, on both sides
IN_LINES = {"cross_attention_positions": "sentence", "cross_attention_window": 1}


def translation_model(types: int = TYPES, **options: Any) -> MegaTransformerModel:
    torch.manual_seed(0)
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()}
    cfg = MegaTransformerConfig(**{**sizes, "max_source_positions": 400, "max_target_positions": 400, **options})
    translation = task(types)
    translation.separators = SEPARATORS
    return perturbed(MegaTransformerModel.build_model(cfg, translation), 0.2)


def documents_task(**options: Any) -> MegaDocumentTranslationTask:
    words = [dictionary(SEPARATOR) for _ in range(2)]
    return MegaDocumentTranslationTask(MegaDocumentTranslationConfig(**options), *words)


def sources(pad_left: bool = True) -> Tensor:
    """(3, 7) sentences of lengths 7, 4 and 6, padded."""
    torch.manual_seed(1)
    tokens = torch.randint(4, TYPES, (SENTENCES, 7))
    for row, pads in enumerate((0, 3, 1)):
        if pads:
            tokens[row, slice(0, pads) if pad_left else slice(7 - pads, 7)] = PAD
    return tokens


def targets(length: int = 5) -> Tensor:
    return torch.randint(4, TYPES, (SENTENCES, length), generator=torch.Generator().manual_seed(2))


def windows_of(documents: Sequence[Sequence[int]], seed: int = 0) -> List[List[int]]:
    """Sources of `documents_task` with lines of these lengths."""
    draw, rows = np.random.default_rng(seed), []
    for lengths in documents:
        lines = [[*draw.integers(4, SEPARATOR, length).tolist(), SEPARATOR] for length in lengths]
        rows.append([*sum(lines, [])[:-1], EOS])
    return rows


@st.composite
def orders_of_beams(draw: Any) -> List[List[int]]:
    """The rows that the rows of a search continue at each step: beams of the same sentence, until it is finished."""
    orders, sentences = [], SENTENCES
    for _ in range(draw(st.integers(1, 12))):
        staying = [s for s in range(sentences) if draw(st.integers(0, 9))] or [0]
        orders.append([s * BEAMS + draw(st.integers(0, BEAMS - 1)) for s in staying for _ in range(BEAMS)])
        sentences = len(staying)
    return orders


class Search:
    """A minimal generator: the tokens of each row, and `states` incremental states of a model to decode them with."""

    def __init__(self, model: Any, seed: int = 0, states: int = 1):
        self.model, self.random = model, torch.Generator().manual_seed(seed)
        self.sentence, self.out = torch.arange(SENTENCES).repeat_interleave(BEAMS), None
        if hasattr(model, "encoder"):
            self.out = model.encoder.reorder_encoder_out(model.encoder(sources()), self.sentence)
        self.tokens, self.states = torch.full((SENTENCES * BEAMS, 1), 2), [{} for _ in range(states)]

    def decode(self, number: int = 0) -> Tensor:
        return self.model.decoder(self.tokens, self.out, self.states[number])[0]

    def follow(self, order: Sequence[int]) -> None:
        """Replaces the rows by the rows `order`, and appends a random word to each."""
        rows = torch.tensor(order)
        for state in self.states:
            self.model.decoder.reorder_incremental_state_scripting(state, rows)
        if self.out is not None:
            self.out = self.model.encoder.reorder_encoder_out(self.out, rows)
        self.sentence = self.sentence[rows]
        words = torch.randint(4, 12, (len(rows), 1), generator=self.random)  # separators are among them
        self.tokens = torch.cat([self.tokens[rows], words], 1)

    def kept(self) -> Any:
        """What the decoder keeps in the first state."""
        return self.model.decoder.get_incremental_state(self.states[0], STATE)


def stock_transformer() -> TransformerModel:
    """fairseq's own."""
    torch.manual_seed(0)
    sizes = {**_sizes("encoder", "stock"), **_sizes("decoder", "stock")}
    args = Namespace(**sizes, encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0)
    base_architecture(args)
    return TransformerModel.build_model(args, task(TYPES)).eval()


# ------------------------------------------------------------------------------------------------ language models


CHUNK = 5
ADAPTIVE = {"adaptive_softmax_cutoff": "10,20", "adaptive_softmax_factor": 2.0}
TIED = {**ADAPTIVE, "adaptive_input": True, "adaptive_input_factor": 2.0, "tie_adaptive_weights": True}
HEADS = {
    "softmax": {"share_decoder_input_output_embed": True},
    "tied, with a bias": {"share_decoder_input_output_embed": True, "output_bias": True},
    "dense, with a bias": {"output_dense": True, "output_bias": True},
    "adaptive": ADAPTIVE,
}


def language_model(types: int = TYPES, **options: Any) -> MegaLanguageModel:
    torch.manual_seed(0)
    sizes = _sizes("decoder", options.get("token_mixer", "mega"))
    common = {"decoder_chunk_size": CHUNK, "normalize_before": True, "dropout": 0.0}
    if "decoder_z_dim" in sizes:
        common["rel_pos_bias"] = "rotary"
    cfg = MegaLMConfig(**{**sizes, **common, "max_target_positions": 64, **options})
    return perturbed(MegaLanguageModel.build_model(cfg, task(types)), 0.1, adaptive=0.3)


def texts(*lengths: int, types: int = TYPES) -> Tuple[List[Tensor], List[Tensor]]:
    """Sources and targets of these lengths."""
    random = torch.Generator().manual_seed(1)
    targets = [torch.randint(4, types, (length,), generator=random) for length in lengths]
    return [torch.cat([torch.tensor([EOS]), target[:-1]]) for target in targets], targets


def padded(rows: List[Tensor], left: bool) -> Tensor:
    width = max(row.numel() for row in rows)
    pads = [torch.full((width - row.numel(),), PAD) for row in rows]
    return torch.stack([torch.cat([pad, row] if left else [row, pad]) for pad, row in zip(pads, rows)])


def net_input(rows: Sequence[Any], left: bool = True) -> Dict[str, Tensor]:
    """Sources of a batch as fairseq gives them to models."""
    tokens = padded([torch.as_tensor(row) for row in rows], left)
    return {"src_tokens": tokens, "src_lengths": torch.tensor(list(map(len, rows)))}


# ------------------------------------------------------------------------------------------------ encoders


LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 13)


def documents(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> List[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(4, TYPES, (length,), generator=random) for length in lengths]


def batch(rows: List[Tensor], width: int = 16) -> Tensor:
    """One tensor of the rows, each with pads before and after it."""
    tokens = torch.full((len(rows), width), PAD)
    for i, row in enumerate(rows):
        start = (3 * i + 2) % (width - len(row) + 1)
        tokens[i, start : start + len(row)] = row
    return tokens


def _with_head(model: Any, config: Any, types: Optional[int], options: Dict[str, Any]) -> Any:
    """With one classification head, called "head"; without `types` its inputs are real numbers."""
    torch.manual_seed(0)
    sizes = _sizes("encoder", options.get("encoder_token_mixer", "mega"))
    cfg = config(**{**sizes, "dropout": 0.0, "max_positions": 64, **options})
    made = model.build_model(cfg, classification(types))
    made.register_classification_head("head", num_classes=3)
    return perturbed(made, 0.2)


def encoder(types: int = TYPES, **options: Any) -> MegaEncoderModel:
    return _with_head(MegaEncoderModel, MegaEncoderConfig, types, options)


def classifier(types: Optional[int] = TYPES, **options: Any) -> MegaClassifier:
    return _with_head(MegaClassifier, MegaClassifierConfig, types, options)


def of_example(make: Any, mixer: str = "mega", **options: Any) -> Any:
    """An `encoder` or `classifier` in double precision, with the mixers of EXAMPLES[mixer]."""
    return make(**{"encoder_token_mixer": mixer_of(mixer), **mixer_options(mixer, "encoder"), **options}).double()
