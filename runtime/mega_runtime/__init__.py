"""Runs models that `mega-fairseq export` wrote, with NumPy and ONNX Runtime."""

from mega_runtime.classifier import Classifier, Prediction
from mega_runtime.folder import FolderError
from mega_runtime.language_model import LanguageModel, Score
from mega_runtime.translator import Line, Translation, Translator

__version__ = "0.1.0"
