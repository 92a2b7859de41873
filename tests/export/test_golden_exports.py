"""Released models, exported, give what was recorded of them; what no graph can express is refused by its option."""

import numpy as np
import pytest

from mega_fairseq.cli.convert.names import HEAD
from mega_fairseq.export.folder import write_classifier, write_language_model, write_translation
from mega_fairseq.tasks import MegaClassificationConfig, MegaClassificationTask
from mega_fairseq.tasks.prediction import Classifier as Project
from mega_runtime import Classifier, LanguageModel, Translator
from mega_runtime.translator import padded
from tests.helpers.exported import LINES, new_folder, ours
from tests.helpers.golden_cases import cases
from tests.helpers.golden_checks import each
from tests.helpers.golden_models import PAD, dictionary
from tests.helpers.golden_models import model as golden_model
from tests.helpers.small_models import TIED, classifier, encoder, language_model, translation_model

TOLERANCE = {"atol": 2e-5, "rtol": 0}

# ------------------------------------------------------------------------------------------- translation


@each("translation model", where=lambda case: not case.config["src_left_pad"])
def test_translation_models_find_the_recorded_hypotheses(case):
    folder = new_folder()
    write_translation(folder, golden_model(case, truncated=False))
    rows = [row[row != PAD].tolist() for row in case.inputs["src_tokens"]]
    for beam in (1, 5):
        found = ours(Translator(folder), rows, beam=beam, max_len_b=20)
        recorded = (case.outputs[f"beam{beam}_{name}"] for name in ("tokens", "scores"))
        for hypotheses, tokens, scores in zip(found, *recorded):
            assert [each for each, _ in hypotheses] == [row[row >= 0].tolist() for row in tokens]
            np.testing.assert_allclose([score for _, score in hypotheses], scores, **TOLERANCE)


# ------------------------------------------------------------------------------------------- language models


EVALUATIONS = [
    pytest.param(case, *sizes, id=f"{case.name}-chunk{sizes[0]}-nums{sizes[1]}")
    for case in cases("language model")
    for sizes in case.config["evals"]
    if not case.config["adaptive_softmax_cutoff"]
]


@pytest.mark.parametrize(("case", "chunk", "chunks"), EVALUATIONS)
def test_language_models_give_the_recorded_log_probabilities(case, chunk, chunks):
    folder, name = new_folder(), f"seq_chunk{chunk}_nums{chunks}"
    write_language_model(folder, golden_model(case, decoder_chunk_size=chunk, truncated=False))
    model = LanguageModel(folder)
    for row, target in enumerate(case.inputs["target"]):
        real = target != PAD
        tokens, targets = (case.inputs[name][row][real].tolist() for name in ("src_tokens", "target"))
        for size in (len(tokens), 7, chunk * chunks):
            state, found = model.reader.start(), []
            for start in range(0, len(tokens), size):
                piece = slice(start, start + size)
                state, log_probs = model.reader.read(state, tokens[piece], targets[piece])
                found += log_probs.tolist()
            np.testing.assert_allclose(found, case.outputs[name][row][real], **TOLERANCE)


# ------------------------------------------------------------------------------------------- classifiers


@each("classifier")
def test_classifiers_give_the_recorded_scores(case):
    model, types = golden_model(case), case.config["vocabulary"]
    (head,) = model.classification_heads
    assert head == HEAD.rpartition(".")[2]
    labels = [str(number) for number in range(case.outputs["logits"].size(1))]
    kind = "values" if types is None else "tokens"
    task = MegaClassificationTask(
        MegaClassificationConfig(input_kind=kind), None if types is None else dictionary(types), labels
    )
    task.number_type, folder = "float", new_folder()
    write_classifier(folder, Project(task, [model]))
    names = ["src_tokens", "src_tokens1"][: 1 + model.pairs]
    rows = [
        row[:length].numpy()
        for name in names
        for row, length in zip(case.inputs[name], case.inputs[name.replace("tokens", "lengths")])
    ]
    given, real = padded(rows, PAD if types else 0.0, np.int64 if types else np.float32)
    (scores,) = Classifier(folder).encoder.run(["scores"], {"inputs": given, "real": real.astype(np.float32)})
    np.testing.assert_allclose(scores, case.outputs["logits"], atol=2e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------- refusals


def written(model):
    write = write_language_model if not hasattr(model, "encoder") else write_translation
    write(new_folder(), model)


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (language_model, {"adaptive_softmax_cutoff": "10,20"}, "--adaptive-softmax-cutoff"),
        (language_model, TIED, "--adaptive-input, --adaptive-softmax-cutoff"),
        (language_model, {"decoder_truncation_length": 4}, "--decoder-truncation-length"),
        (language_model, {"decoder_token_shift": True}, "--decoder-token-shift"),
        (language_model, {"decoder_two_hop": True}, "--decoder-two-hop"),
        (language_model, {"token_mixer": "megalodon"}, "--token-mixer other than mega"),
        (language_model, {"token_mixer": "attention", "decoder_attention_heads": 2}, "--token-mixer other than mega"),
        (translation_model, {"truncation_length": 4}, "--decoder-truncation-length"),
        (translation_model, {"encoder_token_shift": True}, "--encoder-token-shift"),
        (
            translation_model,
            {"encoder_two_hop": True, "decoder_token_shift": True},
            "--encoder-two-hop, --decoder-token",
        ),
        (translation_model, {"adaptive_softmax_cutoff": "10,20"}, "--adaptive-softmax-cutoff"),
        (translation_model, {"rel_pos_bias": "rope", **LINES}, "--rel-pos-bias rope with --cross-attention-positions"),
    ],
)
def test_options_that_no_graph_can_express_are_refused_by_name(build, options, words):
    with pytest.raises(ValueError, match=f"{words}.*cannot be exported; .*train without"):
        written(build(**options))


@pytest.mark.parametrize(
    "options", [{"encoder_token_mixer": "attention", "encoder_attention_heads": 2}, {"encoder_token_shift": True}]
)
@pytest.mark.parametrize("build", [classifier, encoder])
def test_options_of_classifiers_that_no_graph_can_express_are_refused_by_name(build, options):
    task = MegaClassificationTask(MegaClassificationConfig(), dictionary(40), ["a", "b", "c"])
    name = "--" + next(iter(options)).replace("_", "-")
    with pytest.raises(ValueError, match=f"{name}.* cannot be exported"):
        write_classifier(new_folder(), Project(task, [build(**options)]))
