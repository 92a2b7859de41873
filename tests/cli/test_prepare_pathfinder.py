"""`mega-fairseq prepare pathfinder`: published statistics, the rules of contours, and the files."""

import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from random import Random

import numpy as np
import pytest

from mega_fairseq.cli import main as command
from mega_fairseq.cli.prepare import contours, drawing, pathfinder
from mega_fairseq.cli.prepare.contours import RULES, Space, space
from tests.helpers.commands import ROOT, refused_by
from tests.helpers.prepared import contents, killed_in_the_third_part, prepare, within

pytestmark = pytest.mark.slow

FEW = ["--size=32", "--images=250"]

# Of 400 images of 32 pixels of the published generator. Distractors are of another generator with the same statistics.
PUBLISHED = 400
MEAN, DEVIATION, DEVIATION_OF_MEANS = 20.08, 50.97, 2.08
ZEROS, BRIGHT, WHITE = 0.660, 0.0846, 2.30
QUADRANTS = (26.0, 19.7, 19.0, 15.6)
ATTEMPTS, DISTRACTORS = 334, 1.08
# Angles at which a contour can start, by size and margin.
STARTS = {
    (32, 1): {*range(-150, -120)},
    (64, 1): {*range(-180, -135), *range(-134, -84)},
    (128, 2): {*range(-180, -59), *range(-53, 180)},
    (128, 3): {*range(-180, 180)},
    (256, 3): {*range(-180, 180)},
}


def drawings(size, number):
    return [pathfinder.draw(size, Random(f"test {image}").random) for image in range(number)]


@pytest.fixture(scope="module")
def small():
    return drawings(32, 500)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pathfinder") / "few"
    prepare("pathfinder", folder, *FEW, "--workers=1")
    return folder


# ------------------------------------------------------------------------------------------ statistics


def unlike_the_task(found):
    """Names of the statistics that differ from the published ones by more than 4 standard errors of both samples."""
    images = np.stack([each.image for each in found]).astype(float)
    error = (1 / len(found) + 1 / PUBLISHED) ** 0.5
    wrong = []

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
    check("distractors", [len(each.distractors) for each in found], DISTRACTORS)
    if not within(mean_of(images).std(), DEVIATION_OF_MEANS, DEVIATION_OF_MEANS * error / 2**0.5):
        wrong.append("deviation of means")
    # A first contour is only started at the angles that can work, 30 of 360.
    check("attempts", [each.attempts * 360 / 30 for each in found], ATTEMPTS)
    return wrong


def test_images_have_the_published_statistics(small):
    assert unlike_the_task(small) == []


def test_starts_at_any_angle_are_detected(monkeypatch):
    monkeypatch.setattr(contours, "QUADRANTS", [])
    free = Space(32, 1)
    assert len(free.first_starts) > 300
    monkeypatch.setattr(pathfinder, "space", lambda size, margin: free)
    assert {"distractors", "rows None, columns None"} <= set(unlike_the_task(drawings(32, 200)))


@pytest.mark.parametrize(("size", "margin"), STARTS)
def test_contours_start_at_the_published_angles(size, margin):
    assert {angle for angle in range(-180, 180) if space(size, margin).element(angle)} == STARTS[size, margin]
    assert {angle for angle, _ in space(size, margin).first_starts} == STARTS[size, margin]


def test_six_to_nine_pixels_in_the_middle_can_start_an_image_of_32():
    assert {len(pixels) for _, pixels in space(32, 1).first_starts} == {6, 9}


@pytest.mark.parametrize(("size", "seconds", "number"), [(32, 0.05, 40), (128, 1.0, 4)])
def test_an_image_takes_little_cpu_time(size, seconds, number):
    drawings(size, 1)  # computes what all images share
    start = time.process_time()
    drawings(size, number)
    assert time.process_time() - start < number * seconds


# --------------------------------------------------------------------------------------------- contours


@pytest.mark.parametrize("size", RULES)
def test_contours_are_connected_and_the_label_says_whether_one_has_both_discs(size, small):
    rules = RULES[size]
    for each in small[:100] if size == 32 else drawings(size, 3):
        assert [len(contour.bars) for contour in each.targets] == [14, 14]
        assert [len(contour.bars) for contour in each.distractors] == [4] * len(each.distractors)
        assert len(each.distractors) <= rules.distractors
        for contour in (*each.targets, *each.distractors):
            points = [point for point, _ in contour.bars]
            steps = [math.dist(one, other) for one, other in zip(points[1:], points[2:])]
            widest = 2 * rules.length + 3 * max(rules.margins) + 3  # the next bar begins behind the end of the last
            assert min(steps) > 0
            assert max(steps) <= widest
        starts, ends = ({contour.start for contour in each.targets}, {contour.end for contour in each.targets})
        assert each.marked[0] in starts
        assert each.marked[1] in ends
        same = any((contour.start, contour.end) == each.marked for contour in each.targets)
        assert same == (each.label == 1)
        assert all(each.image[point] > 100 for point in each.marked)
        assert (each.image.min(), each.image.max()) == (0, 255)


def overlap(one, other):
    """The largest sum of two bars' masks, as bytes."""
    where, total = space(32, 1), np.zeros(space(32, 1).empty.shape, dtype=int)
    for point, bar in (one, other):
        where.place(total, point, bar.reach)[:] += bar.mask
    return total[where.pad : -where.pad, where.pad : -where.pad].max()


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


def test_bars_keep_a_distance(small):
    assert not any(map(too_close, small[:20]))


def test_bars_that_overlap_are_detected(monkeypatch):
    draw = drawing.bar
    monkeypatch.setattr(contours, "bar", lambda *words: draw(*words)._replace(limit=np.uint8(255)))
    anywhere = Space(32, 1)
    monkeypatch.setattr(pathfinder, "space", lambda size, margin: anywhere)
    assert any(map(too_close, drawings(32, 20)))


def test_labels_are_balanced_and_differ_from_image_to_image(small):
    labels = [each.label for each in small]
    assert within(np.mean(labels), 0.5, 0.5 / len(labels) ** 0.5)
    changes = np.mean(np.diff(labels) != 0)
    assert within(changes, 0.5, 0.5 / len(labels) ** 0.5)


# ---------------------------------------------------------------------------------------------- drawing


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_lines_and_shrinking_equal_pillows(width):
    image, draw = (pytest.importorskip(f"PIL.{name}") for name in ("Image", "ImageDraw"))
    for angle in range(-180, 180, 7):
        end = drawing.move((20, 20), angle, 10)
        ours, theirs = drawing.line(41, (20, 20), end, width), image.new("L", (41, 41))
        draw.Draw(theirs).line([20, 20, *end[::-1]], fill=255, width=width)
        assert np.array_equal(ours, np.asarray(theirs))
        small = theirs.resize((21, 21), image.Resampling.LANCZOS)
        difference = drawing.shrunk(ours, drawing.shrinking(41, 21)).astype(int) - np.asarray(small)
        assert abs(difference).max() <= 1  # Pillow's weights are rounded


def test_dilation_takes_the_largest_value_around(small):
    image, element = small[0].image, [(0, 0), (2, -1), (-3, 0)]
    slow = [
        [max(image[r + y, c + x] if 0 <= r + y < 32 and 0 <= c + x < 32 else 7 for y, x in element) for c in range(32)]
        for r in range(32)
    ]
    assert np.array_equal(drawing.dilated(image, element, outside=7), slow)


# ------------------------------------------------------------------------------------------------ files


def test_arrays_and_labels_are_those_of_the_drawings(few):
    sizes = {"train": 200, "valid": 25, "test": 25}
    arrays = {split: np.load(few / f"{split}.npy", mmap_mode="r") for split in sizes}
    labels = {split: (few / f"{split}.label").read_text().splitlines() for split in sizes}
    assert {split: (array.shape, array.dtype) for split, array in arrays.items()} == {
        split: ((size, 1024), np.dtype("uint8")) for split, size in sizes.items()
    }
    assert {split: len(each) for split, each in labels.items()} == sizes
    flat, text = np.concatenate(list(arrays.values())), sum(labels.values(), [])
    for number in (0, 99, 100, 199, 200, 224, 225, 249):
        expected = pathfinder.draw(32, Random(f"pathfinder 32 1 {number}").random)
        assert np.array_equal(flat[number], expected.image.ravel())
        assert text[number] == str(expected.label)
    assert len({row.tobytes() for row in flat}) == 250
    assert (few / "examples.png").read_bytes().startswith(b"\x89PNG")


def test_only_one_process_prepares_a_folder_ctrl_c_prints_one_sentence_and_any_number_of_workers_continues(
    few, tmp_path, capsys
):
    folder = tmp_path / "interrupted"
    words = [sys.executable, "-m", "mega_fairseq.cli", "prepare", "pathfinder", folder, *FEW, "--workers=2"]
    interrupted = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore SIGINT
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True, "preexec_fn": interrupted}
    with subprocess.Popen(words, cwd=ROOT, **options) as process:
        while process.poll() is None and not list(folder.glob("parts/??????-*[!p]")):
            time.sleep(0.01)
        second = command.main(["prepare", "pathfinder", str(folder), *FEW])
        refused_by("prepare", (second, *capsys.readouterr()), "another process is preparing", "wait until")
        os.killpg(process.pid, signal.SIGINT)  # a terminal interrupts the command and its workers
        _, errors = process.communicate()
    refused_by("prepare", (process.returncode, "", errors), "interrupted; the same command continues")
    prepare("pathfinder", folder, *FEW, "--workers=3")
    assert contents(folder) == contents(few)


def test_a_killed_worker_is_reported_and_the_same_command_continues(few, tmp_path, capsys, monkeypatch):
    words = ["prepare", "pathfinder", str(tmp_path / "killed"), *FEW]
    with monkeypatch.context() as patch:
        patch.setattr(pathfinder, "make_part", killed_in_the_third_part)
        code = command.main([*words, "--workers=2"])
    refused_by("prepare", (code, *capsys.readouterr()), "a worker was killed", "with fewer --workers continues")
    assert list((tmp_path / "killed/parts").glob("00000[01]-*"))
    assert command.main([*words, "--workers=1"]) == 0
    assert contents(tmp_path / "killed") == contents(few)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size=48"], ["--size is 48", "32, 64, 128, 256"]),
        (["--images=9"], ["--images is 9"]),
        (["--images=999999999999"], ["give 10 to"]),
    ],
)
def test_impossible_options_are_refused_before_anything_is_written(options, words, tmp_path, capsys):
    code = command.main(["prepare", "pathfinder", str(tmp_path / "out"), *options])
    refused_by("prepare", (code, *capsys.readouterr()), *words)
    assert list(tmp_path.iterdir()) == []


def test_data_of_other_settings_are_kept(few, capsys):
    before = contents(few)
    for words in (["pathfinder", "--size=64"], ["pathfinder", *FEW, "--seed=2"], ["listops"]):
        code = command.main(["prepare", words[0], str(few), *words[1:]])
        refused_by("prepare", (code, *capsys.readouterr()), few, "data pathfinder, size 32, images 250, seed 1")
    assert contents(few) == before
