"""fairseq-train that saves a checkpoint and ends when it receives SIGTERM, and has --bf16 for fairseq's models too."""

import os
import signal

# Sets the log format, which must happen before anything else of fairseq is imported.
from fairseq_cli import train


def main() -> None:
    args = train.options.parse_args_and_arch(train.options.get_training_parser())
    args.tpu = False  # fairseq takes --bf16 for a TPU
    cfg, process = train.convert_namespace_to_omegaconf(args), os.getpid()

    def stop(*_) -> None:
        if os.getpid() != process:  # a process that loads data
            os._exit(1)
        # fairseq reads both after every update: the current one becomes the last.
        cfg.optimization.max_update = 1
        cfg.dataset.disable_validation = True

    signal.signal(signal.SIGTERM, stop)
    train.distributed_utils.call_main(cfg, train.main)


if __name__ == "__main__":
    main()
