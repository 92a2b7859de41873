"""The files of `mega-fairseq sweep`, how it resumes from them, and its errors."""

import csv
import io
import json
import multiprocessing
import shutil
import signal
import sys
from functools import partial

import pytest
import torch
from fairseq.data import Dictionary

from mega_fairseq.cli import UserError
from mega_fairseq.cli.split import unit_of
from mega_fairseq.cli.sweep import evaluate
from mega_fairseq.cli.sweep.figure import figure
from mega_fairseq.cli.sweep.record import Point, Record
from tests.helpers.commands import MEGA, PLUGIN, TRAINING, Running, fairseq, preprocess_pairs, refused_by
from tests.helpers.faults import killed_after_a_point, killed_while_writing
from tests.helpers.sweeps import points

pytestmark = pytest.mark.slow

refused = partial(refused_by, "sweep")
ORIGIN = {part: {"path": part, "fingerprint": "1", "subset": "test"} for part in ("checkpoint", "data")}
POINT = Point(8, "splits:1", 1, 100, 100, 2.0, 4.0, 1.0, "cpu")


# -------------------------------------------------------------------------------------------- files


def test_json_csv_table_and_figure_agree(sweep, tmp_path):
    code, out, err = sweep("--chunks=4,8", "--streams=1,3")
    assert code == 0, err
    found = points(tmp_path / "out.json")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert len(found) == len(rows) == out.count("\n") - 2 == 4
    names = ", ".join(str(tmp_path / f"out.{ending}") for ending in ("json", "csv", "png"))
    assert out.splitlines()[-1] == f"wrote {names}"
    for row, line in zip(rows, out.splitlines()[1:]):
        point = found[int(row["chunk"]), row["cut"]]
        assert {name: "" if value is None else str(value) for name, value in point.items()} == row
        assert line.split()[:2] == [row["chunk"], row["streams"]]
        assert f"{point['bits']:.4f}" in line
        assert point["perplexity"] == 2 ** point["bits"]
        assert point["seconds"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.json", "out.png"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def evaluated(chunk, context, bits):
    return Point(chunk, f"size:{context}", 1, context, 5000, bits, 2**bits, 1.0, "cpu")


def test_the_figure_has_lines_by_chunk_and_by_context(drawn):
    sizes = {(512, 100): 4.0, (512, 5000): 2.0, (1024, 100): 3.0, (1024, 5000): 1.0}
    points = [evaluated(*size, bits) for size, bits in sizes.items()]
    figure([*points, Point(2048, "size:100", 1, 100, 5000, refused="beyond reach")], "token")
    assert drawn["plot"] == [
        ("512", (100, 5000), (16.0, 4.0)),
        ("1,024", (100, 5000), (8.0, 2.0)),
        ("100", (512, 1024), (16.0, 8.0)),
        ("5,000", (512, 1024), (4.0, 2.0)),
    ]
    assert drawn["set_ylabel"][-1] == ("perplexity",)


def test_the_figure_of_bytes_is_in_bits(drawn):
    figure([evaluated(512, 100, 1.5), evaluated(1024, 100, 1.2)], "byte")
    assert drawn["plot"] == [("100", (512, 1024), (1.5, 1.2))]
    assert drawn["set_ylabel"][-1] == ("bits per byte",)


def test_the_figure_has_models_without_chunks_right_of_the_largest(drawn):
    figure([evaluated(-1, 100, 1.0), evaluated(64, 100, 1.5), evaluated(512, 100, 1.2)], "byte")
    assert drawn["plot"] == [("100", (64, 512, 1024), (1.5, 1.2, 1.0))]


@pytest.mark.parametrize("points", [[(512, 100)], [(512, 100), (1024, 100)], [(512, 100), (512, 200)]])
def test_the_figure_has_no_panel_without_a_line(drawn, points):
    figure([evaluated(*point, 2.0) for point in points], "token")
    assert [len(x) for _, x, _ in drawn["plot"]] == [len(points)]


@pytest.mark.parametrize(("unit", "least"), [("byte", 0.1), ("token", 0.29)])
def test_small_differences_do_not_fill_the_figure(drawn, unit, least):
    figure([evaluated(512, 100, 2.0806), evaluated(1024, 100, 2.0827)], unit)  # perplexity 4.230 to 4.236
    low, high = drawn["set_ylim"][-1][0]
    assert high - low > least
    figure([evaluated(512, 100, 1.0), evaluated(1024, 100, 3.0)], unit)
    low, high = drawn["set_ylim"][-1][0]
    assert high - low < 1.2 * (8 - 2 if unit == "token" else 2)


@pytest.mark.parametrize(
    ("symbols", "unit"), [(["32", "255"], "byte"), (["32", "256"], "token"), (["a", "b"], "token")]
)
def test_tokens_that_are_numbers_of_bytes_are_recognised(symbols, unit):
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    dictionary.finalize()  # adds fairseq's filler
    assert unit_of(dictionary) == unit


def test_without_matplotlib_there_is_no_figure(sweep, tmp_path, monkeypatch):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    code, out, err = sweep("--chunks=8")
    assert code == 0, err
    assert out.splitlines()[-1] == f"wrote {tmp_path / 'out.json'}, {tmp_path / 'out.csv'}"
    assert "out.png was not drawn" in err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.json"]


# -------------------------------------------------------------------------------------------- resuming


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX")
def test_a_killed_sweep_resumes(sweep_folder, sweep, tmp_path):
    arguments = ["--chunks=4,8", "--streams=3,1"]
    files = [sweep_folder / "rotary.pt", sweep_folder / "data", "--out", tmp_path / "out", "--cpu"]
    process = Running("mega-fairseq", "sweep", *files, *arguments, fault=killed_after_a_point)
    assert process.wait()[0] == -signal.SIGKILL
    before = points(tmp_path / "out.json")
    assert list(before) == [(4, "splits:3")]
    code, out, err = sweep(*arguments)
    assert (code, out.count("\n")) == (0, 6)
    assert "1 of 4 points are in" in err
    assert "point 3 of 3" in err
    after = points(tmp_path / "out.json")
    assert len(after) == 4
    assert after[4, "splits:3"] == before[4, "splits:3"]  # its seconds too


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX")
def test_a_sweep_killed_while_writing_leaves_its_files_unchanged(sweep_folder, sweep, tmp_path):
    sweep("--chunks=4")
    before = {name: (tmp_path / name).read_bytes() for name in ("out.json", "out.csv", "out.png")}
    files = [sweep_folder / "rotary.pt", sweep_folder / "data", "--out", tmp_path / "out", "--cpu", "--chunks=4,8"]
    assert Running("mega-fairseq", "sweep", *files, fault=killed_while_writing).wait()[0] == -signal.SIGKILL
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_an_interrupted_sweep_prints_how_to_resume(sweep, tmp_path, monkeypatch):
    measure = evaluate.measure

    def stop(model, split, chunk, *rest):
        if chunk == 8:
            raise KeyboardInterrupt
        return measure(model, split, chunk, *rest)

    monkeypatch.setattr(evaluate, "measure", stop)
    code, out, err = sweep("--chunks=4,8")
    assert (code, out) == (1, "")
    assert "interrupted; the same command continues" in err.splitlines()[-1]
    assert list(points(tmp_path / "out.json")) == [(4, "splits:1")]


def test_later_sweeps_add_to_the_same_files(sweep, tmp_path):
    sweep("--chunks=8")
    code, out, err = sweep("--chunks=4", "--streams=2")
    assert (code, out.count("\n")) == (0, 4)
    assert len(points(tmp_path / "out.json")) == 2
    assert "already" not in err


@pytest.mark.parametrize(
    ("other", "words"),
    [(["--subset=valid"], "other data or another subset"), ([], "another checkpoint")],
)
def test_results_of_another_sweep_are_kept_unless_forced(sweep, tmp_path, other, words):
    sweep("--chunks=8")
    before = (tmp_path / "out.json").read_bytes()
    how = {"model": "rotary.pt" if other else "simple.pt"}
    refused(sweep("--chunks=8", *other, **how), words, "--force")
    assert (tmp_path / "out.json").read_bytes() == before
    assert sweep("--chunks=4", *other, "--force", **how)[0] == 0
    assert list(points(tmp_path / "out.json")) == [(4, "splits:1")]


def test_copies_of_checkpoint_and_data_are_recognised(sweep_folder, sweep, tmp_path):
    sweep("--chunks=8")
    content = torch.load(sweep_folder / "rotary.pt", weights_only=False)
    content["last_optimizer_state"] = None
    torch.save(content, tmp_path / "stripped.pt")
    code, _, err = sweep("--chunks=8", model=tmp_path / "stripped.pt", data=f"../{sweep_folder.name}/data")
    assert code == 0
    assert "1 of 1 points are in" in err


# -------------------------------------------------------------------------------------------- errors


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
def test_wrong_options_are_refused_before_any_work(sweep, tmp_path, arguments, words):
    refused(sweep(*arguments), words)
    assert not list(tmp_path.iterdir())


def test_other_files_are_not_overwritten(sweep, tmp_path):
    for name, content in (("out.csv", "precious"), ("out.json", "[1, 2]"), ("out.json", "precious")):
        (tmp_path / name).write_text(content)
        refused(sweep("--chunks=8"), name, "give another --out")
        assert (tmp_path / name).read_text() == content
    (tmp_path / "out.png").mkdir()
    refused(sweep("--chunks=8", "--force"), "out.png is a folder")


def test_missing_or_damaged_data_is_refused(sweep_folder, sweep, tmp_path):
    refused(sweep("--chunks=8", data="nowhere"), "dict.txt")
    for file in (sweep_folder / "data").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, said in (("test.idx", "test.idx is damaged"), ("dict.txt", "or its dict.txt cannot be read (")):
        (tmp_path / name).write_bytes(b"\xff\xfe damaged")
        refused(sweep("--chunks=8", data=tmp_path), tmp_path, said)


def test_all_parts_of_a_training_split_are_swept(sweep_folder, sweep, tmp_path):
    shutil.copytree(sweep_folder / "data", tmp_path / "data")
    for name in ("train", "train1", "test1"):
        for end in ("bin", "idx"):
            shutil.copy(tmp_path / f"data/test.{end}", tmp_path / f"data/{name}.{end}")
    tokens = []
    for subset in ("test", "train"):
        assert sweep("--chunks=8", f"--subset={subset}", data=tmp_path / "data")[0] == 0
        tokens.append(json.loads((tmp_path / "out.json").read_text())["points"][0]["tokens"])
        for file in tmp_path.glob("out.*"):
            file.unlink()
    assert tokens[1] == 2 * tokens[0]


def test_data_of_another_dictionary_is_refused(sweep_folder, sweep, tmp_path):
    for file in (sweep_folder / "data").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with open(tmp_path / "dict.txt", "a") as dictionary:
        dictionary.write("more 1\n")
    refused(sweep("--chunks=8", data=tmp_path), "does not fit the", "types of dict.txt")


def add_two(prefix, chunk):
    record = Record(prefix, ORIGIN)
    for point in (POINT._replace(chunk=chunk), POINT._replace(chunk=chunk + 1)):
        record.add(point)


def test_concurrent_sweeps_keep_each_others_points(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(partial(add_two, str(tmp_path / "out")), range(1, 101, 2), chunksize=1)
    assert {chunk for chunk, _ in points(tmp_path / "out.json")} == set(range(1, 101))


@pytest.mark.parametrize(
    "wrong",
    [
        *[{"chunk": "x"}, {"bits": "x"}, {"context": None}, {"other": 1}],
        *[{"bits": None}, {"bits": float("nan")}, {"perplexity": float("inf")}, {"seconds": None}],
    ],
)
def test_points_that_a_sweep_cannot_have_written_are_refused(tmp_path, wrong):
    Record(str(tmp_path / "out"), ORIGIN).add(POINT)
    content = json.loads((tmp_path / "out.json").read_text())
    content["points"].append({**content["points"][0], **wrong})
    (tmp_path / "out.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="out.json was not written by a sweep; give another --out"):
        Record(str(tmp_path / "out"), ORIGIN)


def test_a_checkpoint_of_another_model_or_task_is_refused(sweep_folder, sweep, tmp_path):
    content = torch.load(sweep_folder / "rotary.pt", weights_only=False)
    for part, name in (("model", "transformer_lm"), ("task", "language_modeling")):
        other = {**content["cfg"], part: {**content["cfg"][part], "_name": name}}
        torch.save({**content, "cfg": other}, tmp_path / "other.pt")
        refused(sweep("--chunks=8", model=tmp_path / "other.pt"), name, "give a mega_lm")


def test_a_translation_model_or_corpus_is_refused(sweep, tmp_path):
    few = ["--max-update=1", "--disable-validation", f"--save-dir={tmp_path}"]
    corpus = preprocess_pairs(tmp_path)
    fairseq("train", corpus, *PLUGIN, "--task=translation", *MEGA, *TRAINING, *few)
    model = tmp_path / "checkpoint_last.pt"
    refused(sweep("--chunks=8", model=model), "mega_transformer", "translation")
    result = sweep("--chunks=8", model=model, data=corpus)
    refused(result, f"there is no {corpus}/dict.txt", "a text for language models", "--only-source")
