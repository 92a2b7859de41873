"""Translation with Mega in place of the Transformer (paper, section 4.3), for fairseq's `translation` task."""

from dataclasses import dataclass
from typing import Any, Dict, Tuple

from fairseq.dataclass import ChoiceEnum
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor

from mega_fairseq.fairseq_options import SAME_SHAPES, option, typed
from mega_fairseq.models.adaptive import adaptive_softmax
from mega_fairseq.models.base import MegaModel
from mega_fairseq.models.decoder import MegaDecoder
from mega_fairseq.models.embedding import token_embedding
from mega_fairseq.models.encoder import MegaEncoder
from mega_fairseq.models.options import DecoderOptions, EncoderOptions, mirror
from mega_fairseq.models.same_model import check_start
from mega_fairseq.models.source_use import SourceUse
from mega_fairseq.modules import MIXERS, GatedCrossAttentionConfig
from mega_fairseq.modules.cross_attention import POSITIONS


@dataclass
class MegaTransformerConfig(EncoderOptions, DecoderOptions):
    """Options of translation models."""

    share_all_embeddings: bool = option(
        False,
        "tie source and target embeddings and output projection; needs a joined dictionary and one width",
        released=True,
    )
    encoder_token_mixer: ChoiceEnum(list(MIXERS)) = option("mega", "token mixer of all encoder layers")
    decoder_token_mixer: ChoiceEnum(list(MIXERS)) = option("mega", "token mixer of all decoder layers")
    cross_attention_positions: ChoiceEnum(list(POSITIONS)) = mirror(GatedCrossAttentionConfig, "positions", "token")
    cross_attention_window: int = mirror(GatedCrossAttentionConfig, "window", -1, "; -1 for all lines", least=-1)
    # options of the translation task
    max_source_positions: int = option(
        II("task.max_source_positions"), None, least=1, change=SAME_SHAPES, released=True
    )
    max_target_positions: int = option(
        II("task.max_target_positions"), None, least=1, change=SAME_SHAPES, released=True
    )


class MegaTransformerModel(MegaModel, FairseqEncoderDecoderModel):
    """A Mega encoder and decoder; `--arch mega_transformer` builds it and `from_pretrained` loads it."""

    STACKS, OPTIONS = ("encoder", "decoder"), MegaTransformerConfig
    full_context_alignment = True  # fairseq aligns whole targets in a forward pass of their own, not in the search

    def __init__(self, cfg: MegaTransformerConfig, encoder: MegaEncoder, decoder: MegaDecoder):
        super().__init__(encoder, decoder)
        self.cfg = cfg
        self.source_use = SourceUse()

    def set_num_updates(self, num_updates: int) -> None:
        """Called by fairseq before each update, with the number of those before."""
        super().set_num_updates(num_updates)
        self.source_use.updates = num_updates + 1

    def forward(self, src_tokens: Tensor, src_lengths: Tensor, prev_output_tokens: Tensor, **options: Any) -> Any:
        """Tokens of sources and targets -> scores (B, L, V), or features (B, L, D) with the option `features_only`.

        Called in training and validation, not in a search.
        """
        output = super().forward(src_tokens, src_lengths, prev_output_tokens, **options)
        if not self.training:
            self.source_use.check(self, src_tokens, src_lengths, prev_output_tokens)
        return output

    @classmethod
    def build_model(cls, cfg: MegaTransformerConfig, task: FairseqTask) -> "MegaTransformerModel":
        cls.check_options(cfg, task)
        source, target = task.source_dictionary, task.target_dictionary
        if cfg.share_all_embeddings:
            if source != target:
                raise ValueError(
                    "--share-all-embeddings needs one dictionary for both languages and they have two; "
                    "run fairseq-preprocess with --joined-dictionary, or leave the option out"
                )
            paths = cfg.encoder_embed_path, cfg.decoder_embed_path
            if cfg.encoder_embed_dim != cfg.decoder_embed_dim or paths[1] not in (None, paths[0]):
                raise ValueError(
                    "--share-all-embeddings has one table; make --encoder-embed-dim and --decoder-embed-dim equal, and "
                    "give only --encoder-embed-path"
                )
            cfg.share_decoder_input_output_embed = True
        elif cfg.share_decoder_input_output_embed and cfg.adaptive_softmax_cutoff is not None:
            raise ValueError(
                "--share-decoder-input-output-embed ties the output projection, and an adaptive softmax has none; "
                "leave out this option or --adaptive-softmax-cutoff"
            )
        decoder_embed = encoder_embed = token_embedding(source, cfg.encoder_embed_dim, cfg.encoder_embed_path)
        if not cfg.share_all_embeddings:
            decoder_embed = token_embedding(target, cfg.decoder_embed_dim, cfg.decoder_embed_path)
        longest = max(cfg.max_source_positions, cfg.max_target_positions)
        model = cls(
            cfg,
            MegaEncoder(cfg, source, encoder_embed, cfg.max_source_positions),
            MegaDecoder(cfg, target, decoder_embed, longest, cfg.encoder_embed_dim, adaptive_softmax(cfg, len(target))),
        )
        cross = model.decoder.layers[0].cross_attention.config
        if cross.takes_segments:
            model.decoder.separators = getattr(task, "separators", None)
            if model.decoder.separators is None:
                raise ValueError(
                    "--cross-attention-positions sentence and --cross-attention-window are for texts of several lines; "
                    "give --task mega_document_translation, or leave them out"
                )
        model.decoder.need_attn = bool(getattr(getattr(task, "cfg", None), "load_alignments", False))
        # fairseq's loss takes the logarithm of the last layer's weights in each update.
        if model.decoder.need_attn and (cfg.attention_activation_fn != "softmax" or cfg.decoder_layerdrop > 0.0):
            raise ValueError(
                "--load-alignments trains the attention of the last layer; give --attention-activation-fn softmax and "
                "leave out --decoder-layerdrop"
            )
        check_start(model, cfg, task)
        return model

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Fits a checkpoint to this model; refuses longer sources or targets than position bias simple has learned."""
        table = state_dict.get("decoder.layers.0.cross_attention.position_bias.weight")
        if self.decoder.layers[0].cross_attention.longest is not None and table is not None:
            learned = (table.numel() + 1) // 2
            for limit in ("max_source_positions", "max_target_positions"):
                if (allowed := getattr(self.cfg, limit)) > learned:
                    raise ValueError(
                        f"{typed(limit)} is {allowed} and the position bias 'simple' of this model reaches {learned} "
                        "tokens; allow no more, or train with --rel-pos-bias rotary"
                    )
        super().upgrade_state_dict_named(state_dict, name)

    def max_positions(self) -> Tuple[int, int]:
        return min(self.encoder.max_positions(), self.decoder.max_source_positions()), self.decoder.max_positions()
