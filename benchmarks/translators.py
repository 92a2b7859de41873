"""The same translation in PyTorch, mega_runtime and CTranslate2, from checkpoints as fairseq-train writes them."""

import contextlib
import io
import json
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, List

import torch
from fairseq import checkpoint_utils
from fairseq.data.data_utils import collate_tokens
from omegaconf import OmegaConf

from benchmarks.models import configured, dictionary
from mega_fairseq.cli.main import main as mega_fairseq
from mega_runtime import Translator

BEAM = 5
FORMATS = ("float32", "int8")
Sources = List[List[int]]  # tokens with eos
Translate = Callable[[Sources, int], None]  # sources into so many tokens each, eos included


def random_checkpoint(folder: Path, words: List[str], types: int) -> Path:
    """A model with random weights in a folder, which also has its dictionaries."""
    torch.manual_seed(0)
    languages = {"source": "en", "target": "de"}
    cfg, task, model = configured([*words, *(f"--{side}-lang={name}" for side, name in languages.items())], types)
    folder.mkdir()
    for language in languages.values():
        dictionary(types).save(str(folder / f"dict.{language}.txt"))
    training = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    content = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [training],
        "task_state": task.state_dict(),
        "extra_state": {},
    }
    torch.save(content, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


# ------------------------------------------------------------------------------------------- mega_runtime


def exported(checkpoint: Path, folder: Path, number_format: str, data: Path, *options: Any) -> None:
    """Writes a folder as `mega-fairseq export` does."""
    words = ["export", checkpoint, folder, "--format", number_format, "--data", data, *options]
    with contextlib.redirect_stdout(io.StringIO()):
        code = mega_fairseq(list(map(str, words)))
    assert code == 0


def in_runtime(translator: Translator) -> Translate:
    def translate(sources: Sources, length: int) -> None:
        of_lines = translator.config["documents"] is not None  # whose length follows from the lines
        sizes = {} if of_lines else {"min_len": length - 1, "max_len_a": 0.0, "max_len_b": length - 1}
        found = translator.search(sources, beam=BEAM, **sizes)
        check_lengths([len(hypotheses[0].tokens) for hypotheses in found], length)

    return translate


def check_lengths(found: List[int], expected: int) -> None:
    assert set(found) == {expected}, f"translations of {found} tokens instead of {expected}"


# ------------------------------------------------------------------------------------------- PyTorch


def in_pytorch(checkpoint: Path) -> Translate:
    """As fairseq-generate does."""
    overrides = {"data": str(checkpoint.parent)}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], arg_overrides=overrides)
    model.eval().make_generation_fast_(need_attn=False)
    pad, eos = task.source_dictionary.pad(), task.source_dictionary.eos()

    def translate(sources: Sources, length: int) -> None:
        lengths = torch.tensor([len(source) for source in sources])
        tokens = collate_tokens([torch.tensor(source) for source in sources], pad, eos, left_pad=True)
        of_lines = hasattr(task, "separators")
        sizes = {} if of_lines else {"min_len": length - 1, "max_len_a": 0, "max_len_b": length - 1}
        generator = task.build_generator([model], Namespace(beam=BEAM, **sizes))
        sample = {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}
        found = task.inference_step(generator, [model], sample)
        check_lengths([len(hypotheses[0]["tokens"]) for hypotheses in found], length)

    return translate


# ------------------------------------------------------------------------------------------- CTranslate2


def converted(checkpoint: Path, folder: Path, number_format: str, data: Path) -> None:
    """Writes a folder as CTranslate2's converter does, from a checkpoint of fairseq's Transformer."""
    from ctranslate2.converters import FairseqConverter  # here, since it may not be installed

    converter = FairseqConverter(str(checkpoint), str(data), unsafe_deserialization=True)
    converter.convert(str(folder), quantization=None if number_format == "float32" else number_format)


def in_ctranslate2(
    folder: Path, number_format: str, batch: int = 0, inter_threads: int = 1, intra_threads: int = 1
) -> Translate:
    """Batches of at most `batch` sentences, one for each of `inter_threads`; 0 for all sentences at once."""
    import ctranslate2

    threads = {"inter_threads": inter_threads, "intra_threads": intra_threads}
    translator = ctranslate2.Translator(str(folder), compute_type=number_format, **threads)
    types = json.loads((folder / "shared_vocabulary.json").read_text())

    def translate(sources: Sources, length: int) -> None:
        words = [[types[number] for number in source[:-1]] for source in sources]
        sizes = {"min_decoding_length": length - 1, "max_decoding_length": length - 1}
        found = translator.translate_batch(words, beam_size=BEAM, max_batch_size=batch, **sizes)
        check_lengths([len(result.hypotheses[0]) + 1 for result in found], length)

    return translate
