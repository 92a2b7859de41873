"""The command `mega-fairseq sweep`: its numbers, its files, what it refuses, and how it goes on after a kill."""

import csv
import io
import json
import random
import re
import signal
import sys

import pytest
import torch

from mega_fairseq.cli.main import main
from tests.commands import MEGA, PLUGIN, TRAINING, as_words, fairseq, write_corpus
from tests.released import run

CHUNK = 8
SIZES = {"layers": 2, "embed_dim": 16, "ffn_embed_dim": 24, "hidden_dim": 24, "z_dim": 8, "n_dim": 2}
TASK = [*PLUGIN, "--task=mega_language_modeling"]
UPDATES = [
    *["--optimizer=adam", "--lr=0.02", "--clip-norm=1", "--max-tokens=200", "--max-update=6", "--cpu"],
    *["--no-epoch-checkpoints", "--disable-validation"],
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Text, binarised, and a model of it with each of two position biases, after a few updates."""
    place, chance = tmp_path_factory.mktemp("sweep"), random.Random(1)
    for split, lines in (("train", 60), ("test", 23), ("other", 7)):
        words = [[chance.choice("abcdefghij") for _ in range(chance.randint(0, 30))] for _ in range(lines)]
        text = "".join(" ".join(letter + letter for letter in line) + "\n" for line in words)
        (place / split).write_text(text + "\n" + text[:40] + "\n")
    files = [f"--{split}pref={place / split}" for split in ("train", "test")]
    fairseq("preprocess", "--only-source", *files, f"--validpref={place / 'other'}", f"--destdir={place / 'data'}")
    model = ["--arch=mega_lm_small", *as_words({f"decoder_{name}": size for name, size in SIZES.items()})]
    for bias in ("rotary", "simple"):
        options = [*model, f"--decoder-chunk-size={CHUNK}", f"--rel-pos-bias={bias}", f"--save-dir={place / bias}"]
        fairseq("train", place / "data", *TASK, "--criterion=mega_lm_cross_entropy", *options, *UPDATES)
        content = torch.load(place / bias / "checkpoint_last.pt", weights_only=False)
        for tensor in content["model"].values():
            tensor.mul_(3.0 if tensor.dim() > 1 else 1.0)  # more updates would also make more of what came before
        torch.save(content, place / f"{bias}.pt")
    return place


@pytest.fixture
def sweep(folder, tmp_path, capsys):
    """The command in this process, on CPU; its exit code, what it said, and the points that it wrote."""

    def call(*arguments, model="rotary.pt", data="data", device=("--cpu",)):
        code = main(
            ["sweep", str(folder / model), str(folder / data), f"--out={tmp_path / 'out'}", *device, *arguments]
        )
        return code, *capsys.readouterr()

    return call


def points(path):
    """By chunk and cut."""
    return {(point["chunk"], point["cut"]): point for point in json.loads(path.read_text())["points"]}


def eval_lm(folder, chunk, cut, model="rotary.pt", *more):
    """Loss to base 2 and perplexity, as fairseq-eval-lm prints them."""
    overrides = f"--model-overrides={{'decoder_chunk_size': {chunk}}}"
    path = [f"--path={folder / model}", "--gen-subset=test", f"--valid-block={cut}"]
    said = fairseq("eval-lm", folder / "data", *TASK, *path, overrides, "--cpu", *more)
    return tuple(map(float, re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", said).groups()))


def as_printed(point):
    return pytest.approx(point["bits"], abs=5.2e-5), pytest.approx(point["perplexity"], abs=5.2e-3)


# -------------------------------------------------------------------------------------------- numbers


def test_numbers_are_those_of_fairseq_eval_lm(folder, sweep, tmp_path):
    assert sweep("--chunks=4,8,500", "--streams=1,3,50")[0] == 0
    found = points(tmp_path / "out.json")
    assert len(found) == 9
    compared = [found[chunk, f"splits:{streams}"] for chunk, streams in ((4, 3), (8, 1), (8, 50), (500, 3))]
    for point in compared:
        assert eval_lm(folder, point["chunk"], point["cut"]) == as_printed(point)
    bits = sorted(point["bits"] for point in compared)
    assert min(b - a for a, b in zip(bits, bits[1:])) > 1e-3, "this test could not tell points apart"


def test_contexts_are_streams_of_that_many_tokens(folder, sweep, tmp_path):
    assert sweep("--chunks=8", "--contexts=7,100000")[0] == 0
    found = points(tmp_path / "out.json")
    short, whole = found[8, "size:7"], found[8, "size:100000"]
    assert (short["context"], short["streams"]) == (7, -(-short["tokens"] // 7))
    assert (whole["context"], whole["streams"]) == (whole["tokens"], 1)
    assert eval_lm(folder, 8, "size:7") == as_printed(short)


@pytest.mark.parametrize("documents", ["line", "blank"])
def test_streams_can_be_the_documents_of_the_text(folder, sweep, tmp_path, documents):
    assert sweep("--chunks=8", f"--documents={documents}")[0] == 0
    (found,) = points(tmp_path / "out.json").values()
    assert found["streams"] > 1
    assert eval_lm(folder, 8, "documents", "rotary.pt", f"--documents={documents}") == as_printed(found)


def test_without_streams_or_contexts_there_is_one_stream(sweep, tmp_path):
    assert sweep("--chunks=8,8")[0] == 0
    assert list(points(tmp_path / "out.json")) == [(8, "splits:1")]


@pytest.mark.parametrize("limit", ["--max-tokens=40", "--batch-size=2"])
def test_batches_of_other_sizes_have_the_same_numbers(sweep, tmp_path, monkeypatch, limit):
    from mega_fairseq.data import StreamDataset

    sizes, collate = [], StreamDataset.collater
    monkeypatch.setattr(StreamDataset, "collater", lambda self, rows: sizes.append(len(rows)) or collate(self, rows))
    cut = ["--chunks=8", "--contexts=19"]
    sweep(*cut)
    (one,), batches = points(tmp_path / "out.json").values(), len(sizes)
    sweep(*cut, limit, "--force")
    (other,) = points(tmp_path / "out.json").values()
    assert one["bits"] == pytest.approx(other["bits"], rel=1e-6)
    assert batches == 1
    assert set(sizes[1:-1]) == {2}


def test_any_part_of_the_data_can_be_swept(sweep, tmp_path):
    for subset in ("valid", "train"):
        assert sweep("--chunks=8", "--force", f"--subset={subset}")[0] == 0
        assert json.loads((tmp_path / "out.json").read_text())["data"]["subset"] == subset


# ---------------------------------------------------------------------------------------------- files


def test_json_csv_table_and_figure_agree(sweep, tmp_path):
    code, out, err = sweep("--chunks=4,8", "--streams=1,3")
    assert code == 0, err
    found = points(tmp_path / "out.json")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert len(found) == len(rows) == out.count("\n") - 1 == 4
    for row, line in zip(rows, out.splitlines()[1:]):
        point = found[int(row["chunk"]), row["cut"]]
        assert {name: "" if value is None else str(value) for name, value in point.items()} == row
        assert line.split()[:2] == [row["chunk"], row["streams"]]
        assert f"{point['bits']:.4f}" in line
        assert point["perplexity"] == 2 ** point["bits"]
        assert point["seconds"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.json", "out.png"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_has_a_line_for_each_chunk_and_for_each_context(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib.axes")
    from mega_fairseq.cli.sweep_figure import figure
    from mega_fairseq.cli.sweep_record import Point

    drawn, plot = [], matplotlib.Axes.plot
    monkeypatch.setattr(
        matplotlib.Axes, "plot", lambda self, x, y, **how: drawn.append((how["label"], x, y)) or plot(self, x, y, **how)
    )
    size = {(512, 100): 9.0, (512, 5000): 7.0, (1024, 100): 8.0, (1024, 5000): 6.0}
    given = [Point(c, f"size:{n}", 1, n, 5000, 3.0, value, 1.0, "cpu") for (c, n), value in size.items()]
    figure([*given, Point(2048, "size:100", 1, 100, 5000, refused="beyond reach")])
    assert drawn == [
        ("512", (100, 5000), (9.0, 7.0)),
        ("1,024", (100, 5000), (8.0, 6.0)),
        ("100", (512, 1024), (9.0, 8.0)),
        ("5,000", (512, 1024), (7.0, 6.0)),
    ]


def test_without_matplotlib_there_are_numbers_and_no_figure(sweep, tmp_path, monkeypatch):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    code, _, err = sweep("--chunks=8")
    assert code == 0, err
    assert "out.png was not drawn" in err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.json"]


def test_lines_say_how_far_it_is_where_stderr_is_no_terminal(sweep, monkeypatch):
    from mega_fairseq.cli import sweep_progress

    monkeypatch.setattr(sweep_progress, "SECONDS_BETWEEN_LINES", 0.0)
    err = sweep("--chunks=4,8")[2].splitlines()
    assert err[0].startswith("point 1 of 2: chunk 4, splits:1: ")
    assert re.fullmatch(r"point 2 of 2: chunk 8, splits:1: ([\d,]+) of \1 tokens", err[-2]), err
    assert re.fullmatch(r"point 2 of 2: chunk 8, splits:1: [\d.]+ bits, perplexity [\d.]+", err[-1]), err


def test_a_terminal_shows_a_bar_of_tokens(sweep, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert sweep("--chunks=4,8")[0] == 0
    for words in ("point 2 of 2: chunk 8", "100%", "token/s"):
        assert words in terminal.getvalue()


def test_progress_goes_with_the_pieces_of_a_stream_and_ends_at_its_tokens(folder):
    from mega_fairseq.cli import sweep_points

    split = sweep_points.load_split(str(folder / "data"), "test")
    model = sweep_points.load_model(str(folder / "rotary.pt"), split, torch.device("cpu")).model
    model.decoder.cfg.piece_tokens = 40
    heard = []
    with sweep_points.Progress(2, len(split.corpus)) as progress:
        progress.bar.update = heard.append
        for cut, done in (("splits:1", 1), ("documents:line", 2)):  # the latter has pads
            progress.start(cut)
            streams = split.streams(cut)
            sweep_points.score(model, streams, streams.batch_by_size(streams.ordered_indices()), progress)
            assert progress.done == done * len(split.corpus)
    assert sum(heard) == progress.done
    assert len([tokens for tokens in heard if tokens]) > len(split.corpus) // 40
    assert max(heard) <= 40


# ----------------------------------------------------------------------------------------------- going on


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX")
def test_a_killed_sweep_goes_on_where_it_stopped(folder, sweep, tmp_path):
    kill = """
import os, signal
from mega_fairseq.cli.sweep_record import Record
add = Record.add
Record.add = lambda self, point: (add(self, point), os.kill(os.getpid(), signal.SIGKILL))"""
    arguments = ["--chunks=4,8", "--streams=3,1"]
    files = [folder / "rotary.pt", folder / "data", "--out", tmp_path / "out", "--cpu"]
    assert run("sweep", *files, *arguments, program=kill).returncode == -signal.SIGKILL
    before = points(tmp_path / "out.json")
    assert list(before) == [(4, "splits:3")]
    code, out, err = sweep(*arguments)
    assert (code, out.count("\n")) == (0, 5)
    assert "1 of 4 points are in" in err
    assert "point 3 of 3" in err
    after = points(tmp_path / "out.json")
    assert len(after) == 4
    assert after[4, "splits:3"] == before[4, "splits:3"]  # its seconds too


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX")
def test_a_sweep_killed_while_it_writes_leaves_its_files_whole(folder, sweep, tmp_path):
    sweep("--chunks=4")
    before = {name: (tmp_path / name).read_bytes() for name in ("out.json", "out.csv", "out.png")}
    killed = "import os, signal; os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)"
    files = [folder / "rotary.pt", folder / "data", "--out", tmp_path / "out", "--cpu", "--chunks=4,8"]
    assert run("sweep", *files, program=killed).returncode == -signal.SIGKILL
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_sweep_stopped_by_hand_says_how_to_go_on(sweep, tmp_path, monkeypatch):
    from mega_fairseq.cli import sweep_points

    measure = sweep_points.measure

    def stop(model, split, chunk, *rest):
        if chunk == 8:
            raise KeyboardInterrupt
        return measure(model, split, chunk, *rest)

    monkeypatch.setattr(sweep_points, "measure", stop)
    code, out, err = sweep("--chunks=4,8")
    assert (code, out) == (1, "")
    assert "interrupted; the same command goes on" in err.splitlines()[-1]
    assert list(points(tmp_path / "out.json")) == [(4, "splits:1")]


def test_later_sweeps_add_to_the_same_files(sweep, tmp_path):
    sweep("--chunks=8")
    code, out, err = sweep("--chunks=4", "--streams=2")
    assert (code, out.count("\n")) == (0, 3)
    assert len(points(tmp_path / "out.json")) == 2
    assert "already" not in err


@pytest.mark.parametrize(
    ("other", "words"),
    [(["--subset=valid"], "other data or another subset"), ([], "another checkpoint")],
)
def test_the_record_of_another_sweep_is_kept_unless_forced(sweep, tmp_path, other, words):
    sweep("--chunks=8")
    before = (tmp_path / "out.json").read_bytes()
    how = {"model": "rotary.pt" if other else "simple.pt"}
    refused(sweep("--chunks=8", *other, **how), words, "--force")
    assert (tmp_path / "out.json").read_bytes() == before
    assert sweep("--chunks=4", *other, "--force", **how)[0] == 0
    assert list(points(tmp_path / "out.json")) == [(4, "splits:1")]


def test_a_copy_of_checkpoint_and_data_is_the_same(folder, sweep, tmp_path):
    sweep("--chunks=8")
    content = torch.load(folder / "rotary.pt", weights_only=False)
    content["last_optimizer_state"] = None
    torch.save(content, tmp_path / "stripped.pt")
    code, _, err = sweep("--chunks=8", model=tmp_path / "stripped.pt", data=f"../{folder.name}/data")
    assert code == 0
    assert "1 of 1 points are in" in err


# ------------------------------------------------------------------------------------------- refusing


def refused(result, *words):
    """One sentence on stderr that says these words and a remedy, and nothing on stdout."""
    code, out, err = result
    assert (code, out) == (1, ""), err
    assert err.startswith("mega-fairseq sweep: ")
    assert err.count("\n") == 1, err
    assert ";" in err, "no remedy"
    for word in words:
        assert str(word) in err


def test_a_chunk_that_position_bias_simple_does_not_reach_is_left_out(folder, sweep, tmp_path):
    code, out, err = sweep(f"--chunks={2 * CHUNK},{CHUNK},{CHUNK // 2}", "--streams=3", model="simple.pt")
    assert code == 0, err
    found = points(tmp_path / "out.json")
    beyond = found.pop((2 * CHUNK, "splits:3"))
    assert (beyond["bits"], beyond["perplexity"]) == (None, None)
    assert f"reaches {CHUNK} tokens" in beyond["refused"]
    assert f"refused: {beyond['refused']}" in out
    for (chunk, cut), point in found.items():
        assert eval_lm(folder, chunk, cut, "simple.pt") == as_printed(point)
    assert len(found) == 2


def test_where_no_point_can_be_had_the_command_fails(sweep):
    code, out, err = sweep("--chunks=9,10", model="simple.pt")
    assert (code, out) == (1, "")
    assert "no point could be evaluated" in err.splitlines()[-1]
    assert sweep("--chunks=8,10", model="simple.pt")[0] == 0


def test_a_point_that_a_gpu_has_no_memory_for_is_left_out_and_tried_again(sweep, tmp_path, monkeypatch):
    from mega_fairseq.cli import sweep_points

    score = sweep_points.score

    def full(model, *rest):
        if model.decoder.cfg.decoder_chunk_size == 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return score(model, *rest)

    monkeypatch.setattr(sweep_points, "score", full)
    code, out, _ = sweep("--chunks=8,4")
    assert code == 0
    assert "refused: the GPU ran out of memory; give a smaller --max-tokens" in out
    monkeypatch.undo()
    assert "refused" not in sweep("--chunks=8,4")[1]


def test_a_model_that_has_diverged_is_refused_in_words(folder, sweep, tmp_path):
    content = torch.load(folder / "rotary.pt", weights_only=False)
    content["model"]["decoder.layers.0.mixer.kappa"].fill_(float("nan"))
    torch.save(content, tmp_path / "diverged.pt")
    code, out, err = sweep("--chunks=8", model=tmp_path / "diverged.pt")
    assert (code, out) == (1, "")
    assert "nan bits" in err.splitlines()[-1]
    assert "NaN" not in (tmp_path / "out.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chunks=0"], "--chunks is '0'"),
        (["--chunks=-1"], "--chunks is '-1'"),
        (["--chunks=8,x"], "--chunks is '8,x'"),
        (["--chunks=10000000000"], "--chunks is"),
        (["--chunks="], "--chunks is ''"),
        (["--chunks=8", "--streams="], "--streams is ''"),
        (["--chunks=8", "--streams=2,0"], "--streams is '2,0'"),
        (["--chunks=8", "--streams=999999"], "--streams has 999,999"),
        (["--chunks=8", "--contexts=1.5"], "--contexts is '1.5'"),
        (["--chunks=8", "--max-tokens=0"], "--max-tokens is 0"),
        (["--chunks=8", "--batch-size=-2"], "--batch-size is -2"),
        (["--chunks=8", "--subset=none"], "none.bin"),
        (["--chunks=8", "--out="], "--out is ''"),
        (["--chunks=8", "--out=missing/out"], "folder missing"),
    ],
)
def test_wrong_options_are_refused_before_work_starts(sweep, tmp_path, arguments, words):
    refused(sweep(*arguments), words)
    assert not list(tmp_path.iterdir())


def test_wrong_calls_show_the_usage(sweep, capsys):
    for wrong in ([], ["--chunks=8", "--streams=1", "--contexts=9"], ["--chunks=8", "--max-tokens=many"]):
        with pytest.raises(SystemExit):
            sweep(*wrong)
        assert capsys.readouterr().err.startswith("usage: mega-fairseq sweep")


def test_files_of_somebody_else_are_not_overwritten(sweep, tmp_path):
    for name, content in (("out.csv", "precious"), ("out.json", "[1, 2]"), ("out.json", "precious")):
        (tmp_path / name).write_text(content)
        refused(sweep("--chunks=8"), name, "--force")
        assert (tmp_path / name).read_text() == content
    (tmp_path / "out.png").mkdir()
    refused(sweep("--chunks=8", "--force"), "out.png is a folder")


def test_data_that_is_not_there_or_damaged_is_refused(folder, sweep, tmp_path):
    refused(sweep("--chunks=8", data="nowhere"), "dict.txt")
    for file in (folder / "data").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name in ("test.idx", "dict.txt"):
        (tmp_path / name).write_bytes(b"\xff\xfe damaged")
        refused(sweep("--chunks=8", data=tmp_path), tmp_path)


def test_data_of_another_dictionary_is_refused(folder, sweep, tmp_path):
    for file in (folder / "data").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with open(tmp_path / "dict.txt", "a") as dictionary:
        dictionary.write("more 1\n")
    refused(sweep("--chunks=8", data=tmp_path), "does not fit the", "types of dict.txt")


@pytest.mark.parametrize("content", [b"", b"hello, world", "a part"])
def test_a_file_that_is_no_checkpoint_is_refused(folder, sweep, tmp_path, content):
    refused(sweep("--chunks=8", model=tmp_path / "none.pt"), "there is no file")
    path = tmp_path / "any.pt"
    path.write_bytes((folder / "rotary.pt").read_bytes()[:5000] if content == "a part" else content)
    refused(sweep("--chunks=8", model=path), path, "no checkpoint")


def test_a_checkpoint_of_another_model_or_task_is_refused(folder, sweep, tmp_path):
    content = torch.load(folder / "rotary.pt", weights_only=False)
    for part, name in (("model", "transformer_lm"), ("task", "language_modeling")):
        other = {**content["cfg"], part: {**content["cfg"][part], "_name": name}}
        torch.save({**content, "cfg": other}, tmp_path / "other.pt")
        refused(sweep("--chunks=8", model=tmp_path / "other.pt"), name, "give a mega_lm")


def test_a_translation_model_is_refused(sweep, tmp_path):
    write_corpus(tmp_path)
    pair = ["--source-lang=de", "--target-lang=en", "--joined-dictionary"]
    splits = [f"--{split}pref={tmp_path / split}" for split in ("train", "valid", "test")]
    fairseq("preprocess", *pair, *splits, f"--destdir={tmp_path / 'pairs'}")
    few = ["--max-update=1", "--disable-validation", f"--save-dir={tmp_path}"]
    fairseq("train", tmp_path / "pairs", *PLUGIN, "--task=translation", *MEGA, *TRAINING, *few)
    refused(sweep("--chunks=8", model=tmp_path / "checkpoint_last.pt"), "mega_transformer", "translation")


# -------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("available", "cpu", "chosen"), [(True, False, "cuda"), (True, True, "cpu"), (False, False, "cpu")]
)
def test_a_gpu_is_used_where_there_is_one_unless_the_cpu_is_asked_for(monkeypatch, available, cpu, chosen):
    from mega_fairseq.cli.sweep_points import choose_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert choose_device(cpu).type == chosen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_the_same_numbers(sweep, tmp_path):
    arguments = ["--chunks=4,64", "--streams=1,3", "--force"]
    assert sweep(*arguments)[0] == 0
    cpu = points(tmp_path / "out.json")
    assert sweep(*arguments, device=())[0] == 0
    for key, point in points(tmp_path / "out.json").items():
        assert point["device"] == torch.cuda.get_device_name()
        assert point["bits"] == pytest.approx(cpu[key]["bits"], abs=1e-3)
