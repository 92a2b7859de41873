"""Compares an exported folder with the model that it was made from."""

from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import torch

from mega_fairseq.models import MegaLanguageModel, MegaTransformerModel
from mega_fairseq.tasks.mega_document_translation import MegaDocumentTranslationTask
from mega_fairseq.tasks.mega_translation import MegaTranslationTask
from mega_fairseq.tasks.prediction import Classifier

MOST = {"float32": 1e-4, "int8": 0.25}  # root mean square of differences between log-probabilities
LEAST = 1e-4  # smaller probabilities of classes do not matter
LENGTHS = (1, 5, 12, 33)  # of random sources and texts


def check_translation(folder: Path, model: MegaTransformerModel, task: MegaTranslationTask) -> Dict[str, Any]:
    """Differences of log-probabilities and of hypotheses."""
    from mega_runtime import Translator  # here, since only this needs it

    lengths = {} if isinstance(task, MegaDocumentTranslationTask) else {"max_len_a": 1.0, "max_len_b": 10}
    translator = Translator(folder, pieces=True, **lengths)
    model.make_generation_fast_(need_attn=False)
    options = Namespace(beam=translator.options.beam, **lengths)
    generator, found, expected, same = task.build_generator([model], options), [], [], 0
    for length in shortened(translator.config["limits"]["source"]):
        source = random_source(task, length)
        inputs = {"src_tokens": torch.tensor([source]), "src_lengths": torch.tensor([len(source)])}
        with torch.no_grad():
            best = task.inference_step(generator, [model], {"net_input": inputs})[0][0]["tokens"]
            before = torch.cat([best[-1:], best[:-1]])
            log_probs = model.get_normalized_probs(model(**inputs, prev_output_tokens=before[None]), log_probs=True)[0]
        expected.append(log_probs.gather(1, best[:, None])[:, 0].numpy())
        found.append(translator.score_tokens(source, best.tolist()))
        same += translator.search([source])[0][0].tokens == best.tolist()
    return {**differences(found, expected, translator.config), "same hypotheses": f"{same} of {len(LENGTHS)}"}


def shortened(longest: int) -> List[int]:
    """LENGTHS with eos, for models that read at most `longest` tokens."""
    return [min(length, longest - 1) for length in LENGTHS]


def random_source(task: MegaTranslationTask, length: int) -> List[int]:
    """Random tokens with eos; for models of documents, in lines of four."""
    dictionary = task.source_dictionary
    first, last = dictionary.nspecial, len(dictionary) - 1
    documents = isinstance(task, MegaDocumentTranslationTask)
    random = np.random.default_rng(length)
    tokens = random.integers(first, task.separators[0] if documents else last + 1, length).tolist()
    if documents:
        tokens = [task.separators[0] if n % 5 == 4 and n < length - 1 else token for n, token in enumerate(tokens)]
    return [*tokens, dictionary.eos()]


def check_language_model(folder: Path, model: MegaLanguageModel) -> Dict[str, Any]:
    """Differences of the log-probabilities of random texts, read at once and token by token."""
    from mega_runtime import LanguageModel

    reader, found, expected = LanguageModel(folder, pieces=True), [], []
    dictionary = model.decoder.dictionary
    for length in shortened(reader.config["limits"]["target"]):
        tokens = np.random.default_rng(length).integers(dictionary.nspecial, len(dictionary), length).tolist()
        before = torch.tensor([[dictionary.eos(), *tokens[:-1]]])
        with torch.no_grad():
            log_probs = model(before, target=torch.tensor([tokens]))[0][0, :, 0].numpy()
        expected += [log_probs, log_probs]
        found += [reader.score_tokens(tokens), reader.score_in_steps(tokens)]
    return differences(found, expected, reader.config)


def check_classifier(folder: Path, classifier: Classifier) -> Dict[str, Any]:
    """Differences of the log-probabilities of classes, for random inputs."""
    from mega_runtime import Classifier as Exported

    inputs = [random_input(classifier, number) for number in LENGTHS]
    exported = Exported(folder)
    found, expected = (
        np.log(np.maximum([list(p.probabilities.values()) for p in each.predict(inputs)], LEAST))
        for each in (exported, classifier)
    )
    return differences([found.ravel()], [expected.ravel()], exported.config)


def random_input(classifier: Classifier, length: int) -> Any:
    """An input of this length, or of that of the training."""
    task, random = classifier.task, np.random.default_rng(length)
    length = min(length, task.longest - 2)  # with a first token and eos

    def one() -> Any:
        if task.dictionary is None:
            count = task.length or length
            if task.number_type == "float":
                return random.normal(task.cfg.values_mean, task.cfg.values_deviation, count)
            limits = np.iinfo(task.number_type)
            return random.integers(limits.min, limits.max, count, task.number_type)
        symbols = task.dictionary.symbols[task.dictionary.nspecial :]
        words = random.choice(symbols, length)
        return bytes(map(int, words)) if task.cfg.input_kind == "bytes" else " ".join(words)

    return (one(), one()) if classifier.models[0].pairs else one()


def differences(found: List[np.ndarray], expected: List[np.ndarray], config: Dict[str, Any]) -> Dict[str, Any]:
    """Differences of log-probabilities, if they are small enough."""
    gap = np.concatenate(found) - np.concatenate(expected)
    rms, most = float(np.sqrt(np.mean(gap**2))), MOST[config["number_format"]]
    if not rms <= most:
        int8 = config["number_format"] == "int8"
        raise ValueError(
            f"the exported model differs from the checkpoint by {rms:.2g} in log-probabilities, more than {most:g}; "
            + ("give --format float32" if int8 else "generate with fairseq, and report it")
        )
    return {"rms": rms, "largest": float(np.abs(gap).max())}
