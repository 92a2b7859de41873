"""Models; importing this package registers them with fairseq, and the tasks, which checkpoints name."""

import mega_fairseq.models.architectures
import mega_fairseq.tasks
from mega_fairseq.models.checkpoints import allow_plain_containers
from mega_fairseq.models.mega_classifier import MegaClassifier, MegaClassifierConfig
from mega_fairseq.models.mega_encoder import MegaEncoderConfig, MegaEncoderModel
from mega_fairseq.models.mega_lm import MegaLanguageModel, MegaLMConfig
from mega_fairseq.models.mega_transformer import MegaTransformerConfig, MegaTransformerModel

# fairseq calls torch.load itself, and with a stock task no other code of the plugin runs before that.
allow_plain_containers()
