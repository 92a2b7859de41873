"""Metadata of the distribution; the settings of the tools are in pyproject.toml.

It is not in pyproject's [project] table because the licence field has two forms there: the newest setuptools for
Python 3.8 only accepts the old one, and current ones deprecate it. `setup()` works with both.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "mega_fairseq/__init__.py").read_text(), re.MULTILINE)

# For the recipes' segmentations other than sentencepiece. fastBPE is not here, because pip alone cannot build it on
# Python 3.11 and newer: the Makefile and docs/install.md can.
EXAMPLES = ["sacremoses", "subword-nmt"]
TEST = [*EXAMPLES, "hypothesis", "packaging", "pytest", "pytest-cov", "pytest-timeout", "pytest-xdist", "scikit-learn"]

setup(
    name="mega-fairseq",
    version=VERSION.group(1),
    description="Mega (moving average equipped gated attention) as a plugin for stock fairseq",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    author="mega_fairseq contributors",
    python_requires=">=3.8",
    # The Pythons that were tested; docs/install.md has the versions of the other packages.
    classifiers=[f"Programming Language :: Python :: {version}" for version in ("3.8", "3.10", "3.11", "3.12", "3.13")],
    packages=find_packages(include=["mega_fairseq", "mega_fairseq.*"]),
    entry_points={"console_scripts": ["mega-fairseq = mega_fairseq.cli.main:main"]},
    install_requires=[
        # Both provide `import fairseq`: the last official release does not run on Python 3.11 and newer, where
        # fairseq-fixed, its main branch with fixes, does.
        'fairseq==0.12.2; python_version < "3.11"',
        'fairseq-fixed==0.12.3.1; python_version >= "3.11"',
        "numpy",
        "sacrebleu",
        "sentencepiece",
        "torch>=2.4",
    ],
    extras_require={
        "dev": [*TEST, "pre-commit", "ruff"],
        "examples": EXAMPLES,
        "plot": ["matplotlib", "tensorboardX"],
        "test": TEST,
    },
)
