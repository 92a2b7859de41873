"""Train a two-layer byte-level Mega language model for a few dozen updates, then evaluate it on pieces of the text."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from mega_fairseq.modules import FeedForwardConfig, GatedAttentionConfig, MegaBlock, SequenceNorm

LENGTH = 128  # bytes of a training segment
README = Path(__file__).resolve().parents[2] / "README.md"


class ByteLM(nn.Module):
    def __init__(self, layers=2, dim=64):
        super().__init__()
        attention = GatedAttentionConfig(dim, shared_dim=32, chunk_size=32, position_bias="rotary")
        feed_forward = FeedForwardConfig(dim, hidden_dim=2 * dim)
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(MegaBlock(attention, feed_forward) for _ in range(layers))
        self.norm = SequenceNorm("layernorm", dim)
        self.project = nn.Linear(dim, 256)

    def forward(self, tokens, states=None):
        """(B, L) -> logits (B, L, 256) and one state per layer, to pass on with the next tokens."""
        x, new_states = self.embed(tokens), []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks)):
            x, state = block(x, state)
            new_states.append(state)
        return self.project(self.norm(x)), new_states


def batch_of(text, batch_size, length):
    """Random segments of the text: (B, length + 1). Each byte but the first is a target."""
    starts = torch.randint(len(text) - length, (batch_size,)).tolist()
    return torch.stack([text[start : start + length + 1] for start in starts])


@torch.no_grad()
def loss_in_pieces(model, text, piece):
    """Mean loss over the text, evaluated `piece` bytes at a time."""
    total, states = 0.0, None
    for start in range(0, len(text) - 1, piece):
        part = text[None, start : start + piece + 1]
        logits, states = model(part[:, :-1], states)
        total += F.cross_entropy(logits[0], part[0, 1:], reduction="sum").item()
    return total / (len(text) - 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=README, help="training text (default: the README)")
    parser.add_argument("--updates", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    text = torch.tensor(list(options.text.read_bytes()))
    if len(text) <= LENGTH or options.updates < 1:
        parser.error(
            f"--text has {len(text)} bytes and --updates is {options.updates}; give {LENGTH + 1} and 1, or more"
        )
    model = ByteLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for update in range(1, options.updates + 1):
        tokens = batch_of(text, batch_size=8, length=LENGTH)
        logits, _ = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])  # expects the classes in dim 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"\rupdate {update}/{options.updates}, loss {losses[-1]:.3f} nats per byte", end="", flush=True)
    print(f"\nfirst loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
    model.eval()
    whole, pieces = (loss_in_pieces(model, text, piece) for piece in (len(text), 50))
    print(f"the whole text at once: {whole:.5f}, in pieces of 50 bytes with the state carried: {pieces:.5f}")


if __name__ == "__main__":
    main()
