"""fairseq-train that saves a checkpoint and ends when it receives SIGTERM, so that no update is lost."""

import os
import signal

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed.utils import call_main
from fairseq_cli.train import main


def train() -> None:
    cfg, process = (
        convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser())),
        os.getpid(),
    )

    def stop(*_) -> None:
        if os.getpid() == process:
            # fairseq reads both after every update: the current one becomes the last.
            cfg.optimization.max_update = 1
            cfg.dataset.disable_validation = True
        else:  # a process that loads data
            os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    call_main(cfg, main)


if __name__ == "__main__":
    train()
