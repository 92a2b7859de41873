"""The adaptive softmax: frequent types in a head, rare ones in clusters behind it (Grave et al. 2017).

fairseq's module holds the parameters, and its `adaptive_loss` works with it. What is added here computes the
log-probability of each target from the head and the target's own cluster alone.
"""

from typing import List, Optional

from fairseq.modules import AdaptiveSoftmax
from torch import Tensor

from mega_fairseq.models.options import MegaOptions
from mega_fairseq.modules.adaptive_input import AdaptiveInput
from mega_fairseq.ops.log_probs import target_log_probs


def cutoffs(name: str, given: str, types: int) -> List[int]:
    """The ends of clusters but the last, which ends with the vocabulary."""
    ends = [int(part) if part.strip().isdigit() else 0 for part in str(given).strip("[]").split(",")]
    if ends != sorted(set(ends)) or ends[0] < 1 or ends[-1] >= types:
        raise ValueError(
            f"{name} is {given!r}; give rising numbers of types below the vocabulary's {types}, "
            "separated by commas, as in 20000,60000"
        )
    return ends


def adaptive_softmax(
    cfg: MegaOptions, types: int, tied: Optional[AdaptiveInput] = None, tie_projections: bool = False
) -> Optional[AdaptiveSoftmax]:
    """The output layer where the options ask for clusters; with `tied`, its weights are those of the input."""
    if cfg.adaptive_softmax_cutoff is None:
        return None
    if not 0.0 <= cfg.adaptive_softmax_dropout < 1.0:
        raise ValueError(f"--adaptive-softmax-dropout is {cfg.adaptive_softmax_dropout}; give a probability below 1")
    return AdaptiveSoftmax(
        types,
        cfg.decoder_embed_dim,
        cutoffs("--adaptive-softmax-cutoff", cfg.adaptive_softmax_cutoff, types),
        dropout=cfg.adaptive_softmax_dropout,
        factor=cfg.adaptive_softmax_factor,
        adaptive_inputs=tied,
        tie_proj=tie_projections,
    )


def adaptive_log_probs(softmax: AdaptiveSoftmax, x: Tensor, targets: Tensor) -> Tensor:
    """Features (T, D), targets (T,) -> log-probabilities (T,) in float32.

    Clusters that no target is in are asked for no row, so that their parameters have a gradient in every batch.
    """
    x = softmax.dropout_module(x)
    in_head, found = targets.clone(), []
    for i, tail in enumerate(softmax.tail):
        start, end = softmax.cutoff[i], softmax.cutoff[i + 1]
        rows = ((targets >= start) & (targets < end)).nonzero().squeeze(1)
        in_head[rows] = softmax.cutoff[0] + i  # the head has one score for all of a cluster
        found.append((rows, target_log_probs(tail, x[rows], targets[rows] - start, end - start)))
    log_probs = target_log_probs(softmax.head, x, in_head, softmax.cutoff[0] + len(softmax.tail))
    for rows, in_cluster in found:
        log_probs = log_probs.index_add(0, rows, in_cluster)
    return log_probs
