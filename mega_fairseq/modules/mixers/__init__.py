"""The token mixers by name, one file each. Options, property tests and `inspect` use this table."""

from typing import Dict, Type

from mega_fairseq.modules.mixer import MixerConfig
from mega_fairseq.modules.mixers.mega import GatedAttentionConfig

MIXERS: Dict[str, Type[MixerConfig]] = {"mega": GatedAttentionConfig}
