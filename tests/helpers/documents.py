"""Reads the code blocks of README, docs and examples."""

import re
from pathlib import Path
from typing import List

from tests.helpers.commands import ROOT

DOCUMENTS = sorted(
    path for places in ("*.md", "docs/*.md", "examples/**/*.md", "tests/**/*.md") for path in ROOT.glob(places)
)


def blocks(document: Path, language: str) -> List[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
