"""Token mixers through fairseq's own command lines: training, perplexity, generation."""

import pytest

from tests.helpers.commands import (
    GENERATION,
    LM,
    LM_CHUNK,
    LM_HEADS,
    LM_TRAINING,
    PLUGIN,
    SMALL,
    TRAINING,
    as_words,
    assert_same_translations,
    fairseq,
    lines,
    losses,
    on_each_side,
    perplexity,
    preprocess_pairs,
    translations,
)
from tests.helpers.small_models import mixer_of, mixer_options

pytestmark = pytest.mark.slow


def test_a_trained_model_is_evaluated_in_any_pieces_and_continues_texts_in_any_batch(text, tmp_path):
    """With a state that grows; sweeps evaluate those with sums, and with norms that carry a state."""
    sizes = {f"decoder_{size}": number for size, number in SMALL.items()}
    options = {"token_mixer": "sparse", **sizes, **mixer_options("sparse", "decoder"), "normalize_before": True}
    words = [*LM, "--arch=mega_lm", *as_words(options), *LM_HEADS["softmax"], *LM_TRAINING]
    where, path = ["--no-epoch-checkpoints", "--save-dir", tmp_path], tmp_path / "checkpoint_last.pt"
    curve = losses(fairseq("train", text, *words, f"--tokens-per-sample={LM_CHUNK}", "--max-update=24", *where))
    assert curve[-1] < 0.9 * curve[0]

    def evaluate(*options):
        words = [*LM, "--path", path, "--gen-subset=valid", "--valid-block=splits:5", *options]
        return perplexity(fairseq("eval-lm", text, *words))

    pieces = ["--batch-size=3", "--model-overrides={'piece_tokens':37}"]
    assert evaluate(*pieces) == pytest.approx(evaluate(), abs=1e-4)

    words = ["--valid-block=documents", "--documents=line", "--gen-subset=test", "--prefix-size=3", "--beam=3"]
    words += [*LM, "--path", path, "--max-len-b=40"]
    said, other = (fairseq("generate", text, *words, f"--batch-size={size}") for size in (1, 7))
    assert max(len(found.split()) for _, found, _ in translations(said)) > 2 * LM_CHUNK
    assert_same_translations(said, other, count=len(list(lines(said, "S"))))


def test_translation_with_different_mixers_in_encoder_and_decoder(tmp_path):
    options = {**on_each_side(**SMALL), "normalize_before": True, "share_all_embeddings": True}
    for side, name in (("encoder", "aft, local"), ("decoder", "attention, before")):
        options.update({**mixer_options(name, side), f"{side}_token_mixer": mixer_of(name)})
    words = [preprocess_pairs(tmp_path), *PLUGIN, "--arch=mega_transformer", *as_words(options), *TRAINING]
    curve = losses(fairseq("train", *words, "--save-dir", tmp_path, "--max-update=40"))
    assert curve[-1] < 0.85 * curve[0]
    words = [tmp_path / "bin", *GENERATION, "--path", tmp_path / "checkpoint_last.pt"]
    assert_same_translations(*(fairseq("generate", *words, f"--batch-size={size}") for size in (1, 7)))
