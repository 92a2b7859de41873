"""Language models continue texts with fairseq-generate, fairseq-interactive and from_pretrained."""

import functools
import math
import re

import pytest

from mega_fairseq.models import MegaLanguageModel
from tests.helpers import commands
from tests.helpers.commands import LM, assert_same_translations, failure, fairseq, interactive, lines, translations

pytestmark = pytest.mark.slow

LONGEST, BEAM = 30, ["--beam=3", "--max-len-b=30"]
DOCUMENTS = ["--gen-subset=test", "--documents=line", "--valid-block=documents"]


@pytest.fixture(scope="module")
def trained():
    """With an adaptive softmax; tests of models compare both kinds token by token."""
    return commands.trained("adaptive")


@pytest.fixture
def documents(trained):
    """The words of each line of the test set."""
    return [line.split() for line in (trained.folder / "test.text").read_text().splitlines()]


@pytest.fixture(scope="module")
def generate(trained):
    """The output of fairseq-generate, cached for equal calls."""
    words = [trained.data, *LM, *BEAM, "--path", trained.last, *DOCUMENTS]
    return functools.lru_cache(maxsize=None)(lambda *options: fairseq("generate", *words, *options))


@pytest.fixture
def interact(trained):
    words = [*LM, *BEAM, "--path", trained.last, "--buffer-size=64"]
    return lambda inputs, *options: interactive(trained.data, inputs, *words, *options)


@pytest.fixture
def word_scores(trained):
    """The words of each document and their log-probabilities from fairseq-eval-lm, by the number of the document."""

    def call(data=trained.data):
        words = [*LM, "--path", trained.last, *DOCUMENTS, "--output-word-probs"]
        found = re.findall(r"eval_lm(?::| \| )(\d+) (.+ \[.*)$", fairseq("eval-lm", data, *words), re.MULTILINE)
        pairs = {int(number): re.findall(r"(\S+) \[(-?[\d.]+)\]", rest) for number, rest in found}
        return {number: [(word, float(score)) for word, score in each] for number, each in sorted(pairs.items())}

    return call


def test_a_prefix_is_continued_in_any_batch(generate, documents):
    said = generate("--prefix-size=3", "--batch-size=64")
    texts = [text.split() for _, text, _ in translations(said)]
    assert min(map(len, documents)) == 0
    for text, document in zip(texts, documents):
        assert text[: len(document[:3])] == document[:3]
        assert len(text) <= LONGEST
    assert max(map(len, texts)) > 20  # some cross an edge of chunks
    assert_same_translations(said, generate("--prefix-size=3", "--batch-size=1"), count=len(documents))


@pytest.mark.parametrize("options", [["--min-len=9", "--max-len-b=12"], ["--max-len-a=2", "--max-len-b=3"]], ids=str)
def test_prefixes_of_any_lengths_are_continued_in_any_batch(interact, documents, options):
    prefixes = [" ".join(document[:count]) for count, document in enumerate(documents[:9])]
    assert "" in prefixes
    said = interact(prefixes, *options, "--batch-size=64")
    assert_same_translations(said, interact(prefixes, *options, "--batch-size=1"), count=9)
    if "--min-len=9" in options:
        assert all(9 <= len(text.split()) <= 12 for _, text, _ in translations(said))


def test_fairseq_interactive_gives_the_continuations_of_fairseq_generate(generate, interact, documents):
    said = interact([" ".join(document[:3]) for document in documents], "--batch-size=5")
    assert_same_translations(said, generate("--prefix-size=3", "--batch-size=64"), count=len(documents))


def test_generation_and_evaluation_give_the_same_scores(trained, generate, word_scores, tmp_path):
    """Compares scores token by token with those of a full pass, also for texts cut at the maximum length."""
    said = generate("--prefix-size=3", "--batch-size=64")
    scores = {number: [math.log(2) * float(bits) for bits in rest.split()] for number, rest in lines(said, "P")}
    texts = [text for _, text, _ in translations(said)]
    (tmp_path / "test.text").write_text("".join(f"{text}\n" for text in texts))
    known = ["--srcdict", trained.data / "dict.txt", "--testpref", tmp_path / "test.text"]
    fairseq("preprocess", "--only-source", *known, "--destdir", tmp_path)
    evaluated = word_scores(tmp_path)
    assert len(scores) == len(texts) == len(evaluated)
    for number, pairs in evaluated.items():
        assert [word for word, _ in pairs] == [*texts[number].split(), "</s>"]
        assert [score for _, score in pairs] == pytest.approx(scores[number], abs=2e-4)


def test_samples_keep_their_prefix_and_depend_only_on_the_seed(generate, documents):
    words = ["--prefix-size=3", "--sampling", "--sampling-topk=10", "--beam=1", "--seed"]
    sampled = generate.__wrapped__  # not from the cache
    samples = [[text for _, text, _ in translations(sampled(*words, seed))] for seed in (7, 7, 8)]
    assert samples[0] == samples[1] != samples[2]
    for text, document in zip(samples[2], documents):
        assert text.split()[: len(document[:3])] == document[:3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-len-b=10"], "a prefix has "),
        (["--documents=stream", "--prefix-size=90", "--max-len-b=200"], "--documents line"),
        (["--print-alignment"], "--print-alignment"),
    ],
    ids=str,
)
def test_invalid_generation_options_are_refused(trained, options, said):
    assert said in failure("generate", trained.data, *LM, *BEAM, "--path", trained.last, *DOCUMENTS, *options)


@pytest.mark.parametrize(("typed", "said"), [("l u " * 20, "--max-len-b"), ("l u\nl <pad> u\n", "<pad>")])
def test_typed_texts_that_cannot_be_continued_are_refused(trained, typed, said, tmp_path):
    (tmp_path / "typed").write_text(typed)
    words = [*LM, "--path", trained.last, "--input", tmp_path / "typed", "--max-len-b=39"]
    assert said in failure("interactive", trained.data, *words)


def test_text_that_the_model_cannot_read_gives_a_warning(interact):
    assert "most words of an input are unknown (<unk>), " in interact(["", "b Foreign words"])


def test_the_hub_samples_and_scores_like_fairseqs_commands(trained, interact, word_scores, documents):
    full = {number: " ".join(document) for number, document in enumerate(documents[:7]) if document}
    hub = MegaLanguageModel.from_pretrained(str(trained.folder), "checkpoint_last.pt", str(trained.data))
    prefixes, how = [" ".join(each.split()[:3]) for each in full.values()], {"beam": 3, "max_len_b": 30}
    assert hub.sample(prefixes, **how) == [text for _, text, _ in translations(interact(prefixes))]
    assert hub.sample(prefixes, **how) == [hub.sample(prefix, **how) for prefix in prefixes]
    evaluated = word_scores()
    for together, number in zip(hub.score(list(full.values())), full):
        scores, alone = (each["positional_scores"].tolist() for each in (together, hub.score(full[number])))
        assert scores == pytest.approx(alone, abs=1e-5)
        assert scores == pytest.approx([score for _, score in evaluated[number]][:-1], abs=1e-5)  # all but its end


def test_allowed_tokens_are_asked_for_every_prefix_and_constraints_are_refused(trained, documents):
    hub, numbers = (
        MegaLanguageModel.from_pretrained(str(trained.folder), "checkpoint_last.pt", str(trained.data)),
        set(),
    )

    def allow(number, tokens):
        numbers.add(number)
        return list(range(len(hub.task.source_dictionary)))

    prefixes = [hub.encode(prefix) for prefix in ("l", *(" ".join(document) for document in documents[:4]))]
    hub.generate(prefixes, beam=1, max_len_b=60, min_len=5, prefix_allowed_tokens_fn=allow)
    assert numbers == set(range(5))
    with pytest.raises(ValueError, match="--constraints"):
        hub.generate(prefixes, inference_step_args={"constraints": prefixes[0]})
