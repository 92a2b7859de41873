"""Exports a model as two graphs: one starts from a prefix, the other continues it token by token.

TorchScript supports fairseq's Transformer but not these models, whose states are nested. The graphs take and return
lists of tensors and numbers.
"""

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.utils._pytree import tree_flatten, tree_unflatten

from mega_fairseq.models.base import MegaModel
from mega_fairseq.models.decoder import Blocks, MegaDecoder

State = List[Any]  # batch-first tensors, and in translation the number of tokens so far


class Start(nn.Module):
    """Prefixes (B, n), and sources (B, m) to translate -> log-probabilities (B, n, V) and the state after the prefix.

    Sources may be padded; all prefixes of a batch have the same length.
    """

    def __init__(self, model: MegaModel):
        super().__init__()
        self.encoder, self.decoder = getattr(model, "encoder", None), model.decoder

    def forward(self, prefix: Tensor, src_tokens: Optional[Tensor] = None) -> Tuple[Tensor, State]:
        source = None if src_tokens is None else self.encoder(src_tokens)
        scores, blocks = _continue(self.decoder, prefix, self.decoder.first_state(source).blocks)
        return scores, _state(blocks)


class Step(nn.Module):
    """The next token of each row (B, 1) and a state -> log-probabilities (B, 1, V) and the state after the token."""

    def __init__(self, decoder: MegaDecoder, blocks: Blocks):
        super().__init__()
        leaves, self.spec = tree_flatten(blocks)
        self.decoder, self.given = decoder, [leaf is not None for leaf in leaves]

    def forward(self, token: Tensor, state: State) -> Tuple[Tensor, State]:
        leaves = iter(state)
        blocks = tree_unflatten([next(leaves) if given else None for given in self.given], self.spec)
        scores, blocks = _continue(self.decoder, token, blocks)
        return scores, _state(blocks)


def _continue(decoder: MegaDecoder, tokens: Tensor, blocks: Blocks) -> Tuple[Tensor, Blocks]:
    x, blocks, _ = decoder.run(decoder.embed(tokens), blocks)
    if decoder.adaptive_softmax is not None:
        return decoder.adaptive_softmax.get_log_prob(x, None), blocks
    return decoder.output_layer(x).float().log_softmax(-1), blocks


def _state(blocks: Blocks) -> State:
    return [leaf for leaf in tree_flatten(blocks)[0] if leaf is not None]


def export_start(model: MegaModel, *arguments: Tensor) -> ExportedProgram:
    """The graph of `Start` for a model in eval mode and inputs of these shapes; pad sources to the given length."""
    _check_eval(model)
    return export(Start(model), arguments, strict=False)


def export_step(model: MegaModel) -> ExportedProgram:
    """The graph of `Step` for a model in eval mode, for any batch and length; needs torch 2.6.

    A beam search reorders the rows of a state by `index_select(0, order)` on its tensors.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise RuntimeError(f"torch is {torch.__version__}, which exports no graph for any length; use torch 2.6")
    _check_eval(model)
    chunk, dictionary = model.cfg.decoder_chunk_size, model.decoder.dictionary
    if chunk != -1:
        raise ValueError(
            f"--decoder-chunk-size is {chunk}, but a graph has no branch for the end of a chunk; export models with "
            "--decoder-chunk-size -1"
        )
    if not all(layer.mixer.exports_step for layer in model.decoder.layers):
        raise ValueError(
            "the token mixer works in blocks, but a graph has no branch for the end of a block; choose another one"
        )
    device, eos = next(model.parameters()).device, dictionary.eos()
    tokens = torch.full((2, 2), eos, device=device)  # without sizes 0 and 1, which torch.export treats as constants
    source = None
    if "encoder" in model.STACKS:
        source = model.encoder(torch.tensor([[dictionary.pad(), eos, eos]] * 2, device=device))
    _, blocks = _continue(model.decoder, tokens, model.decoder.first_state(source).blocks)
    state = _state(blocks)
    sizes = [dict.fromkeys(range(leaf.dim()), Dim.AUTO) if isinstance(leaf, Tensor) else Dim.AUTO for leaf in state]
    step = Step(model.decoder, blocks)
    return export(step, (tokens[:, :1], state), dynamic_shapes=({0: Dim.AUTO}, sizes), strict=False)


def _check_eval(model: MegaModel) -> None:
    if model.decoder.separators is not None:
        raise ValueError("a graph does not count lines; export models with --cross-attention-positions token")
    if model.training:
        raise ValueError("the model is in training mode, and dropout would become part of the graph; call eval() first")
