"""Training only resumes as the same model, and overrides must name existing options, on real command lines."""

import re

import pytest
import torch

from mega_fairseq.models import MegaLanguageModel, MegaTransformerModel
from tests.helpers import commands
from tests.helpers.commands import CPU, LM, PLUGIN, failure, fairseq, losses, records

pytestmark = pytest.mark.slow

LAST = "checkpoint_last.pt"


@pytest.fixture
def language_model():
    return commands.trained("softmax")


@pytest.fixture(params=["softmax", "translation"])
def trained(request):
    return commands.trained(request.param)


def train(model, folder, *options):
    return fairseq("train", model.data, *model.words, "--save-dir", folder, *options)


def warnings(said):
    return re.findall(
        r"(?:resuming from|starting a new training from) .* with other options: (.*)$", said, re.MULTILINE
    )


# ------------------------------------------------------------------------------------------------ resuming

WAS_SOFTMAX = "--attention-activation-fn is laplace and was softmax"


def test_a_language_model_is_not_resumed_as_another_model(language_model):
    options = ["--decoder-chunk-size=32", "--attention-activation-fn=laplace", "--truncation-length=8"]
    options += ["--no-scale-embedding", "--dropout=0.3", "--save-dir", language_model.folder]
    line = failure("train", language_model.data, *language_model.words, *options)
    start = f"ValueError: {language_model.last} belongs to another model: "
    assert line.startswith(start)
    assert sorted(line[len(start) :].split("; ")[0].split(", ")) == [
        WAS_SOFTMAX,
        "--decoder-chunk-size is 32 and was 16",
        "--no-scale-embedding is True and was False",
        "--truncation-length is 8 and was 0",
    ]


def test_a_translation_model_is_not_resumed_as_another_model(translation):
    """Values are compared as on the command line, although --share-all-embeddings also ties the output projection."""
    limits = [f"--max-{side}-positions" for side in ("source", "target")]
    changed = ", ".join(f"{limit} is 300 and was 1024" for limit in limits)
    words = [*translation.words, "--restore-file", translation.last, *(f"{limit}=300" for limit in limits)]
    for options, changes in (
        (["--attention-activation-fn=laplace"], f"{WAS_SOFTMAX}, {changed}"),
        (["--max-update=4"], changed),  # it shortens position bias simple, and the optimizer's state would not fit
        (
            ["--source-lang=en", "--target-lang=de"],  # the names of files said de to en
            f"{changed}, --source-lang is en and was de, --target-lang is de and was en",
        ),
    ):
        line = failure("train", translation.data, *words, *options)
        assert f"{translation.last} belongs to another model: {changes};" in line


def test_training_resumes_with_other_dropouts_and_limits(language_model, tmp_path):
    options = ["--restore-file", language_model.last, "--dropout=0.3", "--max-target-positions=99", "--max-update=41"]
    said = train(language_model, tmp_path, *options)
    assert [record["num_updates"] for record in records(said, "train_inner")] == [41]
    assert warnings(said) == ["--max-target-positions is 99 and was 2048"]


def test_a_training_with_a_task_without_dataclass_is_resumed(translation, tmp_path):
    """fairseq then stores the options of the task as a Namespace."""
    (tmp_path / "langs").write_text("de\nen\n")
    options = ["--task=translation_multi_simple_epoch", "--lang-pairs=de-en", "--lang-dict", tmp_path / "langs"]
    train(translation, tmp_path, *options, "--max-update=1")
    said = train(translation, tmp_path, *options, "--max-update=2")
    assert [record["num_updates"] for record in records(said, "train_inner")] == [2]
    words = [*translation.words, "--save-dir", tmp_path, *options, "--decoder-z-dim=8"]
    assert "--decoder-z-dim is 8 and was 16" in failure("train", translation.data, *words)


def test_a_new_training_can_start_from_the_weights_of_another_model_if_they_fit(translation, tmp_path):
    start = ["--finetune-from-model", translation.last, "--attention-activation-fn=laplace", "--max-update=1"]
    said = train(translation, tmp_path, *start)
    assert f"loading pretrained model from {translation.last}" in said
    assert warnings(said) == [WAS_SOFTMAX]


def test_a_translation_resumed_at_the_end_of_an_epoch_has_the_losses_of_an_uninterrupted_one(translation, tmp_path):
    """With the option in docs/translation.md; without it, fairseq makes other batches."""
    options = ["--update-epoch-batch-itr=True", "--disable-validation"]
    whole = train(translation, tmp_path / "whole", *options, "--max-epoch=2")
    train(translation, tmp_path / "parts", *options, "--max-epoch=1")
    resumed = losses(train(translation, tmp_path / "parts", *options, "--max-epoch=2"))
    assert resumed == [record["loss"] for record in records(whole, "train_inner") if record["epoch"] == 2]
    assert len(resumed) > 10
    models = (torch.load(tmp_path / run / LAST, weights_only=True)["model"] for run in ("parts", "whole"))
    torch.testing.assert_close(*models, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------ overrides


def evaluation(trained, overrides):
    command = ["generate", trained.data, *PLUGIN, *CPU, "--max-len-b=5"]
    if "mega_lm" in str(trained.words):
        command = ["eval-lm", trained.data, *LM]
    return *command, "--path", trained.last, f"--model-overrides={overrides}"


def test_an_override_of_an_unknown_option_is_refused_with_a_similar_one(language_model):
    line = failure(*evaluation(language_model, {"decoder_chunck_size": 8}))
    assert re.match("ValueError: --model-overrides has 'decoder_chunck_size', .* 'decoder_chunk_size'", line)


def test_an_override_of_an_option_that_the_weights_were_trained_for_is_refused(language_model):
    """Those that keep the shapes of all weights would give other scores without an error."""
    line = failure(*evaluation(language_model, {"decoder_chunk_size": 3, "attention_activation_fn": "laplace"}))
    assert line.startswith("ValueError: --model-overrides has 'attention_activation_fn', ")


def test_overrides_of_any_section_are_accepted(language_model):
    fairseq(*evaluation(language_model, {"dropout": 0.3, "seed": 5, "max_epoch": 3, "checkpoint": {"no_save": True}}))


def test_position_biases_are_fitted_to_smaller_chunks_and_refused_for_larger_ones(translation):
    fairseq(*evaluation(translation, {"encoder_chunk_size": 3, "decoder_chunk_size": 2}))
    for side, chunk in (("encoder", 9), ("decoder", -1)):
        line = failure(*evaluation(translation, {f"{side}_chunk_size": chunk}))
        assert line.startswith(f"ValueError: --{side}-chunk-size is {chunk} ")


def test_from_pretrained_reads_data_relative_to_the_current_folder(trained, monkeypatch):
    model = MegaLanguageModel if "mega_lm" in str(trained.words) else MegaTransformerModel
    monkeypatch.chdir(trained.data.parent)
    assert model.from_pretrained(trained.folder, LAST, f"./{trained.data.name}").task.target_dictionary


def test_from_pretrained_refuses_an_option_that_it_would_ignore(trained):
    model = MegaLanguageModel if "mega_lm" in str(trained.words) else MegaTransformerModel
    where = str(trained.folder), LAST, str(trained.data)
    hub = model.from_pretrained(*where, dropout=0.3, beam=3, generation_args={"lenpen": 2})
    assert (hub.cfg.model.dropout, hub.cfg.generation.beam) == (0.3, 3)  # fairseq 0.12.2 ignores generation_args
    with pytest.raises(ValueError, match="beam is 0"):
        hub.sample("a b", beam=0)
    with pytest.raises(ValueError, match="generate has no option 'max_new_tokens'; give .* max_len_b"):
        hub.sample("a b", max_new_tokens=3)
    with pytest.raises(ValueError, match="^from_pretrained has 'decoder_chunck_size', .* 'decoder_chunk_size'"):
        model.from_pretrained(*where, decoder_chunck_size=8)
