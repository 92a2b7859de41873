"""`mega-fairseq sweep` gives the numbers of fairseq-eval-lm, keeps them in files, and resumes from these."""

import csv
import io
import re
import signal
from functools import partial

import pytest
import torch

from mega_fairseq.cli import sweep as module
from mega_fairseq.data import StreamDataset
from mega_fairseq.ops import backend
from tests.helpers.commands import Running, fairseq, refused_by
from tests.helpers.faults import killed_after_a_point, killed_while_writing
from tests.helpers.sweeps import CHUNK, TASK, language_checkpoint, points

pytestmark = pytest.mark.slow

refused = partial(refused_by, "sweep")


def eval_lm(folder, chunk, cut, model="rotary.pt", *more):
    """Loss to base 2 and perplexity, as printed by fairseq-eval-lm."""
    overrides = f"--model-overrides={{'decoder_chunk_size': {chunk}}}"
    path = [f"--path={folder / model}", "--gen-subset=test", f"--valid-block={cut}"]
    said = fairseq("eval-lm", folder / "data", *TASK, *path, overrides, "--cpu", *more)
    return tuple(map(float, re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", said).groups()))


def as_printed(point):
    return pytest.approx(point["bits"], abs=5.2e-5), pytest.approx(point["perplexity"], abs=5.2e-3)


# -------------------------------------------------------------------------------------------- numbers


def test_numbers_equal_those_of_fairseq_eval_lm(sweep_folder, sweep, tmp_path):
    assert sweep("--chunks=4,500", "--streams=3,50")[0] == 0
    measured = points(tmp_path / "out.json")
    assert len(measured) == 4
    assert len({point["bits"] for point in measured.values()}) == 4
    for chunk, cut in ((4, "splits:3"), (500, "splits:50")):
        assert eval_lm(sweep_folder, chunk, cut) == as_printed(measured[chunk, cut])


def test_contexts_are_the_lengths_of_streams(sweep_folder, sweep, tmp_path):
    assert sweep("--chunks=8", "--contexts=7,100000")[0] == 0
    measured = points(tmp_path / "out.json")
    short, whole = measured[8, "size:7"], measured[8, "size:100000"]
    assert (short["context"], short["streams"]) == (7, -(-short["tokens"] // 7))
    assert (whole["context"], whole["streams"]) == (whole["tokens"], 1)


def test_documents_can_be_streams(sweep_folder, sweep, tmp_path):
    assert sweep("--chunks=8", "--documents=blank")[0] == 0
    (point,) = points(tmp_path / "out.json").values()
    assert point["streams"] > 1
    assert eval_lm(sweep_folder, 8, "documents", "rotary.pt", "--documents=blank") == as_printed(point)


@pytest.mark.parametrize(("name", "chunks"), [("aft, local", [-1]), ("flash", [4, 500]), ("megalodon", [4, 500])])
def test_other_mixers_are_swept(sweep_folder, sweep, tmp_path, name, chunks):
    path = language_checkpoint(sweep_folder / "rotary.pt", tmp_path / "model.pt", name)
    words = [] if chunks == [-1] else ["--chunks=" + ",".join(map(str, chunks))]
    assert sweep("--contexts=19", *words, model=path)[0] == 0
    measured = points(tmp_path / "out.json")
    assert len({point["bits"] for point in measured.values()}) == len(chunks)
    assert eval_lm(sweep_folder, chunks[0], "size:19", path) == as_printed(measured[chunks[0], "size:19"])


@pytest.mark.parametrize("limit", ["--max-tokens=40", "--batch-size=2"])
def test_numbers_do_not_depend_on_the_batch_size(sweep, tmp_path, monkeypatch, limit):
    sizes, collate = [], StreamDataset.collater
    monkeypatch.setattr(StreamDataset, "collater", lambda self, rows: sizes.append(len(rows)) or collate(self, rows))
    sweep("--chunks=8", "--contexts=19")
    (one,), batches = points(tmp_path / "out.json").values(), len(sizes)
    sweep("--chunks=8", "--contexts=19", limit, "--force")
    (other,) = points(tmp_path / "out.json").values()
    assert one["bits"] == pytest.approx(other["bits"], rel=1e-6)
    assert (batches, set(sizes[1:-1])) == (1, {2})


# ------------------------------------------------------------------------- points without numbers


def test_a_chunk_beyond_position_bias_simple_is_not_evaluated(sweep, tmp_path):
    code, out, err = sweep(f"--chunks={2 * CHUNK},{CHUNK}", "--streams=3", model="simple.pt")
    assert code == 0, err
    measured = points(tmp_path / "out.json")
    beyond = measured.pop((2 * CHUNK, "splits:3"))
    assert (beyond["bits"], beyond["perplexity"]) == (None, None)
    assert beyond["refused"] in out
    code, out, err = sweep(f"--chunks={3 * CHUNK}", model="simple.pt")
    assert (code, out) == (1, "")
    assert "no point could be evaluated" in err


def test_a_point_that_ran_out_of_gpu_memory_is_tried_again(sweep, monkeypatch):
    score = module.score

    def full(model, *rest):
        if model.decoder.cfg.decoder_chunk_size == 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return score(model, *rest)

    monkeypatch.setattr(module, "score", full)
    code, out, _ = sweep("--chunks=8,4")
    assert code == 0
    assert "--max-tokens" in out
    monkeypatch.undo()
    assert "not evaluated" not in sweep("--chunks=8,4")[1]


def test_a_diverged_model_is_refused(sweep_folder, sweep, edited, tmp_path):
    def diverge(content):
        content["model"]["decoder.layers.0.mixer.kappa"].fill_(float("nan"))

    code, out, err = sweep("--chunks=8", model=edited(sweep_folder / "rotary.pt", diverge))
    assert (code, out) == (1, "")
    assert "nan bits" in err
    assert "NaN" not in (tmp_path / "out.json").read_text()


# -------------------------------------------------------------------------------------------- files


def test_json_csv_table_and_figure_agree(sweep, tmp_path):
    code, out, err = sweep("--chunks=4,8", "--streams=1,3")
    assert code == 0, err
    measured = points(tmp_path / "out.json")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert len(measured) == len(rows) == out.count("\n") - 2 == 4
    for row, line in zip(rows, out.splitlines()[1:]):
        point = measured[int(row["chunk"]), row["cut"]]
        assert {name: "" if value is None else str(value) for name, value in point.items()} == row
        assert line.split()[:2] == [row["chunk"], row["streams"]]
        assert f"{point['bits']:.4f}" in line
        assert point["perplexity"] == 2 ** point["bits"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.json", "out.png"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    written = (tmp_path / "out.csv").read_text()
    (tmp_path / "out.csv").unlink()  # as after a full disk
    assert sweep("--chunks=4,8", "--streams=1,3")[0] == 0
    assert (tmp_path / "out.csv").read_text() == written


# -------------------------------------------------------------------------------------------- resuming


def test_a_killed_sweep_resumes_and_leaves_no_figure_of_other_points(sweep_folder, sweep, tmp_path):
    sweep("--chunks=2")
    arguments = ["--chunks=4,8", "--streams=3,1"]
    files = [sweep_folder / "rotary.pt", sweep_folder / "data", "--out", tmp_path / "out", "--cpu"]
    process = Running("mega-fairseq", "sweep", *files, *arguments, "--force", fault=killed_after_a_point)
    assert process.wait()[0] == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.json"]
    before = points(tmp_path / "out.json")
    assert list(before) == [(4, "splits:3")]
    code, _, err = sweep(*arguments)
    assert code == 0
    assert "point 3 of 3" in err
    after = points(tmp_path / "out.json")
    assert len(after) == 4
    assert after[4, "splits:3"] == before[4, "splits:3"]  # its seconds too
    files_before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    process = Running("mega-fairseq", "sweep", *files, "--chunks=16", fault=killed_while_writing)
    assert process.wait()[0] == -signal.SIGKILL
    assert {name: (tmp_path / name).read_bytes() for name in files_before} == files_before
    assert sweep("--chunks=16")[0] == 0  # a killed process locks nothing
    assert files_before.keys() == {path.name for path in tmp_path.iterdir() if path.suffix != ".tmp"}


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


def test_sweeps_at_the_same_time_write_the_points_of_all(tmp_path):
    origin = {part: {"path": "", "fingerprint": ""} for part in module.OTHER}
    one, other = (module.Record(str(tmp_path / "out"), origin) for _ in range(2))
    for record, chunk in ((one, 4), (other, 5), (one, 6)):
        record.add(module.Point(chunk, "splits:1", streams=1, context=9, tokens=9))
    assert [chunk for chunk, _ in points(tmp_path / "out.json")] == [4, 5, 6]


@pytest.mark.parametrize("other", ["--subset=valid", "simple.pt"])
def test_results_of_another_sweep_are_kept_until_forced_ones_replace_them(sweep, tmp_path, monkeypatch, other):
    sweep("--chunks=8")
    before = (tmp_path / "out.json").read_bytes()
    words, how = ([other], {}) if other.startswith("--") else ([], {"model": other})
    refused(sweep("--chunks=8", *words, **how), "--force")
    assert (tmp_path / "out.json").read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setattr(module, "measure", interrupt)
        refused(sweep("--chunks=4", *words, "--force", **how), "without --force")
    assert (tmp_path / "out.json").read_bytes() == before
    assert sweep("--chunks=4", *words, "--force", **how)[0] == 0
    assert list(points(tmp_path / "out.json")) == [(4, "splits:1")]


def test_later_sweeps_of_copies_add_to_the_same_files(sweep_folder, sweep, edited, tmp_path):
    sweep("--chunks=4")
    copy = edited(sweep_folder / "rotary.pt", lambda content: content.update(last_optimizer_state=None))
    code, _, err = sweep(f"--chunks=4,{CHUNK}", model=copy, data=f"../{sweep_folder.name}/data")
    assert code == 0
    assert "1 of 2 points are in" in err
    assert "1 of 1 points are in" in sweep()[2]  # by default the chunk size of the model
    assert list(points(tmp_path / "out.json")) == [(4, "splits:1"), (CHUNK, "splits:1")]


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chunks=0"], "--chunks is '0'"),
        (["--streams=999999"], "--streams has 999,999"),
        (["--max-tokens=0"], "--max-tokens is 0"),
        (["--subset=none"], "none.bin"),
        (["--out=missing/out"], "folder missing"),
    ],
)
def test_wrong_options_are_refused_before_any_work(sweep, tmp_path, arguments, words):
    refused(sweep(*arguments), words)
    assert not list(tmp_path.iterdir())


def test_kernels_without_a_gpu_are_refused(sweep, monkeypatch):
    monkeypatch.setenv("MEGA_BACKEND", "triton")
    backend._choose.cache_clear()
    refused(sweep("--chunks=8"), "MEGA_BACKEND")
    backend._choose.cache_clear()


def test_other_files_are_not_overwritten(sweep, tmp_path):
    for name, content in (("out.csv", "precious"), ("out.json", "[1, 2]"), ("out.json", "[" * 100_000)):
        (tmp_path / name).write_text(content)
        refused(sweep("--chunks=8"), name, "--out")
        assert (tmp_path / name).read_text() == content


def test_missing_damaged_or_other_data_is_refused(sweep_folder, sweep, tmp_path):
    for file in (sweep_folder / "data").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with open(tmp_path / "dict.txt", "a") as dictionary:
        dictionary.write("more 1\n")
    refused(sweep("--chunks=8", data=tmp_path), "dict.txt")
    for name in ("test.idx", "dict.txt"):
        (tmp_path / name).write_bytes(b"\xff\xfe damaged")
        refused(sweep("--chunks=8", data=tmp_path), tmp_path, name)
    (tmp_path / "dict.txt").write_text("twice 2\ntwice 1\n")
    refused(sweep("--chunks=8", data=tmp_path), tmp_path, "'twice'")


def test_a_checkpoint_of_another_model_or_task_is_refused(sweep_folder, sweep, translation, edited):
    words = ("mega_transformer", "translation")  # not that the data lack dict.txt
    refused(sweep("--chunks=8", model=translation.last, data=translation.data), *words)
    path = edited(sweep_folder / "rotary.pt", lambda content: content["cfg"]["task"].update(_name="language_modeling"))
    refused(sweep("--chunks=8", model=path), "language_modeling", "mega_lm")
