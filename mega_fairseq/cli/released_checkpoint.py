"""Reads a checkpoint of the released code, and executes nothing that stands in it."""

import argparse
import pickle
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from mega_fairseq.cli.refusal import Refusal

Global = Union[type, Tuple[Any, str]]


class Released(NamedTuple):
    """What we take from a released checkpoint."""

    options: Dict[str, Any]
    tensors: Dict[str, Tensor]


def read(path: str) -> Released:
    """Options and tensors of the checkpoint at `path`, which may come from anybody."""
    content = _load(path)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise Refusal("holds no model, so it is no checkpoint of fairseq; give one that the released code wrote")
    _check_origin(content)
    tensors = content["model"]
    for name, tensor in tensors.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor) and _is_stored(tensor)):
            raise Refusal(f"holds in place of {name!r} what is no tensor of a model; get it again from its source")
    return Released(vars(content["args"]), dict(tensors))


def _load(path: str) -> Any:
    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):  # as old as the allow-list that we need
        raise Refusal(f"torch {torch.__version__} cannot read it without executing it; convert with torch 2.6 or newer")
    try:
        with torch.serialization.safe_globals(_needed_globals()):  # which takes off its list all that it put on
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise Refusal(f"cannot be read ({error.strerror}); give the path of a checkpoint") from None
    except pickle.UnpicklingError as error:
        asked_for = re.search(r"(?:GLOBAL|function|class) ([\w.]+\.[\w.]+)", str(error))
        if asked_for is None:
            raise _damaged() from None
        raise Refusal(
            f"asks for {asked_for.group(1)}, which no checkpoint of the released code needs, and was not executed; "
            "give a file that the released code wrote"
        ) from None
    except Exception:
        raise _damaged() from None


def _damaged() -> Refusal:
    return Refusal("is no checkpoint, or only a part of one; copy or download it again")


def _needed_globals() -> List[Global]:
    """Options are a Namespace; BLEU counts in the training log are numpy arrays, under their old or new module."""
    reconstruct, scalar = np.zeros(1).__reduce__()[0], np.float64().__reduce__()[0]
    names = [
        (function, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for function, name in ((reconstruct, "_reconstruct"), (scalar, "scalar"))
    ]
    dtypes = [type(np.dtype(name)) for name in ("int64", "float64")]
    allowed = torch.serialization.get_safe_globals()  # and stays so when we are done
    return [g for g in (argparse.Namespace, np.ndarray, np.dtype, *dtypes, *names) if g not in allowed]


def _is_stored(tensor: Tensor) -> bool:
    """With a number for each entry, not sparse, not empty or a mere shape, not one number seen as many."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    return 0 < tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _check_origin(content: Mapping[str, Any]) -> None:
    """Refuses what other code wrote: fairseq since 0.10 keeps its options under `cfg`, the release under `args`."""
    config = content.get("cfg")
    model = config.get("model") if isinstance(config, dict) else None
    name = model.get("_name") if isinstance(model, dict) else getattr(model, "_name", None)
    if isinstance(name, str) and name.startswith("mega_"):
        raise Refusal(f"is a checkpoint of this package already (model {name}); use it as it is")
    if config is not None or not isinstance(content.get("args"), argparse.Namespace):
        raise Refusal(f"was not written by the released code (model {name}); give one whose options are under `args`")
