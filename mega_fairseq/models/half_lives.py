"""The half-lives of a model's EMAs: how long each layer remembers."""

import math
from typing import Any, Dict, List, Optional

import numpy as np
import torch
from torch import Tensor, nn

from mega_fairseq.ops.ema.coefficients import LARGEST_LOGIT

QUANTILES = {"min": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "max": 1.0}
# Tokens. The EMA limits its logits, so the half-life of a state that does not decay is log(2) exp(limit) or more.
NEVER = 0.99 * math.log(2) * math.exp(LARGEST_LOGIT)

Rows = List[Dict[str, Any]]


@torch.no_grad()
def of_states(model: nn.Module) -> Dict[str, Rows]:
    """For the states of each layer and direction, the tokens after which half of them is left, and their periods."""
    lives, periods = [], []
    for side in model.STACKS:
        for number, layer in enumerate(getattr(model, side).layers):
            config, turning = layer.mixer.config, layer.mixer.periods()
            for direction, log_decay in layer.mixer.log_decays().items():
                values, chunk = half_lives(log_decay), config.chunk_size
                beyond = None if chunk is None else float((values > chunk).mean())
                name = f"{side} layer {number} {direction}".strip()
                lives.append({"name": name, "chunk": chunk, **_quantiles(values), "beyond_chunk": beyond})
                if direction in turning:
                    periods.append({"name": name, **_quantiles(turning[direction].flatten().numpy())})
    return {"half_lives": lives, "periods": periods}


def half_lives(log_decay: Tensor) -> np.ndarray:
    """The h with decay^h = 1/2 for each state; infinite if a state never decays."""
    lives = (math.log(0.5) / log_decay.double()).flatten().numpy()
    return np.where(lives < NEVER, lives, np.inf)


def _quantiles(values: np.ndarray) -> Dict[str, Optional[float]]:
    """Each quantile is one of the values; None means infinity, which JSON cannot represent."""
    ordered = np.sort(values)
    chosen = {name: float(ordered[round(share * (ordered.size - 1))]) for name, share in QUANTILES.items()}
    return {name: value if math.isfinite(value) else None for name, value in chosen.items()}
