"""The token mixers by name, one file each, and small examples of them; options, tests and `inspect` use both."""

from typing import Dict, Type

from mega_fairseq.modules.mixer import MixerConfig
from mega_fairseq.modules.mixers import aft, flash, gau, gmlp, mega, megalodon, multi_head, sparse
from mega_fairseq.modules.mixers.aft import AFTConfig
from mega_fairseq.modules.mixers.flash import FlashConfig
from mega_fairseq.modules.mixers.gau import GAUConfig
from mega_fairseq.modules.mixers.gmlp import GatedMLPConfig
from mega_fairseq.modules.mixers.mega import GatedAttentionConfig
from mega_fairseq.modules.mixers.megalodon import MegalodonConfig
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
    "megalodon": MegalodonConfig,
}

EXAMPLES: Dict[str, MixerConfig] = {
    name: example
    for module in (mega, gau, flash, multi_head, gmlp, aft, sparse, megalodon)
    for name, example in module.EXAMPLES.items()
}
