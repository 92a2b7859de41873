"""Translation with fairseq's commands: training, generation, interactive use and from_pretrained."""

import functools
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.models import MegaTransformerModel, source_use
from tests.helpers.commands import (
    CPU,
    GENERATION,
    PLUGIN,
    SEARCH,
    SMALL,
    STOCK,
    SYLLABLES,
    TRAINING,
    TRANSLATION,
    Running,
    as_words,
    assert_same_translations,
    failure,
    fairseq,
    fresh,
    interactive,
    lines,
    losses,
    on_each_side,
    once,
    preprocess_pairs,
    records,
    translations,
)
from tests.helpers.small_models import mixer_of, mixer_options

pytestmark = pytest.mark.slow

UPDATES, HALF_WAY = 150, 90
# Avoids the fast path of fairseq 0.12.2's Transformer, which fails under torch 2.
SLOW_PATH = ["--model-overrides={'checkpoint_activations': True}"]
BY_BLEU = [
    "--eval-bleu", "--eval-bleu-remove-bpe", '--eval-bleu-args={"beam": 4, "max_len_a": 0, "max_len_b": 30}',
    "--best-checkpoint-metric=bleu", "--maximize-best-checkpoint-metric",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------ shared fixtures


@pytest.fixture(scope="module")
def corpus():
    return once("corpus", preprocess_pairs)


@pytest.fixture(scope="module")
def sources(corpus):
    return (corpus.parent / "test.de").read_text().splitlines()


@pytest.fixture(scope="module")
def trained(corpus):
    """A model trained in a new process until it translates, and its checkpoint from half way.

    After so few updates only some seeds translate well.
    """

    def train(folder):
        said = fresh(
            sys.executable, "-m", "fairseq_cli.train", corpus, *TRANSLATION, "--seed=2", "--grouped-shuffling",
            "--max-update", UPDATES, "--save-interval-updates", HALF_WAY, "--save-dir", folder,
        )  # fmt: skip
        (half_way,) = folder.glob(f"checkpoint_*_{HALF_WAY}.pt")
        return SimpleNamespace(last=folder / "checkpoint_last.pt", half_way=half_way, said=said, folder=folder)

    return once("translator", train)


@pytest.fixture(scope="module")
def generate(corpus, trained):
    """The output of fairseq-generate, cached for equal calls."""

    @functools.lru_cache(maxsize=None)
    def call(*options, path=trained.last):
        return fairseq("generate", corpus, *GENERATION, "--path", path, *options)

    return call


@pytest.fixture
def interact(corpus, trained):
    words = [*PLUGIN, "--cpu", *SEARCH, "--path", trained.last]
    return lambda sentences, *options: interactive(corpus, sentences, *words, *options)


def texts(said):
    return [text for _, text, _ in translations(said)]


def bleu(said):
    return float(re.search(r"BLEU4 = ([\d.]+)", said).group(1))


# ------------------------------------------------------------------------------------------------ fairseq-train


UNUSED = "hardly uses its sources"


def early_is_over():
    """In the process of a command: its first validation already counts."""
    source_use.EARLY = 0


def test_training_learns_to_translate(trained, generate):
    curve = losses(trained.said)
    assert len(curve) == UPDATES
    assert curve[-1] < curve[0] / 2
    assert UNUSED not in trained.said  # so early
    assert bleu(generate("--batch-size=64")) > 40


def test_a_checkpoint_loads_without_the_plugin(trained):
    program = "import sys, torch; print(torch.load(sys.argv[1], weights_only=True)['cfg']['model']['_name'])"
    assert fresh(sys.executable, "-c", program, trained.last, cwd=trained.folder) == "mega_transformer\n"


def test_validation_of_a_checkpoint_repeats_the_loss_of_its_training(corpus, trained):
    said = fairseq("validate", corpus, *PLUGIN, "--task=translation", *CPU, "--batch-size=7", "--path", trained.last)
    loss = float(re.search(r"valid on 'valid' subset \| loss ([\d.]+)", said).group(1))
    assert loss == pytest.approx(records(trained.said, "valid")[-1]["valid_loss"], abs=2e-3)


def test_validation_warns_once_of_a_model_that_does_not_use_its_sources(corpus, tmp_path):
    words = [corpus, *TRANSLATION, "--lr=0.3", "--max-update=40", "--save-dir", tmp_path, "--valid-subset=valid,test"]
    code, said = Running("train", *words, "--validate-interval-updates=20", fault=early_is_over).wait()
    assert code == 0, said
    validations = [int(record["valid_num_updates"]) for record in records(said, "valid")]
    assert [int(updates) for updates in re.findall(rf"after (\d+) updates, .*{UNUSED}", said)] == validations
    assert len(validations) > 1
    sentences = texts(fairseq("generate", corpus, *GENERATION, "--path", tmp_path / "checkpoint_last.pt"))
    assert len(set(sentences)) < 3  # the warning was right


# ------------------------------------------------------------------------------------------------ fairseq-generate


def test_sentences_longer_than_the_simple_bias_was_trained_for_are_refused(corpus, tmp_path):
    longest, skip = 8, "--skip-invalid-size-inputs-valid-test"
    words = [corpus, *TRANSLATION, "--save-dir", tmp_path, "--max-update=1"]
    said = failure("train", *words, f"--max-source-positions={longest}", "--encoder-chunk-size=-1")
    assert f"max_positions=({longest}, 1024), skip this example with {skip}" in said
    fairseq("train", *words, f"--max-target-positions={longest}", skip)
    words = [corpus, *GENERATION, "--path", tmp_path / "checkpoint_last.pt"]
    for option in ("--batch-size=7", "--score-reference"):
        assert f"max_positions=(1024, {longest}), skip this example with {skip}" in failure("generate", *words, option)
    lengths = [len(scores.split()) for _, scores in lines(fairseq("generate", *words, skip), "P")]
    assert max(lengths) == longest


@pytest.mark.parametrize("options", [["--batch-size=7"], ["--batch-size=64", "--left-pad-source"]], ids=" ".join)
def test_translations_do_not_depend_on_the_batch_or_the_side_of_padding(generate, options):
    said, alone = generate(*options), generate("--batch-size=1")
    assert_same_translations(said, alone)
    assert bleu(said) == bleu(alone)


def test_decoding_a_reference_token_by_token_gives_the_score_of_a_full_pass(generate):
    """Compares references of different lengths as forced prefixes with fairseq's scorer."""
    scored = generate("--batch-size=7", "--score-reference")
    assert texts(scored) == [text for _, text in sorted(lines(scored, "T"))]
    assert_same_translations(generate("--batch-size=7", "--prefix-size=40", "--max-len-b=40"), scored)


def test_translations_with_retained_dropout_depend_on_the_seed(generate):
    drop = ["--batch-size=64", "--retain-dropout", "--retain-dropout-modules=TransformerDecoderLayer", "--seed"]
    one, other = (texts(generate(*drop, seed)) for seed in (7, 8))
    assert one != other
    assert one != texts(generate("--batch-size=64"))


def test_overrides_of_options_newer_than_the_checkpoint_apply_to_every_layer(generate, trained, edited):
    options = {"encoder_truncation_length": 1, "decoder_truncation_length": 1}

    def change(saved):
        saved["cfg"]["model"].update(generation_weights="float32")  # an option that no longer exists
        for name in options:
            del saved["cfg"]["model"][name]

    path = edited(trained.last, change)
    given = f"--model-overrides={options}"
    assert_same_translations(generate("--batch-size=7", given, path=path), generate("--batch-size=7", given))


def test_an_ensemble_does_not_depend_on_the_order_of_its_models(generate, corpus, trained, tmp_path):
    """Two of ours, and fairseq's Transformer."""
    fairseq("train", corpus, *STOCK, *TRAINING, "--max-update=30", "--save-dir", tmp_path)
    paths = [str(path) for path in (trained.last, trained.half_way, tmp_path / "checkpoint_last.pt")]
    options = [*SLOW_PATH, "--print-alignment=hard"]
    one = generate("--batch-size=7", *options, path=":".join(paths))
    assert_same_translations(one, generate("--batch-size=64", *options, path=":".join(reversed(paths))))
    assert texts(one) != texts(generate("--batch-size=7"))


# ------------------------------------------------------------------------------------------------ fairseq-interactive


def test_fairseq_interactive_gives_the_translations_and_alignments_of_fairseq_generate(interact, generate, sources):
    alignments = "--print-alignment=hard"
    said = interact(sources, "--buffer-size=16", "--batch-size=5", alignments)
    assert_same_translations(said, generate("--batch-size=64"))
    found = sorted(lines(said, "A"))
    assert len(found) == len(sources)
    assert any(links for _, links in found)
    assert found == sorted(lines(generate("--batch-size=7", alignments), "A"))


def test_sources_that_the_model_cannot_read_give_one_warning_of_each_kind(interact):
    said = interact([*["ba Foreign words", "ko bar", "ba", ""] * 2, "ba ko da"])
    assert said.count("a guess") == 2
    assert all(words in said for words in ("most words of an input", "an input is blank"))


def test_constraints_are_met_in_any_batch(interact, sources):
    asked = [f"{source}\tko@@ pu\tda" for source in sources[:9]]
    options = ["--constraints=ordered", "--beam=8", "--buffer-size=9"]
    said = interact(asked, *options, "--batch-size=9")
    assert all(re.search(r"(^| )ko@@ pu (.* )?da( |$)", text) for text in texts(said))
    assert_same_translations(said, interact(asked, *options, "--batch-size=1"), count=len(asked))


# ------------------------------------------------------------------------------------------------ other trainings


def test_a_run_with_its_best_checkpoint_chosen_by_bleu_resumes_and_loads(corpus, trained, tmp_path):
    """Its validations do not warn of a model that translates."""
    words = [corpus, *TRANSLATION, "--finetune-from-model", trained.last, "--lr=1e-5", *BY_BLEU, "--save-dir", tmp_path]
    code, said = Running("train", *words, "--max-update=2", fault=early_is_over).wait()
    assert code == 0, said
    assert UNUSED not in said
    first = records(said, "valid")[-1]
    assert first["valid_bleu"] > 30
    best = torch.load(tmp_path / "checkpoint_best.pt", weights_only=False)  # it has arrays of BLEU
    assert best["extra_state"]["best"] == first["valid_bleu"]
    said = fairseq("train", *words, "--max-update=4")
    assert re.search(r"Loaded checkpoint .*checkpoint_last.pt \(epoch 1 @ 2 updates\)", said)
    last = records(said, "valid")[-1]
    assert last["valid_num_updates"] == 4
    assert last["valid_best_bleu"] == max(first["valid_bleu"], last["valid_bleu"])
    fresh(sys.executable, "-c", LIBRARY, tmp_path, "checkpoint_last.pt", corpus, cwd=tmp_path)


LIBRARY = """
import sys, fairseq.models
from mega_fairseq.models import MegaTransformerModel
MegaTransformerModel.from_pretrained(*sys.argv[1:])  # from a checkpoint with arrays of BLEU counts
"""


def test_translation_with_different_mixers_in_encoder_and_decoder(corpus, tmp_path):
    options = {**on_each_side(**SMALL), "normalize_before": True, "share_all_embeddings": True}
    for side, name in (("encoder", "aft, local"), ("decoder", "attention, before")):
        options.update({**mixer_options(name, side), f"{side}_token_mixer": mixer_of(name)})
    words = [corpus, *PLUGIN, "--arch=mega_transformer", *as_words(options), *TRAINING]
    curve = losses(fairseq("train", *words, "--save-dir", tmp_path, "--max-update=40"))
    assert curve[-1] < 0.85 * curve[0]
    words = [corpus, *GENERATION, "--path", tmp_path / "checkpoint_last.pt"]
    assert_same_translations(*(fairseq("generate", *words, f"--batch-size={size}") for size in (1, 7)))


# ------------------------------------------------------------------------------------------------ from_pretrained


def test_from_pretrained_translates_a_list_like_its_single_sentences(corpus, trained, generate, sources, tmp_path):
    joined = [sentence.replace("@@ ", "") for sentence in sources]
    codes = tmp_path / "codes"
    merges = [f"{syllable[0]} {syllable[1]}{end}\n" for syllable in SYLLABLES for end in ("", "</w>")]
    codes.write_text("".join(["#version: 0.2\n", *merges]))
    where = (str(trained.folder), "checkpoint_best.pt", str(corpus))
    hub = MegaTransformerModel.from_pretrained(*where, bpe="subword_nmt", bpe_codes=str(codes))
    how = {"beam": 4, "max_len_a": 0, "max_len_b": 30}
    together = hub.translate(joined, **how)
    assert together == [hub.translate(sentence, **how) for sentence in joined]
    assert hub.translate(["", joined[0], " "], **how) == ["", together[0], ""]
    assert hub.translate("", **how) == ""
    with pytest.raises(ValueError, match="skip_invalid_size_inputs would leave results out"):
        hub.translate(joined, skip_invalid_size_inputs=True)
    generated = generate("--batch-size=64", "--remove-bpe", path=trained.folder / "checkpoint_best.pt")
    assert together == texts(generated)
