"""Widens torch's allow-list when fairseq loads the plugin by `--user-dir`, and only then.

For `--user-dir` fairseq imports every file of this folder; nothing else imports this one, so a program that uses models
as a library keeps its allow-list. There is no later moment: fairseq's `load_checkpoint_to_cpu` calls `torch.load`
itself, and with a stock task nothing of the plugin runs between `--user-dir` and that call.
"""

from mega_fairseq.models.checkpoints import allow_plain_containers

allow_plain_containers()
