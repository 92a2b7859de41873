"""What `mega-fairseq sweep` measures: fairseq-eval-lm's numbers, on any device, and points that cannot be had."""

import io
import json
import re
import sys

import pytest
import torch

from tests.commands import fairseq
from tests.sweeps import CHUNK, TASK, points


def eval_lm(folder, chunk, cut, model="rotary.pt", *more):
    """Loss to base 2 and perplexity, as fairseq-eval-lm prints them."""
    overrides = f"--model-overrides={{'decoder_chunk_size': {chunk}}}"
    path = [f"--path={folder / model}", "--gen-subset=test", f"--valid-block={cut}"]
    said = fairseq("eval-lm", folder / "data", *TASK, *path, overrides, "--cpu", *more)
    return tuple(map(float, re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", said).groups()))


def as_printed(point):
    return pytest.approx(point["bits"], abs=5.2e-5), pytest.approx(point["perplexity"], abs=5.2e-3)


# -------------------------------------------------------------------------------------------- numbers


def test_numbers_are_those_of_fairseq_eval_lm(sweep_folder, sweep, tmp_path):
    assert sweep("--chunks=4,8,500", "--streams=1,3,50")[0] == 0
    found = points(tmp_path / "out.json")
    assert len(found) == 9
    compared = [found[chunk, f"splits:{streams}"] for chunk, streams in ((4, 3), (8, 1), (8, 50), (500, 3))]
    for point in compared:
        assert eval_lm(sweep_folder, point["chunk"], point["cut"]) == as_printed(point)
    bits = sorted(point["bits"] for point in compared)
    assert min(b - a for a, b in zip(bits, bits[1:])) > 1e-3, "this test could not tell points apart"


def test_contexts_are_streams_of_that_many_tokens(sweep_folder, sweep, tmp_path):
    assert sweep("--chunks=8", "--contexts=7,100000")[0] == 0
    found = points(tmp_path / "out.json")
    short, whole = found[8, "size:7"], found[8, "size:100000"]
    assert (short["context"], short["streams"]) == (7, -(-short["tokens"] // 7))
    assert (whole["context"], whole["streams"]) == (whole["tokens"], 1)
    assert eval_lm(sweep_folder, 8, "size:7") == as_printed(short)


@pytest.mark.parametrize("documents", ["line", "blank"])
def test_streams_can_be_the_documents_of_the_text(sweep_folder, sweep, tmp_path, documents):
    assert sweep("--chunks=8", f"--documents={documents}")[0] == 0
    (found,) = points(tmp_path / "out.json").values()
    assert found["streams"] > 1
    assert eval_lm(sweep_folder, 8, "documents", "rotary.pt", f"--documents={documents}") == as_printed(found)


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


# -------------------------------------------------------------------------------------------- points that cannot be had


def test_a_chunk_that_position_bias_simple_does_not_reach_is_left_out(sweep_folder, sweep, tmp_path):
    code, out, err = sweep(f"--chunks={2 * CHUNK},{CHUNK},{CHUNK // 2}", "--streams=3", model="simple.pt")
    assert code == 0, err
    found = points(tmp_path / "out.json")
    beyond = found.pop((2 * CHUNK, "splits:3"))
    assert (beyond["bits"], beyond["perplexity"]) == (None, None)
    assert f"reaches {CHUNK} tokens" in beyond["refused"]
    assert f"refused: {beyond['refused']}" in out
    for (chunk, cut), point in found.items():
        assert eval_lm(sweep_folder, chunk, cut, "simple.pt") == as_printed(point)
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


def test_a_model_that_has_diverged_is_refused_in_words(sweep_folder, sweep, tmp_path):
    content = torch.load(sweep_folder / "rotary.pt", weights_only=False)
    content["model"]["decoder.layers.0.mixer.kappa"].fill_(float("nan"))
    torch.save(content, tmp_path / "diverged.pt")
    code, out, err = sweep("--chunks=8", model=tmp_path / "diverged.pt")
    assert (code, out) == (1, "")
    assert "nan bits" in err.splitlines()[-1]
    assert "NaN" not in (tmp_path / "out.json").read_text()


# -------------------------------------------------------------------------------------------- progress


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


def test_progress_goes_with_the_pieces_of_a_stream_and_ends_at_its_tokens(sweep_folder):
    from mega_fairseq.cli import sweep_points

    split = sweep_points.load_split(str(sweep_folder / "data"), "test")
    model = sweep_points.load_model(str(sweep_folder / "rotary.pt"), split, torch.device("cpu")).model
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
