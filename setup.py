"""All metadata of the distribution; pyproject.toml holds the tools' settings and no fact twice.

Why here: the licence field of pyproject's [project] table has two spellings. The setuptools that still
run on Python 3.8 know only the older one and newer setuptools are about to refuse it, whereas `setup()`
means the same to both.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "mega_fairseq/__init__.py").read_text(), re.MULTILINE)

# for the segmentations of examples/ that do not come with sentencepiece
EXAMPLES = ["sacremoses", "subword-nmt"]
TEST = [*EXAMPLES, "hypothesis", "packaging", "pytest", "pytest-cov", "pytest-timeout", "pytest-xdist"]

setup(
    name="mega-fairseq",
    version=VERSION.group(1),
    description="Mega (moving average equipped gated attention) as a plugin for stock fairseq",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    author="mega_fairseq contributors",
    python_requires=">=3.8",
    packages=find_packages(include=["mega_fairseq", "mega_fairseq.*"]),
    entry_points={"console_scripts": ["mega-fairseq = mega_fairseq.cli.main:main"]},
    install_requires=[
        # Both provide `import fairseq`: the last official release does not run on Python 3.11 and newer,
        # fairseq-fixed is its main branch with the repairs that this takes.
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
        # fastBPE ships C++ generated for older Pythons and regenerates it only if it finds Cython already
        # installed: the README has the two lines that do this.
        "fastbpe": ["Cython", "fastBPE==0.1.0"],
        "plot": ["matplotlib", "tensorboardX"],
        "test": TEST,
    },
)
