"""A bidirectional Mega encoder with fairseq's interface."""

from typing import Any, Dict, List, Optional

from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder
from torch import Tensor, nn

from mega_fairseq.models.embedding import check_types, embed, embedding_norm, final_norm
from mega_fairseq.models.encoder_out import EncoderOut, encoder_out, reordered
from mega_fairseq.models.layers import layers_to_run, run_layer
from mega_fairseq.models.options import UNBOUNDED, MegaOptions, layer_configs
from mega_fairseq.models.retained_dropout import keep_dropout
from mega_fairseq.modules import Block
from mega_fairseq.modules.dropout_switch import DropoutSwitch
from mega_fairseq.ops.padding import Alignment, as_mask


class MegaEncoder(FairseqEncoder):
    """Tokens (B, L), padded on any side -> the dictionary that fairseq passes from encoder to decoder."""

    def __init__(self, cfg: MegaOptions, dictionary: Dictionary, embed_tokens: nn.Embedding, max_positions: int):
        super().__init__(dictionary)
        self.cfg, self.padding_idx = cfg, dictionary.pad()
        self.embed_tokens = embed_tokens
        self.embed_norm = embedding_norm(cfg, cfg.encoder_embed_dim)
        self.layers = nn.ModuleList(Block(*configs) for configs in layer_configs(cfg, "encoder", max_positions))
        self.final_norm = final_norm(cfg, cfg.encoder_embed_dim)
        self.dropout_module = DropoutSwitch()

    def forward(
        self, src_tokens: Tensor, src_lengths: Optional[Tensor] = None, return_all_hiddens: bool = False
    ) -> EncoderOut:
        padding = src_tokens.eq(self.padding_idx)  # (B, L)
        align = Alignment.where_needed(padding)
        x, states = embed(self, src_tokens if align is None else align.front(src_tokens)), []
        if align is not None:
            x = x.masked_fill(as_mask(align.done()).unsqueeze(-1), 0.0)
        for i in layers_to_run(self, self.cfg.encoder_layerdrop):
            x = run_layer(self.cfg, self.layers[i], x, None, None if align is None else align.done())  # (B, width, D)
            if return_all_hiddens:
                states.append(x)
        if self.final_norm is not None:
            x = self.final_norm(x)

        def in_order(t: Tensor) -> Tensor:  # (B, width, D) -> (B, L, D), zero at pads
            return t if align is None else align.back(t).masked_fill(padding.unsqueeze(-1), 0.0)

        return encoder_out(in_order(x), None if align is None else padding, [in_order(t) for t in states])

    def reorder_encoder_out(self, encoder_out: EncoderOut, new_order: Tensor) -> EncoderOut:
        return reordered(encoder_out, new_order)

    def max_positions(self) -> int:
        """The longest sentence that its layers can process."""
        return min((layer.mixer.reach for layer in self.layers if layer.mixer.reach), default=UNBOUNDED)

    def make_generation_fast_(
        self, retain_dropout: bool = False, retain_dropout_modules: Optional[List[str]] = None, **unused: Any
    ) -> None:
        """Called by fairseq before generation."""
        if retain_dropout:
            keep_dropout(self, "TransformerEncoder", retain_dropout_modules)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> Dict[str, Tensor]:
        check_types(self, state_dict, name, "the source's dictionary")
        return super().upgrade_state_dict_named(state_dict, name)
