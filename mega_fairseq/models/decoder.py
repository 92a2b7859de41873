"""A causal Mega decoder with fairseq's interface: whole targets, or token by token with a carried state."""

from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder
from fairseq.modules import AdaptiveSoftmax
from torch import Tensor, nn

from mega_fairseq.fairseq_options import UNBOUNDED
from mega_fairseq.models.beam import DecoderState, Ready, ReadyOnce, reorder
from mega_fairseq.models.embedding import check_types, embed, embedding_norm, final_norm
from mega_fairseq.models.encoder_out import EncoderOut, aligned_source, in_given_order
from mega_fairseq.models.layers import layers_to_run, run_layer
from mega_fairseq.models.options import DecoderOptions, layer_configs
from mega_fairseq.models.retained_dropout import keep_dropout
from mega_fairseq.modules import Block, BlockState
from mega_fairseq.modules.layer import DropoutSwitch
from mega_fairseq.ops.linear import FORMATS, ready_linear, weights_in
from mega_fairseq.ops.padding import Alignment, Padding

Blocks = Tuple[BlockState, ...]
Source = Tuple[Optional[Tensor], Optional[Padding]]  # aligned_source, for layers that project it themselves
Extra = Dict[str, List[Optional[Tensor]]]
NO_SOURCE: Source = (None, None)
STATE = "state"  # key of the DecoderState in fairseq's incremental state


class MegaDecoder(FairseqIncrementalDecoder):
    """Target tokens (B, L) and, in translation, the encoder's output -> scores (B, L, V)."""

    DICTIONARY = "the target's dictionary"

    def __init__(
        self,
        cfg: DecoderOptions,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        max_positions: int,
        source_dim: Optional[int] = None,
        adaptive_softmax: Optional[AdaptiveSoftmax] = None,
        affine_final_norm: bool = True,
    ):
        super().__init__(dictionary)
        if cfg.generation_weights not in FORMATS:
            raise ValueError(f"generation_weights is {cfg.generation_weights!r}; choose one of {', '.join(FORMATS)}")
        self.cfg, self.padding_idx, dim = cfg, dictionary.pad(), cfg.decoder_embed_dim
        self.embed_tokens = embed_tokens
        self.embed_norm = embedding_norm(cfg, dim)
        layers = layer_configs(cfg, "decoder", max_positions, source_dim)
        self.layers = nn.ModuleList(Block(*configs) for configs in layers)
        self.final_norm = final_norm(cfg, dim, affine_final_norm)
        self.adaptive_softmax, self.output_projection = adaptive_softmax, None
        if adaptive_softmax is None and not cfg.share_decoder_input_output_embed:
            self.output_projection = nn.Linear(dim, len(dictionary), bias=False)
            nn.init.normal_(self.output_projection.weight, std=dim**-0.5)
        self.dropout_module = DropoutSwitch()
        self.need_attn = False  # whether to return the last layer's attention to the source in training, too
        self.kept: Optional[ReadyOnce] = None  # once prepared for generation

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[EncoderOut] = None,
        incremental_state: Optional[Dict[str, Any]] = None,
        features_only: bool = False,
        **unused: Any,
    ) -> Tuple[Tensor, Extra]:
        x, extra = self.extract_features(prev_output_tokens, encoder_out, incremental_state)
        state = None if incremental_state is None else self.get_incremental_state(incremental_state, STATE)
        if features_only:
            return x, extra
        if state is not None and state.ready is not None and state.ready.output is not None and x.size(1) == 1:
            return state.ready.output(x.squeeze(1)).unsqueeze(1), extra  # (R, 1, D) -> (R, 1, V)
        return self.output_layer(x), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[EncoderOut] = None,
        incremental_state: Optional[Dict[str, Any]] = None,
        **unused: Any,
    ) -> Tuple[Tensor, Extra]:
        """Tokens (B, L) -> features (B, L, D); with an incremental state, only of new tokens."""
        carry, source = incremental_state is not None, NO_SOURCE
        state = self.get_incremental_state(incremental_state, STATE) if carry else None
        if state is not None:
            # Callers pass all tokens so far, as fairseq's generator does, or only the newest one.
            unseen = max(1, prev_output_tokens.size(1) - state.length)
            prev_output_tokens = prev_output_tokens[:, -unseen:]
        elif carry or not self.training:
            state = self.start(encoder_out)
        else:
            # Each layer projects the source itself: a dropped layer need not do so, a recomputed one does so again.
            state, source = self.start(), aligned_source(encoder_out)
        ready = carry and prev_output_tokens.size(1) == 1
        # After a search, fairseq aligns the whole targets (--print-alignment); steps are faster without weights.
        need_attn = not carry and encoder_out is not None and (self.need_attn or self.kept is not None)
        x, attn, state = self._advance(prev_output_tokens, state, carry, ready, need_attn, source)
        if carry:
            self.set_incremental_state(incremental_state, STATE, state)
        return x, {"attn": [None if attn is None else in_given_order(attn, encoder_out)]}

    def start(self, encoder_out: Optional[EncoderOut] = None) -> DecoderState:
        """The state before the first token. In translation, each layer projects each source once."""
        source, padding = aligned_source(encoder_out)
        if source is None:
            return DecoderState(tuple(BlockState(None) for _ in self.layers), 0)
        blocks = (BlockState(None, b.cross_attention.project_source(source, padding)) for b in self.layers)
        return DecoderState(tuple(blocks), 0)

    def _advance(
        self,
        tokens: Tensor,
        state: DecoderState,
        carry: bool,
        ready: bool = False,
        need_attn: bool = False,
        source: Source = NO_SOURCE,
    ) -> Tuple[Tensor, Optional[Tensor], DecoderState]:
        """Tokens (B, L) after `state` -> features, attention of the last layer to the source, the next state."""
        padding = tokens.eq(self.padding_idx)  # (B, L)
        align = Alignment.where_needed(padding)
        x = embed(self, tokens if align is None else align.front(tokens))  # (B, width, D)
        # Pads come last, where no real token attends to them, so the mask is only needed for a carried state.
        mask = align.done() if align is not None and carry else None
        steps = None
        if ready and align is None and all(layer.takes_step(s) for layer, s in zip(self.layers, state.blocks)):
            steps = state.ready or self.ready()
        rate = 0.0 if carry else self.cfg.decoder_layerdrop
        x, blocks, attn = self.run_layers(x, state.blocks, layers_to_run(self, rate), steps, mask, need_attn, source)
        if align is not None:
            x = align.back(x).masked_fill(padding.unsqueeze(-1), 0.0)
            attn = None if attn is None else align.back(attn).masked_fill(padding.unsqueeze(-1), 0.0)
        return x, attn, DecoderState(blocks, state.length + x.size(1), state.shared, steps)

    def run_layers(
        self,
        x: Tensor,
        blocks: Blocks,
        numbers: Iterable[int],
        steps: Optional[Ready] = None,
        mask: Optional[Padding] = None,
        need_attn: bool = False,
        source: Source = NO_SOURCE,
    ) -> Tuple[Tensor, Blocks, Optional[Tensor]]:
        """Embeddings (B, n, D) and states -> features (B, n, D), the next states, and attention (B, n, m) if needed."""
        after, attn = list(blocks), None
        for i in numbers:
            layer, past = self.layers[i], blocks[i]
            if need_attn and layer is self.layers[-1]:
                x, after[i], attn = layer(x, past, mask, *source, need_weights=True)
            elif steps is not None:
                x, after[i] = steps.blocks[i](x, past)
            else:
                x, after[i] = run_layer(self.cfg, layer, x, past, mask, *source)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x, tuple(after), attn

    def ready(self) -> Ready:
        """The weights prepared for single tokens: once, if fairseq has said that training is over."""
        return self._prepare() if self.kept is None else self.kept.get(self.parameters(), self._prepare)

    def _prepare(self) -> Ready:
        with weights_in(self.cfg.generation_weights):
            output = None if self.adaptive_softmax is not None else ready_linear(self._output_weight())
            return Ready(tuple(layer.step() for layer in self.layers), output)

    def get_normalized_probs(
        self, net_output: Tuple[Tensor, Extra], log_probs: bool, sample: Optional[Dict[str, Any]] = None
    ) -> Tensor:
        if self.training and self.adaptive_softmax is not None:
            raise ValueError(
                "--criterion needs the probability of every type, which an adaptive softmax does not give in training; "
                "choose adaptive_loss, or for language models mega_lm_cross_entropy"
            )
        found = self.get_normalized_probs_scriptable(net_output, log_probs, sample)
        if not self.training:  # in training, fairseq checks gradients
            check_numbers(found.amin(-1))  # NaN if any score of the row is NaN
        return found

    def output_layer(self, features: Tensor) -> Tensor:
        """Features (B, L, D) -> scores (B, L, V), or the features themselves for an adaptive softmax."""
        if self.adaptive_softmax is not None:
            return features
        return F.linear(features, self._output_weight())

    def _output_weight(self) -> Tensor:
        return (self.embed_tokens if self.output_projection is None else self.output_projection).weight

    def reorder_incremental_state(self, incremental_state: Dict[str, Any], new_order: Tensor) -> None:
        """Replaces row i by row new_order[i], in place; callers that fork a search must clone the tensors first."""
        state = self.get_incremental_state(incremental_state, STATE)
        if state is not None:
            drops = self.dropout_module.on or any(layer.dropout_module.on for layer in self.layers)
            self.set_incremental_state(incremental_state, STATE, reorder(state, new_order, alike=not drops))

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> Dict[str, Tensor]:
        check_types(self, state_dict, name, self.DICTIONARY)
        return super().upgrade_state_dict_named(state_dict, name)

    def max_positions(self) -> int:
        """The longest target that it can process; only limited if layers learn a score for each distance."""
        bounded = any(layer.mixer.longest for layer in self.layers) or self.max_source_positions() < UNBOUNDED
        return self.cfg.max_target_positions if bounded else UNBOUNDED

    def max_source_positions(self) -> int:
        """The longest source that it can process, limited in the same way."""
        cross = self.layers[0].cross_attention
        return UNBOUNDED if cross is None or cross.longest is None else self.cfg.max_source_positions

    def make_generation_fast_(
        self,
        retain_dropout: bool = False,
        retain_dropout_modules: Optional[List[str]] = None,
        **unused: Any,
    ) -> None:
        """Called by fairseq before generation, after which it no longer trains the model."""
        if retain_dropout:
            keep_dropout(self, "TransformerDecoder", retain_dropout_modules)
        self.kept = ReadyOnce()


def check_numbers(log_probs: Tensor) -> None:
    """Raises an error where fairseq would report NaN or infinity as the loss, or ignore the tokens that cause it."""
    if not log_probs.sum(dtype=torch.float32).isfinite():
        raise FloatingPointError(
            "the model gives probabilities that are not finite (NaN or infinity): its training has diverged; take an "
            "earlier checkpoint, and train with a smaller --lr"
        )
