"""fairseq-train with --bf16 for fairseq's models too."""

# Sets the log format, which must happen before anything else of fairseq is imported.
from fairseq_cli import train

if __name__ == "__main__":
    args = train.options.parse_args_and_arch(train.options.get_training_parser())
    args.tpu = False  # fairseq takes --bf16 for a TPU
    train.distributed_utils.call_main(train.convert_namespace_to_omegaconf(args), train.main)
