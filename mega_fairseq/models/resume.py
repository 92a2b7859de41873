"""A training starts from a whole checkpoint, even if the one before it was killed while it saved.

fairseq writes a checkpoint beside its place and renames it, and then copies it to checkpoint_best.pt and
checkpoint_last.pt. A copy that breaks off leaves half a file where the next run looks first, and the whole one beside
it. Models are built before fairseq reads any checkpoint, and their options hang in those of the whole run.
"""

import logging
import math
import re
import zipfile
from dataclasses import is_dataclass
from pathlib import Path
from typing import List, Optional, Tuple

from fairseq.dataclass import FairseqDataclass
from fairseq.distributed.utils import is_master
from omegaconf import DictConfig, OmegaConf

logger = logging.getLogger(__name__)
LAST = "checkpoint_last.pt"  # what --restore-file is when it is not given
SAVED = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|_last|\.best_.+)\.pt")  # what fairseq calls checkpoints


def start_from_whole(cfg: FairseqDataclass) -> None:
    """Turns a training away from a broken checkpoint: to the newest whole one of its folder, or back to its user."""
    run = _training(cfg)
    if run is None or run.checkpoint.checkpoint_suffix:  # which names a part of a checkpoint
        return
    options = run.checkpoint
    if options.restore_file != LAST:
        _check("--restore-file", options.restore_file)
        return
    saved, last = _newest_first(Path(options.save_dir)), Path(options.save_dir, LAST)
    whole = [path for path in saved if _is_whole(path)]
    broken = [path for path in saved if path not in whole]
    if last in whole:
        return
    if last in broken and not whole:
        raise ValueError(
            f"{last} is not whole, and no other checkpoint of its folder is; "
            "remove it to train from the start, or give --restore-file"
        )
    if not broken or not whole:
        _check("--finetune-from-model", options.finetune_from_model)
        if whole and is_master(run.distributed_training):
            logger.warning(f"starting anew, since there is no {last}: --restore-file {whole[0]} would go on from there")
        return
    if is_master(run.distributed_training):
        names = ", ".join(path.name for path in broken)
        logger.warning(f"resuming from {whole[0]}, the newest whole checkpoint: {names} is not whole")
    options.restore_file = str(whole[0])
    options.finetune_from_model = None  # that was for the first start, and fairseq takes one of the two


def _training(cfg: FairseqDataclass) -> Optional[DictConfig]:
    """The options of the whole run, if that is a training: it fills dataclasses in, a checkpoint holds plain ones."""
    run = cfg._get_parent() if isinstance(cfg, DictConfig) else None
    if run is None or "checkpoint" not in run or not is_dataclass(OmegaConf.get_type(run, "model")):
        return None
    return run


def _check(option: str, path: Optional[str]) -> None:
    if path and Path(path).is_file() and not _is_whole(Path(path)):
        raise ValueError(f"{option} is {path}, which is not a whole checkpoint; give another, or copy it again")


def _newest_first(folder: Path) -> List[Path]:
    """By the epochs and updates in their names, which all processes of a training and all copies of a folder share;
    behind them those that are copies: the best and the last."""
    found = [path for path in folder.glob("checkpoint*.pt") if SAVED.fullmatch(path.name)]
    return sorted(found, key=lambda path: (*_progress(path.name), path.stat().st_mtime, path.name), reverse=True)


def _progress(name: str) -> Tuple[int, float]:
    """checkpoint3.pt is of the end of epoch 3, checkpoint_3_400.pt of update 400, within it."""
    epoch, _, updates = re.sub(r"^checkpoint_?|\.pt$", "", name).partition("_")
    return (int(epoch), int(updates) if updates else math.inf) if epoch.isdigit() else (0, 0)


def _is_whole(path: Path) -> bool:
    """Whether it is a ZIP archive from its first byte to its last: its table of contents, at the end, says so.

    What stands before an archive is of a save that failed: fairseq tries three times, into one file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return min(entry.header_offset for entry in archive.infolist()) == 0
    except (zipfile.BadZipFile, ValueError):
        return False
