"""Which fairseq is installed, and whether it works with the installed packages and with the plugin.

Versions say little about that, so the checks use fairseq: they read a checkpoint, build data and parse options.
"""

import importlib
import importlib.util
import os
import pickle
import sys
import tempfile
from argparse import Namespace
from functools import partial

import mega_fairseq
from mega_fairseq.cli.doctor.check import Check, Limit, Problem
from mega_fairseq.cli.doctor.packages import GET_CONFIGS, PYTHON_OF_FIXED, distributions, imported, package

OFFICIAL, FIXED = ("fairseq", "0.12.2"), ("fairseq-fixed", "0.12.3.1")
if sys.version_info >= PYTHON_OF_FIXED:
    GET_FAIRSEQ = (
        "pip install Cython numpy torch setuptools wheel, "
        "then pip install --no-cache-dir --no-build-isolation fairseq-fixed==0.12.3.1"
    )
else:
    GET_FAIRSEQ = "pip install 'pip<24.1', then pip install --no-cache-dir fairseq==0.12.2 'torch<2.6' 'numpy<2'"
EXTENSIONS = ("data.data_utils_fast", "data.token_block_utils_fast", "libbleu")
REBUILD = f"pip uninstall -y fairseq fairseq-fixed, then {GET_FAIRSEQ}"
READ_UNSAFE = "set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 for files that you trust"
ONE_BY_ONE = "for --sample-break-mode eos and --num-batch-buckets: pip install 'numpy<2'"


def fairseq() -> str:
    """Which of the two distributions provides `import fairseq`, without importing it."""
    found = distributions(OFFICIAL[0], FIXED[0])
    named = " and ".join(" ".join(pair) for pair in found.items())
    spec = importlib.util.find_spec("fairseq")
    if spec is None or spec.origin is None:
        if found:
            raise Problem(f"{named}, but its files are missing", REBUILD)
        raise Problem("not installed")
    if not found:
        raise Limit(f"a copy of unknown version in {os.path.dirname(spec.origin)}")
    if len(found) > 1:
        raise Problem(f"{named}, one overwrites the other", REBUILD)
    pair = next(iter(found.items()))
    if pair == OFFICIAL and sys.version_info >= PYTHON_OF_FIXED:
        raise Problem(f"{named}, which does not run on Python 3.11 and newer", REBUILD)
    if pair not in (OFFICIAL, FIXED):
        raise Limit(f"{named}, not tested", REBUILD)
    return f"{named}, {'the last official release' if pair == OFFICIAL else 'its main branch with repairs'}"


def extensions() -> str:
    """Compiled parts that training and evaluation use."""
    for name in EXTENSIONS:
        imported(f"fairseq.{name}")
    return "compiled and loaded"


def sentence_blocks() -> str:
    """Data of fairseq's own language modelling task, one sample for each line."""
    torch, data = imported("torch"), imported("fairseq.data")
    data.TokenBlockDataset([torch.tensor([5, 2])], [2], None, pad=1, eos=2, break_mode="eos")
    return "samples of lines work"


def reads_checkpoints() -> str:
    """Write a checkpoint like that of a stock Transformer and read it with fairseq."""
    torch, checkpoint_utils = imported("torch"), imported("fairseq.checkpoint_utils")
    content = {
        "args": None,
        "cfg": {"model": Namespace(arch="transformer")},
        "model": {"weight": torch.ones(2)},
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 1}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        torch.save(content, path)
        try:
            checkpoint_utils.load_checkpoint_to_cpu(path)
        except pickle.UnpicklingError as error:
            raise Problem(f"torch {torch.__version__} reads no argparse.Namespace by default") from error
    return "fairseq reads its own checkpoints"


def plugin() -> str:
    """Register the plugin as `--user-dir` does and look up its names."""
    fairseq_utils = imported("fairseq.utils")
    fairseq_utils.import_user_module(Namespace(user_dir=os.path.abspath(mega_fairseq.__path__[0])))
    for module in ("criterions", "models", "models.user_dir_only", "tasks"):
        importlib.import_module(f"mega_fairseq.{module}")  # fairseq skips a package that is already imported
    models = imported("fairseq.models").MODEL_REGISTRY
    for kind, registry, names in (
        ("model", models, ("mega_transformer", "mega_lm")),
        ("task", imported("fairseq.tasks").TASK_REGISTRY, ("mega_language_modeling",)),
        ("criterion", imported("fairseq.criterions").CRITERION_REGISTRY, ("mega_lm_cross_entropy",)),
    ):
        for name in names:
            if name not in registry:
                raise Problem(f"fairseq does not know the {kind} {name}")
    sizes = sum(name.startswith(("mega_transformer_", "mega_lm_")) for name in models)
    return f"fairseq knows mega_transformer, mega_lm and {sizes} presets"


def options() -> str:
    """Parse a command line into fairseq's configuration, which uses omegaconf and hydra."""
    fairseq_options = imported("fairseq.options")
    words = ["DATA", "--task=mega_language_modeling", "--arch=mega_lm_small", "--decoder-layers=3"]
    args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), words)
    layers = imported("fairseq.dataclass.utils").convert_namespace_to_omegaconf(args).model.decoder_layers
    if layers != 3:
        raise Problem(f"--decoder-layers=3 became {layers}")
    return "command lines are parsed"


def tensorboard() -> str:
    """The package that fairseq found."""
    writer = importlib.import_module("fairseq.logging.progress_bar").SummaryWriter
    if writer is None:
        raise Problem("neither tensorboardX nor tensorboard")
    name = "tensorboardX" if writer.__module__.startswith("tensorboardX") else "tensorboard"
    return f"{name} {package(name)}"


NEEDED = ("torch", "torch with numpy", "omegaconf", "hydra", "sacrebleu", "fairseq")
IMPORTED, REGISTERED = ("import fairseq",), ("plugin in fairseq",)

CHECKS = [
    Check("fairseq", fairseq, GET_FAIRSEQ, needed=True),
    Check("import fairseq", partial(package, "fairseq"), REBUILD, needed=True, after=NEEDED),
    Check("extensions", extensions, REBUILD, needed=True, after=IMPORTED),
    Check("fairseq with numpy", sentence_blocks, ONE_BY_ONE, after=IMPORTED),
    Check("stock checkpoints", reads_checkpoints, f"give --user-dir, or {READ_UNSAFE}", after=IMPORTED),
    Check("plugin in fairseq", plugin, REBUILD, needed=True, after=IMPORTED),
    Check("checkpoints", reads_checkpoints, READ_UNSAFE, needed=True, after=REGISTERED),
    Check("options", options, GET_CONFIGS, needed=True, after=REGISTERED),
    Check("TensorBoard", tensorboard, "for --tensorboard-logdir: pip install tensorboardX", after=IMPORTED),
]
