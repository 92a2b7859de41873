"""A bidirectional Mega encoder with fairseq's interface."""

from typing import Any, Dict, List, NamedTuple, Optional

from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder
from torch import Tensor, nn

from mega_fairseq.fairseq_options import UNBOUNDED
from mega_fairseq.models.embedding import check_types, embed, embedding_norm, final_norm
from mega_fairseq.models.encoder_out import EncoderOut, encoder_out, reordered
from mega_fairseq.models.layers import layers_to_run, run_layer
from mega_fairseq.models.options import StackOptions, layer_configs
from mega_fairseq.models.retained_dropout import keep_dropout
from mega_fairseq.modules import Block
from mega_fairseq.modules.layer import DropoutSwitch
from mega_fairseq.ops.padding import Alignment, as_mask


class Encoded(NamedTuple):
    """Sequences with their real positions first and zeros at pads."""

    x: Tensor  # (B, width, D)
    align: Optional[Alignment]  # None if there are no pads
    states: List[Tensor]  # of each layer, if wanted

    def in_order(self, x: Tensor) -> Tensor:
        """(B, width, D) -> (B, L, D), with pads where they were."""
        return x if self.align is None else self.align.back(x)


class MegaEncoder(FairseqEncoder):
    """Tokens (B, L), padded on any side -> the dictionary that fairseq passes from encoder to decoder.

    `encode` is the stack itself. Without a dictionary, it takes the real numbers (B, L) that `embed_tokens` takes.
    """

    def __init__(
        self, cfg: StackOptions, dictionary: Optional[Dictionary], embed_tokens: nn.Module, max_positions: int
    ):
        super().__init__(dictionary)
        self.cfg, self.padding_idx = cfg, None if dictionary is None else dictionary.pad()
        self.embed_tokens = embed_tokens
        self.embed_norm = embedding_norm(cfg, cfg.encoder_embed_dim)
        self.layers = nn.ModuleList(Block(*configs) for configs in layer_configs(cfg, "encoder", max_positions))
        self.final_norm = final_norm(cfg, cfg.encoder_embed_dim)
        self.dropout_module = DropoutSwitch()

    def forward(
        self, src_tokens: Tensor, src_lengths: Optional[Tensor] = None, return_all_hiddens: bool = False
    ) -> EncoderOut:
        padding = src_tokens.eq(self.padding_idx)  # (B, L)
        encoded = self.encode(src_tokens, padding, return_all_hiddens)
        states = [encoded.in_order(_zero_at_pads(x, encoded.align)) for x in encoded.states]
        return encoder_out(encoded.in_order(encoded.x), padding, encoded.align, states)

    def encode(self, inputs: Tensor, padding_mask: Tensor, return_all_hiddens: bool = False) -> Encoded:
        """Inputs and mask (B, L), True = pad -> the output of the last layer, with the final norm."""
        align, states = Alignment.where_needed(padding_mask), []
        done = None if align is None else align.done()
        x = _zero_at_pads(embed(self, inputs if align is None else align.front(inputs), as_mask(done)), done)
        for i in layers_to_run(self, self.cfg.encoder_layerdrop):
            x = run_layer(self.cfg, self.layers[i], x, None, done)  # (B, width, D)
            if return_all_hiddens:
                states.append(x)
        if self.final_norm is not None:
            x = self.final_norm(x, as_mask(done))
        return Encoded(_zero_at_pads(x, done), align, states)

    def reorder_encoder_out(self, encoder_out: EncoderOut, new_order: Tensor) -> EncoderOut:
        return reordered(encoder_out, new_order)

    def max_positions(self) -> int:
        """The longest sentence that its layers can process."""
        return min((layer.mixer.longest for layer in self.layers if layer.mixer.longest), default=UNBOUNDED)

    def make_generation_fast_(
        self, retain_dropout: bool = False, retain_dropout_modules: Optional[List[str]] = None, **unused: Any
    ) -> None:
        """Called by fairseq before generation."""
        if retain_dropout:
            keep_dropout(self, "TransformerEncoder", retain_dropout_modules)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> Dict[str, Tensor]:
        if self.dictionary is not None:
            check_types(self, state_dict, name, "the source's dictionary")
        return super().upgrade_state_dict_named(state_dict, name)


def _zero_at_pads(x: Tensor, align: Optional[Alignment]) -> Tensor:
    return x if align is None else x.masked_fill(as_mask(align).unsqueeze(-1), 0.0)
