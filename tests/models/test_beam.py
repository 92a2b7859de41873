"""Decoding after any reordering of beams equals decoding from the start; prepared weights are never stale."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.acceleration import steps
from mega_fairseq.models.decoder import STATE
from mega_fairseq.models.passes import STEPS
from mega_fairseq.modules import BlockState, CrossAttentionState, GatedAttentionState
from mega_fairseq.modules.decoder_state import DecoderState
from mega_fairseq.ops.attention.chunks import KeyValues
from tests.helpers import small_models
from tests.helpers.golden_models import PAD
from tests.helpers.small_models import BEAMS, IN_LINES, SENTENCES, TYPES, language_model, orders_of_beams, sources
from tests.helpers.small_models import translation_model as model


class Search(small_models.Search):
    def step(self):
        logits, encoder = self.decode(), self.model.encoder
        fresh, _ = self.model.decoder(self.tokens, encoder_out=encoder(sources()[self.sentence]))
        torch.testing.assert_close(logits[:, -1], fresh[:, -1], atol=2e-5, rtol=1e-4)


MODELS = {
    "full": {},
    "chunks": {"decoder_chunk_size": 3, "rel_pos_bias": "rotary", "normalize_before": True},
    "lines": {**IN_LINES, "decoder_chunk_size": 3},
    "laplace": {"attention_activation_fn": "laplace", "truncation_length": 4},
    "megalodon": {"decoder_token_mixer": "megalodon", "decoder_chunk_size": 3, "normalize_before": True},
    "retained dropout": {"dropout": 0.0},  # the code for dropout, which drops nothing
}


@lru_cache(maxsize=None)
def shared(name):
    made = model(**MODELS[name])
    if name == "retained dropout":
        made.make_generation_fast_(retain_dropout=True)
    return made


@pytest.mark.parametrize("name", MODELS)
@given(orders=orders_of_beams(), seed=st.integers(0, 99))
@torch.no_grad()
def test_decoding_with_reordered_beams_and_finished_sentences_equals_decoding_from_the_start(name, orders, seed):
    search = Search(shared(name), seed)
    search.step()
    for order in orders:
        search.follow(order)
        search.step()


@given(data=st.data())
@torch.no_grad()
def test_decoding_after_any_reordering_of_rows_equals_decoding_from_the_start(data):
    """Rows that are separated from the other rows of their sentence get their own copy of the source."""
    search, rows = Search(shared("full"), 0), SENTENCES * BEAMS
    search.step()
    for _ in range(3):
        order = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows))
        search.follow(order)
        search.step()
        rows = len(order)


@torch.no_grad()
def test_beams_of_a_sentence_share_one_projection_of_the_source():
    search = Search(shared("full"), 0)
    search.step()
    first = source_keys(search)
    assert first.size(0) == SENTENCES
    search.follow([1, 0, 2, 5, 5, 3, 8, 7, 6])
    assert source_keys(search) is first  # not copied
    search.follow([0, 0, 1, 7, 6, 8])  # the second sentence is finished
    assert source_keys(search).size(0) == SENTENCES - 1
    search.follow([0, 3, 1, 4])  # beams of a sentence are separated
    assert source_keys(search).size(0) == 4


def source_keys(search):
    return search.kept().blocks[0].cross.keys


@torch.no_grad()
def test_reordering_copies_only_tokens_that_the_beams_do_not_share(monkeypatch):
    search, copied = Search(shared("full"), 0), []
    moved = KeyValues.follow

    def follow(cache, order, last):
        copied.append(cache.keys.size(1) - last)
        return moved(cache, order, last)

    monkeypatch.setattr(KeyValues, "follow", follow)
    search.step()
    search.follow([0, 0, 0, 3, 3, 3, 6, 6, 6])  # all beams of a sentence come from one
    for _ in range(5):
        search.step()
        search.follow(list(range(9)))  # no reordering, no copies
    assert set(copied) == {0}
    copied.clear()
    search.follow([1, 0, 2, 3, 4, 5, 6, 7, 8])
    assert set(copied) == {1}  # the shared token is not copied
    search.step()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_checks_detect_a_search_that_does_not_reorder(name):
    search = Search(shared(name), 0)
    search.step()
    search.follow([0, 1, 2, 3, 4, 5, 6, 7, 8])
    search.step()
    search.model.decoder.reorder_incremental_state_scripting = lambda state, order: None
    try:
        search.follow([2, 1, 0, 3, 4, 5, 6, 7, 8])
        with pytest.raises(AssertionError):
            search.step()
    finally:
        del search.model.decoder.reorder_incremental_state_scripting


@torch.no_grad()
def test_the_table_of_shared_tokens_grows_linearly_with_sentences():
    state = DecoderState((), 3)
    rows = 4000
    mixer = GatedAttentionState(torch.zeros(rows, 1, 1), KeyValues(torch.zeros(rows, 3, 1), torch.zeros(rows, 3, 1)))
    cross = CrossAttentionState(torch.zeros(rows // 4, 1, 1), torch.zeros(rows // 4, 1, 1), None, 3)
    state = state._replace(blocks=(BlockState(mixer, cross),))
    order = torch.arange(rows).view(-1, 4).flip(1).flatten()
    assert state.reorder(order).shared.numel() == 4 * rows


@pytest.mark.parametrize("pad_left", [True, False])
@torch.no_grad()
def test_pads_in_a_prefix_have_no_effect_at_once_or_token_by_token(pad_left):
    made, state = shared("full"), {}
    tokens = torch.randint(4, TYPES, (SENTENCES, 6), generator=torch.Generator().manual_seed(5))
    tokens[0, slice(0, 2) if pad_left else slice(4, 6)] = PAD
    out = made.encoder(sources(pad_left))
    whole, _ = made.decoder(tokens, out)
    alone, _ = made.decoder(tokens[:1][tokens[:1] != PAD][None], made.encoder(sources()[:1]))
    torch.testing.assert_close(whole[0][tokens[0] != PAD], alone[0], atol=2e-5, rtol=1e-4)
    for step in range(1, 7):
        logits, _ = made.decoder(tokens[:, :step], out, state)
        real = tokens[:, step - 1] != PAD
        torch.testing.assert_close(logits[real, -1], whole[real, step - 1], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_search_can_be_differentiated():
    made, state = shared("full"), {}
    tokens, out = torch.full((SENTENCES, 4), 5), shared("full").encoder(sources())
    for step in (1, 2, 3):
        made.decoder(tokens[:, :step], out, state)
    with torch.enable_grad():
        logits, _ = made.decoder(tokens, out, state)
        logits.sum().backward()
    assert made.decoder.layers[0].mixer.values.weight.grad is not None
    made.zero_grad()


@torch.no_grad()
def test_with_retained_dropout_the_whole_state_of_a_row_is_reordered():
    """Rows with the same tokens have different states, because of dropout."""
    search = Search(model(dropout=0.5), 0)
    search.model.make_generation_fast_(retain_dropout=True)
    search.follow([0] * 9)
    for order in ([1, 0, 2, 3, 3, 4, 8, 7, 6], [0, 2, 1, 3, 5, 4, 7, 7, 8]):
        search.decode()
        before = [cache.keys.clone() for cache in caches(search)]
        search.follow(order)
        for cache, keys in zip(caches(search), before):
            assert not torch.equal(keys[0], keys[1])
            torch.testing.assert_close(cache.keys, keys[order], rtol=0, atol=0)


def caches(search):
    state = search.kept()
    return [block.mixer.cache for block in state.blocks]


@torch.no_grad()
def test_attention_of_whole_targets_is_in_the_order_of_the_given_source():
    made, tokens, source = model(dropout=0.0), torch.full((SENTENCES, 3), 5), sources()
    shifted = torch.stack([source[0], source[1].roll(-3), source[2]])  # the second sentence is padded on the right
    assert made(source, None, tokens)[1]["attn"] == [None]  # in validation, where nothing reads it
    made.decoder.make_generation_fast_()
    left, right = (made(each, None, tokens)[1]["attn"][0] for each in (source, shifted))
    torch.testing.assert_close(left.sum(-1), torch.ones(SENTENCES, 3))
    assert not left[1, :, :3].any()
    torch.testing.assert_close(left[1, :, 3:], right[1, :, :4], atol=2e-5, rtol=1e-4)
    made = model(dropout=0.0).train()
    made.decoder.need_attn = True  # with --load-alignments
    torch.testing.assert_close(made(source, None, tokens)[1]["attn"][0], left, atol=2e-5, rtol=1e-4)


# ------------------------------------------------------------------------------------------------ prepared weights


def scores_of_steps(made):
    """The scores of random words, one word at a time."""
    search = Search(made, 0)
    scores = [search.decode()]
    for _ in range(3):
        search.follow(range(SENTENCES * BEAMS))
        scores.append(search.decode())
    return torch.cat(scores, 1)


@torch.no_grad()
def test_weights_are_prepared_once_after_training_and_again_if_they_change():
    made, other, prepared = model(), model(dropout=0.2), []
    pack = made.decoder.pack
    made.decoder.pack = lambda: prepared.append(1) or pack()
    for _ in range(2):
        before = scores_of_steps(made)
    assert len(prepared) == 2  # training might continue
    made.make_generation_fast_()
    for _ in range(2):
        torch.testing.assert_close(scores_of_steps(made), before, rtol=0, atol=0)
    assert len(prepared) == 3
    for parameter in other.parameters():
        parameter.mul_(1.1)
    made.load_state_dict(other.state_dict())
    torch.testing.assert_close(scores_of_steps(made), scores_of_steps(other), rtol=0, atol=0)
    assert len(prepared) == 4


class Scaled(torch.nn.Module):
    """A parametrisation with a buffer, which can change while no parameter does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor(1.0))

    def forward(self, weight):
        return weight * self.factor


def change_a_row(decoder):
    decoder.layers[0].feed_forward.contract.weight.data[3] *= 1.01


def change_a_parametrisation(decoder):
    decoder.embed_tokens.parametrizations.weight[0].factor.fill_(1.5)


def replace_a_projection(decoder):
    plain = decoder.layers[0].feed_forward.contract
    decoder.layers[0].feed_forward.contract = torch.nn.Linear(plain.in_features, plain.out_features)


def take_a_smaller_chunk(decoder):
    for layer in decoder.layers:
        layer.mixer = layer.mixer.with_chunk(2)


@torch.no_grad()
@pytest.mark.parametrize("capture", [None, list], ids=["eager sums", "sums in a graph"])
@pytest.mark.parametrize("change", [change_a_row, change_a_parametrisation, replace_a_projection, take_a_smaller_chunk])
def test_packed_weights_are_not_stale_after_any_change(change, capture, monkeypatch):
    monkeypatch.setattr(steps, "capture_on", lambda device: capture)
    made = model(decoder_chunk_size=5)
    torch.nn.utils.parametrize.register_parametrization(made.decoder.embed_tokens, "weight", Scaled())
    made.make_generation_fast_()
    before = scores_of_steps(made)
    change(made.decoder)
    changed = scores_of_steps(made)
    assert not torch.equal(changed, before)
    made.decoder.steps = STEPS
    torch.testing.assert_close(changed, scores_of_steps(made), rtol=0, atol=0)


@torch.no_grad()
def test_a_copy_of_a_model_has_its_own_prepared_weights():
    made = model()
    made.make_generation_fast_()
    before = scores_of_steps(made)
    twin = copy.deepcopy(made.decoder)
    assert made.decoder.steps.made is not None
    assert twin.steps.made is None
    assert pickle.loads(pickle.dumps(made.decoder.steps)).made is None
    torch.testing.assert_close(scores_of_steps(made), before, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("make", [model, language_model])
def test_a_state_that_was_saved_goes_on_as_before(make):
    """Between steps that use prepared weights, which are not saved."""
    made, tokens, state = make().eval(), torch.randint(4, TYPES, (SENTENCES, 6)), {}
    source = (made.encoder(sources()),) if make is model else ()
    for n in range(1, 6):
        made.decoder(tokens[:, :n], *source, incremental_state=state)
    assert made.decoder.get_incremental_state(state, STATE).packed is not None
    loaded = pickle.loads(pickle.dumps(state))
    expected, found = (made.decoder(tokens, *source, incremental_state=s)[0] for s in (state, loaded))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_model_made_in_inference_mode_decodes_too():
    with torch.inference_mode():
        made = model()
        made.make_generation_fast_()
        before = scores_of_steps(made)
    torch.testing.assert_close(before, scores_of_steps(model()))


@torch.no_grad()
def test_threads_that_share_a_model_give_the_scores_of_one_after_the_other():
    made = model()
    made.make_generation_fast_()
    long = torch.randint(4, TYPES, (8, 1, 300), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def scores(source):
        out, state = made.encoder(source), {}
        tokens = torch.arange(2, 22)[None]
        return torch.cat([made.decoder(tokens[:, : i + 1], out, state)[0] for i in range(20)], 1)

    alone = [scores(source) for source in long]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(scores, long))
    for found, expected in zip(together, alone):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"decoder_chunk_size": 4, "encoder_chunk_size": 4}], ids=["full", "chunks"])
@torch.no_grad()
def test_rows_with_a_pad_that_all_continue_one_without_take_the_fast_path_again(options):
    """While fairseq forces a prefix, beams without any probability may contain a pad."""
    search = Search(model(**options), 0)
    search.step()
    search.follow(range(SENTENCES * BEAMS))
    search.tokens[1::BEAMS, -1] = PAD
    search.decode()
    search.follow([row - row % BEAMS for row in range(SENTENCES * BEAMS)])
    for _ in range(4):
        search.step()
        assert search.kept().packed is not None
        search.follow(range(SENTENCES * BEAMS))
