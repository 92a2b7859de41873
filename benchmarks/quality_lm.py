"""Mega, the other token mixers and fairseq's transformer_lm as language models: equal parameters, updates and tokens.

    python benchmarks/quality_lm.py DATA --prepare FILE       first, once: bytes of a text, or of a text in xz
    python benchmarks/quality_lm.py DATA OUT --tasks wikipedia --models mega,transformer --lr 5e-3 --seeds 1,2
    python benchmarks/quality_lm.py DATA OUT --collect docs/quality_lm.json
    python benchmarks/quality_lm.py --plot docs/quality_lm.json

Scores are bits per byte for each test chunk, or each context window of the Transformer.
"""

import lzma
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks.runs import PLUGIN, WITH_PLUGIN, Experiment, Run, fairseq, output

TO_BYTES = PLUGIN.parent / "examples/lm/to_bytes.py"
PARTS = {"train": (0.0, 0.9), "valid": (0.9, 0.95), "test": (0.95, 1.0)}  # as enwik8 is split

TASK = ["--task=mega_language_modeling"]
OURS = [*TASK, "--criterion=mega_lm_cross_entropy"]
SMALL = [*OURS, "--variant-block-multiple-min=2", "--variant-block-multiple-max=4"]
MEGA = [*SMALL, "--arch=mega_lm_small", "--init=released"]
SCALED = [*SMALL, "--arch=mega_lm_small"]
TRAINED_CONTEXT = ["--valid-block=size:1024"]  # of the longest training segments
WHOLE = ["--decoder-chunk-size=-1", "--tokens-per-sample=256", *TRAINED_CONTEXT]  # attention in whole segments
STOCK = ["--task=language_modeling", "--sample-break-mode=none", "--tokens-per-sample=512"]
MODELS = {  # parameters within 2%; the Transformer's feed-forward is chosen to have 887,816
    "transformer": [
        *[*STOCK, "--arch=transformer_lm", "--decoder-layers=4", "--decoder-embed-dim=128", "--decoder-input-dim=128"],
        *["--decoder-output-dim=128", "--decoder-ffn-embed-dim=578", "--decoder-attention-heads=4", "--dropout=0.0"],
        *["--decoder-normalize-before", "--share-decoder-input-output-embed"],
    ],
    "mega": MEGA,
    "mega-scaled": SCALED,
    "mega-scaled-whole": [*SCALED, *WHOLE],
    "mega-bf16": [*MEGA, "--bf16"],
    "mega-shift": [*MEGA, "--decoder-token-shift"],
    "mega-shift-scaled": [*SCALED, "--decoder-token-shift"],
    "mega-rope": [*MEGA, "--rel-pos-bias=rope"],
    "mega-alibi": [*MEGA, "--rel-pos-bias=alibi"],
    "mega-simple": [*MEGA, "--rel-pos-bias=simple"],
    "megalodon": [*SMALL, "--arch=megalodon_lm_small"],
    "flash": [*SMALL, "--arch=flash_lm_small"],
    "flash-quad": [*SMALL, "--arch=flash_quad_lm_small"],
    "attention": [*SMALL, "--arch=attention_lm_small"],
    "time-weighted": [*SMALL, "--arch=time_weighted_lm_small"],
    "gmlp": [*SMALL, "--arch=gmlp_lm_small"],
    "aft-local": [*SMALL, "--arch=aft_lm_small", "--tokens-per-sample=256", *TRAINED_CONTEXT],
    "sparse": [*SMALL, "--arch=sparse_lm_small", "--tokens-per-sample=256"],
}
# Whose speed is compared: initialisation, precision and position bias do not change it.
COMPARED = [name for name in MODELS if not re.search("-(scaled|whole|bf16|rope|alibi|simple)$", name)]
# Settings of the evaluation; the first one is also evaluated on valid.
WINDOWS = (384, 0, 256)  # minimum context of a scored token, out of the Transformer's 512
CHUNKS = (256, 64, 128, 512, 1024, 2048)
FEWER_CHUNKS = {
    "mega-scaled-whole": (1024, 256),
    "mega-simple": (256, 64, 128),
    "time-weighted": (256,),
    "gmlp": (256,),
    "sparse": (1024,),
}
RECIPE = [
    *["--optimizer=adam", "--adam-betas=(0.9, 0.98)", "--clip-norm=0.25", "--weight-decay=0.1", "--max-tokens=4096"],
    *["--lr-scheduler=polynomial_decay", "--warmup-updates=150", "--no-epoch-checkpoints", "--save-interval=1000"],
    *["--validate-interval-updates=300", "--save-interval-updates=500", "--keep-interval-updates=1"],
    *["--log-format=json", "--log-interval=50"],
]


class LanguageModels(Experiment):
    updates = {"wikipedia": 1500}
    rates = dict.fromkeys(MODELS, ("5e-3",))
    curve, unit = ("valid", "valid_loss"), "bits per token on valid"

    def prepare(self, source: Path, data: Path) -> None:
        """Writes the bytes of each part as numbers and binarises them."""
        text = lzma.decompress(source.read_bytes()) if source.suffix == ".xz" else source.read_bytes()
        folder = data / "wikipedia"
        folder.mkdir(parents=True, exist_ok=True)
        for name, (start, stop) in PARTS.items():
            part = text[int(len(text) * start) : int(len(text) * stop)]
            with open(folder / f"{name}.numbers", "wb") as file:
                subprocess.run([sys.executable, str(TO_BYTES)], input=part, stdout=file, check=True)
        files = [f"--{name}pref={folder / name}.numbers" for name in PARTS]
        subprocess.run([*fairseq("preprocess"), "--only-source", *files, "--destdir", str(folder / "bin")], check=True)

    def training(self, run: Run, updates: int) -> List[str]:
        length = [f"--lr={run.lr}", f"--total-num-update={updates}", f"--max-update={updates}"]
        return [str(run.data / "bin"), *MODELS[run.model], *RECIPE, *length]

    def scores(self, run: Run) -> Dict[str, float]:
        """Bits per token: all but one in 65,537 is a byte."""
        scores = {}
        for number, (setting, words) in enumerate(evaluations(run.model)):
            for subset in ("test",) if number else ("valid", "test"):
                command = [*fairseq("eval_lm"), str(run.data / "bin"), *words, f"--gen-subset={subset}", "--cpu"]
                command += ["--path", str(run.folder / "checkpoint_last.pt")]
                printed = output(command, run.folder / f"eval-{subset}-{setting.replace(' ', '-')}.log")
                scores[f"{subset}, {setting}"] = float(re.search(r"Loss \(base 2\): ([\d.]+)", printed)[1])
        return scores


def evaluations(model: str) -> List[Tuple[str, List[str]]]:
    """Settings of fairseq-eval-lm."""
    if model == "transformer":
        return [(f"window {w}", [*STOCK, f"--context-window={w}"]) for w in WINDOWS]
    common = [*WITH_PLUGIN, *TASK]
    if model == "aft-local":  # its weights count for less, the more tokens came before
        return [("context 1024", [*common, *TRAINED_CONTEXT]), ("stream", common)]
    chunks = FEWER_CHUNKS.get(model, CHUNKS)
    return [(f"chunk {c}", [*common, "--model-overrides", f"{{'decoder_chunk_size': {c}}}"]) for c in chunks]


if __name__ == "__main__":
    LanguageModels().main(__doc__)
