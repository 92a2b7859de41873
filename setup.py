"""Metadata of the distribution; the settings of the tools are in pyproject.toml.

It is not in pyproject's [project] table because the licence field has two forms there: the newest setuptools for
Python 3.8 only accepts the old one, and current ones deprecate it.
"""

import re
from pathlib import Path

import setuptools

# The public address of this repository, such as https://github.com/OWNER/mega_fairseq. Without it the package page has
# no links to files of the repository: nobody can follow README's relative links there.
REPOSITORY = ""

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "mega_fairseq/__init__.py").read_text(), re.MULTILINE).group(1)
FILES = f"{REPOSITORY}/blob/v{VERSION}"
WITHOUT_PICTURES = re.sub(r"!\[[^]]*\]\([^)]*\)\n", "", (HERE / "README.md").read_text(encoding="utf-8"))
DESCRIPTION = re.sub(
    r"\[([^]]+)\]\((?!https?://)([^)]+)\)", rf"[\1]({FILES}/\2)" if REPOSITORY else r"\1", WITHOUT_PICTURES
)
LINKS = {"Paper": "https://arxiv.org/abs/2209.10655", "fairseq": "https://github.com/facebookresearch/fairseq"}
if REPOSITORY:
    LINKS.update(Source=REPOSITORY, Issues=f"{REPOSITORY}/issues", Changelog=f"{FILES}/CHANGELOG.md")

SPDX = int(setuptools.__version__.partition(".")[0]) >= 77  # has the new form, and deprecates the classifier

# For the recipes' segmentations other than sentencepiece. fastBPE is not here, because pip alone cannot build it on
# Python 3.11 and newer: the Makefile and docs/install.md can.
EXAMPLES = ["sacremoses", "subword-nmt"]
CONVERT = ["safetensors"]  # for folders of Hugging Face's
EXPORT = ["onnx"]  # and mega_runtime, in runtime/
TEST = [*EXAMPLES, "hypothesis", "packaging", "pytest", "pytest-cov", "pytest-timeout", "pytest-xdist", "scikit-learn"]
TEST += [*CONVERT, *EXPORT, "onnxruntime"]

setuptools.setup(
    name="mega-fairseq",
    version=VERSION,
    description="Mega (moving average equipped gated attention) as a plugin for stock fairseq",
    long_description=DESCRIPTION,
    long_description_content_type="text/markdown",
    **{"license_expression" if SPDX else "license": "MIT"},
    author="mega_fairseq contributors",
    url=REPOSITORY or None,
    project_urls=LINKS,
    keywords=["Mega", "fairseq", "gated attention", "moving average", "long sequences", "machine translation"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        *([] if SPDX else ["License :: OSI Approved :: MIT License"]),
        "Operating System :: POSIX :: Linux",
        # The Pythons that were tested; docs/install.md has the versions of the other packages.
        *(f"Programming Language :: Python :: {version}" for version in ("3", "3.8", "3.10", "3.11", "3.12", "3.13")),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.8",
    packages=setuptools.find_packages(include=["mega_fairseq", "mega_fairseq.*"]),
    package_data={"mega_fairseq": ["py.typed"]},
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
        "convert": CONVERT,
        "dev": [*TEST, "pre-commit", "ruff"],
        "examples": EXAMPLES,
        "export": EXPORT,
        "plot": ["matplotlib", "tensorboardX"],
        "test": TEST,
    },
)
