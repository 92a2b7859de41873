"""Brings onnxruntime-web from npm into the folder ort/ beside this file, if it is not there yet."""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "1.30.0"
FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")  # for the CPU
FOLDER = Path(__file__).resolve().parent / "ort"
MARK = FOLDER / "VERSION"  # written last


def bring() -> None:
    if MARK.is_file() and MARK.read_text() == VERSION:
        return
    npm = shutil.which("npm")
    if npm is None:
        sys.exit(
            f"npm was not found: install Node.js, or copy {', '.join(FILES)} of onnxruntime-web {VERSION} into "
            f"{FOLDER}, and write {VERSION} into {MARK.name} there"
        )
    print(f"bringing onnxruntime-web {VERSION} from npm, once", flush=True)
    with tempfile.TemporaryDirectory() as place:
        command = [npm, "pack", "--loglevel=error", f"onnxruntime-web@{VERSION}"]
        if subprocess.run(command, cwd=place, stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"npm could not bring onnxruntime-web {VERSION}: see its message above, and run this again")
        (archive,) = Path(place).glob("*.tgz")
        FOLDER.mkdir(exist_ok=True)
        with tarfile.open(archive) as content:
            for name in FILES:
                (FOLDER / name).write_bytes(content.extractfile(f"package/dist/{name}").read())
    MARK.write_text(VERSION)


if __name__ == "__main__":
    bring()
