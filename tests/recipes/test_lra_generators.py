"""The generators of examples/lra: values, labels and drawings, the published statistics, and interrupted runs."""

import math
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
from PIL import Image, ImageDraw

from mega_fairseq.cli import UserError
from tests.helpers.recipes import EXAMPLES, program

pytestmark = pytest.mark.slow

listops, pathfinder, contours, drawing = (
    program(f"lra/{name}")
    for name in ("listops/expressions", "pathfinder/images", "pathfinder/contours", "pathfinder/drawing")
)
SPLITS = ("train", "valid", "test")


def run(module, *arguments):
    """Runs a program in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *map(str, arguments)])
        module.main()


def within(value, expected, error):
    """Whether a number lies within 4 standard errors; one of 16,000 numbers is outside by chance."""
    return abs(value - expected) < 4 * error


# ------------------------------------------------------------------------------------------ ListOps

COMPUTE = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}
# Of 20,000 examples of another generator; their sampling errors count below.
PUBLISHED = 20_000
MEAN_LENGTH = 1039
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


def unlike_the_task(examples):
    """Names of the statistics that differ from the published ones by more than 4 standard errors."""
    lengths, roots = [len(text.split()) for text, _ in examples], Counter(text.split()[0] for text, _ in examples)
    labels, pairs = (Counter(label for _, label in examples), Counter((text.split()[0], y) for text, y in examples))
    size, wrong = len(examples), []

    def check(name, share, expected, of=size):
        if not within(share, expected, (expected * (1 - expected) * (1 / of + 1 / PUBLISHED)) ** 0.5):
            wrong.append(name)

    if not within(statistics.mean(lengths), MEAN_LENGTH, statistics.stdev(lengths) * (1 / size + 1 / PUBLISHED) ** 0.5):
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


def test_expressions_have_their_values_and_the_published_statistics():
    full = draw_expressions(2000, 501, 1999)
    assert all(value(text) == label for text, label in full[:200])
    assert {501 <= len(text.split()) <= 1999 for text, _ in full} == {True}
    assert len({text for text, _ in full}) == len(full)
    assert unlike_the_task(full) == []


def test_every_expression_occurs_once_and_seeds_differ(tmp_path):
    words = ["--shortest=4", "--longest=4", "--valid=10", "--test=10"]  # only 400 trees have four symbols
    for seed in (1, 2):
        run(listops, tmp_path / str(seed), "--train=280", *words, f"--seed={seed}")
    one, two = (
        [line for split in SPLITS for line in (tmp_path / seed / f"{split}.input").read_text().splitlines()]
        for seed in "12"
    )
    assert len(set(one)) == len(one) == 300
    assert one != two
    for options in (["--train=600", *words], ["--shortest=3"], ["--shortest=9000", "--longest=9001"], ["--valid=0"]):
        with pytest.raises(UserError, match="; give"):
            run(listops, tmp_path / "out", *options)
        assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------- Pathfinder

# Of 400 images of 32 pixels of the published generator. Distractors are of another generator with the same statistics.
IMAGES = 400
MEAN, DEVIATION, DEVIATION_OF_MEANS = 20.08, 50.97, 2.08
ZEROS, BRIGHT, WHITE = 0.660, 0.0846, 2.30
QUADRANTS = {"upper left": 26.0, "upper right": 19.7, "lower left": 19.0, "lower right": 15.6}
ATTEMPTS, DISTRACTORS = 334, 1.08


def drawings(size, number):
    return [pathfinder.draw(size, Random(f"test {image}").random) for image in range(number)]


@pytest.fixture(scope="module")
def small():
    return drawings(32, 200)


def unlike_pathfinder(drawn):
    """Names of the statistics that differ from the published ones by more than 4 standard errors of both samples."""
    images = np.stack([each.image for each in drawn]).astype(float)
    means, error = images.mean(axis=(1, 2)), (1 / len(drawn) + 1 / IMAGES) ** 0.5
    by_image = {
        "mean": (means, MEAN),
        "square": ((images**2).mean(axis=(1, 2)), MEAN**2 + DEVIATION**2),
        "zeros": ((images == 0).mean(axis=(1, 2)), ZEROS),
        "bright": ((images > 127).mean(axis=(1, 2)), BRIGHT),
        "white": ((images == 255).sum(axis=(1, 2)), WHITE),
        "distractors": ([len(each.distractors) for each in drawn], DISTRACTORS),
        # A first contour is only started at the angles that can work, 30 of 360.
        "attempts": ([each.attempts * 360 / 30 for each in drawn], ATTEMPTS),
    }
    corners = images.reshape(-1, 2, 16, 2, 16).mean(axis=(2, 4)).reshape(-1, 4).T
    by_image.update({name: (corner, QUADRANTS[name]) for name, corner in zip(QUADRANTS, corners)})
    wrong = {
        name
        for name, (values, expected) in by_image.items()
        if not within(np.mean(values), expected, np.std(values) * error)
    }
    if not within(means.std(), DEVIATION_OF_MEANS, DEVIATION_OF_MEANS * error / 2**0.5):
        wrong.add("deviation of means")
    return wrong


def test_images_have_the_published_statistics_and_balanced_labels(small):
    assert unlike_pathfinder(small) == set()
    labels = [each.label for each in small]
    assert within(np.mean(labels), 0.5, 0.5 / len(labels) ** 0.5)
    assert within(np.mean(np.diff(labels) != 0), 0.5, 0.5 / len(labels) ** 0.5)


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
    for angle in range(-180, 180, 7):
        end = drawing.move((20, 20), angle, 10)
        ours, theirs = drawing.line(41, (20, 20), end, width), Image.new("L", (41, 41))
        ImageDraw.Draw(theirs).line([20, 20, *end[::-1]], fill=255, width=width)
        assert np.array_equal(ours, np.asarray(theirs))
        shrunk = theirs.resize((21, 21), Image.Resampling.LANCZOS)
        difference = drawing.shrunk(ours, drawing.shrinking(41, 21)).astype(int) - np.asarray(shrunk)
        assert abs(difference).max() <= 1  # Pillow's weights are rounded


def test_a_killed_run_continues_and_workers_do_not_change_images(tmp_path):
    command = [sys.executable, EXAMPLES / "lra/pathfinder/images.py", tmp_path / "out", "--size=32", "--images=110"]
    part = tmp_path / "out.parts/32-1-000000"
    with subprocess.Popen([*command, "--workers=1"]) as process:
        while process.poll() is None and not part.exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    kept = part.read_bytes()
    part.write_bytes(kept[:1] + b"\7" + kept[2:])  # shows that the part is read, not made again
    subprocess.run([*command, "--workers=2"], check=True)
    images = np.concatenate([np.load(tmp_path / f"out/{split}.npy") for split in SPLITS])
    labels = "".join((tmp_path / f"out/{split}.label").read_text() for split in SPLITS).split()
    assert (images.shape, images.dtype, images[0, 0]) == ((110, 1024), np.uint8, 7)
    images[0, 0] = kept[1]
    for number in (0, 99, 100, 109):
        expected = pathfinder.draw(32, Random(f"pathfinder 32 1 {number}").random)
        assert np.array_equal(images[number], expected.image.ravel())
        assert labels[number] == str(expected.label)
