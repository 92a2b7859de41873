"""The token mixers by name, one file each, and small examples of them; options, tests and `inspect` use both."""

from typing import Dict, Type

from mega_fairseq.modules.mixer import MixerConfig
from mega_fairseq.modules.mixers import aft, flash, gau, gmlp, mega, megalodon, multi_head, sparse

MIXERS: Dict[str, Type[MixerConfig]] = {
    "mega": mega.GatedAttentionConfig,
    "gau": gau.GAUConfig,
    "flash": flash.FlashConfig,
    "attention": multi_head.AttentionConfig,
    "gmlp": gmlp.GatedMLPConfig,
    "aft": aft.AFTConfig,
    "sparse": sparse.SparseConfig,
    "megalodon": megalodon.MegalodonConfig,
}

EXAMPLES: Dict[str, MixerConfig] = {
    name: example
    for module in (mega, gau, flash, multi_head, gmlp, aft, sparse, megalodon)
    for name, example in module.EXAMPLES.items()
}
