"""The running memory of a language model's layers, by the number of tokens read: does it stay bounded?"""

from functools import partial
from typing import Any, Dict, List, Optional

from torch import Tensor, nn

from mega_fairseq.cli import UserError
from mega_fairseq.cli.split import Split
from mega_fairseq.models import MegaLanguageModel
from mega_fairseq.modules import Mixer, MixerState
from mega_fairseq.modules.description import RunningMemory
from mega_fairseq.modules.mixer_state import Shifted

PIECES = 64  # of a text that are read, a chunk each
PIECE = 256  # tokens, for mixers without chunks


def memory(model: nn.Module, text: Optional[Split]) -> Dict[str, Any]:
    """A row for each layer of a language model with a memory, and its norms after numbers of `tokens` of the text."""
    layers = [
        (f"decoder layer {i}", layer.mixer, found)
        for i, layer in enumerate(model.decoder.layers if isinstance(model, MegaLanguageModel) else ())
        for found in layer.mixer.describe(most=1)
        if isinstance(found, RunningMemory)
    ]
    rows = [{"name": name, "kind": found.name, "norms": []} for name, _, found in layers]
    if text is None:
        return {"text": None, "tokens": [], "rows": rows}
    if not rows:
        raise UserError("is not a language model with a running memory, which --data is for; leave out --data")
    text.check_types(model)

    def keep(norms: List[float], found: RunningMemory, mixer: Mixer, inputs: Any, output: Any) -> None:
        norms.append(_norm(found, output[1]))

    for row, (_, mixer, found) in zip(rows, layers):
        mixer.register_forward_hook(partial(keep, row["norms"], found))
    chunks = [mixer.config.chunk_size for _, mixer, _ in layers if mixer.config.chunk_size is not None]
    piece, total = max(chunks, default=PIECE), len(text.corpus)
    ends = list(range(piece, total + 1, piece))[:PIECES] or [total]
    stream = text.streams(f"size:{ends[-1]}")
    decoder = model.float().eval().decoder
    decoder.cfg.piece_tokens = piece
    decoder.extract_features(stream.collater([stream[0]])["net_input"]["src_tokens"])
    return {"text": text.origin, "tokens": ends, "rows": rows}


def _norm(found: RunningMemory, state: MixerState) -> float:
    """The Frobenius norm of the memory in the state of one stream."""
    memory: Tensor = found.read(state.mixer if isinstance(state, Shifted) else state)
    return float(f"{memory.norm().item():.6g}")
