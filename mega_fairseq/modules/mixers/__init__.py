"""The token mixers by name, one file each. Options, property tests and `inspect` use this table."""

from typing import Dict, Type

from mega_fairseq.modules.mixer import MixerConfig
from mega_fairseq.modules.mixers.aft import AFTConfig
from mega_fairseq.modules.mixers.flash import FlashConfig
from mega_fairseq.modules.mixers.gau import GAUConfig
from mega_fairseq.modules.mixers.gmlp import GatedMLPConfig
from mega_fairseq.modules.mixers.mega import GatedAttentionConfig
from mega_fairseq.modules.mixers.multi_head import AttentionConfig
from mega_fairseq.modules.mixers.sparse import SparseConfig

MIXERS: Dict[str, Type[MixerConfig]] = {
    "mega": GatedAttentionConfig,
    "gau": GAUConfig,
    "flash": FlashConfig,
    "attention": AttentionConfig,
    "gmlp": GatedMLPConfig,
    "aft": AFTConfig,
    "sparse": SparseConfig,
}
