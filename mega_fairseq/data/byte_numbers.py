"""Text as the numbers of its bytes, for the models of bytes of examples/lm: `--bpe byte_numbers`."""

from dataclasses import dataclass

from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass


@dataclass
class ByteNumbersConfig(FairseqDataclass):
    """fairseq asks for options, even if there are none."""


@register_bpe("byte_numbers", dataclass=ByteNumbersConfig)
class ByteNumbers:
    def __init__(self, cfg: ByteNumbersConfig):
        pass

    def encode(self, text: str) -> str:
        return " ".join(map(str, text.encode()))

    def decode(self, numbers: str) -> str:
        """Tokens that are not numbers and bytes that are not UTF-8 become replacement characters."""
        return bytes(int(n) if n.isdigit() else 0xFF for n in numbers.split()).decode(errors="replace")
