"""The runtime works in a Python that has none of torch, fairseq, onnx and this project, and imports little."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

from tests.helpers.commands import ROOT
from tests.helpers.exported import documents, exported_classifier, language, translation

RUNTIME = ROOT / "runtime"
NEEDED = {"numpy", "onnxruntime", "sentencepiece"}
PROGRAM = """
import importlib.abc, json, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in {refused}:
            raise ModuleNotFoundError(f"{{name}} is not installed here")

sys.meta_path.insert(0, Refuse())
from mega_runtime import Classifier, LanguageModel, Translator
found = [line.text for line in Translator(sys.argv[1]).translate(["w1 w2", ""])]
found += Translator(sys.argv[2]).translate_documents([["w1", "w2"]])[0]
model = LanguageModel(sys.argv[3])
found += [model.continue_text("w1", 5), str(round(model.score("w1 w2").bits, 3))]
found.append(Classifier(sys.argv[4]).predict(["w1"])[0].label)
print(json.dumps([found, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""
REFUSED = ["torch", "fairseq", "mega_fairseq", "onnx", "scipy", "hydra", "omegaconf", "sacrebleu", "tests"]


@pytest.mark.slow
def test_all_models_run_without_torch_fairseq_and_this_project(tmp_path):
    models = [translation()[1], documents()[2], language()[1]]
    folders = [*(model.folder.path for model in models), exported_classifier()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ORT_", "XDG_"))}
    home = tmp_path / "home"
    home.mkdir()
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(refused=REFUSED), *map(str, folders)],
        cwd=tmp_path, env={**environment, "PYTHONPATH": str(RUNTIME), "HOME": str(home)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found, loaded = json.loads(said.stdout)
    assert said.stderr == ""
    assert not list(home.iterdir())  # where ONNX Runtime stores what it reports
    assert not set(REFUSED) & set(loaded)
    assert {"mega_runtime", "numpy", "onnxruntime"} <= set(loaded)
    ours, of_documents, text = models
    expected = [line.text for line in ours.translate(["w1 w2", ""])] + of_documents.translate_documents([["w1", "w2"]])[
        0
    ]
    assert found[:-1] == [*expected, text.continue_text("w1", 5), str(round(text.score("w1 w2").bits, 3))]


@pytest.mark.skipif(sys.version_info < (3, 10), reason="sys.stdlib_module_names came with Python 3.10")
def test_the_source_imports_nothing_else():
    files = sorted((RUNTIME / "mega_runtime").glob("*.py"))
    assert len(files) > 5
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            other = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"mega_runtime"}
            assert other <= NEEDED, path


def test_the_distribution_requires_what_the_source_imports():
    setup = (RUNTIME / "setup.py").read_text()
    required = re.search(r"install_requires=\[(.*?)\]", setup).group(1)
    assert {re.match(r"\w+", name.strip(' "')).group() for name in required.split(",")} == NEEDED
