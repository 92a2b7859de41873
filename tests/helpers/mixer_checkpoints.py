"""Checkpoints of models with any token mixer and random weights, made from a checkpoint of fairseq-train."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mega_fairseq.models import MegaLanguageModel, MegaLMConfig
from tests.helpers.golden_models import task
from tests.helpers.small_models import mixer_of, mixer_options

CHUNK, HEADS = 8, 2
SMALL = {"layers": 2, "embed_dim": 16, "ffn_embed_dim": 24}


def language_checkpoint(trained: Path, target: Path, name: str, **options: Any) -> Path:
    """Writes a checkpoint with the mixer EXAMPLES[name], in chunks of CHUNK, and the dictionary of a trained model."""
    mixer = {**mixer_options(name, "decoder"), "token_mixer": mixer_of(name)}
    if mixer["decoder_chunk_size"] > 0:
        mixer["decoder_chunk_size"] = CHUNK
    sizes = {f"decoder_{size}": number for size, number in SMALL.items()}
    common = {"normalize_before": True, "share_decoder_input_output_embed": True}
    cfg = MegaLMConfig(**{**sizes, **mixer, **common, **options})
    content = torch.load(trained, weights_only=False)
    torch.manual_seed(1)
    types = content["model"]["decoder.embed_tokens.weight"].size(0)
    model = MegaLanguageModel.build_model(cfg, task(types))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    content["model"] = model.state_dict()
    content["cfg"]["model"].update({**asdict(cfg), "_name": "mega_lm"})
    content["last_optimizer_state"] = None
    torch.save(content, target)
    return target
