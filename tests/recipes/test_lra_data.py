"""The programs of examples/lra that generate data, or read published data: content, statistics, and what is refused."""

import math
import os
import pickle
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from random import Random

import numpy as np
import pytest

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare import published_split
from mega_fairseq.data.classification.inputs import Scaling
from mega_fairseq.data.classification.labels import class_numbers
from mega_fairseq.data.classification.layouts import open_folder
from tests.helpers import published
from tests.helpers.recipes import EXAMPLES, program

pytestmark = pytest.mark.slow

listops, pathfinder, contours, drawing = (
    program(f"lra/{name}")
    for name in ("listops/expressions", "pathfinder/images", "pathfinder/contours", "pathfinder/drawing")
)
reviews, papers = program("lra/text/reviews"), program("lra/retrieval/papers")
SPLITS = ("train", "valid", "test")


def run(name, *arguments):
    """Runs a program in this process."""
    words = [name, *map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        program(name).main()


def lines(path):
    return path.read_bytes().split(b"\n")[:-1]


def within(value, expected, error, errors=4):
    """Whether a number lies within so many standard errors; at 4, one of 16,000 numbers is outside by chance."""
    return abs(value - expected) < errors * error


# ------------------------------------------------------------------------------------------ ListOps

COMPUTE = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}
# Of 20,000 examples of another generator; their sampling errors count below.
PUBLISHED = 20_000
KEPT, MEAN_LENGTH = 0.083, 1039
LENGTHS = {579: 0.10, 706: 0.25, 961: 0.50, 1315: 0.75, 1649: 0.90}
LABELS = (0.170, 0.090, 0.077, 0.081, 0.091, 0.087, 0.080, 0.075, 0.082, 0.167)
OF_ROOT = {("[MIN", 0): 0.576, ("[MAX", 9): 0.570, ("[MED", 4): 0.213}
FROM_ROOT = 0.363


def value(text):
    """The value of an expression: replaces innermost operations by theirs until a digit is left."""

    def computed(match):
        return str(COMPUTE[match[1]](list(map(int, match[2].split()))))

    while len(text) > 1:
        text, replaced = re.subn(r"\[([A-Z]+)((?: \d){2,10}) \]", computed, text)
        assert replaced, "not an expression"
    return int(text)


def draw_expressions(number, *lengths):
    drawn = listops.expressions(1, *lengths)
    return [(text, int(label)) for text, label in (next(drawn) for _ in range(number))]


@pytest.fixture(scope="module")
def full():
    return draw_expressions(4000, 501, 1999)


def unlike_the_task(examples):
    """Names of the statistics that differ from the published ones by more than 4 standard errors."""
    examples = [(text.split(), label) for text, label in examples]
    size, wrong = len(examples), []
    lengths = [len(symbols) for symbols, _ in examples]
    labels, roots = Counter(label for _, label in examples), Counter(symbols[0] for symbols, _ in examples)
    pairs = Counter((symbols[0], label) for symbols, label in examples)

    def check(name, share, expected, of=size):
        if not within(share, expected, (expected * (1 - expected) * (1 / of + 1 / PUBLISHED)) ** 0.5):
            wrong.append(name)

    error = statistics.stdev(lengths) * (1 / size + 1 / PUBLISHED) ** 0.5
    if not within(statistics.mean(lengths), MEAN_LENGTH, error):
        wrong.append("mean")
    for length, share in LENGTHS.items():
        check(f"length {length}", sum(n <= length for n in lengths) / size, share)
    for label, share in enumerate(LABELS):
        check(f"label {label}", labels[label] / size, share)
    for root in listops.OPERATORS:
        check(root, roots[root] / size, 0.25)
    for (root, label), share in OF_ROOT.items():
        check(f"{label} given {root}", pairs[root, label] / roots[root], share, roots[root])
    best = sum(max(pairs[root, label] for label in range(10)) for root in roots)
    check("best guess from the root", best / size, FROM_ROOT)
    return wrong


def test_expressions_have_their_values_and_the_published_statistics(full):
    assert all(value(text) == label for text, label in full[:500])
    assert {501 <= len(text.split()) <= 1999 for text, _ in full} == {True}
    assert len({text for text, _ in full}) == len(full)
    assert unlike_the_task(full) == []


@pytest.mark.parametrize("lengths", [(501, 1999), (501, 1500)])
def test_other_rules_of_expressions_are_detected(lengths, monkeypatch):
    monkeypatch.setattr(listops, "DEEPEST", 9 if lengths == (501, 1999) else 10)
    assert "length 1315" in unlike_the_task(draw_expressions(1000, *lengths))


def test_a_median_rounded_up_is_detected(monkeypatch):
    monkeypatch.setitem(listops.OPERATORS, "[MED", lambda values: 9 - listops.median([9 - each for each in values]))
    assert any(value(text) != label for text, label in draw_expressions(100, 50, 200))


def test_every_expression_occurs_once_and_seeds_differ(tmp_path):
    words = ["--shortest=4", "--longest=4", "--valid=10", "--test=10"]  # only 400 trees have four symbols
    for seed in (1, 2):
        run("lra/listops/expressions", tmp_path / str(seed), "--train=280", *words, f"--seed={seed}")
    one, two = ([each for split in SPLITS for each in lines(tmp_path / seed / f"{split}.input")] for seed in "12")
    assert len(set(one)) == len(one) == 300
    assert one != two
    for options in (["--train=600", *words], ["--shortest=3"], ["--shortest=9000", "--longest=9001"], ["--valid=0"]):
        with pytest.raises(UserError, match="; give"):
            run("lra/listops/expressions", tmp_path / "out", *options)
        assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------- Pathfinder

# Of 400 images of 32 pixels of the published generator. Distractors are of another generator with the same statistics.
IMAGES = 400
MEAN, DEVIATION, DEVIATION_OF_MEANS = 20.08, 50.97, 2.08
ZEROS, BRIGHT, WHITE = 0.660, 0.0846, 2.30
QUADRANTS = (26.0, 19.7, 19.0, 15.6)
ATTEMPTS, DISTRACTORS = 334, 1.08


def drawings(size, number):
    return [pathfinder.draw(size, Random(f"test {image}").random) for image in range(number)]


@pytest.fixture(scope="module")
def small():
    return drawings(32, 500)


def unlike_pathfinder(drawn):
    """Names of the statistics that differ from the published ones by more than 4 standard errors of both samples."""
    images = np.stack([each.image for each in drawn]).astype(float)
    error, wrong = (1 / len(drawn) + 1 / IMAGES) ** 0.5, []

    def check(name, by_image, expected):
        if not within(np.mean(by_image), expected, np.std(by_image) * error):
            wrong.append(name)

    def mean_of(pixels):
        return pixels.mean(axis=(1, 2))

    check("mean", mean_of(images), MEAN)
    check("square", mean_of(images**2), MEAN**2 + DEVIATION**2)
    check("zeros", mean_of(images == 0), ZEROS)
    check("bright", mean_of(images > 127), BRIGHT)
    check("white", (images == 255).sum(axis=(1, 2)), WHITE)
    halves = slice(None, 16), slice(16, None)
    for (rows, columns), expected in zip(((r, c) for r in halves for c in halves), QUADRANTS):
        check(f"rows {rows.start}, columns {columns.start}", mean_of(images[:, rows, columns]), expected)
    check("distractors", [len(each.distractors) for each in drawn], DISTRACTORS)
    if not within(mean_of(images).std(), DEVIATION_OF_MEANS, DEVIATION_OF_MEANS * error / 2**0.5):
        wrong.append("deviation of means")
    # A first contour is only started at the angles that can work, 30 of 360.
    check("attempts", [each.attempts * 360 / 30 for each in drawn], ATTEMPTS)
    return wrong


def test_images_have_the_published_statistics_and_balanced_labels(small):
    assert unlike_pathfinder(small) == []
    labels = [each.label for each in small]
    assert within(np.mean(labels), 0.5, 0.5 / len(labels) ** 0.5)
    assert within(np.mean(np.diff(labels) != 0), 0.5, 0.5 / len(labels) ** 0.5)


def test_starts_at_any_angle_are_detected(monkeypatch):
    monkeypatch.setattr(contours, "QUADRANTS", [])
    free = contours.Space(32, 1)
    assert len(free.first_starts) > 300
    monkeypatch.setattr(pathfinder, "space", lambda size, margin: free)
    assert {"distractors", "rows None, columns None"} <= set(unlike_pathfinder(drawings(32, 200)))


@pytest.mark.parametrize("size", contours.RULES)
def test_the_label_says_whether_one_contour_has_both_discs(size, small):
    rules = contours.RULES[size]
    for each in small[:100] if size == 32 else drawings(size, 3):
        assert [len(contour.bars) for contour in each.targets] == [14, 14]
        assert [len(contour.bars) for contour in each.distractors] == [4] * len(each.distractors)
        assert len(each.distractors) <= rules.distractors
        for contour in (*each.targets, *each.distractors):
            points = [point for point, _ in contour.bars]
            steps = [math.dist(one, other) for one, other in zip(points[1:], points[2:])]
            assert min(steps) > 0
            assert max(steps) <= 2 * rules.length + 3 * max(rules.margins) + 3
        same = any((contour.start, contour.end) == each.marked for contour in each.targets)
        assert same == (each.label == 1)
        assert all(each.image[point] > 100 for point in each.marked)
        assert (each.image.min(), each.image.max()) == (0, 255)


def overlap(one, other):
    """The largest sum of two bars' masks, as bytes."""
    space = contours.space(32, 1)
    total = np.zeros(space.empty.shape, dtype=int)
    for point, bar in (one, other):
        space.place(total, point, bar.reach)[:] += bar.mask
    return total[space.pad : -space.pad, space.pad : -space.pad].max()


def too_close(each):
    """Whether bars of a drawing overlap more than allowed, other than neighbours in a contour."""
    pairs = []
    for contour in (*each.targets, *each.distractors):
        bars = contour.bars
        pairs += [(bars[later], bar) for later in range(2, len(bars)) for bar in bars[: later - 1]]
    first, second = (contour.bars for contour in each.targets)
    others = [*first[:-1], *second]  # the last bar of the first contour never joins the mask
    pairs += [(bar, other) for contour in each.distractors for bar in contour.bars[1:] for other in others]
    return any(overlap(*pair) >= 1.8 * 255 for pair in pairs)


def test_bars_keep_a_distance(small, monkeypatch):
    assert not any(map(too_close, small[:20]))
    draw = drawing.bar
    monkeypatch.setattr(contours, "bar", lambda *words: draw(*words)._replace(limit=np.uint8(255)))
    anywhere = contours.Space(32, 1)
    monkeypatch.setattr(pathfinder, "space", lambda size, margin: anywhere)
    assert any(map(too_close, drawings(32, 20)))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_lines_and_shrinking_equal_pillows(width):
    image, draw = (pytest.importorskip(f"PIL.{name}") for name in ("Image", "ImageDraw"))
    for angle in range(-180, 180, 7):
        end = drawing.move((20, 20), angle, 10)
        ours, theirs = drawing.line(41, (20, 20), end, width), image.new("L", (41, 41))
        draw.Draw(theirs).line([20, 20, *end[::-1]], fill=255, width=width)
        assert np.array_equal(ours, np.asarray(theirs))
        shrunk = theirs.resize((21, 21), image.Resampling.LANCZOS)
        difference = drawing.shrunk(ours, drawing.shrinking(41, 21)).astype(int) - np.asarray(shrunk)
        assert abs(difference).max() <= 1  # Pillow's weights are rounded


def test_a_killed_run_continues_and_workers_do_not_change_images(tmp_path):
    words = ["--size=32", "--images=250"]
    run("lra/pathfinder/images", *words, "--workers=1", tmp_path / "whole")
    command = [sys.executable, str(EXAMPLES / "lra/pathfinder/images.py"), *words, str(tmp_path / "killed")]
    part = tmp_path / "killed.parts/32-1-000000"
    with subprocess.Popen([*command, "--workers=1"]) as process:
        while process.poll() is None and not part.exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "killed").exists()
    kept = part.read_bytes()
    part.write_bytes(kept[:1] + b"\7" + kept[2:])  # shows that the part is read, not made again
    subprocess.run([*command, "--workers=2"], check=True)
    arrays, others = ([np.load(tmp_path / name / f"{split}.npy") for split in SPLITS] for name in ("whole", "killed"))
    assert others[0][0, 0] == 7
    others[0][0, 0] = kept[1]
    assert all(map(np.array_equal, arrays, others))
    assert [(each.shape, each.dtype) for each in arrays] == [((n, 1024), np.uint8) for n in (200, 25, 25)]
    flat, labels = np.concatenate(arrays), sum((lines(tmp_path / f"killed/{split}.label") for split in SPLITS), [])
    for number in (0, 99, 100, 249):
        expected = pathfinder.draw(32, Random(f"pathfinder 32 1 {number}").random)
        assert np.array_equal(flat[number], expected.image.ravel())
        assert labels[number] == b"%d" % expected.label


# ----------------------------------------------------------------------------------- published data

# The program of each data set, and its numbers of published examples, as the tests replace them.
TABLES = {"train": ("basic_train.tsv", 50), "valid": ("basic_val.tsv", 5), "test": ("basic_test.tsv", 5)}
PROGRAMS = {
    "text": ("lra/text/reviews", {"REVIEWS": 30, "HELD_OUT": 12}),
    "retrieval": ("lra/retrieval/papers", {"TRAINING": 40}),
    "listops": ("lra/listops/expressions", {"PUBLISHED": TABLES}),
    "image": ("lra/image/cifar", {"IMAGES": 20, "HELD_OUT": 10}),
    "speech": ("speech_commands/words", {"CLIPS": 100}),
    "pathfinder": ("lra/pathfinder/published", {"IMAGES": 40}),
}  # fmt: skip
CLASSES = {
    "text": ["neg", "pos"],
    "image": list(published.image.LABELS),
    "speech": list(published.speech.LABELS),
    "listops": list("0123456789"),
}


@pytest.fixture
def source(tmp_path, monkeypatch):
    def write(data):
        name, sizes = PROGRAMS[data]
        for constant, number in sizes.items():
            monkeypatch.setattr(program(name), constant, number)
        return published.write(data, tmp_path / "source")

    return write


@pytest.fixture
def read(tmp_path):
    def run_program(data, place):
        name, _ = PROGRAMS[data]
        if data == "listops":
            run(name, tmp_path / "out", "--source", place)
        else:
            program(name).main(place, tmp_path / "out")
        return tmp_path / "out"

    return run_program


@pytest.mark.parametrize("data", PROGRAMS)
def test_the_task_reads_files_and_classes(data, source, read):
    out = read(data, source(data))
    kind = "values" if data in ("image", "speech", "pathfinder") else "bytes"
    folder = open_folder(str(out), kind, Scaling(0, 1))
    for split in SPLITS:
        inputs, labels = folder.inputs(split), folder.labels(split)
        assert [len(each) for each in inputs] == [len(labels)] * (2 if data == "retrieval" else 1)
        class_numbers(labels, folder.classes(), split)
    assert folder.classes() == CLASSES.get(data, ["0", "1"])


def test_reviews_are_bytes_and_some_of_train_are_held_out(source, read):
    out = read("text", source("text"))
    pairs = {split: list(zip(lines(out / f"{split}.label"), lines(out / f"{split}.input"))) for split in SPLITS}
    counts = [Counter(label for label, _ in pairs[split]) for split in SPLITS]
    assert counts == [dict.fromkeys((b"neg", b"pos"), number) for number in (24, 6, 30)]
    expected = {"train": [], "test": []}
    for name, content in published.reviews().items():
        split, label, _ = name.split("/")
        expected[split].append((label.encode(), content))
    assert sorted(pairs["train"] + pairs["valid"]) == sorted(expected["train"])
    assert sorted(pairs["test"]) == sorted(expected["test"])


def test_expressions_lose_their_parentheses_only(source, read):
    out = read("listops", source("listops"))
    for split, trees in zip(SPLITS, published.trees().values()):
        assert lines(out / f"{split}.input") == [" ".join(tree.symbols).encode() for tree in trees]
        assert lines(out / f"{split}.label") == [b"%d" % tree.value for tree in trees]


def test_grey_images_equal_pillows(source, read):
    modes = pytest.importorskip("PIL.Image")
    out, expected = read("image", source("image")), {}
    for name, (pixels, labels) in published.batches().items():
        colours = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        grey = [np.asarray(modes.fromarray(image).convert("L")) for image in colours]
        expected[name] = [(CLASSES["image"][label].encode(), each.tobytes()) for label, each in zip(labels, grey)]
    *train, test = expected.values()
    rows = [list(zip(lines(out / f"{s}.label"), (row.tobytes() for row in np.load(out / f"{s}.npy")))) for s in SPLITS]
    assert rows[2] == test
    assert sorted(rows[0] + rows[1]) == sorted(sum(train, []))
    assert [len(each) for each in rows] == [90, 10, 20]


def test_clips_of_a_second_are_split_with_equal_shares_of_words(source, read):
    out = read("speech", source("speech"))
    arrays = [np.load(out / f"{split}.npy") for split in SPLITS]
    assert [(each.shape, each.dtype.str) for each in arrays] == [((n, 16_000), "<i2") for n in (70, 15, 15)]
    labels = [lines(out / f"{split}.label") for split in SPLITS]
    rows = [(label.decode(), row.tobytes()) for names, each in zip(labels, arrays) for label, row in zip(names, each)]
    whole = [(name.split("/")[0], each.tobytes()) for name, each in published.clips().items() if len(each) == 16_000]
    assert sorted(rows) == sorted(whole)
    words = Counter(label for label, _ in whole)
    for names, share in zip(labels, (0.7, 0.15, 0.15)):
        counts = Counter(name.decode() for name in names)
        assert all(abs(counts[word] - share * words[word]) <= 1 for word in words)


def test_pictures_are_split_in_the_order_of_the_metadata(source, read):
    pytest.importorskip("PIL.Image")
    out, rows = read("pathfinder", source("pathfinder")), list(published.pictures().values())
    for number, split in enumerate(SPLITS):
        chosen = np.flatnonzero(published_split((32, 4, 4)) == number)
        assert np.array_equal(np.load(out / f"{split}.npy"), [rows[row][0].ravel() for row in chosen])
        assert lines(out / f"{split}.label") == [b"%d" % rows[row][1] for row in chosen]


HEADER = b"Source\tTarget\n"
BLACK = np.zeros((published.SIDE, published.SIDE), np.uint8)
PIXELS, NUMBERS = published.batches()["test_batch"]
CLIP = bytes(32_000)


@pytest.mark.parametrize(
    ("data", "name", "content", "words"),
    [
        ("text", "test/pos/7_*.txt", b" \t", "pos/7_.* is empty"),
        ("text", "test/neg/3_*.txt", None, "29 reviews"),
        ("retrieval", "*.eval.tsv", b"1.0\ta\tb\ttext\ttext\n0.0\ta\tb\ttext\n", "row 2"),
        ("listops", "*_val.tsv", HEADER + b"( ( ( [MAX 2 ) 9 ) ] )\t8\n" * 5, "row 2"),
        ("image", "data_batch_2", published.batch(PIXELS, NUMBERS), "the same images"),
        # Neither numbers a place in memory nor asks for bytes that it does not have.
        ("image", "data_batch_2", b"\x80\2Nr" + b"\xff\xff\xff\x7f.", "not a batch"),
        ("image", "data_batch_2", b"\x80\5\x96" + (1 << 40).to_bytes(8, "little"), "not a batch"),
        ("speech", "no/0001_*.wav", published.wav(CLIP, rate=8000), "0001_.* 1 channel"),
        ("speech", "no/0001_*.wav", published.wav(CLIP)[:-2], "0001_"),
        ("pathfinder", "*/metadata/2.npy", b"imgs/2 sample_0.png 0 2\n" * 10, "column 4"),
        ("pathfinder", "*/imgs/2/sample_0.png", lambda: published.picture(BLACK), "sample_0.png is black"),
        ("pathfinder", "*/imgs/2/sample_0.png", lambda: published.picture(BLACK[1:] + 1), "sample_0.png"),
    ],
)
def test_bad_files_are_refused_by_name(data, name, content, words, source, read, tmp_path):
    place = source(data)
    path = sorted(place.glob(name))[0]
    path.unlink() if content is None else path.write_bytes(content() if callable(content) else content)
    with pytest.raises(UserError, match=words):
        read(data, place)
    assert os.listdir(tmp_path) == ["source"]


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("content", [Code(), {"data": Code(), "labels": []}])
def test_code_in_a_batch_is_not_executed(content, source, read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = source("image")
    (place / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
    pickle.loads((place / "data_batch_1").read_bytes())
    os.rmdir("executed")
    with pytest.raises(UserError, match="posix.mkdir"):
        read("image", place)
    assert not os.path.exists("executed")
