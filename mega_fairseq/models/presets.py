"""Presets: published sizes as data, each an architecture of fairseq with other defaults than its model's own."""

# ruff: noqa: C408 - names of options without quotes

# ------------------------------------------------------------------------------------------- translation

DROPOUTS = dict(dropout=0.15, attention_dropout=0.1, hidden_dropout=0.1, activation_dropout=0.1)

TRANSLATION = {
    "mega_transformer_base": dict(
        DROPOUTS,
        __doc__="The paper's WMT model (table 4), with the dropouts of its recipe.",
    ),
    "mega_transformer_laplace": dict(
        DROPOUTS,
        __doc__="The paper's WMT model with the Laplace attention function.",
        attention_activation_fn="laplace",
    ),
    "mega_transformer_big": dict(
        DROPOUTS,
        __doc__="Twice the widths of the base model.",
        encoder_embed_dim=1024, encoder_hidden_dim=2048, encoder_z_dim=256, encoder_ffn_embed_dim=2048,
        decoder_embed_dim=1024, decoder_hidden_dim=2048, decoder_z_dim=256, decoder_ffn_embed_dim=2048,
        dropout=0.3,
    ),
    "mega_transformer_small": dict(
        DROPOUTS,
        __doc__="For small corpora, laptops and the demo.",
        encoder_layers=3, encoder_embed_dim=256, encoder_hidden_dim=512, encoder_z_dim=64, encoder_ffn_embed_dim=512,
        decoder_layers=3, decoder_embed_dim=256, decoder_hidden_dim=512, decoder_z_dim=64, decoder_ffn_embed_dim=512,
        init="scaled",
    ),
    "mega_transformer_tiny": dict(
        __doc__="For some 10,000 sentences; the model of docs/results.md.",
        encoder_layers=3, encoder_embed_dim=128, encoder_hidden_dim=256, encoder_z_dim=32, encoder_ffn_embed_dim=256,
        decoder_layers=3, decoder_embed_dim=128, decoder_hidden_dim=256, decoder_z_dim=32, decoder_ffn_embed_dim=256,
        init="scaled", dropout=0.2,
    ),
}  # fmt: skip

# ------------------------------------------------------------------------------------------- language models

# Position bias of any length and context, as in the released models.
STREAMING = dict(rel_pos_bias="rotary", normalize_before=True, no_affine_final_norm=True)
WORDS = dict(
    STREAMING,
    adaptive_input=True, adaptive_softmax_cutoff="20000,60000", adaptive_softmax_dropout=0.2,
    tie_adaptive_weights=True, tie_adaptive_proj=True,
    dropout=0.3, attention_dropout=0.1, hidden_dropout=0.1, activation_dropout=0.1,
)  # fmt: skip
SMALL_CORPUS = dict(dropout=0.0, init="scaled")
# Other token mixers.
PRENORM = dict(normalize_before=True, share_decoder_input_output_embed=True)
GAU = dict(PRENORM, rel_pos_bias="rope", decoder_ffn_embed_dim=0)  # attention and feed-forward in one
TIME_WEIGHTED = dict(
    PRENORM,
    token_mixer="attention", decoder_time_weight="before", decoder_time_beta=True, decoder_time_gamma=True,
    decoder_token_shift=True,
)  # fmt: skip
GMLP = dict(PRENORM, token_mixer="gmlp", decoder_time_alpha=True, decoder_time_beta=True, decoder_token_shift=True)
AFT_LOCAL = dict(PRENORM, token_mixer="aft", decoder_aft_form="local", decoder_aft_reach=32)
MEGALODON = dict(token_mixer="megalodon", normalize_before=True, decoder_two_hop=True)
# One layer with tables over 128 places, a gated feed-forward layer and token shift in both. In MHA+ and AFT, alpha
# would cancel. The experiment counts it all the same: 1,024 parameters more than here.
TIME_EXPERIMENT = dict(
    normalize_before=True, decoder_layers=1, decoder_embed_dim=512, decoder_ffn_embed_dim=1536,
    ffn_activation_fn="geglu", decoder_chunk_size=128, decoder_token_shift=True,
    decoder_time_beta=True, decoder_time_gamma=True,
)  # fmt: skip

LANGUAGE_MODELS = {
    "mega_lm_wt103": dict(
        WORDS,
        __doc__="The paper's WikiText-103 model; v and feed-forward as released (the paper's table says 1536).",
        decoder_layers=16, decoder_embed_dim=1024, decoder_hidden_dim=2048, decoder_ffn_embed_dim=2048,
        decoder_z_dim=256, decoder_chunk_size=1024,
    ),
    "mega_lm_enwik8": dict(
        STREAMING,
        __doc__="The paper's enwik8 model.",
        decoder_layers=12, decoder_embed_dim=512, decoder_hidden_dim=1024, decoder_ffn_embed_dim=1024,
        decoder_z_dim=128, decoder_chunk_size=2048, share_decoder_input_output_embed=True,
    ),
    "mega_lm_base": dict(
        WORDS,
        __doc__="Words, as released for one machine.",
        decoder_layers=16, decoder_embed_dim=768, decoder_hidden_dim=1536, decoder_ffn_embed_dim=1536,
        decoder_z_dim=128, decoder_chunk_size=1024,
    ),
    "mega_lm_big": dict(
        STREAMING,
        __doc__="One softmax over a vocabulary of BPE.",
        decoder_layers=16, decoder_embed_dim=1024, decoder_hidden_dim=2048, decoder_ffn_embed_dim=2048,
        decoder_z_dim=256, decoder_chunk_size=1024, share_decoder_input_output_embed=True,
    ),
    "mega_lm_small": dict(
        STREAMING, **SMALL_CORPUS,
        __doc__="For small corpora, laptops and the demo.",
        decoder_layers=4, decoder_embed_dim=128, decoder_hidden_dim=256, decoder_ffn_embed_dim=256,
        decoder_z_dim=64, decoder_chunk_size=256, share_decoder_input_output_embed=True,
    ),
    "flash_quad_lm_base": dict(
        GAU,
        __doc__="FLASH-Quad of 110M parameters (Hua et al. 2022): 24 gated attention units with full attention.",
        token_mixer="gau", decoder_layers=24, decoder_embed_dim=768, decoder_hidden_dim=1536, decoder_z_dim=128,
    ),
    "flash_quad_lm_small": dict(
        GAU, **SMALL_CORPUS,
        __doc__="FLASH-Quad in chunks, for small corpora.",
        token_mixer="gau", decoder_layers=8, decoder_embed_dim=128, decoder_hidden_dim=256, decoder_z_dim=64,
        decoder_chunk_size=256,
    ),
    "flash_lm_base": dict(
        GAU,
        __doc__="FLASH of 110M parameters (Hua et al. 2022).",
        token_mixer="flash", decoder_layers=24, decoder_embed_dim=768, decoder_hidden_dim=1536, decoder_z_dim=128,
        decoder_chunk_size=256,
    ),
    "flash_lm_small": dict(
        GAU, **SMALL_CORPUS,
        __doc__="FLASH for small corpora.",
        token_mixer="flash", decoder_layers=8, decoder_embed_dim=128, decoder_hidden_dim=256, decoder_z_dim=64,
        decoder_chunk_size=256,
    ),
    "attention_lm_base": dict(
        PRENORM,
        __doc__="Multi-head attention with RoPE, of the size of GPT-2's smallest model.",
        token_mixer="attention", decoder_layers=12, decoder_embed_dim=768, decoder_ffn_embed_dim=3072,
        decoder_attention_heads=12, decoder_rotary_dims=64,
    ),
    "attention_lm_small": dict(
        PRENORM, **SMALL_CORPUS,
        __doc__="Multi-head attention with RoPE in chunks, for small corpora.",
        token_mixer="attention", decoder_layers=4, decoder_embed_dim=128, decoder_ffn_embed_dim=576,
        decoder_attention_heads=4, decoder_rotary_dims=32, decoder_chunk_size=256,
    ),
    "time_weighted_lm_base": dict(
        TIME_WEIGHTED,
        __doc__="Multi-head attention with time weighting, RoPE on half of each head and token shift.",
        decoder_layers=12, decoder_embed_dim=768, decoder_ffn_embed_dim=3072,
        decoder_attention_heads=12, decoder_rotary_dims=32, decoder_chunk_size=512,
    ),
    "time_weighted_lm_small": dict(
        TIME_WEIGHTED, **SMALL_CORPUS,
        __doc__="Attention with time weighting, for small corpora.",
        decoder_layers=4, decoder_embed_dim=128, decoder_ffn_embed_dim=576,
        decoder_attention_heads=4, decoder_rotary_dims=16, decoder_chunk_size=256,
    ),
    "time_weighted_lm_seed": dict(
        TIME_EXPERIMENT,
        __doc__="MHA+ of the time weighting experiment.",
        token_mixer="attention", decoder_time_weight="before", decoder_rotary_dims=32, decoder_talking_heads=True,
    ),
    "gmlp_lm_base": dict(
        GMLP,
        __doc__="gMLP with weights by distance and token shift.",
        decoder_layers=12, decoder_embed_dim=768, decoder_ffn_embed_dim=2304,
        decoder_attention_heads=12, decoder_chunk_size=512,
    ),
    "gmlp_lm_small": dict(
        GMLP, **SMALL_CORPUS,
        __doc__="gMLP for small corpora.",
        decoder_layers=4, decoder_embed_dim=128, decoder_ffn_embed_dim=440,
        decoder_attention_heads=4, decoder_chunk_size=256,
    ),
    "gmlp_lm_seed": dict(
        TIME_EXPERIMENT, __doc__="gMLP of the time weighting experiment.", token_mixer="gmlp", decoder_time_alpha=True
    ),
    "aft_lm_enwik8": dict(
        AFT_LOCAL,
        __doc__="The deep AFT-local of Zhai et al. (2021) for bytes.",
        decoder_layers=24, decoder_embed_dim=256, decoder_ffn_embed_dim=1024,
    ),
    "aft_lm_enwik8_wide": dict(
        AFT_LOCAL,
        __doc__="The wide AFT-local of Zhai et al. (2021) for bytes.",
        decoder_layers=12, decoder_embed_dim=512, decoder_ffn_embed_dim=2048,
    ),
    "aft_lm_small": dict(
        AFT_LOCAL, **SMALL_CORPUS,
        __doc__="AFT-local for small corpora.",
        decoder_layers=4, decoder_embed_dim=128, decoder_ffn_embed_dim=576, decoder_attention_heads=4,
    ),
    "aft_lm_seed": dict(TIME_EXPERIMENT, __doc__="AFT of the time weighting experiment.", token_mixer="aft"),
    "sparse_lm_enwik8": dict(
        PRENORM,
        __doc__="The Sparse Transformer of Child et al. (2019) for bytes, with RoPE in place of learned positions.",
        token_mixer="sparse", decoder_layers=30, decoder_embed_dim=512, decoder_ffn_embed_dim=2048,
        decoder_rotary_dims=64, decoder_sparse_stride=128, decoder_sparse_summary=32, decoder_chunk_size=12288,
        ffn_activation_fn="gelu_sigmoid", init="scaled",
    ),
    "sparse_lm_small": dict(
        PRENORM, **SMALL_CORPUS,
        __doc__="Sparse attention for small corpora.",
        token_mixer="sparse", decoder_layers=4, decoder_embed_dim=128, decoder_ffn_embed_dim=576,
        decoder_attention_heads=4, decoder_rotary_dims=32, decoder_sparse_stride=64, decoder_chunk_size=1024,
    ),
    "megalodon_lm_enwik8": dict(
        MEGALODON,
        __doc__="Megalodon for bytes, with the widths and parameters of mega_lm_enwik8.",
        decoder_layers=12, decoder_embed_dim=512, decoder_hidden_dim=1024, decoder_ffn_embed_dim=1280,
        decoder_z_dim=128, decoder_chunk_size=2048, share_decoder_input_output_embed=True,
    ),
    "megalodon_lm_200m": dict(
        MEGALODON,
        __doc__="The smallest model of Megalodon's released code, mega200M.",
        decoder_layers=12, decoder_embed_dim=1024, decoder_hidden_dim=2048, decoder_ffn_embed_dim=2560,
        decoder_z_dim=256, decoder_chunk_size=2048,
    ),
    "megalodon_lm_small": dict(
        MEGALODON, **SMALL_CORPUS,
        __doc__="Megalodon for small corpora.",
        decoder_layers=4, decoder_embed_dim=128, decoder_hidden_dim=256, decoder_ffn_embed_dim=320,
        decoder_z_dim=64, decoder_chunk_size=256, share_decoder_input_output_embed=True,
    ),
}  # fmt: skip

# ------------------------------------------------------------------------------------------- classifiers

# The recipes of the Mega paper (table 8) for the Long Range Arena and raw speech. Where the released architectures
# differ from the released commands, these are the commands. Tokens have post-norm, softmax and dropout 0.1, which are
# the defaults; these are for real numbers.
NUMBERS = dict(normalization_type="batchnorm", normalize_before=True, attention_activation_fn="laplace", dropout=0.0)
SPEECH = dict(
    NUMBERS,
    max_positions=16000, truncation_length=1000, encoder_chunk_size=1000, encoder_layers=6,
    encoder_attention_heads=6,  # of other mixers: eight do not divide the width
)  # fmt: skip

CLASSIFIERS = {
    "mega_lra_listops": dict(
        __doc__="ListOps: the value of a nested expression.",
        encoder_layers=6, encoder_embed_dim=80, encoder_hidden_dim=160, encoder_ffn_embed_dim=160, encoder_z_dim=64,
        max_positions=2002, truncation_length=1024,
    ),
    "mega_lra_text": dict(
        __doc__="Text: reviews as bytes.",
        encoder_layers=4, encoder_embed_dim=128, encoder_hidden_dim=256, encoder_ffn_embed_dim=256, encoder_z_dim=64,
        max_positions=4002, truncation_length=1024, normalization_type="scalenorm",
    ),
    "mega_lra_retrieval": dict(
        __doc__="Retrieval: does one paper cite the other.",
        encoder_layers=6, encoder_embed_dim=128, encoder_hidden_dim=256, encoder_ffn_embed_dim=256, encoder_z_dim=64,
        max_positions=4002, truncation_length=1024, normalization_type="scalenorm", pairs=True,
    ),
    "mega_lra_image": dict(
        NUMBERS,
        __doc__="Image: CIFAR-10, grey pixel by pixel.",
        encoder_layers=8, encoder_embed_dim=160, encoder_hidden_dim=320, encoder_ffn_embed_dim=320, encoder_z_dim=96,
        max_positions=1024, truncation_length=1024,
    ),
    "mega_lra_pathfinder": dict(
        NUMBERS,
        __doc__="Pathfinder: are two points of a 32 x 32 picture connected.",
        encoder_layers=6, encoder_embed_dim=128, encoder_hidden_dim=256, encoder_ffn_embed_dim=256, encoder_z_dim=64,
        max_positions=1024, truncation_length=1024,
    ),
    "mega_lra_pathx": dict(
        NUMBERS,
        __doc__="Path-X: Pathfinder with pictures of 128 x 128.",
        encoder_layers=4, encoder_embed_dim=64, encoder_hidden_dim=128, encoder_ffn_embed_dim=128, encoder_z_dim=32,
        max_positions=16384, truncation_length=4096,
    ),
    "mega_sc_raw": dict(
        SPEECH,
        __doc__="Speech Commands, from raw samples.",
        encoder_embed_dim=60, encoder_hidden_dim=120, encoder_ffn_embed_dim=120, encoder_z_dim=30,
    ),
    "mega_sc_raw_big": dict(
        SPEECH,
        __doc__="Speech Commands, larger.",
        encoder_embed_dim=72, encoder_hidden_dim=144, encoder_ffn_embed_dim=144, encoder_z_dim=36,
    ),
    "mega_classifier_small": dict(
        __doc__="For small data sets and laptops.",
        encoder_layers=2, encoder_embed_dim=64, encoder_hidden_dim=128, encoder_ffn_embed_dim=128, encoder_z_dim=32,
        max_positions=1024, truncation_length=1024, encoder_chunk_size=128,
    ),
}  # fmt: skip
# Each recipe also in chunks; those of speech are in chunks already.
CHUNKS = {
    "mega_lra_listops": 128, "mega_lra_text": 128, "mega_lra_retrieval": 128, "mega_lra_image": 128,
    "mega_lra_pathfinder": 128, "mega_lra_pathx": 4096, "mega_sc_raw": 1000, "mega_sc_raw_big": 1000,
}  # fmt: skip
for name, chunk in CHUNKS.items():
    about = CLASSIFIERS[name]["__doc__"].rstrip(".")
    CLASSIFIERS[f"{name}_chunk"] = dict(CLASSIFIERS[name], __doc__=f"{about}, in chunks.", encoder_chunk_size=chunk)

# ------------------------------------------------------------------------------------------- encoders

# Chunks and positions for texts of any length.
LONG_TEXTS = dict(rel_pos_bias="rotary", normalize_before=True, pooling="mean")

ENCODERS = {
    "mega_encoder_base": dict(
        LONG_TEXTS,
        __doc__="Of the size of RoBERTa base.",
        encoder_layers=12, encoder_embed_dim=768, encoder_hidden_dim=1536, encoder_ffn_embed_dim=1408,
        encoder_z_dim=128, encoder_chunk_size=512, attention_dropout=0.1,
    ),
    "mega_encoder_small": dict(
        LONG_TEXTS,
        __doc__="For small corpora and laptops.",
        encoder_layers=4, encoder_embed_dim=128, encoder_hidden_dim=256, encoder_ffn_embed_dim=256, encoder_z_dim=64,
        encoder_chunk_size=256, init="scaled",
    ),
}  # fmt: skip
