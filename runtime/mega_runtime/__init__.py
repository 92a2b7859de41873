"""Runs models that `mega-fairseq export` wrote, with NumPy and ONNX Runtime."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # newer versions of ONNX Runtime report each session to their maker

from mega_runtime.classifier import Classifier, Prediction
from mega_runtime.folder import FolderError
from mega_runtime.language_model import LanguageModel, Score
from mega_runtime.translator import Line, Translation, Translator

__version__ = "0.1.0"
