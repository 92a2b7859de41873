"""Sparse attention as a mixer: options that are refused, initialisation."""

import pytest

from mega_fairseq.modules.mixers.sparse import SparseConfig

DIM = 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "heads is 3 and does not divide dim, 64; give a divisor"),
        ({"rotary_dims": 3}, "rotary_dims is 3 and RoPE .* give an even number from 0 to 8"),
        ({"rotary_dims": 10}, "rotary_dims is 10 and RoPE .* give an even number from 0 to 8"),
        ({"stride": 4, "summary": 5}, "summary is 5 and stride 4; the summaries of a block cannot be longer than it"),
        ({"stride": 4, "summary": 1, "subblocks": 5}, "summary is 1 times 5 subblocks and stride 4; the summaries"),
        ({"pattern": "strided", "subblocks": 2}, "subblocks is 2 and the strided pattern has no summaries; leave it"),
        ({"pattern": "dense"}, "pattern is 'dense'; choose one of strided, fixed"),
        ({"combine": "both"}, "combine is 'both'; choose one of interleaved, merged, heads"),
        ({"stride": 0}, "stride is 0"),
    ],
)
def test_impossible_options_are_refused_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        SparseConfig(DIM, **options)


def test_errors_name_the_options_of_the_command_line():
    with pytest.raises(ValueError, match="--decoder-sparse-summary is 40 and --decoder-sparse-stride 32; the summ"):
        SparseConfig(DIM, stride=32, summary=40, side="decoder")


def test_released_init_is_that_of_all_mixers_and_scaled_init_that_of_the_sparse_transformer():
    for init, std, output_std in (("released", 0.02, 0.02), ("scaled", 0.125 / 16, 0.125 / 16 / 12**0.5)):
        made = SparseConfig(256, init=init, layers=6).build()
        for layer in (made.query, made.key, made.value):
            assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
            assert not layer.bias.any()
        assert made.output.weight.std().item() == pytest.approx(output_std, rel=0.05)
        assert not made.output.bias.any()
