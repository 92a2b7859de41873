"""Faults to inject into commands: each is called in the process before the command starts (`fault` of `Running`)."""

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

from fairseq.trainer import Trainer


def _kill() -> None:
    """Kills the process like `kill -9`: nothing is flushed or closed."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_update(number: int) -> None:
    """Kills the process between backward and step of its n-th update."""
    clip, calls = Trainer.clip_grad_norm, []

    def clip_or_die(self: Trainer, *limits: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            _kill()
        return clip(self, *limits)

    Trainer.clip_grad_norm = clip_or_die


def killed_in_copy(source: str, target: str) -> None:
    """Kills the process when half of the checkpoint `source` has been copied to `target`."""
    copy = shutil.copyfile

    def copy_or_die(src: str, dst: str, **options: Any) -> str:
        if (os.path.basename(src), os.path.basename(dst)) == (source, target):
            with open(src, "rb") as original, open(dst, "wb") as half:
                half.write(original.read()[: os.path.getsize(src) // 2])
            _kill()
        return copy(src, dst, **options)

    shutil.copyfile = copy_or_die


def no_space(size: int) -> None:
    """Limits the size of files, so that writing more fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def killed_while_writing() -> None:
    """Kills the process when a file of `mega-fairseq` is complete but not yet renamed."""
    os.fsync = lambda number: _kill()


def killed_after_a_point() -> None:
    """Kills a sweep when its first point has been saved."""
    from mega_fairseq.cli.sweep import Record

    add = Record.add

    def add_and_die(self: Record, point: Any) -> None:
        add(self, point)
        _kill()

    Record.add = add_and_die


def killed_while_exporting() -> None:
    """Kills an export when its graphs are written, but not its config.json."""
    from mega_fairseq.export.folder import Writer

    Writer.finish = lambda *call: _kill()


def killed_after_export() -> None:
    """Kills an export when its folder is complete and checked, but not renamed."""
    from mega_fairseq.cli import export

    export.record = lambda *call: _kill()


def folder_after_export(folder: Path) -> None:
    """Makes a folder where an export will be, when it is complete and checked, but not renamed."""
    from mega_fairseq.cli import export

    record = export.record

    def record_late(*call: Any) -> None:
        record(*call)
        folder.mkdir()
        (folder / "text.onnx").touch()

    export.record = record_late
