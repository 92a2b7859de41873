"""A bidirectional Mega encoder with fairseq's interface."""

from typing import Any, Dict, List, NamedTuple, Optional

from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder
from torch import Tensor, nn

from mega_fairseq.data.words import check_words
from mega_fairseq.fairseq_options import UNBOUNDED
from mega_fairseq.models.encoder_out import EncoderOut, encoder_out
from mega_fairseq.models.options import StackOptions
from mega_fairseq.models.passes import PASSES
from mega_fairseq.models.stack import Stack
from mega_fairseq.ops.padding import Alignment, as_mask


class Encoded(NamedTuple):
    """Sequences with their real positions first and zeros at pads."""

    x: Tensor  # (B, width, D)
    align: Optional[Alignment]  # None if there are no pads
    states: List[Tensor]  # embeddings and the output of each layer, on request

    def with_pads(self, x: Tensor) -> Tensor:
        """(B, width, D) -> (B, L, D), with pads where they were."""
        return x if self.align is None else self.align.back(x)


class MegaEncoder(Stack, FairseqEncoder):
    """Tokens (B, L), padded on any side -> the dictionary that fairseq passes from encoder to decoder.

    `encode` is the stack itself. Without a dictionary, it takes the real numbers (B, L) that `embed_tokens` takes.
    """

    side = "encoder"

    def __init__(
        self, cfg: StackOptions, dictionary: Optional[Dictionary], embed_tokens: nn.Module, max_positions: int
    ):
        super().__init__(dictionary)
        self.padding_idx = None if dictionary is None else dictionary.pad()
        self.build_stack(cfg, embed_tokens, max_positions)

    @property
    def sentence_encoder(self) -> "MegaEncoder":
        """The stack, by the name in which fairseq's criteria look for its embeddings."""
        return self

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,
        return_all_hiddens: bool = False,
        **unused: Any,  # what fairseq passes to encoder and decoder alike
    ) -> EncoderOut:
        padding = src_tokens.eq(self.padding_idx)  # (B, L)
        encoded = self.encode(src_tokens, padding, return_all_hiddens)
        states = [encoded.with_pads(_zero_at_pads(x, encoded.align)) for x in encoded.states]
        return encoder_out(encoded.with_pads(encoded.x), src_tokens, padding, encoded.align, states)

    def forward_torchscript(self, net_input: Dict[str, Tensor]) -> EncoderOut:
        """`forward` for a search, by fairseq's name, with a warning of sources that the model cannot read."""
        check_words(net_input["src_tokens"], self.dictionary, can_be_blank=False)
        return super().forward_torchscript(net_input)

    def encode(
        self,
        inputs: Tensor,
        padding_mask: Tensor,
        return_all_hiddens: bool = False,
        token_types: Optional[Tensor] = None,
    ) -> Encoded:
        """Inputs and mask (B, L), True = pad -> the output of the last layer, with the final norm.

        Inputs may also be embeddings (B, L, D).
        """
        passes = PASSES if return_all_hiddens else self.passes.for_batch(self, inputs)
        align = self.alignment(padding_mask, passes)
        done = None if align is None else align.done()
        if align is not None:
            inputs, token_types = align.front(inputs), None if token_types is None else align.front(token_types)
        x = _zero_at_pads(self.embed(inputs, as_mask(done), token_types), done)
        states = [x] if return_all_hiddens else None
        return Encoded(passes.form_of(self.run)(x, done, states), align, states or [])

    def run(self, x: Tensor, done: Optional[Alignment] = None, states: Optional[List[Tensor]] = None) -> Tensor:
        """Layers and the final norm on embeddings (B, L, D), pads last; adds the output of each layer to `states`."""
        for _, layer in self.layers_to_run():
            x = layer(x, None, done)  # (B, L, D)
            if states is not None:
                states.append(x)
        if self.final_norm is not None:
            x = self.final_norm(x, as_mask(done))
        return _zero_at_pads(x, done)

    def reorder_encoder_out(self, encoder_out: EncoderOut, new_order: Tensor) -> EncoderOut:
        """Only records the sentence of each row, without copies, since the decoder projects each sentence once."""
        rows = encoder_out["rows"]
        return {**encoder_out, "rows": [rows[0].index_select(0, new_order) if rows else new_order]}

    def max_positions(self) -> int:
        """The longest sentence that its layers can process."""
        return self.longest or UNBOUNDED


def _zero_at_pads(x: Tensor, align: Optional[Alignment]) -> Tensor:
    return x if align is None else x.masked_fill(as_mask(align).unsqueeze(-1), 0.0)
