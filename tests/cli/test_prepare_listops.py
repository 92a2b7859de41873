"""`mega-fairseq prepare listops`: values, published statistics, and files that do not depend on the workers."""

import statistics
from collections import Counter
from random import Random

import pytest

from mega_fairseq.cli import UserError
from mega_fairseq.cli import main as command
from mega_fairseq.cli.prepare import listops
from mega_fairseq.cli.prepare.folder import Folder
from tests.helpers.commands import refused_by
from tests.helpers.faults import killed_after_a_part, killed_after_the_training_set, killed_while_writing
from tests.helpers.prepared import contents, kill, prepare, value, within

pytestmark = pytest.mark.slow

SIZES = {"train": 3200, "valid": 400, "test": 400}
FULL = ["--train=3200", "--valid=400", "--test=400", "--seed=3"]
SHORT = ["--train=700", "--valid=100", "--test=100", "--shortest=20", "--longest=60"]

# Of 20,000 examples of another generator; their own sampling errors count below.
PUBLISHED = 20_000
KEPT = 0.083
MEAN = 1039
LENGTHS = {579: 0.10, 706: 0.25, 961: 0.50, 1315: 0.75, 1649: 0.90}
LABELS = (0.170, 0.090, 0.077, 0.081, 0.091, 0.087, 0.080, 0.075, 0.082, 0.167)
OF_ROOT = {("[MIN", 0): 0.576, ("[MAX", 9): 0.570, ("[MED", 4): 0.213}
FROM_ROOT = 0.363


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("listops") / "full"
    prepare("listops", folder, *FULL, "--workers=1")
    return folder


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    folder = tmp_path_factory.mktemp("listops") / "short"
    prepare("listops", folder, *SHORT, "--workers=1")
    return folder


def examples(folder, splits=("train", "valid", "test")):
    for split in splits:
        inputs, labels = ((folder / f"{split}.{name}").read_text().splitlines() for name in ("input", "label"))
        assert len(inputs) == len(labels)
        yield from zip(inputs, map(int, labels))


# ---------------------------------------------------------------------------------------------- values


def test_every_label_is_the_value_of_its_expression(full, short):
    for found in (examples(full, ["test"]), examples(short)):
        assert all(value(text) == label for text, label in found)


def test_a_median_rounded_up_is_detected(monkeypatch):
    monkeypatch.setitem(listops.OPERATORS, "[MED", lambda values: 9 - listops.median([9 - each for each in values]))
    lines = listops.make_part(1, 50, 200, 0).decode().splitlines()
    assert any(value(text) != int(label) for label, text in (line.split("\t") for line in lines))


def test_depth_and_arguments_are_those_of_the_task(full):
    deepest, symbols = 0, set()
    for text, _ in examples(full, ["test"]):
        symbols.update(text.split())
        depth = 1
        for symbol in text.split():
            depth += symbol.startswith("[") - (symbol == "]")
            deepest = max(deepest, depth)
    assert deepest == 10  # an operator at depth 9 has arguments at depth 10
    assert symbols == {*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"}


def test_every_example_occurs_once_in_all_splits(full, short):
    for folder in (full, short):
        texts = [text for text, _ in examples(folder)]
        assert len(texts) == len(set(texts))


def test_repeated_trees_are_replaced(tmp_path, capsys):
    """Only 400 trees have four symbols, and a part has 500 examples."""
    words = ["--shortest=4", "--longest=4", "--valid=10", "--test=10", "--workers=1"]
    assert command.main(["prepare", "listops", str(tmp_path / "all"), "--train=280", *words]) == 0
    assert len({text for text, _ in examples(tmp_path / "all")}) == 300
    capsys.readouterr()
    code = command.main(["prepare", "listops", str(tmp_path / "more"), "--train=600", *words])
    refused_by("prepare", (code, *capsys.readouterr()), "different trees of 4 to 4 symbols")
    assert not (tmp_path / "more").exists()


# ------------------------------------------------------------------------------------------ statistics


def share_error(share, size):
    return (share * (1 - share) * (1 / size + 1 / PUBLISHED)) ** 0.5


def unlike_the_task(found):
    """Names of the statistics that differ from the published ones by more than 4 standard errors."""
    found = [(text.split(), label) for text, label in found]
    size = len(found)
    lengths = [len(symbols) for symbols, _ in found]
    labels, roots = Counter(label for _, label in found), Counter(symbols[0] for symbols, _ in found)
    pairs = Counter((symbols[0], label) for symbols, label in found)
    wrong = []

    def check(name, share, expected, of=size):
        if not within(share, expected, share_error(expected, of)):
            wrong.append(name)

    if not within(statistics.mean(lengths), MEAN, statistics.stdev(lengths) * (1 / size + 1 / PUBLISHED) ** 0.5):
        wrong.append("mean")
    for length, share in LENGTHS.items():
        check(f"length {length}", sum(n <= length for n in lengths) / size, share)
    for label, share in enumerate(LABELS):
        check(f"label {label}", labels[label] / size, share)
    for root in listops.NAMES:
        check(root, roots[root] / size, 0.25)
    for (root, label), share in OF_ROOT.items():
        check(f"{label} given {root}", pairs[root, label] / roots[root], share, roots[root])
    best = sum(max(pairs[root, label] for label in range(10)) for root in roots)
    check("best guess from the root", best / size, FROM_ROOT)
    return wrong


def test_lengths_labels_and_roots_have_the_published_shares(full):
    found = list(examples(full))
    assert {501 <= len(text.split()) <= 1999 for text, _ in found} == {True}
    assert unlike_the_task(found) == []


@pytest.mark.parametrize(("name", "other"), [("DEEPEST", 9), ("LENGTHS", (501, 1500))])
def test_other_rules_are_detected(name, other, monkeypatch):
    lengths = other if name == "LENGTHS" else (501, 1999)
    if name == "DEEPEST":
        monkeypatch.setattr(listops, name, other)
    lines = [
        line.split("\t") for part in range(2) for line in listops.make_part(1, *lengths, part).decode().split("\n")
    ]
    assert "length 1315" in unlike_the_task([(text, int(label)) for label, text in (p for p in lines if len(p) == 2)])


def test_one_of_twelve_trees_has_an_allowed_length():
    random, size = Random("kept").random, 30_000
    trees = (listops.tree(random, 1999) for _ in range(size))
    kept = sum(found is not None and len(found.symbols) > 500 for found in trees)
    tried = PUBLISHED / KEPT  # trees behind the published share
    assert within(kept / size, KEPT, (KEPT * (1 - KEPT) * (1 / size + 1 / tried)) ** 0.5)


def test_operators_and_their_numbers_of_arguments_are_uniform():
    random, size = Random("uniform").random, 2000
    operators, arguments, nodes = Counter(), Counter(), Counter()
    for _ in range(size):
        above = []
        for symbol in listops.tree(random, 10**9).symbols:
            if symbol == "]":
                arguments[above.pop()] += 1
                continue
            nodes[len(above) < 9, symbol.startswith("[")] += 1
            if above:
                above[-1] += 1
            if symbol.startswith("["):
                operators[symbol] += 1
                above.append(0)
    total = sum(operators.values())
    assert sorted(arguments) == list(range(2, 11))
    assert nodes[False, True] == 0
    inner = nodes[True, True] + nodes[True, False]
    assert within(nodes[True, True] / inner, 1 / 4, (3 / 16 / inner) ** 0.5)
    assert all(within(n / total, 1 / 4, (3 / 16 / total) ** 0.5) for n in operators.values())
    assert all(within(n / total, 1 / 9, (8 / 81 / total) ** 0.5) for n in arguments.values())


# ----------------------------------------------------------------------------------------------- files


def test_three_workers_write_the_files_of_one(short, tmp_path):
    prepare("listops", tmp_path / "same", *SHORT, "--workers=3")
    assert contents(tmp_path / "same") == contents(short)
    names = {f"{split}.{name}" for split in SIZES for name in ("input", "label")}
    assert set(contents(short)) == {*names, "prepare.json"}


def test_another_seed_gives_other_trees(short, tmp_path):
    prepare("listops", tmp_path / "other", *SHORT, "--seed=2")
    mine, others = (Counter(text for text, _ in examples(folder)) for folder in (short, tmp_path / "other"))
    assert not mine & others


@pytest.mark.parametrize(
    ("fault", "kept"),
    [
        (killed_while_writing, None),
        (killed_after_a_part, "parts/000000-*"),
        (killed_after_the_training_set, "train.input"),
    ],
)
def test_a_killed_preparation_continues(fault, kept, short, tmp_path):
    folder = tmp_path / "killed"
    kill(fault, "listops", folder, *SHORT, "--workers=1")
    assert not (folder / "valid.input").exists()
    (path,) = folder.glob(kept) if kept else [None]
    if path and path.parent.name == "parts":  # the next command uses the part instead of making it again
        path.write_bytes(path.read_bytes().replace(b"[MIN", b"[MAX"))
        prepare("listops", folder, *SHORT, "--workers=1")
        assert b"[MIN" not in b"".join((folder / "train.input").read_bytes().splitlines(True)[:500])
        return
    assert path is None or path.read_bytes() == contents(short)[kept]
    prepare("listops", folder, *SHORT, "--workers=1")
    assert contents(folder) == contents(short)


def test_of_two_processes_that_start_together_one_prepares_and_the_other_is_refused(tmp_path):
    mine, other = (Folder(str(tmp_path / "out"), {"data": "listops", "seed": seed}) for seed in (1, 2))
    mine.make(lambda _: b"of mine\n", [0], 1, 1)
    with pytest.raises(UserError, match="another process is preparing .*out; wait until"):
        other.make(lambda _: b"of the other\n", [0], 1, 1)
    mine.finish({"train.input": mine.lines()}, {"train": 1})
    mine.release()
    other.release()
    with pytest.raises(UserError, match="another process has changed .*out; run the same command again"):
        other.make(lambda _: b"of the other\n", [0], 1, 1)
    assert (tmp_path / "out/train.input").read_bytes() == b"of mine"


def test_finished_data_are_left_alone(short):
    before = contents(short)
    assert "is complete already" in prepare("listops", short, *SHORT)
    assert contents(short) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shortest=3"], ["--shortest is 3"]),
        (["--shortest=60", "--longest=50"], ["--shortest is 60", "--longest 50"]),
        (["--shortest=90000", "--longest=90001"], ["none of 20,000 trees"]),
        (["--train=0"], ["--train is 0"]),
        (["--train=999999999999"], ["--train is 999999999999; give a whole number from 1 to 100,000,000"]),
        (["--workers=0"], ["--workers is 0"]),
        (["--seed=-1"], ["--seed is -1"]),
    ],
)
def test_impossible_options_are_refused_before_anything_is_written(options, words, tmp_path, capsys):
    code = command.main(["prepare", "listops", str(tmp_path / "out"), *options])
    refused_by("prepare", (code, *capsys.readouterr()), *words)
    assert list(tmp_path.iterdir()) == []


def test_folders_with_other_contents_are_refused(short, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("precious")
    for place, words in (
        (tmp_path, ["contains files of something else"]),
        (tmp_path / "thesis.txt", ["is a file"]),
        (tmp_path / "thesis.txt/out", ["Not a directory"]),
        (short, ["other settings", "longest 60"]),
    ):
        code = command.main(["prepare", "listops", str(place)])
        refused_by("prepare", (code, *capsys.readouterr()), place, *words)
    assert contents(tmp_path) == {"thesis.txt": b"precious"}
