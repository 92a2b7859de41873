"""The command `mega-runtime`: in this process, or as one that can import nothing of this project but mega_runtime."""

import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from mega_runtime import Classifier, Translator
from mega_runtime.command import main
from tests.helpers.commands import ROOT
from tests.helpers.exported import CHUNKS, SEARCHED, documents, exported_classifier, language, translation

pytestmark = pytest.mark.slow

LINES = ["w1 w2 w3", "", "w4", "w5 " * 30, " \t", "unknown w7", "w6 w7 w8 w9 w1"]


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder to start from, and the environment of a process there."""
    folder = tmp_path_factory.mktemp("outside")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    shutil.copytree(ROOT / "runtime/mega_runtime", folder / "mega_runtime", ignore=shutil.ignore_patterns("__py*"))
    return {"cwd": folder, "env": {**environment, "OMP_NUM_THREADS": "1"}}


@pytest.fixture
def process(outside):
    """Runs `mega-runtime ARGUMENTS` with this text as its input; returns exit code, stdout and stderr."""

    def call(*arguments, text=""):
        words = [sys.executable, "-m", "mega_runtime", *map(str, arguments)]
        result = subprocess.run(words, input=text.encode(), capture_output=True, timeout=60, **outside)
        return result.returncode, result.stdout.decode(), result.stderr.decode()

    return call


def piped(outside, *options, waits=True):
    """A process that translates what is written into it; its input may be one that does not wait for text."""
    words = [sys.executable, "-m", "mega_runtime", "translate", str(folder()), *options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, **pipes, **outside, preexec_fn=partial(os.set_blocking, 0, waits))


@pytest.fixture
def command(capsys, tmp_path):
    """The same without a new process, with this text or these bytes in a file, or None for commands that read none."""

    def call(*arguments, text=""):
        words = [*map(str, arguments)]
        if text is not None:
            (tmp_path / "given").write_bytes(text if isinstance(text, bytes) else text.encode())
            words += ["--input", str(tmp_path / "given")]
        try:
            code = main(words)
        except SystemExit as end:  # of argparse
            code = end.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def refuses(command):
    """Checks that the command fails with one sentence with these words, after this output."""

    def call(*arguments, words, text="", out=""):
        code, said, err = command(*arguments, text=text)
        assert (code, said) == (1, out), err
        assert err.count("\n") == 1
        assert err.startswith(f"mega-runtime {arguments[0]}: ")
        assert not [word for word in words if word not in err], err

    return call


def model(name="chunks"):
    return translation(**SEARCHED[name])[1]


def folder(name="chunks"):
    return model(name).folder.path


def text_of(lines):
    return "".join(f"{line}\n" for line in lines)


# ------------------------------------------------------------------------------------------- translate


def test_lines_are_translated_in_their_order(process, command):
    expected = text_of(line.text for line in model().translate(LINES))
    code, said, err = process("translate", folder(), text=text_of(LINES))
    assert (code, said) == (0, expected)
    warned, counted = err.splitlines()
    assert warned.startswith("1 of 2 pieces of a text are unknown to the model, ")
    assert re.fullmatch(r"7 lines in [\d.]+ s", counted)
    for options in (["--threads", 2], ["--batch-tokens", 1], ["--batch-tokens=50", "--threads=1"]):
        assert command("translate", folder(), *options, text=text_of(LINES))[:2] == (0, expected)
    assert command("translate", folder(), text=text_of(LINES)[:-1])[:2] == (0, expected)


def test_empty_input_and_blank_lines(command):
    assert command("translate", folder())[:2] == (0, "")
    assert command("translate", folder(), text="\n")[:2] == (0, "\n")
    assert command("translate", folder(), text=" \n\n\t\n")[:2] == (0, "\n\n\n")


def test_lines_end_at_line_feeds_only(command):
    given = "w1\u2028w2\u0085w3\x0bw4\rw5\n"
    assert command("translate", folder(), text=given)[1] == model().translate([given])[0].text + "\n"
    windows = command("translate", folder(), text="w1 w2\r\nw3\r\n")[1]
    assert windows == text_of(line.text for line in model().translate(["w1 w2", "w3"]))


def test_options_are_those_of_the_search(command):
    options = {"beam": 3, "lenpen": 0.3, "max_len_a": 0.5, "max_len_b": 7, "min_len": 2}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    expected = [line.text for line in model().translate(LINES, **options)]
    assert expected != [line.text for line in model().translate(LINES)]
    assert command("translate", folder(), *words, text=text_of(LINES))[1] == text_of(expected)
    assert "<unk>" in command("translate", folder(), "--unkpen=-20", text="w1\n")[1]


def test_as_many_hypotheses_of_each_line_with_scores(command):
    code, said, _ = command("translate", folder(), "--nbest=2", "--scores", "--beam=4", text="w1 w2\n\nw4\n")
    first, _, last = model().translate(["w1 w2", "", "w4"], beam=4)
    shown = [[f"{best.score:.4f}\t{best.text}" for best in line.hypotheses[:2]] for line in (first, last)]
    assert (code, said) == (0, text_of([*shown[0], "0.0000\t", "0.0000\t", *shown[1]]))


def test_a_file_that_is_not_there_is_named(process, tmp_path):
    code, said, err = process("translate", folder(), "--input", tmp_path / "none")
    assert (code, said, err.count("\n")) == (1, "", 1)
    assert f"No such file or directory: '{tmp_path / 'none'}'" in err


def test_paragraphs_keep_their_white_space(command):
    given = ["W1 w2.  W3!\tW4", "", "w5"]
    assert command("translate", folder(), "--paragraphs", text=text_of(given))[1] == text_of(
        model().translate_paragraphs(given)
    )


def test_documents_have_as_many_lines_as_before(command, refuses):
    ours = documents(ends=2.0, cross_attention_positions="sentence", **CHUNKS)[2]
    texts = [["w1 w2", "w3 " * 20, "w4"], ["w5 w6", "w7"]]
    first, second = ours.translate_documents(texts)
    given = ["", *texts[0], "", " ", *texts[1]]
    code, said, _ = command("translate", ours.folder.path, "--documents", text=text_of(given))
    assert (code, said) == (0, text_of(["", *first, "", "", *second]))
    assert all([*first, *second])
    refuses("translate", folder(), "--documents", text="w1\n", words=["single lines", "mega_document_translation"])


# ------------------------------------------------------------------------------------------- errors


BEFORE = ["w1 w2", "w3"]


@pytest.mark.parametrize("units", [[], ["--paragraphs"]])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"w1 " * 10_000, ["line 3 has 10,001 tokens", "reads 8,192"]),
        (b"w1 \xff\xfe", ["line 3 is not UTF-8", "iconv"]),
    ],
)
def test_a_line_with_an_error_is_named_behind_the_translations_of_those_before(line, words, units, refuses):
    given = text_of(BEFORE).encode() + line + b"\nw5\n"
    expected = text_of(line.text for line in model().translate(BEFORE))
    refuses("translate", folder(), *units, text=given, words=words, out=expected)


def test_a_search_without_enough_memory_says_what_takes_less(monkeypatch, refuses):
    def stream(*call, **options):
        return [np.zeros(2**44)]

    monkeypatch.setattr(Translator, "stream", stream)
    refuses("translate", folder(), text="w1", words=["Unable to allocate", "; lower --beam or --batch-tokens"])


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Non-zero status code while running Mul node. bfc_arena.cc Failed to allocate memory for 9"),
        MemoryError(),
    ],
)
def test_errors_of_memory_without_a_sentence_get_one(monkeypatch, refuses, error):
    """ONNX Runtime's is a traceback of nodes, Python's own is empty."""

    def stream(*call, **options):
        raise error

    monkeypatch.setattr(Translator, "stream", stream)
    refuses("translate", folder(), text="w1", words=["out of memory; lower --beam or --batch-tokens"])


def test_a_document_with_an_error_is_named_behind_those_before(refuses):
    ours = documents(ends=2.0, cross_attention_positions="sentence", **CHUNKS)[2]
    before = ["w1 w2", "w3", "", "w4", ""]
    expected = [*ours.translate_documents([before[:2]])[0], "", *ours.translate_documents([["w4"]])[0], ""]
    for wrong, words in (("w1 <sep> w2", ["line 7 has <sep>"]), ("w1 " * 9000, ["line 7 has 9,001 tokens"])):
        given = text_of([*before, "w5", wrong, "w6"])
        refuses("translate", ours.folder.path, "--documents", text=given, words=words, out=text_of(expected))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nbest=6"], ["--nbest is 6", "from 1 to --beam, 5"]),
        (["--nbest=0"], ["--nbest is 0"]),
        (["--beam=0"], ["beam is 0"]),
        (["--buffer-size=0"], ["buffer_size is 0"]),
        (["--min-len=9", "--max-len-b=8"], ["min_len is 9", "8 tokens"]),
        (["--paragraphs", "--scores"], ["--nbest and --scores", "--paragraphs"]),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words, refuses):
    refuses("translate", folder(), *options, text="w1\n", words=words)


def test_wrong_folders_are_refused(refuses, tmp_path):
    refuses("translate", tmp_path, words=["config.json", "No such file", "mega-fairseq export"])
    refuses("score", folder(), words=["contains a translation model", "language model"])
    refuses("classify", folder(), words=["contains a translation model", "classifier"])
    refuses("continue", folder(), words=["contains a translation model", "language model"])


def test_usage(command):
    assert command("--version", text=None)[0] == 0
    assert "--threads" in command("translate", "--help", text=None)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "mega-runtime: the following arguments are required: COMMAND; "),
        (["translate", "x", "--beams=2"], "mega-runtime translate: unrecognized arguments: --beams=2; "),
        (["translate", "x", "--beam=two"], "mega-runtime translate: argument --beam: invalid int value: 'two'; "),
    ],
)
def test_a_wrong_option_is_named_in_one_line(command, words, said):
    code, out, err = command(*words, text=None)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(said)
    assert f"; {said.split(':')[0]} --help" in err


def test_a_folder_is_described(process, command, tmp_path):
    ours = documents(ends=2.0, cross_attention_positions="sentence", **CHUNKS)[2]
    kinds = {
        folder(): ["translation model", "float32", "8,192 (target)"],
        ROOT / "pretrained/bible-en-de": ["en to de", "int8", "pieces; types: ", "at most 1,024 tokens"],
        ours.folder.path: ["translation model", "in windows of at most 60 tokens"],
        language()[1].folder.path: ["language model", "words; types: 40 (target)"],
        language(decoder_chunk_size=-1, rel_pos_bias="simple")[1].folder.path: ["limits ", "tokens: 64 (target)"],
        exported_classifier("values", "uint8"): ["classifier", "values of type uint8", "a, b, c"],
        exported_classifier("tokens", pairs=True): ["pairs of tokens"],
        ROOT / "pretrained/digits": ["values of type uint8, 64\n"],
    }
    for path, words in kinds.items():
        code, said, err = command("info", path, text=None)
        assert (code, err) == (0, "")
        assert not [word for word in [*words, "half-lives, median", "format             1, "] if word not in said], said
    assert process("info", path) == (0, said, "")
    code, said, err = command("info", tmp_path, text=None)
    assert (code, said, err.count("\n")) == (1, "", 1)
    assert "config.json" in err


@pytest.mark.parametrize("job", [["score"], ["continue", "--temperature=0", "--max-tokens=5"]])
def test_ends_of_lines_of_windows_are_no_text(command, of_bytes, job):
    path = of_bytes.folder.path
    plain, windows = (command(job[0], path, *job[1:], text=f"Fellow citizens{end}") for end in ("\n", "\r\n"))
    assert plain == windows
    assert plain[0] == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_does_not_fit_on_a_disk_is_an_error(outside, tmp_path, unbuffered):
    """Also if only the end of the last write is missing."""
    lines = ["w1 w2", "w3 w4 w5"]
    size = len(text_of(line.text for line in model().translate(lines))) - 2
    environment = {**outside["env"], "PYTHONUNBUFFERED": unbuffered, "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-m", "mega_runtime", "translate", str(folder())]
    with open(tmp_path / "out", "wb") as out:
        done = subprocess.run(
            words, input=text_of(lines), stdout=out, stderr=subprocess.PIPE, text=True, cwd=outside["cwd"],
            env=environment, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()[-1][:24]) == (1, "mega-runtime translate: ")
    assert "Traceback" not in done.stderr


def test_a_reader_that_stops_ends_the_command_quietly(outside):
    """As `| head -1` does."""
    with piped(outside, "--max-len-b=2", "--batch-tokens=1") as process:
        process.stdin.write(b"w1 w2\n" * 3000)
        process.stdin.close()
        first = process.stdout.readline().decode()
        process.stdout.close()
        process.wait(60)
        assert (process.returncode, process.stderr.read()) == (1, b"")
    assert first == model().translate(["w1 w2"], max_len_b=2)[0].text + "\n"


def test_closed_streams_do_not_matter(outside):
    python = shlex.quote(sys.executable)
    (outside["cwd"] / "given").write_text("w1 w2\n")
    for streams in ("< given 2>&-", "--input given <&-", "< given 2>/dev/full"):
        words = f"{python} -m mega_runtime translate {folder()} {streams}"
        ran = subprocess.run(words, shell=True, stdout=subprocess.PIPE, timeout=60, **outside)
        assert (ran.returncode, ran.stdout.decode()) == (0, model().translate(["w1 w2"])[0].text + "\n")
    words = f"{python} -m mega_runtime translate {folder()} < given >&-"
    ran = subprocess.run(words, shell=True, stderr=subprocess.PIPE, timeout=60, **outside)
    assert (ran.returncode, ran.stderr) == (1, b"mega-runtime: standard output is closed\n")


def test_an_interrupt_ends_the_command_quietly(outside):
    with piped(outside, "--max-len-b=2") as process:
        process.stdin.write(b"w1 w2\n" * 1500)
        process.stdin.flush()
        process.stdout.readline()  # the rest waits for more lines
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        assert process.stderr.read() == b""
    assert code == 130


@pytest.mark.parametrize("waits", [True, False])
def test_lines_are_answered_one_by_one_on_request(outside, waits):
    with piped(outside, "--max-len-b=3", "--buffer-size=1", waits=waits) as process:
        for text in ("w1 w2", "", "w3"):
            process.stdin.write(f"{text}\n".encode())
            process.stdin.flush()
            expected = model().translate([text], max_len_b=3)[0].text
            assert process.stdout.readline().decode() == f"{expected}\n"
        process.stdin.close()
        assert process.wait(60) == 0


# ------------------------------------------------------------------------------------------- other models


def test_texts_are_continued(command):
    ours = language()[1]
    for text, options, words in (
        ("w1 w2", {"max_tokens": 9}, ["--max-tokens=9"]),
        ("w1\nw2", {"max_tokens": 20, "seed": 3}, ["--max-tokens=20", "--seed=3"]),
        ("w1", {"temperature": 0, "max_tokens": 5}, ["--temperature=0", "--max-tokens=5"]),
        ("", {"top_k": 3, "top_p": 0.9, "max_tokens": 8}, ["--top-k=3", "--top-p=0.9", "--max-tokens=8"]),
        ("w1 w2", {"max_tokens": 60, "stop": ["w3", "w2"]}, ["--stop=w3", "--stop", "w2", "--max-tokens=60"]),
    ):
        code, said, err = command("continue", ours.folder.path, *words, text=f"{text}\n")
        assert (code, said, err) == (0, ours.continue_text(text, **options) + "\n", "")


def test_a_wrong_option_is_named_before_the_text_is_repeated(refuses):
    refuses("continue", language()[1].folder.path, "--seed=-1", text="w1\n", words=["seed is -1"])


def test_texts_are_scored_line_by_line(command, refuses):
    ours, lines = language()[1], ["w1 w2 w3", "", "unknown"]
    scores = [ours.score(line) for line in lines]
    expected = text_of(f"{score.bits:.4f}\t{len(score.pieces)}" for score in scores)
    assert "\n0.0000\t0\n" in expected
    assert command("score", ours.folder.path, text=text_of(lines)) == (0, expected, "")
    refuses("score", ours.folder.path, text=text_of([*lines, "w1 <pad>"]), words=["line 4: ", "<pad>"], out=expected)


def test_a_byte_order_mark_is_no_text(command):
    path = folder()
    assert command("translate", path, text=b"\xef\xbb\xbfw1 w2\n")[:2] == command("translate", path, text="w1 w2\n")[:2]


@pytest.mark.parametrize(
    ("kind", "number_type", "pairs", "lines", "inputs"),
    [
        ("tokens", None, False, ["w1 w2", "w3"], ["w1 w2", "w3"]),
        ("tokens", None, True, ["w1 w2\tw3", "w4\tw5"], [("w1 w2", "w3"), ("w4", "w5")]),
        ("bytes", None, False, ["ab\r", "c d"], [b"ab", b"c d"]),
        ("values", "uint8", False, ["0 255", "7 8 9"], [[0, 255], [7, 8, 9]]),
        ("values", "float", False, ["0.5 -1", "1e-3"], [np.array([0.5, -1]), np.array([0.001])]),
    ],
)
def test_lines_are_classified(command, kind, number_type, pairs, lines, inputs):
    path = exported_classifier(kind, number_type, pairs=pairs)
    expected = text_of(f"{found.label}\t{found.probability:.4f}" for found in Classifier(path).predict(inputs))
    assert command("classify", path, text=text_of(lines)) == (0, expected, "")
    first, rest = expected.split("\n", 1)
    blank = "" if kind == "bytes" else " "
    assert command("classify", path, text=text_of([lines[0], blank, *lines[1:]])) == (0, f"{first}\n\n{rest}", "")


def test_any_bytes_are_classified_as_in_training(command):
    path = exported_classifier("bytes")
    lines = [b"caf\xe9 au lait", b"\xef\xbb\xbfabc", b" ", b"\t\xff"]
    expected = "".join(f"{p.label}\t{p.probability:.4f}\n" for p in Classifier(path).predict(lines))
    assert command("classify", path, text=b"\r\n".join(lines)) == (0, expected, "")
    pairs = exported_classifier("bytes", pairs=True)
    (one,) = Classifier(pairs).predict([(b"\xe9", b"a b")])
    assert command("classify", pairs, text=b"\xe9\ta b\n") == (0, f"{one.label}\t{one.probability:.4f}\n", "")


def test_whole_numbers_may_have_a_point(command):
    path = exported_classifier("values", "uint8")
    assert command("classify", path, text="5.000e+00 7.0\n") == command("classify", path, text="5 7\n")


def test_lines_that_cannot_be_classified_are_named(refuses, tmp_path):
    path = exported_classifier("values", "uint8")
    first = Classifier(path).predict([[1, 2]])[0]
    out = f"{first.label}\t{first.probability:.4f}\n"
    refuses("classify", path, text="1 2\n1 300\n", words=["line 2: ", "0 to 255"], out=out)
    refuses("classify", path, text="1 2\n1 x\n", words=["line 2: ", "no whole number"], out=out)
    refuses("classify", path, text=b"1 2\n\xff\n", words=["line 2 is not UTF-8"], out=out)
    refuses("classify", exported_classifier("tokens", pairs=True), text="w1\n", words=["line 1: ", "pair"])


def test_pieces_stay_segmented(command):
    path = folder()
    expected = Translator(path, pieces=True).translate(["w1 w2"])[0].pieces
    assert command("translate", path, "--pieces", text="w1 w2\n")[1] == " ".join(expected) + "\n"
