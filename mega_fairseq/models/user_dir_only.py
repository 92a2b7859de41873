"""Extends torch's allow-list when, and only when, fairseq loads the plugin by `--user-dir`.

For `--user-dir` fairseq imports every file of this folder. The package itself does not import this file, so a program
that uses models as a library keeps its allow-list. A training widens it too (`check_start`); a program that runs
fairseq's other commands in its own process, after it has imported the package, imports this file first. It cannot be
done later: fairseq's `load_checkpoint_to_cpu` calls `torch.load` itself, and with a stock task no code of the plugin
runs between `--user-dir` and that call.
"""

from mega_fairseq.models.checkpoints import allow_plain_containers

allow_plain_containers()
