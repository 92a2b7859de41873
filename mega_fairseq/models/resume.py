"""Ensures that a training starts from a complete checkpoint of the same model.

fairseq writes a checkpoint under a temporary name and renames it, but then copies it to checkpoint_best.pt and
checkpoint_last.pt. A run that is killed while copying leaves a truncated file where the next run looks first, next
to the complete one.

With a stock task such as `translation`, building the model is the only call into the plugin before fairseq loads a
checkpoint, so it is where this is checked.
"""

import logging
import math
import re
import zipfile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, List, Mapping, Optional, Tuple

import torch.distributed
from fairseq.dataclass import FairseqDataclass
from omegaconf import DictConfig

from mega_fairseq.models.base import MegaModel
from mega_fairseq.models.checkpoints import allow_plain_containers
from mega_fairseq.models.same_model import check_same_model
from mega_fairseq.models.whole_config import is_training, option_of_command

logger = logging.getLogger(__name__)
LAST = "checkpoint_last.pt"  # the default of --restore-file
SAVED = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|_last|\.best_.+)\.pt")  # what fairseq calls checkpoints


def check_start(model: MegaModel, cfg: FairseqDataclass, task_state: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Check the precision of a training and the checkpoint that it will load; `task_state` is that of its task.

    A broken checkpoint is replaced by the newest complete one.

    The model's `has_other_classes` then says whether that checkpoint is of a classifier with other classes.

    The first process decides for all, since each may see a different folder. In all of them torch.load may then read
    the plain containers that fairseq saves, also if the plugin was imported without `--user-dir`.
    """
    if not is_training(cfg):
        return
    _check_precision(option_of_command(cfg, "common"))
    if getattr(cfg, "generation_weights", "float32") != "float32":
        raise ValueError(
            f"--generation-weights is {cfg.generation_weights}, and a training needs float32; leave it out, and give "
            f"fairseq-generate --model-overrides \"{{'generation_weights': '{cfg.generation_weights}'}}\""
        )
    allow_plain_containers()
    options = option_of_command(cfg, "checkpoint")
    if options.checkpoint_suffix:  # each process loads a part of a checkpoint
        return

    def decide() -> Tuple[Optional[str], bool]:
        chosen = _newest_whole(options)
        path, resumed = _to_load(options, chosen)
        exists = path is not None and path.is_file()
        return chosen, exists and check_same_model(model, cfg, path, resumed, task_state)

    chosen, model.has_other_classes = _decided_by_first_process(decide)
    if chosen is not None:
        options.restore_file = chosen
        options.finetune_from_model = None  # only for the first start; fairseq accepts only one of the two


def _check_precision(common: DictConfig) -> None:
    if common.fp16 and not common.memory_efficient_fp16 and not torch.cuda.is_available():
        raise ValueError(
            "--fp16 needs a GPU; give --bf16, --memory-efficient-fp16 or --amp, which also run without one"
        )


def _decided_by_first_process(decide: Callable[[], Any]) -> Any:
    """Return the result of `decide` in the first process to all processes, or raise its error in all."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    outcome: List[Any] = [None]
    if not several or torch.distributed.get_rank() == 0:
        try:
            outcome = [decide()]
        except Exception as error:
            outcome = [error]
    if several:
        torch.distributed.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _newest_whole(options: DictConfig) -> Optional[str]:
    """Return the checkpoint to load instead of a broken one; raise an error if there is none."""
    if options.restore_file != LAST:
        _check_whole("--restore-file", options.restore_file)
        return None
    saved, last = _newest_first(Path(options.save_dir)), Path(options.save_dir, LAST)
    whole = [path for path in saved if _is_whole(path)]
    broken = [path for path in saved if path not in whole]
    if last in whole:
        return None
    if last in broken and not whole:
        raise ValueError(
            f"{last} is not a complete checkpoint, and {options.save_dir} has no other; "
            "remove it to train from the start, or give --restore-file"
        )
    if not broken or not whole:
        _check_whole("--finetune-from-model", options.finetune_from_model)
        if whole:
            logger.warning(
                f"starting a new training, since there is no {last}: --restore-file {whole[0]} would resume from there"
            )
        return None
    names = ", ".join(path.name for path in broken)
    logger.warning(f"resuming from {whole[0]}, the newest complete checkpoint: {names} is not complete")
    return str(whole[0])


def _to_load(options: DictConfig, chosen: Optional[str]) -> Tuple[Optional[Path], bool]:
    """Return the checkpoint that fairseq will load, and whether that resumes its training or starts a new one."""
    if chosen is not None or options.restore_file != LAST:
        return Path(chosen or options.restore_file), not options.reset_optimizer
    last = Path(options.save_dir, LAST)
    if last.exists():
        return last, not options.reset_optimizer
    once = getattr(options, "continue_once", None)  # fairseq 0.12.2 has no such option
    if once:
        return Path(once), not options.reset_optimizer
    return Path(options.finetune_from_model) if options.finetune_from_model else None, False


def _check_whole(option: str, path: Optional[str]) -> None:
    if path and Path(path).is_file() and not _is_whole(Path(path)):
        raise ValueError(f"{option} is {path}, which is not a complete checkpoint; give another, or copy it again")


def _newest_first(folder: Path) -> List[Path]:
    """Sort by the epochs and updates in the names, which are the same in all copies of a folder, unlike file times.

    checkpoint_best.pt and checkpoint_last.pt, which are copies, come last.
    """
    found = [path for path in folder.glob("checkpoint*.pt") if SAVED.fullmatch(path.name)]
    return sorted(found, key=lambda path: (*_progress(path.name), path.stat().st_mtime, path.name), reverse=True)


def _progress(name: str) -> Tuple[int, float]:
    """Epoch and update: checkpoint3.pt is from the end of epoch 3, checkpoint_3_400.pt from update 400 within it."""
    epoch, _, updates = re.sub(r"^checkpoint_?|\.pt$", "", name).partition("_")
    return (int(epoch), int(updates) if updates else math.inf) if epoch.isdigit() else (0, 0)


def _is_whole(path: Path) -> bool:
    """Whether the file is a ZIP archive from its first byte to its last, where its table of contents is.

    Bytes before the archive are from a failed save: fairseq tries three times to save to the same file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return min(entry.header_offset for entry in archive.infolist()) == 0
    except (zipfile.BadZipFile, ValueError):
        return False
