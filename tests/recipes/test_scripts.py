"""All scripts of examples/: their help, their usage messages, their style."""

import os
import random
import resource
import subprocess
import sys
from math import nan

import pytest
import torch
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig

from tests.helpers.forking import write_script
from tests.helpers.recipes import EXAMPLES, Recipe, run_program

pytestmark = pytest.mark.slow

AVERAGE, MOSES, SEGMENT = (EXAMPLES / f"wmt16_en_de/{name}.py" for name in ("average_checkpoints", "moses", "segment"))


def call(*words, **options):
    words = list(map(str, words))
    result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    return result.returncode, result.stdout


def test_every_script_prints_its_help(tmp_path):
    scripts = [path for path in EXAMPLES.rglob("*.sh") if path.name != "common.sh"]
    assert scripts
    for script in scripts:  # invalid variables do not matter
        code, said = call(script, "--max-update", "3", "--help", cwd=tmp_path, env={**os.environ, "PYTHON": "false"})
        assert (code, "\nVariables: " in said) == (0, True), script


@pytest.mark.parametrize(
    ("name", "last", "data"),
    [
        ("wmt16_en_de/bible", "generate.sh", "sentencepiece/bin"),
        ("lm/addresses", "evaluate.sh", "bytes/bin"),
        ("lra/image", "evaluate.sh", "small/bin"),
    ],
)
def test_scripts_in_the_wrong_order_are_refused(name, last, data, tmp_path):
    recipe = Recipe(EXAMPLES / name, tmp_path)
    assert "run prepare.sh first" in recipe.refusal("train.sh")
    (recipe.data / data).mkdir(parents=True)
    assert f"run {'average' if last == 'generate.sh' else 'train'}.sh first" in recipe.refusal(last)


@pytest.fixture
def shell(tmp_path):
    """Runs a program with the functions of common.sh."""

    def run(program, **variables):
        settings = {"PYTHON": sys.executable, "DATA": tmp_path / "data", "HERE": EXAMPLES, **variables}
        environment = {**os.environ, **{name: str(value) for name, value in settings.items()}}
        return call("bash", "-euc", f'source "$HERE/common.sh"; {program}', env=environment)

    return run


@pytest.fixture
def chosen(shell, tmp_path):
    """The precision that recipes choose, with a CPU for which doctor finds bf16 fast or not."""

    def choose(fast, gpus=0, **variables):
        python = tmp_path / "python"
        write_script(python, f"case $2 in *cpu_bf16*) exit {int(not fast)} ;; esac")
        settings = {"PYTHON": python, "CHECKPOINTS": tmp_path / "checkpoints", "PRECISION": "auto", **variables}
        code, said = shell(f'choose_precision {gpus}; echo "$PRECISION"', **settings)
        assert code == 0, said
        return said.strip()

    return choose


@pytest.mark.parametrize(
    ("expected", "settings"),
    [
        ("bf16", {"fast": True}),
        ("fp32", {"fast": False}),
        ("fp32", {"fast": True, "gpus": 1}),
        ("fp32", {"fast": True, "PRECISION": "fp32"}),
        ("fp32", {"fast": True, "ARCH": "transformer_iwslt_de_en"}),
    ],
)
def test_recipes_choose_bf16_on_cpus_that_multiply_it_fast(expected, settings, chosen, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/precision").touch()  # as a full disk leaves it
    assert chosen(**settings) == expected
    assert chosen(not settings["fast"]) == expected, "a training that has begun changed its precision"


def test_two_preparations_of_one_folder_do_not_write_at_once(tmp_path):
    make = 'make() { echo half >"$1"; touch started; until [ -e go ]; do sleep 0.01; done; echo whole >"$1"; }'
    words = ["bash", "-euc", f'source "$HERE/common.sh"; {make}; step "$DATA/text" make']
    environment = {**os.environ, "PYTHON": sys.executable, "DATA": str(tmp_path / "it's data"), "HERE": str(EXAMPLES)}
    for killed in (True, False):
        with subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as first:
            while not (tmp_path / "started").exists():
                assert first.poll() is None
            code, said = call(*words, cwd=tmp_path, env=environment)
            assert code == 1
            assert f"{tmp_path}/it's data: wait" in said
            if killed:
                first.kill()
            else:
                (tmp_path / "go").touch()
        (tmp_path / "started").unlink()
    assert first.returncode == 0
    assert "have" in call(*words, cwd=tmp_path, env=environment)[1]
    assert [(path.name, path.read_text()) for path in (tmp_path / "it's data").iterdir()] == [("text", "whole\n")]


def test_a_variable_that_is_no_whole_number_is_refused(shell):
    for value in ("many", "-1", "08", "1.5", "0"):
        code, said = shell(f"UPDATES={value}; whole_numbers 1 UPDATES")
        assert (code, f"UPDATES is '{value}'" in said) == (1, True)
    assert shell("UPDATES=3; whole_numbers 1 UPDATES")[0] == 0


def test_results_made_with_other_settings_are_refused_even_if_removed(shell, tmp_path):
    def prepare(settings):
        return shell(f'make() {{ echo {settings} >"$1"; }}; remember "$DATA/raw" {settings}; step "$DATA/raw" make')

    assert prepare("one")[0] == prepare("one")[0] == 0
    for _ in range(2):
        code, said = prepare("two")
        assert (code, "raw was made with one, not with two" in said) == (1, True)
        (tmp_path / "data/raw").unlink(missing_ok=True)
    assert prepare("one")[0] == 0  # what depends on it still fits


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--beam 3", "--beam 3 --model-overrides {'a': 1}"),
        ("--model-overrides=\"{'a': 2, 'b': 3}\" --beam 3", "--beam 3 --model-overrides {'a': 1, 'b': 3}"),
        ("--model-overrides b=3", "error: --model-overrides is b=3"),
    ],
)
def test_overrides_of_the_model_are_added_to_those_of_the_script(arguments, expected, shell):
    assert expected in shell(f'override "{{\'a\': 1}}" {arguments}; echo "${{ARGUMENTS[@]}}"')[1]


def test_different_arguments_have_different_results(shell):
    words = ["1 a", "1 -a", '"" 1 a', "--n \"{'x': 1}\"", "--n \"{'x': -1}\""]
    found = [shell(f"name_result {word}")[1].strip() for word in words]
    assert found == ["1-a", "1--a", "1-a", "n---x---1-", "n---x----1-"]


def test_pieces_hold_the_text_as_it_is(tmp_path):
    """Unicode's NFKC would change each of these characters. Any white space is a blank, also for fairseq's --bpe."""
    model, text = tmp_path / "pieces.model", "½ … ﬁ m² ① Ａ\n" * 50
    spaces = "".join(filter(str.isspace, map(chr, range(sys.maxunicode))))
    (tmp_path / "text").write_text(text)
    assert call(sys.executable, SEGMENT, "learn", "sentencepiece", model, 17, 1.0, tmp_path / "text") == (0, "")
    _, pieces = call(sys.executable, SEGMENT, "apply", "sentencepiece", model, input=text)
    assert "\u2581" in pieces
    assert call(sys.executable, SEGMENT, "undo", "sentencepiece", input=pieces) == (0, text)
    bpe = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(model)))
    assert bpe.encode(f"½{spaces}m²\tﬁ\u00a0…") == bpe.encode("½ m² ﬁ …")


@pytest.mark.parametrize(("text", "size", "reason"), [("", 17, "empty"), ("a b\n", 0, "6 or more"), ("a b\n", 1, "6")])
def test_learning_pieces_of_an_empty_or_very_short_text_names_the_file(tmp_path, text, size, reason):
    (tmp_path / "train.en").write_text(text)
    words = ["learn", "sentencepiece", tmp_path / "model", size, 1.0, tmp_path / "train.en"]
    code, said = call(sys.executable, SEGMENT, *words)
    assert (code, said.startswith(f"error: {tmp_path}/train.en: "), said.count("\n")) == (1, True, 1)
    assert reason in said.split("train.en: ")[1]


def test_a_file_that_is_no_model_of_pieces_is_named(tmp_path):
    (tmp_path / "text").write_text("a text\n")
    code, said = call(sys.executable, SEGMENT, "apply", "sentencepiece", "text", input="a text\n", cwd=tmp_path)
    assert (code, said.startswith("error: text "), said.count("\n")) == (1, True, 1)


def test_tokenising_text_that_is_not_utf8_ends_with_an_error(tmp_path):
    (tmp_path / "text").write_bytes(b"Hallo Welt\nGr\xfc\xdfe\n")
    with open(tmp_path / "text") as text:
        code, said = call(sys.executable, MOSES, "tokenize", "de", 2, stdin=text, timeout=60)
    assert code == 1
    assert said.startswith("error: the text is not UTF-8")


def test_tokenising_ends_with_an_error_if_a_worker_is_killed(tmp_path):
    (tmp_path / "sacremoses.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code, said = call(sys.executable, MOSES, "tokenize", "de", 2, input="Ein Satz.\n", env=environment, timeout=60)
    assert code == 1
    assert said.startswith("error: ")
    assert "WORKERS" in said


def average(*arguments):
    """The exit status or message of the program, run in this process."""
    with pytest.raises(SystemExit) as end:
        run_program(AVERAGE, *arguments)
    return end.value.code


def test_averaging_reports_a_checkpoint_that_it_cannot_average(tmp_path):
    models = {"narrow": {"w": torch.ones(2)}, "wide": {"w": torch.ones(3)}, "diverged": {"w": torch.full((2,), nan)}}
    for name, content in {"empty": {}, **{name: {"model": model} for name, model in models.items()}}.items():
        torch.save(content, tmp_path / f"{name}.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "wide.pt").read_bytes()[:500])
    for name in ("missing", "wide", "empty", "half", "diverged"):
        inputs = [tmp_path / "narrow.pt", tmp_path / f"{name}.pt"]
        assert average(tmp_path / "averaged.pt", *inputs).startswith(f"error: {inputs[1]} ")
    assert not (tmp_path / "averaged.pt").exists()


def test_averaging_writes_the_whole_file_or_nothing(tmp_path):
    torch.save({"model": {"w": torch.ones(50_000)}}, tmp_path / "1.pt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # as a full disk would
    try:
        sentence = average(tmp_path / "averaged.pt", tmp_path / "1.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "averaged.pt was not written" in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["1.pt"]


def test_to_bytes_writes_any_bytes_as_numbers(tmp_path):
    data = bytes(range(256)) + bytes(random.Random(1).choices(range(256), k=70_000)) + b"\xc3"
    (tmp_path / "data").write_bytes(data)
    with open(tmp_path / "data") as file:
        _, said = call(sys.executable, EXAMPLES / "lm/to_bytes.py", stdin=file)
    assert bytes(map(int, said.split())) == data
    assert [len(line.split()) for line in said.splitlines()] == [65_536, len(data) - 65_536]
