"""The page's models, in onnxruntime-web, do what the runtime's do."""

import numpy as np
import pytest
import torch

from mega_fairseq.export.folder import PROBE_WIDTH
from mega_runtime import Classifier, LanguageModel, Translator
from tests.helpers.commands import ROOT
from tests.helpers.exported import SEARCHED, documents, language, ours, sources, translation
from tests.helpers.hypotheses import assert_same
from tests.helpers.page import CHAPTER, write_documents
from tests.helpers.pieces import pieces_model
from tests.helpers.small_models import net_input

LINES = CHAPTER.read_text().split("\n")[:-1]
TEXTS = [*LINES[:4], "", "  ", *LINES[4:7], "", LINES[7]]


def lines_of(events):
    return [text for _, text in sorted((each["line"], each["text"]) for each in events if "line" in each)]


def groups(texts):
    """Documents, which blank lines separate."""
    found, open_one = [], False
    for text in texts:
        if not text.strip():
            found.append([text])
        elif open_one:
            found[-1].append(text)
        else:
            found.append([text])
        open_one = bool(text.strip())
    return found


def window(translator, texts):
    """The tokens of lines as one source."""
    lines = (translator.encode(text)[:-1] for text in texts)
    tokens = [token for line in lines for token in (*line, translator.source_separator)]
    return [*tokens[:-1], translator.special.eos]


# ------------------------------------------------------------------------------------------- translation


@pytest.mark.parametrize("name", ["whole", "laplace", "chunks"])
def test_hypotheses_are_those_of_the_runtime(runtime, name):
    translator = translation(**SEARCHED[name])[1]
    for number, length in enumerate((1, 2, 9, 31)):
        (source,), options = sources(length, seed=number), {"beam": number + 1, "max_len_b": 20, "unkpen": 1.0}
        found = runtime.ask("hypotheses", path=str(translator.folder.path), source=source, options=options)
        assert_same([found], ours(translator, [source], **options))


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_documents_are_translated_as_by_the_runtime(runtime, models, beam):
    events = runtime.ask("translate", path=str(models / "documents"), texts=TEXTS, options={"beam": beam})
    expected = Translator(models / "documents").translate_documents(groups(TEXTS), beam=beam)
    assert lines_of(events) == [text for document in expected for text in document]
    assert [each["tokens"] for each in events if "tokens" in each] == list(
        range(1, sum("tokens" in e for e in events) + 1)
    )


def test_lines_are_told_before_their_window_ends(runtime, models):
    events = runtime.ask("translate", path=str(models / "documents"), texts=LINES[:6], options={})
    kinds = ["line" if "line" in each else "end" if "weights" in each else "step" for each in events]
    assert "step" in kinds[kinds.index("line") : kinds.index("end")]


@pytest.mark.parametrize("places", [{}, {"cross_attention_positions": "token", "cross_attention_window": 0}])
def test_other_places_of_cross_attention(runtime, tmp_path, places):
    write_documents(tmp_path / "model", pieces_model(tmp_path, model_type="bpe"), **places)
    events = runtime.ask("translate", path=str(tmp_path / "model"), texts=LINES[:5], options={})
    assert lines_of(events) == Translator(tmp_path / "model").translate_documents([LINES[:5]])[0]


def test_a_model_of_single_lines(runtime):
    translator = translation(**SEARCHED["chunks"])[1]
    texts = ["w1 w2 w3", "", "w9 other w4"]
    events = runtime.ask("translate", path=str(translator.folder.path), texts=texts, options={"max_len_b": 15})
    assert lines_of(events) == [line.text for line in translator.translate(texts, max_len_b=15)]


def test_texts_that_the_model_cannot_read_are_refused(runtime, models):
    path = str(models / "documents")
    with pytest.raises(RuntimeError, match="line 2 has .* tokens and the model reads 8192; cut it"):
        runtime.ask("translate", path=path, texts=["a", "unto " * 9000], options={})
    path = str(documents()[2].folder.path)
    with pytest.raises(RuntimeError, match="line 1 has <sep>, which stands between lines; remove it"):
        runtime.ask("translate", path=path, texts=["w1 <sep>"], options={})
    with pytest.raises(RuntimeError, match="the text has the word <pad>; remove it"):
        runtime.ask("translate", path=path, texts=["w1 <pad>"], options={})


def assert_scores_of_the_runtime(runtime, path):
    """In 8 bits, the log-probabilities of a translation."""
    translator = Translator(path)
    source = window(translator, LINES[:6])
    target = translator.search([source])[0][0].tokens
    found = runtime.ask("score", path=str(path), source=source, target=target)
    np.testing.assert_allclose(found, translator.score_tokens(source, target), atol=0.1)


def test_8_bits_give_the_log_probabilities_of_the_runtime(runtime, tmp_path):
    write_documents(tmp_path / "model", pieces_model(tmp_path), "int8")
    assert_scores_of_the_runtime(runtime, tmp_path / "model")
    found = runtime.ask("probe", path=str(tmp_path / "model"), width=PROBE_WIDTH)
    assert found == pytest.approx([PROBE_WIDTH] * PROBE_WIDTH, rel=1e-3)


# ------------------------------------------------------------------------------------------- where words look


def weights_of(model, translator, texts):
    """The weights of the last layer, as the model itself gives them, for each token of a translation."""
    source = window(translator, texts)
    target = translator.search([source])[0][0].tokens
    found = []

    def again(module, given, options, _):
        if not options.get("need_weights"):
            found.append(module(*given, **options, need_weights=True)[2][0])

    hook = model.decoder.layers[-1].cross_attention.register_forward_hook(again, with_kwargs=True)
    with torch.no_grad():
        model(**net_input([source]), prev_output_tokens=torch.tensor([[translator.special.eos, *target[:-1]]]))
    hook.remove()
    return source, target, found[-1].numpy()


def test_words_look_where_the_models_cross_attention_does(runtime, tmp_path):
    model, texts = write_documents(tmp_path / "model", pieces_model(tmp_path)), LINES[:3]
    translator = Translator(tmp_path / "model")
    events = runtime.ask("translate", path=str(tmp_path / "model"), texts=texts, options={})
    (picture,) = (each for each in events if "weights" in each)
    source, target, weights = weights_of(model, translator, texts)
    assert picture["lines"] == [0, 1, 2]

    def words(tokens, separator):
        """The number of each token's word, or -1, and the words' texts."""
        numbers, found, line, begins = [], [], 0, True
        for token in tokens[:-1]:
            if token == separator:
                numbers.append(-1)
                line, begins = line + 1, True
                continue
            piece = translator.source.types[token]
            if begins or piece.startswith("\u2581"):
                found.append([line, ""])
            found[-1][1] += piece.replace("\u2581", "")
            numbers.append(len(found) - 1)
            begins = False
        return numbers, found

    columns, read = words(source, translator.source_separator)
    rows, written = words(target, translator.special.separator)
    for side, found in (("source", read), ("target", written)):
        assert [[word["line"], word["text"]] for word in picture[side]] == found
    expected = np.zeros((len(written), len(read)))
    for token, row in enumerate(rows):
        for place, column in enumerate(columns):
            if row >= 0 and column >= 0:
                expected[row, column] += weights[token, place] / rows.count(row)
    np.testing.assert_allclose(np.reshape(picture["weights"], expected.shape), expected, atol=1e-5)
    assert expected.max() > 2 * expected.mean()


# ------------------------------------------------------------------------------------------- texts and values


def continued(events):
    return "".join(each.get("part", "") for each in events)


@pytest.mark.parametrize("start", ["", "Fellow citizens", "na\u00efve \u20ac \U0001f600", "x" * 1100])
@pytest.mark.parametrize(("temperature", "top_p"), [(0, 1.0), (0.8, 1.0), (1.0, 0.7)])
def test_texts_continue_as_by_the_runtime(runtime, models, start, temperature, top_p):
    """With the random numbers that NumPy draws."""
    model, seed = LanguageModel(models / "bytes"), 3
    expected = "".join(model.stream(start, 40, temperature, top_p=top_p, seed=seed))
    options = {"maxTokens": 40, "temperature": temperature, "topP": top_p}
    draws = np.random.default_rng(seed).random(40).tolist()
    assert (
        continued(runtime.ask("continue", path=str(models / "bytes"), text=start, options=options, draws=draws))
        == expected
    )


def test_a_text_of_words_ends_where_the_model_reads_no_more(runtime):
    model = language(decoder_chunk_size=-1, rel_pos_bias="simple")[1]
    path, options = str(model.folder.path), {"maxTokens": 60, "temperature": 0}
    with pytest.raises(RuntimeError, match="would have 65 tokens and the model reads 64; shorten it"):
        runtime.ask("continue", path=path, text="w1 w2 w3 w4 w5", options=options, draws=[])
    found = continued(runtime.ask("continue", path=path, text="w1 w2 w3 w4", options=options, draws=[]))
    assert found == "".join(model.stream("w1 w2 w3 w4", 60, 0))
    for blank in (" ", "\x1c", "\ufeff"):  # the last one is a blank in JavaScript only
        text, options = f"w1 w2 w3{blank}", {**options, "maxTokens": 9}
        found = continued(runtime.ask("continue", path=path, text=text, options=options, draws=[]))
        assert found == "".join(model.stream(text, 9, 0))
        assert found.startswith(" ") == (blank == "\ufeff")


def test_probabilities_of_classes_are_those_of_the_runtime(runtime, models):
    random = np.random.default_rng(0)
    for values in (np.zeros(64, np.uint8), np.full(64, 255, np.uint8), random.integers(0, 256, 64, np.uint8)):
        (expected,) = Classifier(models / "digits").predict([values])
        found = runtime.ask("classify", path=str(models / "digits"), values=values.tolist())
        assert found == pytest.approx(expected.probabilities, abs=1e-5)
    with pytest.raises(RuntimeError, match="63 numbers and those of the training 64"):
        runtime.ask("classify", path=str(models / "digits"), values=[0] * 63)


# ------------------------------------------------------------------------------------------- the trained models


@pytest.mark.slow
def test_the_trained_model_gives_its_translation_the_runtimes_log_probabilities(runtime):
    """In 8 bits a long search may end elsewhere; docs/deploy.md says by how much probabilities may differ."""
    path = ROOT / "pretrained/bible-en-de"
    if not (path / "config.json").is_file():
        pytest.skip("there is no trained model in pretrained/bible-en-de")
    assert_scores_of_the_runtime(runtime, path)
