"""Continue texts with fairseq's search, from prefixes of different lengths that do not influence each other."""

from typing import Any, Dict, List

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor


def continue_texts(
    generator: SequenceGenerator,
    models: List[BaseFairseqModel],
    sample: Dict[str, Any],
    prefixes: Tensor,
    dictionary: Dictionary,
) -> List[Any]:
    """Continue the texts of a batch from their prefixes (B, L), in parts whose rows do not influence each other.

    While any row is within its prefix, fairseq's search ignores --min-len for all rows, and with --max-len-a the
    longest source of a batch limits the length of all its texts.
    """
    pad, eos, sources = dictionary.pad(), dictionary.eos(), sample["net_input"]["src_tokens"]
    ends = prefixes == eos
    if (ends[:, :-1] & (prefixes[:, 1:] != pad)).any():
        raise ValueError(
            "a prefix crosses the end of a line, where fairseq's search stops; remove </s> from typed texts, and for "
            "texts of a corpus give --documents line --valid-block documents, or --prefix-size N for the first N "
            "tokens of each"
        )
    prefixes = prefixes.masked_fill(ends, pad)  # the eos of shorter ones would end fairseq's search for that text
    numbers = sample.get("id", torch.arange(len(sources)))  # fairseq-interactive gives none
    given, lengths = prefixes.ne(pad).sum(1), sources.ne(pad).sum(1)
    kinds = lengths if generator.max_len_a else given.clamp(max=generator.min_len)
    found: List[Any] = [None] * len(sources)
    for kind in kinds.unique():
        rows = (kinds == kind).nonzero().squeeze(1)
        length, needed = int(lengths[rows].max()), int(given[rows].max())
        longest = min(int(generator.max_len_a * length + generator.max_len_b), generator.max_len - 1)
        if needed > longest:
            raise ValueError(
                f"a prefix has {needed} tokens, but a text may have only {longest}; "
                "raise --max-len-b, up to what the model allows"
            )
        part = {
            "id": numbers.to(rows.device)[rows],  # a prefix_allowed_tokens_fn gets them
            "net_input": {"src_tokens": sources[rows, :length], "src_lengths": lengths[rows]},
        }
        texts = generator.generate(models, part, prefix_tokens=prefixes[rows, :needed], bos_token=eos)
        for row, text in zip(rows.tolist(), texts):
            found[row] = text
    return found
