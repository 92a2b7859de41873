"""Checkpoints in the format of the released code, made from golden cases, and `mega-fairseq convert` for tests."""

from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, Dict, Sequence, Tuple

import torch
from fairseq import checkpoint_utils
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax

from mega_fairseq.cli.main import main
from tests.helpers import golden_cases as golden

READS_SAFELY = hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")
NEEDS_TORCH = "convert needs torch 2.6"
ROOT = Path(__file__).resolve().parents[2]
REMARKS = ("gen", "src_left_pad", "evals")  # entries of a case's config that are not options
# Some of the 150 options in each released checkpoint, including ones that the converter ignores.
OF_TRANSLATION = {
    "task": "translation",
    "source_lang": "de",
    "target_lang": "en",
    "left_pad_source": True,
    "left_pad_target": False,
    "criterion": "label_smoothed_cross_entropy",
    "label_smoothing": 0.1,
}
OF_LANGUAGE_MODELLING = {
    "task": "language_modeling",
    "sample_break_mode": "complete",
    "tokens_per_sample": 1024,
    "variant_block_multiple_min": 2,
    "variant_block_multiple_max": 6,
    "valid_block": "splits:10",
    "output_dictionary_size": -1,
    "criterion": "cross_entropy",
    "report_ema_alpha": False,
    "write_out_alpha": False,
}
OF_CLASSIFICATION = {"criterion": "lra_cross_entropy"}
OF_TASK = {
    "translation model": OF_TRANSLATION,
    "language model": OF_LANGUAGE_MODELLING,
    "classifier": OF_CLASSIFICATION,
}
OF_TRAINING = {
    "data": "data-bin",
    "optimizer": "adam",
    "lr_scheduler": "linear_decay",
    "clip_mode": "total",
    "lr": [0.001],
    "adam_betas": "(0.9, 0.98)",
    "update_freq": [1],
    "user_dir": None,
}


def model(name: str) -> golden.Case:
    """The golden model whose name ends like this."""
    (case,) = (case for case in golden.cases(*OF_TASK) if case.name.endswith(name))
    return case


def checkpoint(case: golden.Case, **options: Any) -> Dict[str, Any]:
    """The checkpoint that the released code would save for this model, with these options replaced or added."""
    config = {name: value for name, value in case.config.items() if name not in REMARKS}
    return {
        "args": Namespace(**{**config, **OF_TRAINING, **OF_TASK[case.kind], **options}),
        "model": dict(case.parameters),
        "optimizer_history": [
            {
                "criterion_name": "LabelSmoothedCrossEntropyCriterion",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {"best": 3.2},
                "num_updates": 40,
            }
        ],
        "extra_state": {
            "train_iterator": {"version": 2, "epoch": 3, "iterations_in_epoch": 6, "shuffle": True},
            "val_loss": 3.2,
            "best": 3.2,
            "metrics": {"default": [(10, "loss", "AverageMeter", {"val": torch.tensor(3.6), "sum": 4.0, "count": 1})]},
        },
        "last_optimizer_state": {
            "state": {0: {"step": 40, "exp_avg": torch.zeros(3)}},
            "param_groups": [{"lr": 0.004, "params": [0]}],
        },
    }


def save(content: Any, path: Path, **how: Any) -> Path:
    torch.save(content, path, **how)
    return path


def convert(content: Any, folder: Path, name: str = "released.pt", options: Sequence[Any] = (), **how: Any) -> Path:
    """Converts in this process and returns the path of the result."""
    target = folder / f"ours-{name}"
    assert main(["convert", str(save(content, folder / name, **how)), str(target), *map(str, options)]) == 0
    return target


def load(path: Path, data: Path, **overrides: Any) -> Tuple[torch.nn.Module, Any]:
    """Loads model and configuration with fairseq."""
    models, cfg, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], {"data": str(data), **overrides})
    return models[0].eval(), cfg


def tied_bands(case: golden.Case, tie_proj: bool) -> Tuple[Dict[str, Any], AdaptiveSoftmax]:
    """A checkpoint of the case with an adaptive softmax that is tied to its embeddings, and fairseq's module for it."""
    types, dim, cutoff, prefix = 40, 32, [16, 28], "decoder.embed_tokens."
    embeddings = AdaptiveInput(types, 1, dim, 4.0, dim, cutoff)
    embeddings.load_state_dict({n[len(prefix) :]: t for n, t in case.parameters.items() if n.startswith(prefix)})
    softmax = AdaptiveSoftmax(types, dim, cutoff, 0.0, factor=4.0, adaptive_inputs=embeddings, tie_proj=tie_proj)
    content = checkpoint(case, tie_adaptive_weights=True, tie_adaptive_proj=tie_proj, criterion="adaptive_loss")
    kept = {name: tensor for name, tensor in content["model"].items() if "adaptive_softmax" not in name}
    stock = {f"decoder.adaptive_softmax.{name}": tensor for name, tensor in softmax.state_dict().items()}
    return {**content, "model": {**kept, **stock}}, softmax.eval()


def converter(folder: Path) -> Callable[[golden.Case], Path]:
    """A function that converts each golden model once and returns the path of the result."""
    paths: Dict[str, Path] = {}

    def path_of(case: golden.Case) -> Path:
        if case.name not in paths:
            paths[case.name] = convert(checkpoint(case), folder, f"{case.name}.pt")
        return paths[case.name]

    return path_of
