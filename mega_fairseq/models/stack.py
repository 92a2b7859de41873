"""A stack of layers with its embeddings and norms: what encoder and decoder share.

In training, layers may be dropped at random (Fan et al. 2019) and activations recomputed or kept in CPU memory; both
happen in `layers_to_run`.
"""

import math
import re
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from mega_fairseq.models.attach import attach_passes
from mega_fairseq.models.embedding import types_of
from mega_fairseq.models.options import StackOptions, layer_configs
from mega_fairseq.models.passes import PASSES, Passes
from mega_fairseq.modules import Block, SequenceNorm
from mega_fairseq.modules.layer import DropoutSwitch
from mega_fairseq.ops.dropout import dropped
from mega_fairseq.ops.padding import Alignment


class Stack:
    """A mixin for fairseq's encoder and decoder classes."""

    side: str  # "encoder" or "decoder"

    def build_stack(
        self,
        cfg: StackOptions,
        embed_tokens: nn.Module,
        max_positions: int,
        source_dim: Optional[int] = None,
        affine_final_norm: bool = True,
    ) -> None:
        dim, norm = getattr(cfg, f"{self.side}_embed_dim"), str(cfg.normalization_type)
        self.cfg, self.embed_tokens = cfg, embed_tokens
        self.reach = max_positions  # of position bias simple without chunks
        types = getattr(cfg, "token_types", 0)
        self.embed_types = nn.Embedding(types, dim) if types else None
        self.embed_norm = SequenceNorm(norm, dim) if cfg.normalize_embedding else None
        configs = layer_configs(cfg, self.side, max_positions, source_dim)
        self.layers = nn.ModuleList(Block(*of_layer) for of_layer in configs)
        self.final_norm, has_final_norm = None, cfg.normalize_before and not cfg.no_final_norm
        with_state = configs[0][0].final_norm(affine_final_norm) if has_final_norm else None
        self.final_norm_has_state = with_state is not None
        if has_final_norm:
            self.final_norm = Block(with_state) if with_state else SequenceNorm(norm, dim, affine=affine_final_norm)
        self.dropout_module = DropoutSwitch()
        self.passes = PASSES
        attach_passes(self)

    def embed(
        self, tokens: Tensor, padding_mask: Optional[Tensor] = None, token_types: Optional[Tensor] = None
    ) -> Tensor:
        """Tokens and their types (B, L) -> (B, L, D), with the norm and dropout of embeddings.

        Instead of tokens, it also takes their embeddings (B, L, D).
        """
        x = self.embed_tokens(tokens) if tokens.dim() == 2 else tokens
        if not getattr(self.cfg, "no_scale_embedding", True):  # models without a decoder never scale
            x = x * math.sqrt(x.size(-1))
        if self.embed_types is not None:
            first = torch.zeros((), dtype=torch.long, device=x.device)
            x = x + self.embed_types(first if token_types is None else token_types)
        if self.embed_norm is not None:
            x = self.embed_norm(x, padding_mask)
        return dropped(x, self.dropout_module.rate(self.cfg.dropout), self.cfg.feature_dropout)

    def alignment(self, padding_mask: Tensor, passes: Passes = PASSES) -> Optional[Alignment]:
        """Moves pads to the end, and adds some if passes need batches of few lengths."""
        bucket = None if passes.bucket is None else partial(passes.bucket, limit=self.reach)
        return Alignment.where_needed(padding_mask, bucket)

    @property
    def longest(self) -> Optional[int]:
        """The longest sequence that all layers can process; None for any length."""
        parts = [part for layer in self.layers for part in (layer.mixer, layer.cross_attention) if part is not None]
        return min((part.longest for part in parts if part.longest is not None), default=None)

    def layers_to_run(self, drop: bool = True) -> Iterator[Tuple[int, Callable[..., Any]]]:
        """Layers with their numbers, in training without those that layerdrop drops.

        With --checkpoint-activations, backward recomputes their activations.
        """
        rate = getattr(self.cfg, f"{self.side}_layerdrop") if self.training and drop else 0.0
        kept = [True] * len(self.layers) if rate == 0.0 else (torch.rand(len(self.layers)) >= rate).tolist()
        recompute = (self.cfg.checkpoint_activations or self.cfg.offload_activations) and torch.is_grad_enabled()
        for i, layer in enumerate(self.layers):
            if kept[i]:
                yield i, partial(_recomputed, layer, self.cfg.offload_activations) if recompute else layer

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> Dict[str, Tensor]:
        """Refuses weights of another dictionary: fairseq would blame the architecture."""
        if self.dictionary is not None:
            stored, types = types_of(state_dict, f"{name}.embed_tokens"), len(self.dictionary)
            if stored not in (0, types):
                raise ValueError(
                    f"the checkpoint's {name} has {stored:,} types and its dictionary here has {types:,} types; give "
                    "the data and --task that it was trained with, or another --save-dir to train anew"
                )
        return super().upgrade_state_dict_named(state_dict, name)

    def make_generation_fast_(
        self,
        retain_dropout: bool = False,
        retain_dropout_modules: Union[None, str, Sequence[str]] = None,
        **unused: Any,
    ) -> None:
        """Keeps dropout in generation for --retain-dropout, in all modules or in those listed; fairseq calls it.

        `TransformerEncoder` stands for the embeddings of an encoder, `TransformerEncoderLayer` for its layers.
        """
        if not retain_dropout:
            return
        names = retain_dropout_modules  # a list, or the text of one as on fairseq's command line
        names = re.findall(r"\w+", names) if isinstance(names, str) else names
        own = f"Transformer{self.side.capitalize()}"
        for module, name in ((self, own), *((layer, f"{own}Layer") for layer in self.layers)):
            if names is None or name in names:
                module.dropout_module.apply_during_inference = True


def _recomputed(layer: nn.Module, offload: bool, x: Tensor, *rest: Any, **options: Any) -> Any:
    """`layer(x, *rest)`, whose activations backward computes again; its inputs may be kept in CPU memory."""
    with save_on_cpu(pin_memory=x.is_cuda) if offload else nullcontext():
        options["context_fn"] = lambda: (nullcontext(), _buffers_restored(layer))  # of the recomputation
        return checkpoint(layer, x, *rest, use_reentrant=False, **options)


@contextmanager
def _buffers_restored(module: nn.Module) -> Iterator[None]:
    """Restores buffers at the end, so that recomputation does not count a batch in batch norm again."""
    originals = [(part, dict(part._buffers)) for part in module.modules()]
    for part, buffers in originals:
        part._buffers.update({name: t.clone() for name, t in buffers.items() if t is not None})
    try:
        yield
    finally:
        for part, buffers in originals:
            part._buffers.update(buffers)
