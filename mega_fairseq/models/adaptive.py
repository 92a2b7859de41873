"""The adaptive softmax: frequent types in a head, rare ones in clusters behind it (Grave et al. 2017).

fairseq's module contains the parameters, and its `adaptive_loss` works with it. The functions here compute the
log-probability of each target from only the head and the target's own cluster.
"""

from typing import List, Optional, Sequence

from fairseq.modules import AdaptiveSoftmax
from fairseq.modules.adaptive_softmax import TiedHeadModule, TiedLinear
from torch import Tensor, nn

from mega_fairseq.models.options import DecoderOptions
from mega_fairseq.modules.adaptive_input import AdaptiveInput
from mega_fairseq.modules.projection import projected_log_probs

TABLES = (nn.Linear, TiedLinear)  # what contains the weights of types; a TiedLinear those of the input


def cutoffs(name: str, given: str, types: int) -> List[int]:
    """Parses the ends of all clusters except the last, which ends with the vocabulary."""
    ends = [int(part) if part.strip().isdecimal() else 0 for part in str(given).strip("[]").split(",")]
    if ends != sorted(set(ends)) or ends[0] < 1 or ends[-1] >= types:
        raise ValueError(
            f"{name} is {given!r}; give increasing numbers of types below the vocabulary's {types}, "
            "separated by commas, as in 20000,60000"
        )
    return ends


def check_factor(name: str, factor: float, dim: int, ends: Sequence[int] = ()) -> None:
    """Raises an error if the last band would have no width, each being `factor` times narrower than the previous."""
    if dim // factor ** len(ends) < 1:
        raise ValueError(
            f"{name} is {factor}, which leaves less than 1 of {dim} dimensions for the rarest types; "
            "give a smaller factor or fewer cutoffs"
        )


def adaptive_softmax(
    cfg: DecoderOptions, types: int, tied: Optional[AdaptiveInput] = None, tie_projections: bool = False
) -> Optional[AdaptiveSoftmax]:
    """The adaptive softmax that the options specify, or None; with `tied`, it shares the weights of the input."""
    if cfg.adaptive_softmax_cutoff is None:
        return None
    ends = cutoffs("--adaptive-softmax-cutoff", cfg.adaptive_softmax_cutoff, types)
    check_factor("--adaptive-softmax-factor", cfg.adaptive_softmax_factor, cfg.decoder_embed_dim, ends)
    softmax = AdaptiveSoftmax(
        types,
        cfg.decoder_embed_dim,
        ends,
        dropout=cfg.adaptive_softmax_dropout,
        factor=cfg.adaptive_softmax_factor,
        adaptive_inputs=tied,
        tie_proj=tie_projections,
    )
    if tied is not None:
        softmax.head._float_tensor.zero_()  # fairseq leaves it uninitialised, and NaN in it would be saved
    return softmax


def adaptive_log_probs(softmax: AdaptiveSoftmax, x: Tensor, targets: Tensor) -> Tensor:
    """Features (T, D), targets (T,) -> log-probabilities (T,) in float32.

    Clusters without a target process zero rows, so that their parameters have a gradient in every batch.
    """
    x = softmax.dropout_module(x)
    in_head, found = targets.clone(), []
    for i, (project, dropout, table) in enumerate(softmax.tail):
        start, end = softmax.cutoff[i], softmax.cutoff[i + 1]
        rows = ((targets >= start) & (targets < end)).nonzero().squeeze(1)
        in_head[rows] = softmax.cutoff[0] + i  # the head has one score for each cluster
        narrow = dropout(project(x[rows]))  # (rows, D) -> (rows, D / factor**i)
        found.append((rows, projected_log_probs([table], narrow, targets[rows] - start, TABLES)))
    head = softmax.head  # types and then clusters: one table, or the table of the input and a separate one
    tables = [head.word_proj, head.class_proj] if isinstance(head, TiedHeadModule) else [head]
    log_probs = projected_log_probs(tables, x, in_head, TABLES)
    for rows, in_cluster in found:
        log_probs = log_probs.index_add(0, rows, in_cluster)
    return log_probs
