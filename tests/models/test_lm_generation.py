"""Language models continue texts with fairseq-generate, fairseq-interactive and from_pretrained."""

import math
import re
from types import SimpleNamespace

import pytest

from mega_fairseq.models import MegaLanguageModel
from tests.helpers.commands import (
    LM,
    LM_HEADS,
    LM_TRAINING,
    MEGA_LM,
    failure,
    fairseq,
    lines,
    preprocess_text,
    translations,
)

pytestmark = pytest.mark.slow

LONGEST, BEAM = 30, ["--beam=3", "--max-len-b=30"]
DOCUMENTS = ["--gen-subset=test", "--documents=line", "--valid-block=documents"]
one_model = pytest.mark.parametrize("trained", ["adaptive"], indirect=True)  # where the kind of softmax is irrelevant


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return preprocess_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module", params=LM_HEADS)
def trained(request, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    words = [*LM, *MEGA_LM, *LM_HEADS[request.param], *LM_TRAINING, "--max-update=40", "--save-dir", folder]
    fairseq("train", text, *words, "--no-epoch-checkpoints")
    return SimpleNamespace(folder=folder, last=folder / "checkpoint_last.pt")


@pytest.fixture(scope="module")
def documents(text):
    """The words of each line of the test set."""
    return [line.split() for line in (text.parent / "test.text").read_text().splitlines()]


def generate(text, trained, *options):
    return fairseq("generate", text, *LM, *BEAM, "--path", trained.last, *DOCUMENTS, *options)


def interact(text, trained, inputs, folder, *options):
    file = folder / "input"
    file.write_text("".join(f"{line}\n" for line in inputs))
    words = [*LM, *BEAM, "--path", trained.last, "--input", file, "--buffer-size=64", *options]
    return fairseq("interactive", text, *words)


def assert_same_texts(said, other):
    (numbers, texts, scores), (_, other_texts, other_scores) = (zip(*translations(each)) for each in (said, other))
    assert list(numbers) == list(range(len(numbers)))
    assert texts == other_texts
    assert scores == pytest.approx(other_scores, abs=1e-4)


def word_scores(text, trained, *options):
    """The words of each document and their log-probabilities from fairseq-eval-lm, by the number of the document."""
    words = [*LM, "--path", trained.last, *DOCUMENTS, "--output-word-probs", *options]
    found = re.findall(r"eval_lm(?::| \| )(\d+) (.+ \[.*)$", fairseq("eval-lm", text, *words), re.MULTILINE)
    pairs = {int(number): re.findall(r"(\S+) \[(-?[\d.]+)\]", rest) for number, rest in found}
    return {number: [(word, float(score)) for word, score in each] for number, each in sorted(pairs.items())}


def test_a_prefix_is_continued_in_any_batch(text, trained, documents):
    said = generate(text, trained, "--prefix-size=3", "--batch-size=64")
    texts = [found.split() for _, found, _ in translations(said)]
    assert min(map(len, documents)) == 0
    assert [found[:3] for found in texts if found][0] == documents[0][:3]
    for found, document in zip(texts, documents):
        assert found[: len(document[:3])] == document[:3]
        assert len(found) <= LONGEST
    assert max(map(len, texts)) > 20  # some cross an edge of chunks
    assert_same_texts(said, generate(text, trained, "--prefix-size=3", "--batch-size=1"))


@one_model
@pytest.mark.parametrize(
    "options",
    [["--min-len=9", "--max-len-b=12"], ["--beam=4"], ["--max-len-a=2", "--max-len-b=3"]],
    ids=["shorter than --min-len", "nothing at all", "--max-len-a"],
)
def test_continuations_of_prefixes_of_any_lengths_are_batch_independent(text, trained, documents, tmp_path, options):
    prefixes = [" ".join(document[:count]) for count, document in enumerate(documents[:9])]
    assert "" in prefixes
    said = interact(text, trained, prefixes, tmp_path, *options, "--batch-size=64")
    assert_same_texts(said, interact(text, trained, prefixes, tmp_path, *options, "--batch-size=1"))
    if "--min-len=9" in options:
        assert all(9 <= len(found.split()) <= 12 for _, found, _ in translations(said))


@one_model
def test_fairseq_interactive_gives_the_continuations_of_fairseq_generate(text, trained, documents, tmp_path):
    prefixes = [" ".join(document[:3]) for document in documents]
    said = interact(text, trained, prefixes, tmp_path, "--batch-size=64")
    assert_same_texts(said, generate(text, trained, "--prefix-size=3", "--batch-size=64"))
    assert_same_texts(said, interact(text, trained, prefixes, tmp_path, "--batch-size=5"))


def test_generation_and_evaluation_give_the_same_scores(text, trained, tmp_path):
    """Compares scores token by token with those of a full pass, also for texts cut at the maximum length."""
    said = generate(text, trained, "--prefix-size=3", "--batch-size=64")
    scores = {number: [math.log(2) * float(bits) for bits in rest.split()] for number, rest in lines(said, "P")}
    texts = [found for _, found, _ in translations(said)]
    (tmp_path / "test.text").write_text("".join(f"{found}\n" for found in texts))
    known = ["--srcdict", text / "dict.txt", "--testpref", tmp_path / "test.text"]
    fairseq("preprocess", "--only-source", *known, "--destdir", tmp_path)
    for number, pairs in word_scores(tmp_path, trained).items():
        assert [word for word, _ in pairs] == [*texts[number].split(), "</s>"]
        assert [score for _, score in pairs] == pytest.approx(scores[number], abs=2e-4)
    assert len(scores) == len(texts) == number + 1


@one_model
def test_samples_keep_their_prefix_and_depend_only_on_the_seed(text, trained, documents):
    words = ["--prefix-size=3", "--sampling", "--sampling-topk=10", "--beam=1", "--seed"]
    samples = [[found for _, found, _ in translations(generate(text, trained, *words, seed))] for seed in (7, 7, 8)]
    assert samples[0] == samples[1] != samples[2]
    for found, document in zip(samples[2], documents):
        assert found.split()[: len(document[:3])] == document[:3]


@one_model
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-len-b=10"], "a prefix has "),
        (["--documents=stream", "--prefix-size=90", "--max-len-b=200"], "--documents line"),
        (["--constraints"], "--constraints"),
        (["--print-alignment"], "--print-alignment"),
    ],
    ids=str,
)
def test_invalid_generation_options_are_refused(text, trained, options, said):
    line = failure("generate", text, *LM, *BEAM, "--path", trained.last, *DOCUMENTS, *options)
    assert said in line


@one_model
@pytest.mark.parametrize(("typed", "said"), [("l u " * 20, "--max-len-b"), ("l u\nl <pad> u\n", "<pad>")])
def test_typed_texts_that_cannot_be_continued_are_refused(text, trained, typed, said, tmp_path):
    (tmp_path / "typed").write_text(typed)
    words = [*LM, "--path", trained.last, "--input", tmp_path / "typed", "--max-len-b=39"]
    assert said in failure("interactive", text, *words)


@one_model
def test_fairseq_interactive_gives_sentences_the_scores_of_fairseq_eval_lm(text, trained, documents, tmp_path):
    """Except for the end of a sentence, which is not part of the input."""
    full = {number: " ".join(document) for number, document in enumerate(documents[:7]) if document}
    said = interact(text, trained, full.values(), tmp_path, "--score-reference", "--batch-size=64")
    scores = [[math.log(2) * float(bits) for bits in rest.split()] for _, rest in lines(said, "P")]
    evaluated = word_scores(text, trained)
    assert [found for _, found, _ in translations(said)] == list(full.values())
    for found, number in zip(scores, full):
        assert found == pytest.approx([score for _, score in evaluated[number]][:-1], abs=2e-4)


@one_model
def test_the_hub_samples_and_scores_like_fairseqs_commands(text, trained, documents, tmp_path):
    full = {number: " ".join(document) for number, document in enumerate(documents[:7]) if document}
    hub = MegaLanguageModel.from_pretrained(str(trained.folder), "checkpoint_last.pt", str(text))
    prefixes, how = [" ".join(each.split()[:3]) for each in full.values()], {"beam": 3, "max_len_b": 30}
    expected = interact(text, trained, prefixes, tmp_path)
    assert hub.sample(prefixes, **how) == [found for _, found, _ in translations(expected)]
    assert hub.sample(prefixes, **how) == [hub.sample(prefix, **how) for prefix in prefixes]
    evaluated = word_scores(text, trained)
    for together, number in zip(hub.score(list(full.values())), full):
        scores, alone = (each["positional_scores"].tolist() for each in (together, hub.score(full[number])))
        assert scores == pytest.approx(alone, abs=1e-5)
        assert scores == pytest.approx([score for _, score in evaluated[number]][:-1], abs=1e-5)  # all but its end


@one_model
def test_allowed_tokens_are_asked_for_every_prefix_and_constraints_are_refused(text, trained, documents):
    hub, numbers = MegaLanguageModel.from_pretrained(str(trained.folder), "checkpoint_last.pt", str(text)), set()

    def allow(number, tokens):
        numbers.add(number)
        return list(range(len(hub.task.source_dictionary)))

    prefixes = [hub.encode(prefix) for prefix in ("l", *(" ".join(document) for document in documents[:4]))]
    hub.generate(prefixes, beam=1, max_len_b=60, min_len=5, prefix_allowed_tokens_fn=allow)
    assert numbers == set(range(5))
    with pytest.raises(ValueError, match="--constraints"):
        hub.generate(prefixes, inference_step_args={"constraints": prefixes[0]})
