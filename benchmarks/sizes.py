"""How much there is to read: lines, words, and functions and files between a decoder and its arithmetic.

python benchmarks/sizes.py
"""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Dict, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

import torch

from benchmarks.models import from_args

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mega_fairseq"
ENDS = {"the EMA": ("in_blocks", "ema_token_naive"), "attention": ("attention",)}  # functions without further choices


def lines(*folders: Path, without: Tuple[Path, ...] = ()) -> int:
    files = [path for folder in folders for path in folder.rglob("*.py") if not set(without) & {path, *path.parents}]
    return sum(len(path.read_text().splitlines()) for path in files)


def occurrences(pattern: str, folder: Path) -> int:
    files = [path for path in folder.rglob("*.py") if path.name != "backend.py"]
    return sum(len(re.findall(pattern, path.read_text())) for path in files)


def words() -> Tuple[int, int]:
    """Words of README and docs, and marks, such as the lines of tables, which `wc -w` counts as words."""
    found = [word for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] for word in path.read_text().split()]
    real = sum(any(map(str.isalnum, word)) for word in found)
    return real, len(found) - real


def paths(run: Any) -> Dict[str, List[str]]:
    """The functions of the package on the stack when `run()` first reaches each of ENDS, as file:function."""
    found: Dict[str, List[str]] = {}

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        ends = [name for name, functions in ENDS.items() if event == "call" and frame.f_code.co_name in functions]
        if not ends or ends[0] in found or str(PACKAGE) not in frame.f_code.co_filename:
            return
        names = []
        while frame is not None:
            if str(PACKAGE) in frame.f_code.co_filename:
                names.append(f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_code.co_name}")
            frame = frame.f_back
        found[ends[0]] = names[::-1]

    sys.setprofile(on_call)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def print_paths(title: str, run: Any) -> None:
    for end, names in paths(run).items():
        files = len({name.partition(":")[0] for name in names})
        print(f"{title}, to {end}: {len(names)} functions in {files} files: {' '.join(names)}")


def main() -> None:
    apart = (PACKAGE / "export", PACKAGE / "cli" / "export.py")
    print(f"mega_fairseq without export: {lines(PACKAGE, without=apart):,} lines, export: {lines(*apart[:1]):,}")
    for name in ("runtime", "tests", "benchmarks", "examples/demo"):
        print(f"{name}: {lines(ROOT / name):,} lines")
    print("README and docs: {:,} words, and {:,} marks of tables and lists".format(*words()))
    print(f"device.type or backend( outside backend.py: {occurrences(r'device[.]type|[^_]backend[(]', PACKAGE)}")
    print(f"imports of Triton inside functions: {occurrences(r'    from [a-z_.]*[.]triton import', PACKAGE)}")
    tokens = torch.full((1, 9), 5)
    model = from_args(["--arch=mega_lm_small", "--task=mega_language_modeling", "--decoder-layers=1"], 20)
    print_paths("training", lambda: model.train()(tokens))
    model.eval().make_generation_fast_()
    state: Dict[str, Any] = {}
    with torch.no_grad():
        model.decoder(tokens[:, :1], incremental_state=state)
        print_paths("a step", lambda: model.decoder(tokens[:, :2], incremental_state=state))


if __name__ == "__main__":
    main()
