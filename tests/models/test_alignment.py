"""Alignments: learned from given ones, and asked for after a model was loaded."""

import pytest

from mega_fairseq.models import MegaTransformerModel
from tests.helpers.commands import MEGA, PLUGIN, TRAINING, failure, fairseq, records, write_corpus

pytestmark = pytest.mark.slow

ALIGNED = ["--load-alignments", "--criterion=label_smoothed_cross_entropy_with_alignment", "--alignment-lambda=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model trained with alignments of each target word to the source word at its place, and the training's log."""
    folder = tmp_path_factory.mktemp("aligned")
    write_corpus(folder)
    for split in ("train", "valid"):
        sides = ((folder / f"{split}.{language}").read_text().splitlines() for language in ("de", "en"))
        words = ([len(line.split()) for line in lines] for lines in sides)
        links = [" ".join(f"{i}-{i}" for i in range(min(pair))) for pair in zip(*words)]
        (folder / f"{split}.align").write_text("".join(f"{line}\n" for line in links))
    files = [f"--{split}pref={folder}/{split}" for split in ("train", "valid")]
    languages = ["--source-lang=de", "--target-lang=en"]
    joined = ["--joined-dictionary", "--align-suffix=align", f"--destdir={folder}/bin"]
    fairseq("preprocess", *languages, *files, *joined)
    words = [*PLUGIN, *MEGA, *TRAINING, *ALIGNED, "--max-update=60", f"--save-dir={folder}"]
    return folder, fairseq("train", folder / "bin", *words)


def test_given_alignments_are_learned(trained):
    found = [record["alignment_loss"] for record in records(trained[1], "train_inner")]
    assert sum(found[-5:]) < 0.7 * sum(found[:5])


def test_alignments_can_be_asked_for_after_loading(trained):
    folder, _ = trained
    hub = MegaTransformerModel.from_pretrained(str(folder), "checkpoint_last.pt", str(folder / "bin"))
    tokens = hub.encode("bo ka bu")
    plain, aligned = (
        hub.generate(tokens, beam=2, max_len_a=0, max_len_b=8, **how)[0] for how in ({}, {"print_alignment": "hard"})
    )
    assert aligned["tokens"].tolist() == plain["tokens"].tolist()
    links = aligned["alignment"]
    assert [int(target) for _, target in links] == list(range(len(aligned["tokens"]) - 1))
    assert all(0 <= int(source) < 3 for source, _ in links)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--attention-activation-fn=laplace", "--attention-activation-fn is laplace"),
        ("--decoder-layerdrop=0.2", "--decoder-layerdrop"),
    ],
)
def test_options_that_cannot_give_alignments_are_refused(trained, option, said):
    folder, _ = trained
    words = [*PLUGIN, *MEGA, *TRAINING, *ALIGNED, option, f"--save-dir={folder}/other"]
    assert said in failure("train", folder / "bin", *words)
