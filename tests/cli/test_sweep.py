"""`mega-fairseq sweep` gives the numbers of fairseq-eval-lm, and reports points that it cannot evaluate."""

import io
import os
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.cli.split import load_split
from mega_fairseq.cli.sweep import evaluate
from tests.helpers.commands import Running, fairseq, free_port
from tests.helpers.mixer_checkpoints import language_checkpoint
from tests.helpers.sweeps import CHUNK, TASK, points

pytestmark = pytest.mark.slow


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
    assert sweep("--chunks=4,8,500", "--streams=1,3,50")[0] == 0
    found = points(tmp_path / "out.json")
    assert len(found) == 9
    compared = [found[chunk, f"splits:{streams}"] for chunk, streams in ((4, 3), (8, 50), (500, 1))]
    for point in compared:
        assert eval_lm(sweep_folder, point["chunk"], point["cut"]) == as_printed(point)
    bits = sorted(point["bits"] for point in compared)
    assert min(b - a for a, b in zip(bits, bits[1:])) > 1e-3, "the points are too similar for this test"


def test_contexts_are_the_lengths_of_streams(sweep_folder, sweep, tmp_path):
    assert sweep("--chunks=8", "--contexts=7,100000")[0] == 0
    found = points(tmp_path / "out.json")
    short, whole = found[8, "size:7"], found[8, "size:100000"]
    assert (short["context"], short["streams"]) == (7, -(-short["tokens"] // 7))
    assert (whole["context"], whole["streams"]) == (whole["tokens"], 1)
    assert eval_lm(sweep_folder, 8, "size:7") == as_printed(short)


def started_by_torchrun(rank, port):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def test_streams_are_shared_by_the_processes_of_torchrun(sweep_folder, tmp_path):
    port, words = free_port(), [sweep_folder / "rotary.pt", sweep_folder / "data", "--streams=1,3", "--cpu"]
    for name, faults in (("one", [None]), ("two", [partial(started_by_torchrun, rank, port) for rank in (0, 1)])):
        words_of_run = ["sweep", *words, "--chunks=4,8", f"--out={tmp_path / name}"]
        ends = [process.wait() for process in [Running("mega-fairseq", *words_of_run, fault=each) for each in faults]]
        assert [code for code, _ in ends] == [0] * len(faults), ends
        assert ["perplexity" in said for _, said in ends] == [True, False][
            : len(faults)
        ]  # the first process alone reports
    one, two = (points(tmp_path / f"{name}.json") for name in ("one", "two"))
    assert {at: point["bits"] for at, point in two.items()} == {
        at: pytest.approx(point["bits"], abs=1e-6) for at, point in one.items()
    }


@pytest.mark.parametrize("documents", ["line", "blank"])
def test_documents_can_be_streams(sweep_folder, sweep, tmp_path, documents):
    assert sweep("--chunks=8", f"--documents={documents}")[0] == 0
    (found,) = points(tmp_path / "out.json").values()
    assert found["streams"] > 1
    assert eval_lm(sweep_folder, 8, "documents", "rotary.pt", f"--documents={documents}") == as_printed(found)


def test_the_default_is_one_stream_and_the_chunk_size_of_the_model(sweep, tmp_path):
    assert sweep("--chunks=4,4")[0] == 0
    assert list(points(tmp_path / "out.json")) == [(4, "splits:1")]
    assert sweep()[0] == 0
    assert list(points(tmp_path / "out.json")) == [(4, "splits:1"), (CHUNK, "splits:1")]


def test_contexts_of_a_model_without_chunks_are_swept(sweep_folder, sweep, tmp_path):
    path = language_checkpoint(sweep_folder / "rotary.pt", tmp_path / "aft.pt", "aft local")
    code, out, _ = sweep("--contexts=7,19", model=path)
    assert code == 0
    assert [row.split()[0] for row in out.splitlines()[1:3]] == ["none", "none"]
    found = points(tmp_path / "out.json")
    assert as_printed(found[-1, "size:7"]) == eval_lm(sweep_folder, -1, "size:7", path)
    assert found[-1, "size:7"]["bits"] != found[-1, "size:19"]["bits"]


def test_chunks_of_flash_are_swept(sweep_folder, sweep, tmp_path):
    path = language_checkpoint(sweep_folder / "rotary.pt", tmp_path / "flash.pt", "flash")
    assert sweep("--chunks=4,8,500", model=path)[0] == 0
    found = points(tmp_path / "out.json")
    assert len({point["bits"] for point in found.values()}) == 3
    assert eval_lm(sweep_folder, 4, "splits:1", path) == as_printed(found[4, "splits:1"])


@pytest.mark.parametrize("limit", ["--max-tokens=40", "--batch-size=2"])
def test_numbers_do_not_depend_on_the_batch_size(sweep, tmp_path, monkeypatch, limit):
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


# -------------------------------------------------------------------------------------------- points without numbers


def test_a_chunk_beyond_position_bias_simple_is_not_evaluated(sweep_folder, sweep, tmp_path):
    code, out, err = sweep(f"--chunks={2 * CHUNK},{CHUNK},{CHUNK // 2}", "--streams=3", model="simple.pt")
    assert code == 0, err
    found = points(tmp_path / "out.json")
    beyond = found.pop((2 * CHUNK, "splits:3"))
    assert (beyond["bits"], beyond["perplexity"]) == (None, None)
    assert f"reaches {CHUNK} tokens" in beyond["refused"]
    assert f"not evaluated: {beyond['refused']}" in out
    assert len(found) == 2
    chunk, cut = CHUNK // 2, "splits:3"
    assert eval_lm(sweep_folder, chunk, cut, "simple.pt") == as_printed(found[chunk, cut])


def test_the_command_fails_if_no_point_can_be_evaluated(sweep):
    code, out, err = sweep("--chunks=9,10", model="simple.pt")
    assert (code, out) == (1, "")
    assert "no point could be evaluated" in err.splitlines()[-1]
    assert sweep("--chunks=8,10", model="simple.pt")[0] == 0


@pytest.mark.parametrize("name", ["attention before", "gmlp", "aft"])
def test_tables_over_places_are_evaluated_at_the_chunk_size_of_training_only(sweep_folder, sweep, tmp_path, name):
    path = language_checkpoint(sweep_folder / "rotary.pt", tmp_path / "tables.pt", name)
    sentence = (
        f"--decoder-chunk-size is 4 and this model learned tables over the {CHUNK} places of a chunk; evaluate at "
        f"chunks of {CHUNK}"
    )
    code, out, err = sweep("--chunks=4", model=path)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == f"mega-fairseq sweep: no point could be evaluated; the last one: {sentence}"
    code, out, _ = sweep(f"--chunks=4,{CHUNK}", model=path)
    assert code == 0
    assert f"chunk 4, splits:1 was not evaluated: {sentence}" in out
    assert points(tmp_path / "out.json")[CHUNK, "splits:1"]["bits"] > 0


def test_a_point_that_ran_out_of_gpu_memory_is_tried_again(sweep, tmp_path, monkeypatch):
    score = evaluate.score

    def full(model, *rest):
        if model.decoder.cfg.decoder_chunk_size == 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return score(model, *rest)

    monkeypatch.setattr(evaluate, "score", full)
    code, out, _ = sweep("--chunks=8,4")
    assert code == 0
    assert "not evaluated: the GPU ran out of memory; give a smaller --max-tokens" in out
    monkeypatch.undo()
    assert "not evaluated" not in sweep("--chunks=8,4")[1]


def test_a_diverged_model_is_refused(sweep_folder, sweep, tmp_path):
    content = torch.load(sweep_folder / "rotary.pt", weights_only=False)
    content["model"]["decoder.layers.0.mixer.kappa"].fill_(float("nan"))
    torch.save(content, tmp_path / "diverged.pt")
    code, out, err = sweep("--chunks=8", model=tmp_path / "diverged.pt")
    assert (code, out) == (1, "")
    assert "nan bits" in err.splitlines()[-1]
    assert "NaN" not in (tmp_path / "out.json").read_text()


# -------------------------------------------------------------------------------------------- progress


def test_each_point_is_printed_without_a_terminal(sweep):
    err = sweep("--chunks=4,8")[2].splitlines()
    for number, (chunk, line) in enumerate(zip((4, 8), err), 1):
        assert re.fullmatch(rf"point {number} of 2: chunk {chunk}, splits:1: [\d.]+ bits, perplexity [\d.]+", line), err
    assert len(err) == 2


def test_a_terminal_shows_a_progress_bar(sweep, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert sweep("--chunks=4,8")[0] == 0
    for words in ("point 2 of 2: chunk 8", "100%", "token/s"):
        assert words in terminal.getvalue()


def test_progress_counts_the_pieces_of_a_stream(sweep_folder):
    split = load_split(str(sweep_folder / "data"), "test")
    model, _ = evaluate.load_model(str(sweep_folder / "rotary.pt"), split)
    model.decoder.cfg.piece_tokens = 40
    heard, streams = [], split.streams("splits:1")
    batches = streams.batch_by_size(streams.ordered_indices())
    evaluate.score(model, streams, batches, SimpleNamespace(update=heard.append))
    assert sum(heard) == len(split.corpus)
    assert max(heard) <= 40


# -------------------------------------------------------------------------------------------- devices


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_the_same_numbers(sweep, tmp_path):
    arguments = ["--chunks=4,64", "--streams=1,3", "--force"]
    assert sweep(*arguments)[0] == 0
    cpu = points(tmp_path / "out.json")
    assert sweep(*arguments, device=())[0] == 0
    for key, point in points(tmp_path / "out.json").items():
        assert point["device"] == torch.cuda.get_device_name()
        assert point["bits"] == pytest.approx(cpu[key]["bits"], abs=1e-3)
