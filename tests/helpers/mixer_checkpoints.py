"""Checkpoints of models with any token mixer and random weights, made from a checkpoint of fairseq-train."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict

import torch
from fairseq.models import MODEL_REGISTRY

from mega_fairseq.models import MegaLMConfig, MegaTransformerConfig
from tests.helpers.golden_models import task

CHUNK, HEADS = 8, 2
SMALL = {"layers": 2, "embed_dim": 16, "ffn_embed_dim": 24, "chunk_size": CHUNK}
SINGLE_HEAD = {"decoder_z_dim": 8, "decoder_hidden_dim": 24, "rel_pos_bias": "rotary"}
UNBOUNDED = {"token_mixer": "aft", "decoder_chunk_size": -1}
PLACES = {"decoder_time_beta": True, "decoder_time_gamma": True, "decoder_attention_heads": HEADS}

# Options of language models, each with its name: a mixer, and what is special about its form.
MODELS: Dict[str, Dict[str, Any]] = {
    "mega": {**SINGLE_HEAD, "token_mixer": "mega", "decoder_n_dim": 2},
    "gau": {**SINGLE_HEAD, "token_mixer": "gau"},
    "gau rope": {**SINGLE_HEAD, "token_mixer": "gau", "rel_pos_bias": "rope"},
    "flash": {**SINGLE_HEAD, "token_mixer": "flash"},
    "attention": {"token_mixer": "attention", "decoder_attention_heads": HEADS},
    "attention before": {**PLACES, "token_mixer": "attention", "decoder_time_weight": "before"},
    "attention after": {
        **PLACES,
        "token_mixer": "attention",
        "decoder_time_weight": "after",
        "decoder_time_alpha": True,
    },
    "gmlp": {**PLACES, "token_mixer": "gmlp", "decoder_time_alpha": True, "decoder_gmlp_spatial_bias": True},
    "aft": {**PLACES, "token_mixer": "aft"},
    "aft local": {**UNBOUNDED, "decoder_aft_form": "local", "decoder_aft_reach": 5, "decoder_attention_heads": HEADS},
    "aft simple": {**UNBOUNDED, "decoder_aft_form": "simple"},
    "sparse": {
        "token_mixer": "sparse",
        "decoder_attention_heads": HEADS,
        "decoder_sparse_stride": 4,
        "decoder_sparse_summary": 1,
    },
}


def language_checkpoint(trained: Path, target: Path, name: str, **options: Any) -> Path:
    """Writes a checkpoint of MODELS[name] with the dictionary of a trained language model."""
    given = {**MODELS[name], **options}
    sizes = {f"decoder_{size}": number for size, number in SMALL.items()}
    cfg = MegaLMConfig(**{**sizes, "normalize_before": True, "share_decoder_input_output_embed": True, **given})
    return _write(trained, target, "mega_lm", cfg)


def translation_checkpoint(trained: Path, target: Path, **options: Any) -> Path:
    """Writes a checkpoint of a translation model with the dictionaries of a trained one."""
    sizes = {f"{side}_{size}": number for side in ("encoder", "decoder") for size, number in SMALL.items()}
    cfg = MegaTransformerConfig(**{**sizes, "normalize_before": True, "share_all_embeddings": True, **options})
    return _write(trained, target, "mega_transformer", cfg)


def _write(trained: Path, target: Path, name: str, cfg: Any) -> Path:
    content = torch.load(trained, weights_only=False)
    torch.manual_seed(1)
    model = MODEL_REGISTRY[name].build_model(cfg, task(content["model"]["decoder.embed_tokens.weight"].size(0)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    content["model"] = model.state_dict()
    content["cfg"]["model"].update({**asdict(cfg), "_name": name})
    content["last_optimizer_state"] = None
    torch.save(content, target)
    return target
