"""Metadata of the distribution `mega-runtime`, which needs neither PyTorch nor fairseq nor a compiler."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent

setup(
    name="mega-runtime",
    version=re.search(r'^__version__ = "(.+)"', (HERE / "mega_runtime/__init__.py").read_text(), re.MULTILINE).group(1),
    description="Runs exported Mega models with NumPy and ONNX Runtime",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    author="mega_fairseq contributors",
    python_requires=">=3.8",
    packages=["mega_runtime"],
    entry_points={"console_scripts": ["mega-runtime = mega_runtime.command:main"]},
    install_requires=["numpy>=1.20", "onnxruntime>=1.19", "sentencepiece"],
)
