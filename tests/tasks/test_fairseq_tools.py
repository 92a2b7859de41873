"""fairseq's tools with translation models: dropout in generation, options of a loaded model, alignments."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import commands
from tests.helpers.commands import (
    LM,
    LM_HEADS,
    LM_TRAINING,
    MEGA_LM,
    PLUGIN,
    SEARCH,
    fairseq,
    lines,
    translations,
)
from tests.helpers.small_models import sources, targets, translation_model

LAST = "checkpoint_last.pt"


@pytest.fixture
def trained():
    return commands.trained("translation")


def evaluation(command, trained, *options):
    return command, trained.data, *PLUGIN, "--cpu", *SEARCH, "--path", trained.last, *options


# ------------------------------------------------------------------------------------------------ retained dropout


PARTS = ("TransformerEncoder", "TransformerEncoderLayer", "TransformerDecoder", "TransformerDecoderLayer")


@pytest.mark.parametrize(
    ("modules", "kept"),
    [
        (None, PARTS),
        (["TransformerEncoder", "TransformerDecoderLayer"], ("TransformerEncoder", "TransformerDecoderLayer")),
        ("TransformerDecoder", ("TransformerDecoder",)),
        ("['TransformerEncoderLayer', 'AdaptiveSoftmax']", ("TransformerEncoderLayer",)),
    ],
)
@torch.no_grad()
def test_dropout_is_retained_in_the_given_modules(modules, kept):
    made = translation_model(dropout=0.5)
    made.make_generation_fast_(retain_dropout=True, retain_dropout_modules=modules)
    switches = {
        "TransformerEncoder": [made.encoder],
        "TransformerEncoderLayer": made.encoder.layers,
        "TransformerDecoder": [made.decoder],
        "TransformerDecoderLayer": made.decoder.layers,
    }
    on = {name: {each.dropout_module.on for each in modules} for name, modules in switches.items()}
    assert on == {name: {name in kept} for name in PARTS}
    assert differs_from_call_to_call(made)


@torch.no_grad()
def test_generation_without_retained_dropout_is_deterministic():
    made = translation_model(dropout=0.5)
    made.make_generation_fast_()
    assert not differs_from_call_to_call(made)


def differs_from_call_to_call(made):
    source, target = sources(), targets()
    one, other = (made(source, None, target)[0] for _ in range(2))
    return not torch.equal(one, other)


@pytest.mark.slow
def test_translations_with_retained_dropout_depend_only_on_the_seed(trained):
    drop = ["--retain-dropout", "--retain-dropout-modules=TransformerDecoderLayer", "--seed"]
    runs = [translations(fairseq(*evaluation("generate", trained, *drop, seed))) for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


# ------------------------------------------------------------------------------------------------ alignments


@pytest.mark.slow
def test_fairseq_interactive_prints_the_alignments_of_fairseq_generate(trained):
    text = trained.data.parent / "test.de"
    typed = evaluation("interactive", trained, "--input", text, "--buffer-size=9", "--print-alignment=hard")
    found = sorted(lines(fairseq(*typed), "A"))
    assert len(found) == len(text.read_text().splitlines())
    assert any(links for _, links in found)
    batches = ["--batch-size=7", "--required-batch-size-multiple=1", "--print-alignment=hard"]
    assert found == sorted(lines(fairseq(*evaluation("generate", trained, *batches)), "A"))


@pytest.mark.slow
def test_a_fused_language_model_allows_alignments(trained, tmp_path):
    """With --lm-path, fairseq prepares the language model for alignments too."""
    trained = SimpleNamespace(data=shutil.copytree(trained.data, tmp_path / "bin"), last=trained.last)
    for folder in (trained.data, tmp_path):
        shutil.copy(trained.data / "dict.en.txt", folder / "dict.txt")
    for file in ("train.bin", "train.idx", "valid.bin", "valid.idx"):
        shutil.copy(trained.data / file.replace(".", ".de-en.en."), tmp_path / file)
    words = [*LM, *MEGA_LM, *LM_HEADS["softmax"], *LM_TRAINING, "--max-update=1", "--save-dir", tmp_path]
    fairseq("train", tmp_path, *words)
    fused = ["--lm-path", tmp_path / LAST, "--lm-weight=0.1", "--print-alignment=hard"]
    said = fairseq(*evaluation("generate", trained, "--required-batch-size-multiple=1", *fused))
    assert len(list(lines(said, "A"))) == 37
