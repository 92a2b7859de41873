"""Classifies the test images: accuracy, and one image of each class with what the model looks at.

python classifying.py CHECKPOINT DATA OUT.json
"""

import sys
from pathlib import Path
from typing import Any, Dict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import benchmarks.transformer_classifier  # noqa: F401 - importing it registers fairseq's Transformer
from mega_fairseq.cli.classify import Scores, read_examples, saliency
from mega_fairseq.cli.output import write_json
from mega_fairseq.models import MegaClassifier


def main() -> None:
    checkpoint, data, out = map(Path, sys.argv[1:])
    classifier = MegaClassifier.from_pretrained(str(checkpoint.parent), checkpoint.name, str(data))
    examples = read_examples(classifier, "test")
    scores = Scores(classifier.labels, torch.from_numpy(examples.classes), classifier.probabilities(examples, 50))

    def shown(number: int) -> Dict[str, Any]:
        pixels = examples[number]["inputs"][0]
        return {
            "label": scores.labels[scores.truth[number]],
            "predicted": scores.labels[scores.predicted[number]],
            "pixels": pixels.tolist(),
            "saliency": saliency(classifier, pixels).tolist(),
        }

    first = [int((scores.truth == label).nonzero()[0]) for label in scores.truth.unique()]
    write_json(str(out.with_suffix("")), {"accuracy": scores.accuracy, "shown": [shown(number) for number in first]})


if __name__ == "__main__":
    main()
