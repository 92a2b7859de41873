"""fairseq's tools with translation models: dropout in generation, options of a loaded model, alignments."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.models import MegaTransformerModel
from tests.helpers.commands import (
    GENERATION,
    LANGUAGE_MODELS,
    TRANSLATION,
    fairseq,
    lines,
    records,
    write_corpus,
)
from tests.helpers.small_models import sources, targets, translation_model

LAST = "checkpoint_last.pt"


# ------------------------------------------------------------------------------------------------ retained dropout


PARTS = ("TransformerEncoder", "TransformerEncoderLayer", "TransformerDecoder", "TransformerDecoderLayer")


@pytest.mark.parametrize(
    ("retained", "modules", "kept"),
    [
        (False, None, ()),
        (True, None, PARTS),
        (True, ["TransformerEncoder", "TransformerDecoderLayer"], ("TransformerEncoder", "TransformerDecoderLayer")),
        (True, "TransformerDecoder", ("TransformerDecoder",)),
        (True, "['TransformerEncoderLayer', 'AdaptiveSoftmax']", ("TransformerEncoderLayer",)),
    ],
)
@torch.no_grad()
def test_dropout_is_retained_in_the_given_modules(retained, modules, kept):
    made = translation_model(dropout=0.5)
    made.make_generation_fast_(retain_dropout=retained, retain_dropout_modules=modules)
    switches = {
        "TransformerEncoder": [made.encoder],
        "TransformerEncoderLayer": made.encoder.layers,
        "TransformerDecoder": [made.decoder],
        "TransformerDecoderLayer": made.decoder.layers,
    }
    on = {name: {each.dropout_module.on for each in modules} for name, modules in switches.items()}
    assert on == {name: {name in kept} for name in PARTS}
    source, target = sources(), targets()
    one, other = (made(source, None, target)[0] for _ in range(2))
    assert torch.equal(one, other) != retained


# ------------------------------------------------------------------------------------------------ alignments


@pytest.mark.slow
def test_a_fused_language_model_allows_alignments(translation, tmp_path):
    """With --lm-path, fairseq prepares the language model for alignments too."""
    translation = SimpleNamespace(data=shutil.copytree(translation.data, tmp_path / "bin"), last=translation.last)
    for folder in (translation.data, tmp_path):
        shutil.copy(translation.data / "dict.en.txt", folder / "dict.txt")
    for file in ("train.bin", "train.idx", "valid.bin", "valid.idx"):
        shutil.copy(translation.data / file.replace(".", ".de-en.en."), tmp_path / file)
    words = [*LANGUAGE_MODELS["softmax"], "--max-update=1", "--save-dir", tmp_path]
    fairseq("train", tmp_path, *words)
    fused = ["--lm-path", tmp_path / LAST, "--lm-weight=0.1", "--print-alignment=hard"]
    said = fairseq("generate", translation.data, *GENERATION, "--path", translation.last, *fused)
    assert len(list(lines(said, "A"))) == 37


@pytest.mark.slow
def test_given_alignments_are_learned_and_asked_for_after_loading(tmp_path):
    """Each target word is aligned to the source word at its place."""
    write_corpus(tmp_path)
    for split in ("train", "valid"):
        sides = ((tmp_path / f"{split}.{language}").read_text().splitlines() for language in ("de", "en"))
        words = ([len(line.split()) for line in lines] for lines in sides)
        links = [" ".join(f"{i}-{i}" for i in range(min(pair))) for pair in zip(*words)]
        (tmp_path / f"{split}.align").write_text("".join(f"{line}\n" for line in links))
    files = [f"--{split}pref={tmp_path}/{split}" for split in ("train", "valid")]
    joined = ["--joined-dictionary", "--align-suffix=align", f"--destdir={tmp_path}/bin"]
    fairseq("preprocess", "--source-lang=de", "--target-lang=en", *files, *joined)
    aligned = ["--load-alignments", "--criterion=label_smoothed_cross_entropy_with_alignment", "--alignment-lambda=1"]
    words = [*TRANSLATION, *aligned, "--max-update=60", f"--save-dir={tmp_path}"]
    said = fairseq("train", tmp_path / "bin", *words)
    losses = [record["alignment_loss"] for record in records(said, "train_inner")]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])

    hub = MegaTransformerModel.from_pretrained(str(tmp_path), LAST, str(tmp_path / "bin"))
    plain, aligned = (
        hub.generate(hub.encode("bo ka bu"), beam=2, max_len_a=0, max_len_b=8, **options)[0]
        for options in ({}, {"print_alignment": "hard"})
    )
    assert aligned["tokens"].tolist() == plain["tokens"].tolist()
    assert [int(target) for _, target in aligned["alignment"]] == list(range(len(aligned["tokens"]) - 1))
    assert all(0 <= int(source) < 3 for source, _ in aligned["alignment"])
