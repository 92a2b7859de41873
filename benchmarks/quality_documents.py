"""Mega against fairseq's Transformer on whole documents: equal parameters, batches and updates.

    VOCABULARY=4000 DATA=DATA/bible examples/wmt16_en_de/bible/prepare.sh
    python benchmarks/quality_documents.py DATA --prepare DATA/bible       first, once
    python benchmarks/quality_documents.py DATA OUT --tasks lines,continued --models mega,transformer --seeds 1,2
    python benchmarks/quality_documents.py DATA OUT --collect docs/quality_documents.json
    python benchmarks/quality_documents.py --plot docs/quality_documents.json

Tasks: `lines` trains on single lines, `mixed` on them and windows of documents, `continued` on both from the weights of
the run on `lines` with the same model, rate and seed, and `pretrained` on both from pretrained/bible-en-de, which is
mega-sentence and has been trained for longer. The average of the last five checkpoints translates the test set as lines
and, but for `lines`, in windows of several lengths. Half of the training documents contain lines that test recall: a
code that the source has told some lines before, and a word that the target has chosen between two. Both are scored with
the reference before the answer.
"""

import random
import shutil
import sys
from os.path import commonprefix
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

import sentencepiece
import torch
from fairseq import checkpoint_utils
from torch import Tensor

from benchmarks.quality_translation import MODELS, Translation, averaged
from benchmarks.runs import PLUGIN, WITH_PLUGIN, Run, fairseq, output
from mega_fairseq.cli.documents.metrics import measure
from mega_fairseq.documents import SEPARATOR, document_borders, read_lines

Line = Tuple[str, str]  # English and German
SPLITS, LANGUAGES = ("train", "valid", "test"), ("en", "de")
WINDOWS = (0, 512, 1024, 2048)  # tokens; 0 for single lines
CHUNKS = ["--encoder-chunk-size=128", "--decoder-chunk-size=128"]
MEGA = ["--arch=mega_transformer_tiny", "--rel-pos-bias=rotary", *CHUNKS]
SYSTEMS = {
    "mega": MEGA,
    "mega-sentence": [*MEGA, "--cross-attention-positions=sentence"],
    "transformer": MODELS["transformer"],
}
TASKS = {"lines": "1", "continued": "0.25", "mixed": "0.25", "pretrained": "0.25"}  # --single-lines
PRETRAINED = PLUGIN.parent / "pretrained/bible-en-de/checkpoint.pt"
RECIPE = [
    *["--task=mega_document_translation", "--source-lang=en", "--target-lang=de", "--share-all-embeddings"],
    *["--window-tokens=1024", "--max-source-positions=4096", "--max-target-positions=4096", "--max-tokens=4096"],
    *["--criterion=label_smoothed_cross_entropy", "--label-smoothing=0.1", "--weight-decay=0.05", "--clip-norm=1.0"],
    *["--optimizer=adam", "--adam-betas=(0.9, 0.98)", "--adam-eps=1e-8", "--dropout=0.2"],
    *["--lr-scheduler=inverse_sqrt", "--warmup-updates=400", "--no-epoch-checkpoints", "--save-interval=1000"],
    *["--save-interval-updates={often}", "--keep-interval-updates=5", "--validate-interval-updates={seldom}"],
    *["--validate-interval=1000"],
    *["--num-workers=0", "--log-format=json", "--log-interval=50"],
]

# ------------------------------------------------------------------------------------------- recall

NAMES = [  # a piece each
    *["Israel", "David", "Jesus", "Jerusalem", "Saul", "Aaron", "Joseph", "Moab", "Abraham", "Jordan", "Ephraim"],
    *["Benjamin", "Samuel", "Zion", "Ammon", "Joab", "Baal", "Samaria", "Jonathan", "Gilead", "Edom", "Ahab"],
    *["Hebron", "Absalom", "Abner", "Jericho", "Simon", "Abram", "Levi", "Jehu", "Midian", "Esther"],
]
DISTANCES = (1, 2, 4, 8, 16, 32)  # lines; the last is longer than any window in training
EXAMPLES = 100  # of a distance
RENDERINGS = [
    ("And the gate was of stone.", "Und das Tor war aus Stein.", "Und die Tür war aus Stein."),
    ("And the tent was of skins.", "Und die Hütte war aus Fellen.", "Und das Zelt war aus Fellen."),
    ("And the well was of old.", "Und der Brunnen war aus alter Zeit.", "Und die Quelle war aus alter Zeit."),
]


def told(rng: random.Random) -> Tuple[Line, Line, List[str]]:
    """A line that defines a code, one that asks for it, and the wrong answers: all other codes."""
    name, code = rng.sample(NAMES, 2)
    first = f"And the sign of {name} is {code}.", f"Und das Zeichen für {name} ist {code}."
    answers = {other: f"Das Zeichen für {name} ist {other}." for other in NAMES}
    return first, (f"What is the sign of {name}?", answers.pop(code)), list(answers.values())


def rendered(rng: random.Random) -> Tuple[Line, Line, List[str]]:
    """Twice the same line with one of two translations, and the other translation."""
    source, *targets = rng.choice(RENDERINGS)
    rng.shuffle(targets)
    return (source, targets[0]), (source, targets[0]), targets[1:]


FORMS = {"source": told, "target": rendered}  # where the answer is


def with_recall(document: List[Line], rng: random.Random) -> List[Line]:
    """The document with two codes and one choice of words."""
    for form in (told, told, rendered):
        first, second, _ = form(rng)
        distance = rng.choice([d for d in DISTANCES[:-1] if d <= len(document)])
        start = rng.randint(0, len(document) - distance)
        end = start + distance - 1
        document = [*document[:start], first, *document[start:end], second, *document[end:]]
    return document


def examples(form: str, distance: int, documents: List[List[Line]]) -> Iterator[Tuple[List[Line], List[str]]]:
    """Lines of test documents with a first line and, `distance` lines later, the last one; and its wrong targets."""
    rng = random.Random(f"{form} {distance}")
    long = [document for document in documents if len(document) > distance]
    for _ in range(EXAMPLES):
        first, second, wrong = FORMS[form](rng)
        document = rng.choice(long)
        start = rng.randint(0, len(document) - distance)
        yield [first, *document[start : start + distance - 1], second], wrong


# ------------------------------------------------------------------------------------------- the experiment


class Documents(Translation):
    updates = dict.fromkeys(TASKS, 3000)
    rates = {name: ("4e-3",) if name == "transformer" else ("8e-3",) for name in SYSTEMS}  # found for single lines

    def prepare(self, source: Path, data: Path) -> None:
        """Adds the lines of recall to training documents of examples/wmt16_en_de/bible, and binarises."""
        pieces, text = source / "sentencepiece", data / "documents"
        shutil.rmtree(text, ignore_errors=True)
        text.mkdir(parents=True)
        model = sentencepiece.SentencePieceProcessor(model_file=str(pieces / "codes"))
        rng = random.Random(1)
        for split in SPLITS:
            documents = of_documents(pieces, split)
            if split == "train":
                chosen = [rng.random() < 0.5 for _ in documents]
                recall = [with_recall(decoded(model, d), rng) if c else [] for d, c in zip(documents, chosen)]
                documents = [encoded(model, r) if r else d for r, d in zip(recall, documents)]
            for number, language in enumerate(LANGUAGES):
                lines = (line[number] for document in documents for line in document)
                (text / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
            ids = (f"{number}\n" * len(document) for number, document in enumerate(documents))
            (text / f"{split}.docs").write_text("".join(ids))
        words = [f"--{split}pref={text / split}" for split in SPLITS]
        words += ["--source-lang=en", "--target-lang=de", "--joined-dictionary"]
        words += [f"--srcdict={pieces / 'bin/dict.en.txt'}", f"--destdir={text / 'bin'}"]
        output([*fairseq("preprocess"), *words], text / "preprocess.log")
        for split in SPLITS:
            shutil.copy(text / f"{split}.docs", text / "bin")
        shutil.copytree(text / "bin", text / "lines")
        count = len(read_lines(text / "test.docs"))
        (text / "lines/test.docs").write_text("".join(f"{number}\n" for number in range(count)))
        shutil.copy(pieces / "codes", text)

    def training(self, run: Run, updates: int) -> List[str]:
        recipe = [word.format(often=min(100, updates), seldom=min(250, updates)) for word in RECIPE]
        recipe += [f"--single-lines={TASKS[run.task]}", f"--lr={run.lr}", f"--max-update={updates}"]
        model = run.model.replace("-sentence", "")  # single lines do not differ
        lines = run.folder.with_name(f"lines-{model}-{run.lr}-{run.seed}") / "checkpoint_last.pt"
        begin = {"continued": lines, "pretrained": PRETRAINED}.get(run.task)
        if begin:  # near the rate at which the run on lines ends
            recipe += [f"--finetune-from-model={begin}", f"--lr={float(run.lr) / 2}", "--warmup-updates=50"]
        return [str(run.data.parent / "documents/bin"), *SYSTEMS[run.model], *recipe, "--bf16"]

    def scores(self, run: Run) -> Dict[str, float]:
        checkpoint, scores = averaged(run), {}
        for window in WINDOWS[: 1 if run.task == "lines" else None]:
            scores.update(self.bleu(run, checkpoint, window))
        return {**scores, **recall(checkpoint, run.data.parent, run.task == "lines")}

    def bleu(self, run: Run, checkpoint: Path, window: int) -> Dict[str, float]:
        """BLEU of lines and of documents, translated in windows of so many tokens."""
        text, name = run.data.parent / "documents", f"windows of {window:,}" if window else "lines"
        data, prefix = text / ("bin" if window else "lines"), run.folder / f"test-{window}"
        command = [*fairseq("generate"), str(data), *WITH_PLUGIN, "--path", str(checkpoint), "--beam=5"]
        command += ["--task=mega_document_translation", "--max-tokens=4096", "--required-batch-size-multiple=1"]
        command += ["--cpu", *[f"--valid-window-tokens={window}"] * bool(window)]
        output(command, prefix.with_suffix(".out"))
        split = [sys.executable, "-m", "mega_fairseq.cli", "documents", "split", str(prefix.with_suffix(".out"))]
        output([*split, str(data / "test.docs"), "--out", str(prefix)], prefix.with_suffix(".log"))
        model = sentencepiece.SentencePieceProcessor(model_file=str(text / "codes"))
        hypotheses = [model.decode(line.split()) for line in read_lines(f"{prefix}.pieces")]
        references = [model.decode(line.split()) for line in read_lines(text / "test.de")]
        borders = document_borders(read_lines(text / "test.docs"), text / "test.docs")
        result = measure(hypotheses, references, references, borders, {})
        return {f"{kind}-BLEU, {name}": result[f"{kind}-BLEU"] for kind in ("s", "d")}


def of_documents(pieces: Path, split: str) -> List[List[Line]]:
    sides = [read_lines(pieces / f"text/{split}.{language}") for language in LANGUAGES]
    path = pieces / f"bin/{split}.docs"
    borders = document_borders(read_lines(path), path)
    return [list(zip(*(side[start:end] for side in sides))) for start, end in zip(borders, borders[1:])]


def decoded(model: sentencepiece.SentencePieceProcessor, lines: List[Line]) -> List[Line]:
    return [tuple(model.decode(side.split()) for side in line) for line in lines]


def encoded(model: sentencepiece.SentencePieceProcessor, lines: List[Line]) -> List[Line]:
    return [tuple(" ".join(model.encode(side, out_type=str)) for side in line) for line in lines]


@torch.no_grad()
def recall(checkpoint: Path, data: Path, alone: bool) -> Dict[str, float]:
    """Percentage of examples, by form and distance, in which the right answer is the likeliest of all answers, given
    the reference before it; with `alone`, the model sees only the last line.
    """
    overrides = {"data": str(data / "documents/bin")}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], arg_overrides=overrides)
    model.eval()
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "documents/codes"))
    documents = [decoded(pieces, document) for document in of_documents(data / "bible/sentencepiece", "test")]

    def numbers(text: str) -> Tensor:
        """With the end of the text."""
        return task.target_dictionary.encode_line(text, add_if_not_exist=False).long()

    def is_right(lines: List[Line], wrong: List[str]) -> bool:
        lines = encoded(pieces, lines[-1:] if alone else lines)
        source, target = (numbers(f" {SEPARATOR} ".join(side)) for side in zip(*lines))
        all_answers = [lines[-1], *encoded(pieces, [("", line) for line in wrong])]
        answers = [numbers(line).tolist() for _, line in all_answers]
        place = len(commonprefix(answers))  # where the answers differ
        encoder_out = model.encoder(source.unsqueeze(0), torch.tensor([len(source)]))
        x = model.decoder(target.roll(1).unsqueeze(0), encoder_out, features_only=True)[0]
        scores = model.decoder.output_layer(x[0, len(target) - len(answers[0]) + place])
        return bool(scores[[answer[place] for answer in answers]].argmax() == 0)

    longest = max(map(len, documents))
    return {
        f"{form}, {distance}": 100 * sum(is_right(*each) for each in examples(form, distance, documents)) / EXAMPLES
        for form in FORMS
        for distance in DISTANCES
        if distance < longest
    }


if __name__ == "__main__":
    Documents().main(__doc__)
