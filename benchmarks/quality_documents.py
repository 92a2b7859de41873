"""Mega against fairseq's Transformer on whole documents: equal parameters, batches and updates.

    VOCABULARY=4000 DATA=DATA/bible examples/wmt16_en_de/bible/prepare.sh
    python benchmarks/quality_documents.py DATA --prepare DATA/bible       first, once
    python benchmarks/quality_documents.py DATA OUT --tasks lines,continued --models mega,transformer --seeds 1,2
    python benchmarks/quality_documents.py DATA OUT --collect docs/quality_documents.json
    python benchmarks/quality_documents.py --plot docs/quality_documents.json

Tasks: `lines` trains on single lines, `windows` on windows of documents, `mixed` on both, and `continued` on both from
the weights of the run on `lines` with the same model, rate and seed. The average of the last five checkpoints
translates the test set as lines and, but for `lines`, in windows of several lengths. Half of the training documents
contain lines that test recall: a code that the source has told some lines before, and a word that the target has
chosen between two. Both are scored with the reference before the answer.
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
from fairseq import checkpoint_utils, utils
from fairseq.data.language_pair_dataset import collate
from torch import Tensor

from benchmarks.quality_translation import MODELS, Translation, averaged
from benchmarks.runs import WITH_PLUGIN, Run, fairseq, output
from mega_fairseq.cli.documents.metrics import measure
from mega_fairseq.documents import SEPARATOR, document_borders, read_lines

Line = Tuple[str, str]  # English and German
SPLITS, LANGUAGES = ("train", "valid", "test"), ("en", "de")
WINDOWS = (0, 512, 1024, 2048)  # tokens; 0 for single lines
ROTARY = ["--arch=mega_transformer_tiny", "--rel-pos-bias=rotary"]
CHUNKS = ["--encoder-chunk-size=128", "--decoder-chunk-size=128"]
SYSTEMS = {
    "mega": [*ROTARY, *CHUNKS],
    "mega-full": ROTARY,
    "mega-sentence": [*ROTARY, *CHUNKS, "--cross-attention-positions=sentence"],
    "transformer": MODELS["transformer"],
}
TASKS = {"lines": "1", "continued": "0.25", "mixed": "0.25", "windows": "0"}  # --single-lines
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
EXAMPLES, BATCH = 100, 20  # of a distance
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
    tasks = TASKS
    models = SYSTEMS

    def rates(self, model: str) -> List[str]:
        return ["4e-3" if model == "transformer" else "8e-3"]  # found for single lines

    def updates(self, task: str) -> int:
        return 3000

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
        if run.task == "continued":  # near the rate at which the run on lines ends
            model = run.model.replace("-sentence", "")  # single lines do not differ
            lines = run.folder.with_name(f"lines-{model}-{run.lr}-{run.seed}") / "checkpoint_last.pt"
            recipe += [f"--finetune-from-model={lines}", f"--lr={float(run.lr) / 2}", "--warmup-updates=50"]
        recipe += [] if self.gpu else ["--bf16"]
        return [str(run.data.parent / "documents/bin"), *self.models[run.model], *recipe]

    def scores(self, run: Run) -> Dict[str, float]:
        checkpoint, scores = averaged(run), {}
        for window in WINDOWS[: 1 if run.task == "lines" else None]:
            scores.update(self.bleu(run, checkpoint, window))
        return {**scores, **recall(checkpoint, run.data.parent, run.task == "lines", self.gpu)}

    def bleu(self, run: Run, checkpoint: Path, window: int) -> Dict[str, float]:
        """BLEU of lines and of documents, translated in windows of so many tokens."""
        text, name = run.data.parent / "documents", f"windows of {window:,}" if window else "lines"
        data, prefix = text / ("bin" if window else "lines"), run.folder / f"test-{window}"
        command = [*fairseq("generate"), str(data), *WITH_PLUGIN, "--path", str(checkpoint), "--beam=5"]
        command += ["--task=mega_document_translation", "--max-tokens=4096", "--required-batch-size-multiple=1"]
        command += [f"--valid-window-tokens={window}"] * bool(window) + (["--fp16"] if self.gpu else ["--cpu"])
        output(command, prefix.with_suffix(".out"))
        split = [sys.executable, "-m", "mega_fairseq.cli", "documents", "split", str(prefix.with_suffix(".out"))]
        output([*split, str(data / "test.docs"), "--out", str(prefix)], prefix.with_suffix(".log"))
        model = sentencepiece.SentencePieceProcessor(model_file=str(text / "codes"))
        hypotheses = [model.decode(line.split()) for line in read_lines(f"{prefix}.pieces")]
        references = [model.decode(line.split()) for line in read_lines(text / "test.de")]
        borders = document_borders(read_lines(text / "test.docs"), text / "test.docs")
        result = measure(hypotheses, references, references, borders, {})
        return {f"{kind}-BLEU, {name}": result[f"{kind}-BLEU"] for kind in ("s", "d")}

    def markdown(self, results: Dict[str, Dict]) -> str:
        """BLEU of lines and of documents by windows, and the share of right answers by distance."""
        tables = []
        for kinds in (["s-BLEU", "d-BLEU"], ["source"], ["target"]):
            names = [name for result in results.values() for name in result["scores"] if name.startswith(kinds[0])]
            columns = list(dict.fromkeys(name.split(", ")[1] for name in names))
            rows = [[" / ".join(kinds), *columns], ["---"] * (1 + len(columns))]
            for run, result in results.items():
                cells = [[result["scores"].get(f"{kind}, {column}") for kind in kinds] for column in columns]
                rows.append([run, *(" / ".join("" if c is None else f"{c:.2f}" for c in cell) for cell in cells)])
            tables.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
        return "\n\n".join(tables)


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
def recall(checkpoint: Path, data: Path, alone: bool, gpu: bool) -> Dict[str, float]:
    """Percentage of examples, by form and distance, in which the right answer is the likeliest of all answers, given
    the reference before it; with `alone`, the model sees only the last line.
    """
    overrides = {"data": str(data / "documents/bin")}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], arg_overrides=overrides)
    model = (model.cuda() if gpu else model).eval()
    dictionary = task.target_dictionary
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "documents/codes"))
    documents = [decoded(pieces, document) for document in of_documents(data / "bible/sentencepiece", "test")]

    def numbers(text: str) -> Tensor:
        return dictionary.encode_line(text, add_if_not_exist=False).long()

    scores = {}
    longest = max(map(len, documents))
    for form in FORMS:
        for distance in (d for d in DISTANCES if d < longest):
            samples, choices = [], []
            for lines, wrong in examples(form, distance, documents):
                lines = encoded(pieces, lines[-1:] if alone else lines)
                source, target = (numbers(f" {SEPARATOR} ".join(side)) for side in zip(*lines))
                answers = [
                    numbers(line).tolist() for _, line in [lines[-1], *encoded(pieces, [("", w) for w in wrong])]
                ]
                place = len(commonprefix(answers))  # where the answers differ
                samples.append({"id": len(samples), "source": source, "target": target})
                choices.append((len(target) - len(answers[0]) + place, [answer[place] for answer in answers]))
            right = 0
            for start in range(0, EXAMPLES, BATCH):
                batch = collate(samples[start : start + BATCH], dictionary.pad(), dictionary.eos())
                batch = utils.move_to_cuda(batch) if gpu else batch
                encoder_out = model.encoder(batch["net_input"]["src_tokens"], batch["net_input"]["src_lengths"])
                x = model.decoder(batch["net_input"]["prev_output_tokens"], encoder_out, features_only=True)[0]
                for row, number in enumerate(batch["id"].tolist()):
                    place, answers = choices[number]
                    right += int(model.decoder.output_layer(x[row, place])[answers].argmax() == 0)
            scores[f"{form}, {distance}"] = 100 * right / EXAMPLES
    return scores


if __name__ == "__main__":
    Documents().main(__doc__)
