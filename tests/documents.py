"""What README, docs and examples tell their reader to type, and what shows that it works."""

import re
import sys
from pathlib import Path
from typing import Iterator, List, NamedTuple

from mega_fairseq.cli.listing import Option, architectures, options_of, tasks
from tests.commands import ROOT

DOCUMENTS = sorted(
    path for places in ("*.md", "docs/*.md", "examples/**/*.md", "tests/*.md") for path in ROOT.glob(places)
)
README = "README.md"
INLINE = -1
# A program's name and what it is told: without that it is only spoken of.
IN_A_SENTENCE = r"([A-Z_]+=\S+ )*(make|pip|python\d?|fairseq-\w+|mega-fairseq|sacrebleu|torchrun|\S+\.(sh|py)) \S"


class Command(NamedTuple):
    document: str
    block: int  # which of the document's blocks of shell commands; INLINE for none
    words: str

    def __str__(self) -> str:
        return f"{self.document}: {self.words}"


def blocks(document: Path, language: str) -> List[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def commands(document: Path) -> Iterator[Command]:
    """Each command of the document's blocks in one line, without its comment; and those that stand in its sentences."""
    name = str(document.relative_to(ROOT))
    for number, block in enumerate(blocks(document, "bash")):
        for line in block.replace("\\\n", " ").splitlines():
            words = " ".join(re.sub(r"(^|\s)#.*", "", line).split())
            if words:
                yield Command(name, number, words)
    sentences = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for span in dict.fromkeys(re.findall(r"`([^`]+)`", sentences)):
        words = " ".join(span.split())
        if re.match(IN_A_SENTENCE, words):
            yield Command(name, INLINE, words)


# ------------------------------------------------------------------------------------------------ options

OPTIONS = """# Options

The options of the models and the task: `--name` on the command line, `name` with underscores in hydra's YAML. Defaults
are those of the model without a preset. fairseq's `--help` does not list the options of an `--arch`;
`mega-fairseq options ARCH` does, with the defaults of a preset.
"""


def options_document() -> str:
    """docs/options.md: `python -m tests.documents > docs/options.md` writes it."""
    archs = architectures()
    sections = {f"--arch {name}": archs[name] for name in ("mega_transformer", "mega_lm")}
    sections.update({f"--task {name}": config for name, config in tasks().items()})
    parts = [OPTIONS]
    for title, config in sections.items():
        lines = [f"## `{title}`\n", "| option | default | meaning |", "|---|---|---|"]
        parts.append("\n".join([*lines, *map(_row, options_of(config)), ""]))
    return "\n".join(parts)


def _row(option: Option) -> str:
    choices = f": {', '.join(f'`{choice}`' for choice in option.choices)}" if option.choices else ""
    default = f"`{option.default}`" if option.default.startswith("--") else option.default
    return f"| `{option.name}` | {default} | {option.help}{choices} |"


# ------------------------------------------------------------------------------------------------ commands

# test_own_data.py runs all blocks of own-data.md.
COMMANDS = [command for document in DOCUMENTS if document.name != "own-data.md" for command in commands(document)]

BIBLE = "test_examples_wmt16.py::test_the_shipped_corpus_goes_from_text_to_scores"
ADDRESSES = "test_examples_lm.py::test_the_shipped_corpus_goes_from_text_to_scores_per_byte_and_per_word"
TORCHRUN = "test_ddp.py::test_torchrun_starts_two_processes_on_one_node_or_on_two"
RUNS = "test_benchmarks_lm.py::test_a_run_is_trained_once_and_one_that_was_stopped_goes_on"
LAYER = "test_benchmarks.py::test_the_benchmark_times_every_layer_and_writes_its_numbers"
# A pattern for all of a command, and the tests that run it, or why none does.
SHOWN = {
    r"make install|make lint|make test( ARGS=.*)?": ["continuous integration runs them on a clean clone: .ci/run"],
    r"make demo": [
        "test_demo.py::test_the_demo_ends_with_a_table_of_both_models_on_both_tasks",
        "test_docs.py::test_make_does_what_is_said",
    ],
    r"make (PYTHON=\S+ install|test-fast|format|coverage|bench)": [
        "what make does in each case, and no more: test_docs.py::test_make_does_what_is_said",
    ],
    r"make clean": ["test_docs.py::test_make_clean_leaves_what_is_worth_something"],
    r"mega-fairseq options ARCH": ["test_cli.py::test_options_prints_what_fairseq_parses_with_its_defaults"],
    r"mega-fairseq doctor": ["test_doctor.py::test_the_command_reports_which_checkpoints_torch_reads"],
    r"mega-fairseq user-dir": ["test_cli.py::test_user_dir_prints_the_package_folder_without_importing_torch"],
    r"pip install .*": ["it would change what the tests run in; make install gives pip the same"],
    r"cd examples/(wmt16_en_de/bible|lm/addresses)": [BIBLE, ADDRESSES],
    r"\./(prepare|train|generate|evaluate)\.sh|\.\./average\.sh checkpoints/sentencepiece": [BIBLE, ADDRESSES],
    r"DATA=/tmp/addresses (CHECKPOINTS=.* )?examples/lm/addresses/(prepare|train)\.sh( --rel-pos-bias rotary)?": [
        ADDRESSES
    ],
    r"CHECKPOINT=checkpoints/bytes/checkpoint_last\.pt \./evaluate\.sh --documents line": [ADDRESSES],
    r"sacrebleu -t wmt14/full .*": ["it downloads the references"],
    r"sweep\.sh --help": ["test_examples_scripts.py::test_a_script_prints_its_help_and_starts_nothing"],
    r"\./sweep\.sh": [ADDRESSES],
    r"fairseq-preprocess --source-lang .*": ["test_docs.py::test_the_readme_trains_and_translates"],
    r"fairseq-preprocess --only-source .*": [
        "test_docs.py::test_the_readme_trains_evaluates_and_sweeps_a_language_model"
    ],
    r"echo .* \| fairseq-interactive DATA .*": ["test_docs.py::test_the_readme_goes_on_with_a_text"],
    r"fairseq-train DATA --user-dir .*--task translation .*": ["test_docs.py::test_the_readme_trains_and_translates"],
    r"fairseq-generate DATA .*": ["test_docs.py::test_the_readme_trains_and_translates"],
    r"fairseq-train DATA .*--task mega_language_modeling .*|fairseq-eval-lm .*|mega-fairseq (sweep|inspect)( .*)?": [
        "test_docs.py::test_the_readme_trains_evaluates_and_sweeps_a_language_model"
    ],
    r"mega-fairseq convert( released\.pt ours\.pt| IN\.pt OUT\.pt)?": [
        "test_cli.py::test_convert_prints_the_model_and_what_changed"
    ],
    r"torchrun --standalone .*--cpu .*": [TORCHRUN],
    r"torchrun .*--distributed-world-size (8|16)": ["there are no GPUs here; the same on two processes: " + TORCHRUN],
    r"srun .*": ["there is no slurm here"],
    r"VOCABULARY=4000 DATA=/tmp/bible examples/wmt16_en_de/bible/prepare\.sh": [BIBLE],
    r"python examples/plain_torch/train_few_updates\.py": ["test_docs.py::test_plain_torch_trains_and_reads_in_pieces"],
    r"python benchmarks/layer\.py .*": [LAYER],
    r"python benchmarks/decode\.py .*": [
        "test_benchmarks.py::test_the_decode_benchmark_times_both_models_and_writes_its_numbers",
        "test_benchmarks.py::test_the_decode_benchmark_compares_a_long_translation_with_short_ones",
    ],
    r"python benchmarks/train\.py .*": [
        "test_benchmarks.py::test_the_training_benchmark_times_models_of_equal_size_and_writes_its_numbers"
    ],
    r"python benchmarks/quality\.py .*": [
        RUNS,
        "test_benchmarks.py::test_the_quality_benchmark_trains_scores_collects_and_draws",
    ],
    r"python benchmarks/quality_lm\.py .*": [
        RUNS,
        "test_benchmarks_lm.py::test_the_quality_of_language_models_goes_from_text_to_a_figure",
    ],
    r"cd docs/sweeps": ["where the next command reads and writes"],
    r"python \.\./\.\./benchmarks/extrapolation\.py .*": [
        "test_benchmarks_lm.py::test_sweeps_of_several_models_are_drawn_beside_each_other"
    ],
    r"python benchmarks/eval_lm\.py .*": [
        "test_benchmarks_lm.py::test_the_evaluation_benchmark_fills_all_tables_and_writes_its_numbers"
    ],
    r"export MALLOC_TRIM_THRESHOLD_=\d+ MALLOC_MMAP_THRESHOLD_=\d+": ["a setting of the C library"],
}

if __name__ == "__main__":
    sys.stdout.write(options_document())
