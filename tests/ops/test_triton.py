"""Triton kernels: in Triton's interpreter, compiled for GPUs that are not here, and where Triton does not work.

On a GPU, `make gpu` compares all layers and models with the CPU.
"""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mega_fairseq.ops import backend, rows
from mega_fairseq.ops.attention import rotary_kernels, tile_kernels
from mega_fairseq.ops.attention.fixed.triton import attend_kernel
from mega_fairseq.ops.dense import triton as dense
from mega_fairseq.ops.ema import coefficient_kernels
from mega_fairseq.ops.ema import kernels as ema_kernels
from mega_fairseq.ops.ema.kernels import channels, load
from mega_fairseq.ops.gates import triton as gates
from mega_fairseq.ops.norm import triton as norm
from mega_fairseq.ops.queries_keys import triton as queries_keys
from mega_fairseq.ops.timestep_norm import triton as timestep_norm

pytest.importorskip("triton", minversion="3.6", reason="older ones have another compiler")

OLDEST = Path(sys.prefix) / "triton-oldest"  # what torch 2.4 brings, and a NumPy that its interpreter needs
VERSIONS = {"newest": "", **({"oldest": str(OLDEST)} if OLDEST.exists() else {})}
INTERPRETED = sorted(map(str, Path(__file__).with_name("interpreted").glob("*_kernels.py")))


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_all_kernels_are_right_in_the_interpreter(version):
    """Triton reads TRITON_INTERPRET when it is imported, so these tests have a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *INTERPRETED]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": VERSIONS[version]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


FLOATS = dict.fromkeys(("x", "dy", "y", "alpha", "delta", "beta", "eta", "values", "new_values", "out"), "*bf16")
FLOATS.update(dict.fromkeys(("scores", "grad", "dscores", "products"), "*bf16"))
OTHERS = dict.fromkeys(("lengths", "number", "rows", "positions", "count"), "*i64")
OTHERS.update({"turns": "*fp64", "keep": "*i1", "padding": "*i1"})
OTHERS.update(dict.fromkeys(("mean", "var", "means", "end_mean", "end_var", "dend_mean", "dend_var"), "*fp64"))
OTHERS.update(dict.fromkeys(("dmean", "dvar"), "*fp64"))
INTEGERS = {
    *("L", "T", "D", "K", "E", "P", "R", "M", "Z", "Q", "A", "SEGMENTS", "OFFSET", "BEAMS", "LEFT", "RIGHT"),
    *("length", "half", "heads", "width", "stride", "candidate_stride", "sums_stride", "first", "H"),
    *("padding_stride", "keep_group", "keep_row", "seen_group", "seen_row"),
}
TILE = {"N": 16, "PADDED": 16, "C": 32}
ONE_WAY = {**TILE, "BACK": False}
ROWS = {"ROWS": 2, "COLUMNS": 512, "WIDE": "fp32"}


def compiled(kernel, constants, absent=(), capability=80, warps=1):
    """The kernel for a GPU of this compute capability, with aligned pointers as at run time."""
    names, types = kernel.arg_names, {}
    for name in names:
        if name in constants or name in absent:
            types[name] = "constexpr"
        elif name in INTEGERS:
            types[name] = "i32"
        else:
            types[name] = {**OTHERS, **FLOATS}.get(name, "*fp32")
    constants = {name: tl.float32 if v == "fp32" else v for name, v in constants.items()}
    fixed = {(names.index(name),): value for name, value in {**constants, **dict.fromkeys(absent)}.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].startswith("*") or n == "D"}
    source = ASTSource(kernel, types, fixed, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "enable_fp_fusion": True}
    )


def of_the_ema():
    for form, absent in (({"COMPLEX": False}, ("turns", "weight_imag")), ({"COMPLEX": True}, ())):
        kind = {**ONE_WAY, **form}
        for gradient in (False, True):
            yield ema_kernels.segment_sums, {**kind, "GRADIENT": gradient}, absent
            yield ema_kernels.outputs, {**kind, "GRADIENT": gradient}, ("add", "end", *absent)
            yield ema_kernels.outputs, {**kind, "GRADIENT": gradient}, ("lengths", "skip", "before", *absent)
        yield ema_kernels.scan_segments, kind, ("start", *absent[:1])
        states = {"N": 8, "PADDED": 8} if form["COMPLEX"] else {}
        yield ema_kernels.coefficient_gradients, {**kind, **states}, absent
        yield ema_kernels.coefficient_gradients, {**kind, **states}, ("lengths", "before", "after", *absent)


def of_tables():
    for kernel in (coefficient_kernels.coefficients, coefficient_kernels.coefficients_backward):
        yield kernel, {**TILE, "SCALE": 0.25, "LARGEST": 40.0}, ()
    yield coefficient_kernels.add_gradients, {"ROWS": 32, "C": 32}, ()


def of_rows():
    for kernel in (dense.silu_backward, rows.column_sums, rows.add_rows):
        yield kernel, ROWS, ()
    for kernel, reset in product((gates.gate, gates.gate_backward), (True, False)):
        yield kernel, {**ROWS, "RESET": reset}, ()
    for kernel in (queries_keys.scale, queries_keys.scale_backward):
        for silu in (True, False):
            yield kernel, {**ROWS, "SILU": silu}, ()
    yield rotary_kernels.angles, {**ROWS, "STEP": -0.5}, ()
    for back in (True, False):
        yield rotary_kernels.turn, {**ROWS, "BACK": back}, ()
    for kernel in (rotary_kernels.distances, rotary_kernels.distances_backward):
        yield kernel, {**ROWS, "STEP": -0.5}, ()
    for kernel, more in ((gates.update, ("more",)), (gates.update_backward, ())):
        yield kernel, {**ROWS, "SCALE": 1.5}, more
        yield kernel, {**ROWS, "SCALE": 1.0}, ("keep", *more)
    of_tokens = {"STEPS": 128, "W": 32, "WIDE": "fp32"}
    yield timestep_norm.forward_kernel, {**of_tokens, "EPS": 1e-5}, ("lengths",)
    yield timestep_norm.backward_kernel, of_tokens, ()
    yield timestep_norm.backward_kernel, of_tokens, ("lengths", "weight", "dend_mean", "dend_var")
    yield norm.normalize, {**ROWS, "EPS": 1e-5, "CENTER": False}, ("bias",)
    yield norm.normalize_backward, {**ROWS, "EPS": 1e-5, "CENTER": True}, ()


def of_tiles():
    options = {**ROWS, "COLUMNS": 2048, "CAUSAL": True, "SCALE": 0.25, "KEEP_SCALE": 1.5, **tile_kernels.CONSTANTS}
    for function in ({"SOFTMAX": True}, {"LAPLACE": True}, {"OUTER": True}):
        constants = {**options, **dict.fromkeys(("SOFTMAX", "LAPLACE", "OUTER"), False), **function}
        absent = ("grad", "dscores", "products", "multiplier", "padding", "keep", *(["seen"] * ("SOFTMAX" in function)))
        yield tile_kernels.weigh, constants, absent
        yield tile_kernels.weigh, constants, ("bias",)


def of_single_tokens():
    options = {"SCALE": 0.5, "MEAN": 0.7, "STD": 0.3, "BLOCK": 32, "WIDTH": 128, "COLUMNS": 128, "WIDE": "fp32"}
    for function in ({"SOFTMAX": True}, {"LAPLACE": True}, {"OUTER": True}):
        constants = {**options, **dict.fromkeys(("SOFTMAX", "LAPLACE", "OUTER"), False), **function}
        yield attend_kernel, constants, ("padding",)
        yield attend_kernel, constants, ("bias", "rows", "new_keys", "new_values")
    of_ema = {"N": 10, "PADDED": 16, "C": 64, "ROWS": 4, "SILU": True}
    yield ema_kernels.token, {**of_ema, "COMPLEX": False}, ("turns",)
    yield ema_kernels.token, {**of_ema, "COMPLEX": True}, ()
    yield gates.update, {**ROWS, "SCALE": 1.0}, ("bias", "keep")


def exchanges_between_lanes(made):
    return made.metadata.shared > 0 or "shfl" in made.asm["ptx"]


@pytest.mark.slow
def test_kernels_of_the_ema_compile_with_the_states_of_a_channel_in_one_lane():
    """Otherwise lanes would exchange them in each step, which takes several times as long."""
    for kernel, constants, absent in of_the_ema():
        assert not exchanges_between_lanes(compiled(kernel, constants, absent))


def test_an_exchange_between_lanes_would_be_found():
    with_hint, without = (compiled(sum_of_states, {**TILE, "HINT": hint}) for hint in (True, False))
    assert not exchanges_between_lanes(with_hint)
    assert exchanges_between_lanes(without)


@triton.jit
def sum_of_states(tables, sums, D, N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, HINT: tl.constexpr):
    channel = tl.program_id(1) * C + tl.arange(0, C)
    if HINT:
        channel = channels(C)
    tl.store(sums + channel, tl.sum(load(tables, channel, D, N, PADDED), 0), mask=channel < D)


@pytest.mark.slow
def test_the_other_kernels_compile():
    for kernel, constants, absent in of_tables():
        assert "ptx" in compiled(kernel, constants, absent).asm
    for kernel, constants, absent in (*of_rows(), *of_tiles(), *of_single_tokens()):
        assert "ptx" in compiled(kernel, constants, absent, capability=90, warps=4).asm


# ------------------------------------------------------------------------------------------- where they run


@pytest.fixture
def cuda(monkeypatch):
    """A device that would be a GPU."""
    backend._choose.cache_clear()
    monkeypatch.delenv("MEGA_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield torch.device("cuda:0")
    backend._choose.cache_clear()


def test_where_triton_does_not_work_one_warning_says_so(cuda, caplog):
    for _ in range(2):
        assert backend.backend(cuda) == "cpu"
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "Mega's layers are slower" in warnings[0].getMessage()


def test_triton_is_chosen_where_its_kernels_run(cuda, monkeypatch):
    monkeypatch.setattr(backend, "why_no_kernels", lambda device: None)
    assert backend.backend(cuda) == "triton"
    assert backend.backend(torch.device("cpu")) == "cpu"


def test_older_gpus_take_the_plain_form(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert backend.why_no_kernels(cuda) == "the GPU is older than compute capability 8.0"
    assert backend.backend(cuda) == "cpu"


def test_a_lack_of_memory_is_no_reason_to_do_without_kernels_later(cuda, monkeypatch):
    def fail(device):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        backend.backend(cuda)
