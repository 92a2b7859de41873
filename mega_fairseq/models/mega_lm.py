"""Language modelling: Mega-chunk as a recurrent model over streams of any length (paper, section 4.4)."""

import re
from dataclasses import dataclass
from typing import Optional

from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from fairseq.models import FairseqLanguageModel
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationTask
from torch import nn

from mega_fairseq.fairseq_options import ALWAYS, SAME_SHAPES, option
from mega_fairseq.models.adaptive import adaptive_softmax, check_factor, cutoffs
from mega_fairseq.models.base import MegaModel
from mega_fairseq.models.embedding import NarrowEmbedding, token_embedding
from mega_fairseq.models.language_decoder import MegaLanguageDecoder
from mega_fairseq.models.options import DecoderOptions
from mega_fairseq.models.same_model import check_start
from mega_fairseq.modules import MIXERS
from mega_fairseq.modules.adaptive_input import AdaptiveInput


@dataclass
class MegaLMConfig(DecoderOptions):
    """Options of language models."""

    token_mixer: ChoiceEnum(list(MIXERS)) = option("mega", "token mixer of all layers")
    decoder_input_dim: int = option(0, "width of token embeddings; 0 for --decoder-embed-dim", least=0, released=True)
    token_types: int = option(
        0, "number of token types; all tokens get the embedding of the first", least=0, huggingface="type_vocab_size"
    )
    no_affine_final_norm: bool = option(
        False, "no learned scale and offset in the norm after the last layer", needs="normalize_before", released=True
    )
    adaptive_input: bool = option(False, "narrower embeddings for rarer types", released=True)
    adaptive_input_cutoff: Optional[str] = option(
        None,
        "ends of the bands of an adaptive input; by default those of the softmax",
        needs="adaptive_input",
        released=True,
    )
    adaptive_input_factor: float = option(
        4.0, "each band is narrower than the one before by this factor", least=1, needs="adaptive_input", released=True
    )
    tie_adaptive_weights: bool = option(False, "share the tables of adaptive input and adaptive softmax", released=True)
    tie_adaptive_proj: bool = option(False, "also share their projections", released=True)
    max_target_positions: int = option(
        2048,
        "longest sequence of a model with position bias simple and no chunks",
        least=1,
        change=SAME_SHAPES,
        released=True,
        huggingface="max_positions",
    )
    piece_tokens: int = option(
        8192,
        "tokens processed at once outside training; longer streams are processed in pieces, with equal results",
        least=1,
        change=ALWAYS,
    )


class MegaLanguageModel(MegaModel, FairseqLanguageModel):
    """A causal Mega decoder; `--arch mega_lm` builds it and `from_pretrained` loads it."""

    STACKS, OPTIONS = ("decoder",), MegaLMConfig

    def __init__(self, cfg: MegaLMConfig, decoder: MegaLanguageDecoder):
        super().__init__(decoder)
        self.cfg = cfg

    @classmethod
    def build_model(cls, cfg: MegaLMConfig, task: FairseqTask) -> "MegaLanguageModel":
        if isinstance(task, TranslationTask):
            raise ValueError(
                "--arch mega_lm has no encoder for the source of --task translation; choose an --arch that starts with "
                "mega_transformer, or --task mega_language_modeling"
            )
        if hasattr(task, "label_dictionary"):
            raise ValueError(
                "--arch mega_lm predicts tokens, and this --task has classes; choose an --arch that starts with "
                "mega_classifier or mega_lra, or --task mega_language_modeling"
            )
        cls.check_options(cfg, task)
        dictionary = task.source_dictionary
        if len(task.target_dictionary) != len(dictionary):
            raise ValueError("--output-dictionary-size is not for Mega models, which predict all types; leave it out")
        embed_tokens = _embedding(cfg, dictionary)
        tied = embed_tokens if cfg.tie_adaptive_weights else None
        softmax = adaptive_softmax(cfg, len(dictionary), tied, cfg.tie_adaptive_proj)
        decoder = MegaLanguageDecoder(
            cfg,
            dictionary,
            embed_tokens,
            cfg.max_target_positions,
            adaptive_softmax=softmax,
            affine_final_norm=not cfg.no_affine_final_norm,
        )
        model = cls(cfg, decoder)
        check_start(model, cfg, task)
        return model


def _embedding(cfg: MegaLMConfig, dictionary: Dictionary) -> nn.Module:
    width, dim, types = cfg.decoder_input_dim or cfg.decoder_embed_dim, cfg.decoder_embed_dim, len(dictionary)
    softmax, own = cfg.adaptive_softmax_cutoff, cfg.adaptive_input_cutoff  # without bands of its own, the softmax's
    if cfg.adaptive_input and not (own or softmax):
        raise ValueError("--adaptive-input has no bands; give --adaptive-input-cutoff, as in 20000,60000")
    if cfg.adaptive_input and cfg.decoder_embed_path:
        raise ValueError("--decoder-embed-path fills one table and --adaptive-input has several; leave one of them out")
    if cfg.tie_adaptive_weights or cfg.tie_adaptive_proj:
        both = cfg.tie_adaptive_weights and cfg.adaptive_input and softmax
        equal = width == dim and cfg.adaptive_input_factor == cfg.adaptive_softmax_factor
        if not (both and equal and re.findall(r"\d+", own or softmax) == re.findall(r"\d+", softmax)):
            raise ValueError(
                "--tie-adaptive-weights, and --tie-adaptive-proj with it, share the tables of --adaptive-input and "
                "--adaptive-softmax-cutoff; give both, and make --adaptive-input-cutoff, --adaptive-input-factor and "
                "--decoder-input-dim equal to --adaptive-softmax-cutoff, --adaptive-softmax-factor and "
                "--decoder-embed-dim"
            )
    if cfg.share_decoder_input_output_embed and (cfg.adaptive_input or softmax or width != dim):
        raise ValueError(
            "--share-decoder-input-output-embed, which most architectures set, ties one table of one width; leave out "
            "--adaptive-input, --adaptive-softmax-cutoff and --decoder-input-dim, or give --arch mega_lm without it, "
            "and --tie-adaptive-weights to tie adaptive ones"
        )
    if cfg.adaptive_input:
        name = "--adaptive-input-cutoff" if own else "--adaptive-softmax-cutoff"
        ends = cutoffs(name, own or softmax, types)
        if ends[0] < dictionary.nspecial:
            raise ValueError(
                f"{name} starts with {ends[0]}, and the first band of an adaptive input contains fairseq's "
                f"{dictionary.nspecial} special symbols; start with at least {dictionary.nspecial}"
            )
        check_factor("--adaptive-input-factor", cfg.adaptive_input_factor, width, ends)
        return AdaptiveInput(types, dictionary.pad(), width, dim, ends, cfg.adaptive_input_factor)
    if width != dim:
        return NarrowEmbedding(dictionary, width, dim, cfg.decoder_embed_path)
    return token_embedding(dictionary, dim, cfg.decoder_embed_path)
