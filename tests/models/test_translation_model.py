"""The translation model: options without a golden case."""

from argparse import Namespace

import pytest
import torch
from omegaconf import OmegaConf

from mega_fairseq.models import MegaTransformerConfig, MegaTransformerModel
from tests.helpers.golden_models import dictionary
from tests.helpers.small_models import IN_LINES, TYPES, sources, targets
from tests.helpers.small_models import translation_model as model

CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@torch.no_grad()
def logits(made):
    return made(sources(), None, targets(11))[0]


@torch.no_grad()
def steps(made, stops):
    """The same logits, from steps that end at these tokens."""
    out, state = made.encoder(sources()), {}
    return torch.cat([made.decoder(targets(11)[:, :stop], out, state)[0] for stop in stops], 1)


OPTIONS = [
    {}, {"rel_pos_bias": "rotary", "encoder_chunk_size": 3, "decoder_chunk_size": 3}, {"rel_pos_bias": "t5"},
    {"encoder_embed_dim": 24}, {"encoder_ffn_embed_dim": 0, "decoder_ffn_embed_dim": 0}, {"no_scale_embedding": True},
    {"normalize_before": True, "normalize_embedding": True, "normalization_type": "rmsnorm"},
    {"share_decoder_input_output_embed": True}, {"share_all_embeddings": True}, IN_LINES,
    {**IN_LINES, "cross_attention_window": 0}, {**IN_LINES, "cross_attention_positions": "token"},
    {"adaptive_softmax_cutoff": "10,20", "adaptive_softmax_factor": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_options_give_the_same_logits_token_by_token_or_in_pieces(options):
    made = model(**options)
    tied = options.keys() & {"share_decoder_input_output_embed", "share_all_embeddings", "adaptive_softmax_cutoff"}
    assert (made.decoder.output_projection is None) == bool(tied)
    assert (made.encoder.embed_tokens is made.decoder.embed_tokens) == ("share_all_embeddings" in options)
    for stops in (range(1, 12), (4, 5, 10, 11)):
        torch.testing.assert_close(steps(made, stops), logits(made), **CLOSE)


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
def test_every_parameter_has_a_gradient(options):
    """pytorch_ddp, fairseq's default on GPUs, fails if a parameter has no gradient."""
    made = model(**options, attention_dropout=0.1).train()
    made(sources(), None, targets())[0].sum().backward()
    assert [name for name, parameter in made.named_parameters() if parameter.grad is None] == []


def test_pre_trained_embeddings_are_read_from_a_file(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("2 16\n" + "\n".join(f"w{i} " + " ".join([str(i + 0.5)] * 16) for i in (0, 7)) + "\n")
    words = dictionary(TYPES)
    made = model(decoder_embed_path=str(path))
    # `model` adds noise to every parameter, so compare the means of rows.
    rows = made.decoder.embed_tokens.weight.detach()
    assert rows[words.index("w7")].mean().item() == pytest.approx(7.5, abs=0.5)
    assert abs(rows[words.index("w8")].mean().item()) < 0.5


def test_sharing_all_embeddings_needs_one_dictionary():
    cfg = MegaTransformerConfig(share_all_embeddings=True, max_source_positions=9, max_target_positions=9)
    with pytest.raises(ValueError, match="--joined-dictionary"):
        MegaTransformerModel.build_model(
            cfg, Namespace(source_dictionary=dictionary(20), target_dictionary=dictionary(21))
        )


def test_args_of_a_model_contain_all_options_of_its_command():
    made = model(dropout=0.3)
    assert made.args.dropout == 0.3
    assert made.args is made.args  # resolved once
    made = model()
    sections = {"common": {"seed": 7}, "task": {"seed": "${common.seed}"}, "optimizer": None, "model": {"dropout": 0.2}}
    made.cfg = OmegaConf.create(sections).model
    assert made.args == Namespace(seed=7, dropout=0.2)


def test_cross_attention_takes_learned_scores_for_shorter_sequences_and_refuses_longer_ones():
    chunks = {"encoder_chunk_size": 3, "decoder_chunk_size": 3}
    whole, shorter, longer = (
        model(**chunks, max_source_positions=longest, max_target_positions=longest) for longest in (400, 50, 500)
    )
    shorter.load_state_dict(whole.state_dict())
    assert shorter.max_positions() == (50, 50)
    torch.testing.assert_close(logits(shorter), logits(whole), rtol=0, atol=0)
    for refused in (longer, model(max_source_positions=500, max_target_positions=500)):  # chunks would not help
        with pytest.raises(ValueError, match="--max-source-positions is 500 .* 400 tokens"):
            refused.load_state_dict(whole.state_dict())


def test_the_norms_of_all_parts_of_a_layer_may_have_no_weights():
    names = [[name for name, _ in model(no_affine_norm=switch).named_parameters()] for switch in (False, True)]
    assert {*names[0]} - {*names[1]} == {name for name in names[0] if ".norm.norm." in name}
    assert sum(".norm.norm." in name for name in names[0]) == 2 * (2 * 2 + 3 * 2)  # layers, parts, weight and bias


def test_only_the_simple_bias_limits_the_length():
    longest = {"max_source_positions": 50, "max_target_positions": 60}
    simple, chunked = model(**longest), model(**longest, encoder_chunk_size=8, decoder_chunk_size=8)
    assert simple.max_positions() == (50, 60)
    assert chunked.max_positions() == (50, 60)  # cross attention has no chunks
    assert min(model(**longest, rel_pos_bias="rotary").max_positions()) >= 1_000_000
    with pytest.raises(ValueError, match="rotary"):
        simple(torch.full((1, 51), 5), None, torch.full((1, 3), 5))
