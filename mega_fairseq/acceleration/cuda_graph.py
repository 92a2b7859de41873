"""CUDA graphs: operations recorded once, which a GPU then runs without Python."""

from typing import Any, Callable, List, Optional, Sequence, Tuple, TypeVar

import torch

Step = Callable[[], None]
Capture = Callable[..., List[Step]]
Captured = TypeVar("Captured")


def cuda_graphs(steps: Sequence[Step], pool: Optional[Any] = None) -> List[Step]:
    """Captures consecutive steps; returns the functions that replay them.

    Graphs with the same pool share memory, so a replay may overwrite what an earlier one of another capture left there.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # Torch requires a run before: kernels are compiled and workspaces allocated. A step that waits for the GPU fails
    # here: if its capture failed, torch would stay on the stream of the capture and could draw no random numbers.
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            for step in steps:
                step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.current_stream().wait_stream(stream)
    graphs, pool = [], torch.cuda.graph_pool_handle() if pool is None else pool
    for step in steps:
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: fairseq's data loaders pin memory.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step()
        graphs.append(graph)
    return [graph.replay for graph in graphs]


def capture_on(device: torch.device) -> Optional[Capture]:
    """How steps on this device are captured, or None."""
    return cuda_graphs if device.type == "cuda" and torch.version.hip is None else None


def try_capture(make: Callable[[], Captured]) -> Tuple[Optional[Captured], str]:
    """What `make` captures, or None and why it cannot, such as an operation that waits for the GPU."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return make(), ""
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return None, f"{type(error).__name__}: {error}"
