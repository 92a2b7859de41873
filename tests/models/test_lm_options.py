"""Presets and options of the language model: parameters, released options, and errors."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.models import MODEL_REGISTRY, build_model

from mega_fairseq.models import MegaLanguageModel, MegaLMConfig
from mega_fairseq.models.lm_presets import PRESETS
from tests.helpers.commands import as_words
from tests.helpers.configurations import parsed, plain, released_options, under_hydra
from tests.helpers.golden_models import dictionary, task
from tests.helpers.small_models import ADAPTIVE, TIED
from tests.helpers.small_models import language_model as model

WORDS, BYTES, BPE, PIECES, CHARACTERS = 267_744, 208, 33_000, 32_000, 5_744
CANCELLING = 8 * 128  # the experiment counts a table alpha, which cancels in normalised forms
PARAMETERS = {  # size of the vocabulary, and parameters with it
    "mega_lm": (BPE, 53_330_682),
    "mega_lm_wt103": (WORDS, 252_237_824),  # 252M in the paper
    "mega_lm_enwik8": (BYTES, 39_137_792),  # 39M in the paper
    "mega_lm_base": (WORDS, 149_591_552),
    "mega_lm_big": (BPE, 240_635_904),
    "mega_lm_small": (BYTES, 888_064),
    # Other token mixers; the small ones have as many parameters as mega_lm_small, within 2%.
    "flash_quad_lm_base": (PIECES, 112_015_872),  # 110M in the paper
    "flash_quad_lm_small": (BYTES, 888_576),
    "flash_lm_base": (PIECES, 112_028_160),  # 110M in the paper
    "flash_lm_small": (BYTES, 890_624),
    "attention_lm_base": (PIECES, 109_632_000),
    "attention_lm_small": (BYTES, 885_760),
    "time_weighted_lm_base": (PIECES, 109_785_600),
    "time_weighted_lm_small": (BYTES, 894_976),
    "time_weighted_lm_seed": (CHARACTERS, 9_301_696 - CANCELLING),  # 9.3M
    "gmlp_lm_base": (PIECES, 109_853_184),
    "gmlp_lm_small": (BYTES, 889_824),
    "gmlp_lm_seed": (CHARACTERS, 9_826_432),  # 9.8M
    "aft_lm_enwik8": (BYTES, 19_014_144),
    "aft_lm_enwik8_wide": (BYTES, 37_939_200),
    "aft_lm_small": (BYTES, 886_272),
    "aft_lm_seed": (CHARACTERS, 9_301_632 - CANCELLING),  # 9.3M
    "sparse_lm_enwik8": (BYTES, 94_679_040),  # 95M in the paper
    "sparse_lm_small": (BYTES, 885_760),
}


def test_the_table_of_parameters_lists_every_preset():
    assert set(PARAMETERS) == {"mega_lm", *PRESETS}
    for name in PRESETS:
        if name.endswith("_small"):
            assert PARAMETERS[name] == (BYTES, pytest.approx(PARAMETERS["mega_lm_small"][1], rel=0.02))


@pytest.mark.parametrize("preset", PARAMETERS)
def test_a_preset_is_the_same_model_on_the_command_line_and_with_hydra_without_warnings(preset, caplog):
    types, count = PARAMETERS[preset]
    command_line, hydra = parsed("--arch", preset), under_hydra("mega_language_modeling", _name=preset)
    assert plain(command_line) == plain(hydra)
    with torch.device("meta"):
        made = build_model(hydra, task(types))
    assert not [record for record in caplog.records if record.name.startswith("mega_fairseq")]
    assert type(made) is MODEL_REGISTRY[preset]
    assert sum(parameter.numel() for parameter in made.parameters()) == count


@pytest.mark.parametrize("preset", PRESETS)
def test_a_flag_that_a_preset_has_already_set_changes_nothing(preset):
    flags = as_words({name: value for name, value in vars(PRESETS[preset]()).items() if value is True})
    assert flags
    assert plain(parsed("--arch", preset, *flags)) == plain(parsed("--arch", preset))


# ------------------------------------------------------------------------------------------------ released options


def test_fairseq_train_accepts_every_option_of_the_released_language_models():
    # The released model writes these diagnostics during training; here, `mega-fairseq inspect` does.
    wanted = released_options("released_options_mega_lm.json", "report_ema_alpha", "write_out_alpha")
    cfg = parsed("--arch=mega_lm", *as_words(wanted))
    assert {name: cfg[name] for name in wanted} == wanted


# ------------------------------------------------------------------------------------------------ refusals

BANDS = {"adaptive_input": True, "adaptive_input_cutoff": "10,20"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decoder_z_dim": 7}, "--decoder-z-dim is 7; make --decoder-z-dim even"),
        # cutoffs and factors
        *(
            ({"adaptive_softmax_cutoff": text}, f"--adaptive-softmax-cutoff is {text!r}; give increasing numbers")
            for text in ("x", "", "10,", "9,5", "5,5", "0,5", "-3", "40", "10,50", "2.5")
        ),
        *(
            ({"adaptive_input": True, "adaptive_input_cutoff": text}, f"--adaptive-input-cutoff is {text!r}; give")
            for text in ("x", "9,5", "40")
        ),
        ({"adaptive_input": True, "adaptive_softmax_cutoff": "50"}, "--adaptive-softmax-cutoff is '50'"),
        ({**BANDS, "adaptive_input_cutoff": "3"}, "--adaptive-input-cutoff starts with 3, "),
        ({**ADAPTIVE, "adaptive_softmax_factor": 9.0}, "--adaptive-softmax-factor is 9.0"),
        ({**BANDS, "adaptive_input_factor": 9.0}, "--adaptive-input-factor is 9.0"),
        # conflicts
        ({"adaptive_input": True}, "--adaptive-input has no bands; give --adaptive-input-cutoff"),
        ({**BANDS, "decoder_embed_path": "x"}, "--decoder-embed-path fills one table"),
        ({"tie_adaptive_weights": True}, "--tie-adaptive-weights and --tie-adaptive-proj share"),
        ({"tie_adaptive_proj": True, **ADAPTIVE}, "--tie-adaptive-weights and --tie-adaptive-proj share"),
        ({"tie_adaptive_proj": True, **ADAPTIVE, **BANDS}, "add --tie-adaptive-weights"),
        ({**TIED, "adaptive_input_factor": 4.0}, "make --adaptive-input-cutoff, --adaptive-input-factor and"),
        ({**TIED, "adaptive_input_cutoff": "5,20"}, "make --adaptive-input-cutoff, --adaptive-input-factor and"),
        ({**TIED, "decoder_input_dim": 8}, "--decoder-input-dim equal to"),
        *(
            ({"share_decoder_input_output_embed": True, **other}, "--share-decoder-input-output-embed ties one table")
            for other in (ADAPTIVE, BANDS, {"decoder_input_dim": 8})
        ),
    ],
    ids=str,
)
def test_options_in_conflict_are_refused_by_their_names(given, said):
    with pytest.raises(ValueError, match=".") as caught:
        model(**given)
    assert said.replace("_", "-") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "without"),
    [
        ({"adaptive_softmax_dropout": 0.3}, "--adaptive-softmax-cutoff"),
        ({"adaptive_softmax_factor": 2.0}, "--adaptive-softmax-cutoff"),
        ({"adaptive_input_cutoff": "10"}, "--adaptive-input"),
        ({"adaptive_input_factor": 2.0}, "--adaptive-input"),
        ({"no_affine_final_norm": True}, "--normalize-before"),
    ],
    ids=str,
)
def test_an_option_without_effect_gives_a_warning(given, without, caplog):
    model(**{"normalize_before": False, **given})
    ((name, _),) = given.items()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].startswith(f"--{name.replace('_', '-')} has no effect without {without}")


def test_a_second_dictionary_is_refused():
    words = SimpleNamespace(source_dictionary=dictionary(40), target_dictionary=dictionary(30))
    with pytest.raises(ValueError, match="--output-dictionary-size is not for Mega models"):
        MegaLanguageModel.build_model(MegaLMConfig(), words)
