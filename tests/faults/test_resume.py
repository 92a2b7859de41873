"""Training only resumes as the same model, and overrides must name existing options, on real command lines."""

import re
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.models import MegaLanguageModel, MegaTransformerModel
from tests.helpers.commands import (
    CPU,
    LM,
    LM_CHUNK,
    LM_HEADS,
    LM_TRAINING,
    MEGA,
    MEGA_LM,
    PLUGIN,
    TRAINING,
    failure,
    fairseq,
    preprocess_pairs,
    preprocess_text,
    records,
)

pytestmark = pytest.mark.slow

LAST = "checkpoint_last.pt"


# ------------------------------------------------------------------------------------------------ shared fixtures


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """One update of a language model with a learned position bias, whose size depends on the chunk size."""
    folder = tmp_path_factory.mktemp("language_model")
    words = [preprocess_text(folder), *LM, *MEGA_LM, *LM_HEADS["softmax"], *LM_TRAINING, "--rel-pos-bias=simple"]
    fairseq("train", *words, "--max-update=1", "--save-dir", folder)
    return SimpleNamespace(words=words, last=folder / LAST, folder=folder, command="eval-lm")


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translation")
    words = [preprocess_pairs(folder), *PLUGIN, *MEGA, *TRAINING]
    fairseq("train", *words, "--max-update=1", "--save-dir", folder)
    return SimpleNamespace(words=words, last=folder / LAST, folder=folder, command="generate")


@pytest.fixture(params=["language_model", "translation"])
def trained(request):
    return request.getfixturevalue(request.param)


def warnings(said):
    return re.findall(
        r"(?:resuming from|starting a new training from) .* with other options: (.*)$", said, re.MULTILINE
    )


# ------------------------------------------------------------------------------------------------ resuming

CHUNK = f"and was {LM_CHUNK}"
WAS_SOFTMAX = "--attention-activation-fn is laplace and was softmax"


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (["--decoder-chunk-size=32"], f"--decoder-chunk-size is 32 {CHUNK}"),
        (
            ["--attention-activation-fn=laplace", "--truncation-length=8", "--no-scale-embedding", "--dropout=0.3"],
            f"{WAS_SOFTMAX}, --no-scale-embedding is True and was False, --truncation-length is 8 and was 0",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_language_model_training_is_not_resumed_as_another_model(language_model, options, changes):
    line = failure("train", *language_model.words, "--save-dir", language_model.folder, *options)
    start = f"ValueError: {language_model.last} belongs to another model: "
    assert line.startswith(start)
    assert sorted(line[len(start) :].split("; ")[0].split(", ")) == sorted(changes.split(", "))


def test_translation_training_is_not_resumed_as_another_model(translation):
    """Values are compared as on the command line, although --share-all-embeddings also ties the output projection."""
    options = ["--attention-activation-fn=laplace", "--restore-file", translation.last, "--max-source-positions=300"]
    line = failure("train", *translation.words, *options)
    changes = f"{WAS_SOFTMAX}, --max-source-positions is 300 and was 1024"
    assert f"{translation.last} belongs to another model: {changes};" in line


def test_training_resumes_with_other_dropouts_and_limits(language_model, tmp_path):
    where = ["--restore-file", language_model.last, "--save-dir", tmp_path, "--max-update=2"]
    said = fairseq("train", *language_model.words, *where, "--dropout=0.3", "--max-target-positions=99")
    assert [record["num_updates"] for record in records(said, "train_inner")] == [2]
    assert warnings(said) == ["--max-target-positions is 99 and was 2048"]


def test_a_training_with_a_task_without_dataclass_is_resumed(translation, tmp_path):
    """fairseq then stores the options of the task as a Namespace."""
    (tmp_path / "langs").write_text("de\nen\n")
    task = ["--task=translation_multi_simple_epoch", "--lang-pairs=de-en", "--lang-dict", tmp_path / "langs"]
    words = [*translation.words, *task, "--save-dir", tmp_path, "--decoder-layers=1"]
    fairseq("train", *words, "--max-update=1")
    assert [record["num_updates"] for record in records(fairseq("train", *words, "--max-update=2"), "train_inner")] == [
        2
    ]
    assert "--decoder-z-dim is 8 and was 16" in failure("train", *words, "--decoder-z-dim=8")


def test_a_new_training_can_start_from_the_weights_of_another_model_if_they_fit(trained, tmp_path):
    where = ["--save-dir", tmp_path, "--max-update=1", "--finetune-from-model", trained.last]
    said = fairseq("train", *trained.words, *where, "--attention-activation-fn=laplace")
    assert f"loading pretrained model from {trained.last}" in said
    assert warnings(said) == [WAS_SOFTMAX]


def test_a_pruned_model_is_trained_further_and_resumed_by_the_same_command(language_model, tmp_path):
    words = ["train", *language_model.words, "--decoder-layers=3"]
    fairseq(*words, "--max-update=1", "--save-dir", tmp_path / "whole")
    start = ["--finetune-from-model", tmp_path / "whole" / LAST, "--save-dir", tmp_path / "pruned"]
    for updates in (1, 2):
        said = fairseq(*words, *start, "--decoder-layers-to-keep=0,2", "--max-update", updates)
        assert warnings(said) == []
    assert f"Loaded checkpoint {tmp_path / 'pruned' / LAST}" in said


def test_a_translation_resumed_at_the_end_of_an_epoch_has_the_losses_of_an_uninterrupted_one(translation, tmp_path):
    """With the option in docs/translation.md; without it, fairseq makes other batches."""
    words = ["train", *translation.words, "--update-epoch-batch-itr=True", "--disable-validation", "--save-dir"]
    whole = fairseq(*words, tmp_path / "whole", "--max-epoch=2")
    fairseq(*words, tmp_path / "parts", "--max-epoch=1")
    resumed = fairseq(*words, tmp_path / "parts", "--max-epoch=2")
    found = [record["loss"] for record in records(resumed, "train_inner")]
    assert found == [record["loss"] for record in records(whole, "train_inner") if record["epoch"] == 2]
    assert len(found) > 10
    models = (torch.load(tmp_path / run / LAST, weights_only=True)["model"] for run in ("parts", "whole"))
    torch.testing.assert_close(*models, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------ overrides


def evaluation(trained, overrides):
    task = LM if trained.command == "eval-lm" else [*PLUGIN, *CPU, "--max-len-b=5"]
    return trained.command, trained.words[0], *task, "--path", trained.last, f"--model-overrides={overrides}"


def test_an_override_of_an_unknown_option_is_refused_with_a_similar_one(trained):
    line = failure(*evaluation(trained, {"decoder_chunck_size": 8}))
    assert re.match("ValueError: --model-overrides has 'decoder_chunck_size', .* 'decoder_chunk_size'", line)


@pytest.mark.parametrize(("name", "value"), [("attention_activation_fn", "laplace"), ("rel_pos_bias", "rope")])
def test_an_override_of_an_option_that_the_weights_were_trained_for_is_refused(trained, name, value):
    """Those that keep the shapes of all weights would give other scores without an error."""
    line = failure(*evaluation(trained, {"decoder_chunk_size": 3, name: value}))
    assert line.startswith(f"ValueError: --model-overrides has {name!r}, ")


def test_overrides_of_any_section_are_accepted(trained):
    fairseq(*evaluation(trained, {"dropout": 0.3, "seed": 5, "max_epoch": 3, "checkpoint": {"no_save": True}}))


def test_position_biases_are_fitted_to_smaller_chunks_and_refused_for_larger_ones(translation):
    fairseq(*evaluation(translation, {"encoder_chunk_size": 3, "decoder_chunk_size": 2}))
    for side, chunk in (("encoder", 9), ("decoder", -1)):
        line = failure(*evaluation(translation, {f"{side}_chunk_size": chunk}))
        assert line.startswith(f"ValueError: --{side}-chunk-size is {chunk} ")


def test_from_pretrained_refuses_an_option_that_it_would_ignore(trained):
    model = {"eval-lm": MegaLanguageModel, "generate": MegaTransformerModel}[trained.command]
    where = str(trained.folder), LAST, str(trained.words[0])
    hub = model.from_pretrained(*where, dropout=0.3, beam=3, generation_args={"lenpen": 2})
    assert (hub.cfg.model.dropout, hub.cfg.generation.beam) == (0.3, 3)  # fairseq 0.12.2 ignores generation_args
    with pytest.raises(ValueError, match="beam is 0"):
        hub.sample("a b", beam=0)
    with pytest.raises(ValueError, match="^from_pretrained has 'decoder_chunck_size', .* 'decoder_chunk_size'"):
        model.from_pretrained(*where, decoder_chunck_size=8)
