"""Training steps as CUDA graphs: forward and backward of a stack's layers, captured once for each shape of a batch.

A GPU computes a layer in about half the time in which Python launches its kernels; a graph needs no Python. A shape is
captured when it is seen again, and sequences are padded to a few lengths (`bucket`), so that there are few graphs.

All graphs of a stack share memory: a pool for activations, and a storage for inputs, outputs and gradients. Between
forward and backward of a graph it is in use, and another forward pass runs without graphs.
"""

import logging
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from mega_fairseq.acceleration.cuda_graph import Step, capture_on, try_capture
from mega_fairseq.modules.projection import has_hooks
from mega_fairseq.ops.precision import autocast_dtype

logger = logging.getLogger(__name__)

Function = Callable[..., Tensor]
MOST_GRAPHS = 256  # of a stack
MOST_MEMORY = 0.5  # of the GPU's, for all graphs of a stack


def bucket(length: int, limit: int) -> int:
    """The next of the lengths 8, 16, ..., 128, 144, ..., 256, ... (eight between two powers of two), or `limit`."""
    step = max(8, 1 << max(0, (length - 1).bit_length() - 4))
    wide = -(-length // step) * step
    return min(wide, limit) if length <= limit else wide


class Storage:
    """Tensors by name, of any shape, in little more memory than the largest of each name needs."""

    def __init__(self):
        self.buffers: Dict[Tuple, Tensor] = {}

    def get(self, name: str, like: Tensor) -> Tensor:
        capacity = 1 << max(0, like.numel() - 1).bit_length()
        key = (name, like.dtype, capacity)
        if key not in self.buffers:
            self.buffers[key] = torch.zeros(capacity, dtype=like.dtype, device=like.device)
        return self.buffers[key][: like.numel()].view(like.shape)


class TrainGraph:
    """Forward and backward of a function for inputs of these shapes, captured."""

    def __init__(
        self,
        function: Function,
        inputs: Sequence[Any],
        parameters: List[Tensor],
        storage: Storage,
        capture: Callable[[List[Step]], List[Step]],
    ):
        self.storage = storage
        self.parameters = parameters  # without those that the function does not use, after the first run
        tensors = [i for i, t in enumerate(inputs) if isinstance(t, Tensor)]
        self.inputs = [storage.get(f"input {i}", t) if i in tensors else t for i, t in enumerate(inputs)]
        self.learned = [i for i in tensors if inputs[i].requires_grad]
        for i in self.learned:
            self.inputs[i].requires_grad_()
        self._load(inputs)
        # The function is not kept: it refers to the layers, and a cycle would keep a deleted model in memory.
        self._replay_forward, self._replay_backward = capture([partial(self._forward, function), self._backward])

    @torch.no_grad()
    def _load(self, inputs: Sequence[Any]) -> None:
        for stored, new in zip(self.inputs, inputs):
            if isinstance(stored, Tensor):
                stored.copy_(new)

    def _forward(self, function: Function) -> None:
        device = self.inputs[0].device.type
        dtype = autocast_dtype(self.inputs[0])
        # A cache of autocast would keep rounded weights in memory that later replays overwrite.
        autocast = nullcontext() if dtype is None else torch.autocast(device, dtype, cache_enabled=False)
        with torch.enable_grad(), autocast:
            self.y = function(*self.inputs)
        self.out, self.dout = (self.storage.get(name, self.y) for name in ("output", "gradient of output"))
        self.out.copy_(self.y.detach())

    def _backward(self) -> None:
        inputs = [self.inputs[i] for i in self.learned]
        check_leaves(self.y, [*inputs, *self.parameters])
        found = torch.autograd.grad(self.y, [*inputs, *self.parameters], self.dout, allow_unused=True)
        self.y, found = None, (found[: len(inputs)], found[len(inputs) :])
        self.parameters = [p for p, gradient in zip(self.parameters, found[1]) if gradient is not None]
        self.gradients = []  # of inputs and of parameters, which have different dtypes with autocast
        for kind, new in zip(("input", "parameter"), found):
            new = [t for t in new if t is not None]
            self.gradients.append([self.storage.get(f"gradient of {kind} {i}", t) for i, t in enumerate(new)])
            if new:
                torch._foreach_copy_(self.gradients[-1], new)

    def forward(self, inputs: Sequence[Any]) -> Tensor:
        self._load(inputs)
        self._replay_forward()
        return self.out.clone()

    def backward(self, dout: Tensor) -> List[Optional[Tensor]]:
        """The gradients of inputs and `parameters`: copies, since a parameter keeps the first one that it gets."""
        self.dout.copy_(dout)
        self._replay_backward()
        of_inputs, of_parameters = (torch._foreach_mul(part, 1.0) if part else [] for part in self.gradients)
        by_input = dict(zip(self.learned, of_inputs))
        return [*(by_input.get(i) for i in range(len(self.inputs))), *of_parameters]


def check_leaves(y: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raises an error if y depends on others, as if a wrapper keeps the weights: they would get no gradient."""
    known, nodes, seen = set(map(id, leaves)), [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            if hasattr(node, "variable") and id(node.variable) not in known:
                raise RuntimeError("the layers use parameters that are not among theirs")


class _Use:
    """Exists for as long as a backward pass may follow."""


class _Replay(torch.autograd.Function):
    """A graph as an operation of torch."""

    @staticmethod
    def forward(ctx: Any, graphs: "TrainGraphs", graph: TrainGraph, *leaves: Any) -> Tensor:
        ctx.graphs, ctx.graph, ctx.use = graphs, graph, _Use()
        graphs.use = weakref.ref(ctx.use)
        return graph.forward(leaves[: len(graph.inputs)])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tuple[Optional[Tensor], ...]:
        if torch.is_grad_enabled() or ctx.graphs.use() is not ctx.use:
            raise RuntimeError("a CUDA graph has one backward pass and no second derivatives; give --cuda-graphs off")
        ctx.graphs.use = _nobody
        return (None, None, *ctx.graph.backward(dout))


class TrainGraphs:
    """The graphs of one stack, in place of the `eager` form of its passes; copies and pickles of it are empty."""

    def __init__(self, eager: Any):
        self.eager = eager
        self.graphs: Dict[Tuple, Optional[TrainGraph]] = {}  # by shapes; None if they are not captured
        self.valid_for: List[Any] = []  # modules and weights as they were when the graphs were captured
        self.parameters: List[Tensor] = []  # that learn
        self.buffers: List[Tensor] = []
        self.storage, self.pool, self.memory = Storage(), None, 0.0
        self.use: Callable[[], Optional[_Use]] = _nobody
        self.logged: Set[str] = set()
        self.failure: Optional[str] = None  # why no further graph can be captured

    bucket = staticmethod(bucket)

    def for_batch(self, stack: Any, tokens: Tensor) -> Any:
        """These graphs for a pass over tokens, or the eager form (models/passes.py) if they cannot run it."""
        trains = stack.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        runs = trains and capture_on(tokens.device) is not None and self.ready_for(stack)
        return self if runs else self.eager

    def ready_for(self, stack: Any) -> bool:
        """Whether the layers of the stack can be captured or replayed; forgets graphs of what they were before."""
        modules = [m for part in (stack.layers, stack.final_norm) if part is not None for m in part.modules()]
        parameters = list(dict.fromkeys(p for m in modules for p in m._parameters.values() if p is not None))
        reason = obstacle(stack, modules, parameters)
        if reason is not None:
            self._log(reason, logging.INFO)
        if reason is not None or self.use() is not None:
            return False
        self.parameters = [p for p in parameters if p.requires_grad]
        self.buffers = [t for m in modules for t in m._buffers.values() if t is not None]
        now = [(id(m), m.training, getattr(m, "config", None)) for m in modules]
        now += [(id(t), t.data_ptr(), t.dtype, t.requires_grad) for t in (*parameters, *self.buffers)]
        if now != self.valid_for:
            self.graphs, self.valid_for, self.failure = {}, now, None
            self.storage, self.pool, self.memory = Storage(), None, 0.0
        return True

    def form_of(self, function: Function) -> Function:
        return partial(self._run, function)

    def _run(self, function: Function, *inputs: Any) -> Tensor:
        """`function(*inputs)`, which calls the layers; a replay if these shapes were captured.

        An input is a tensor or a tuple of inputs; what is neither is a constant of the graph.
        """
        inputs, structure = tree_flatten(inputs)
        function = partial(_of_leaves, function, structure)
        key = (autocast_dtype(inputs[0]), *map(_signature, inputs))
        learns = self.parameters or any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        if learns and key in self.graphs and self.graphs[key] is None:
            self.graphs[key] = self._captured(function, inputs)
        graph = self.graphs.setdefault(key, None)
        return function(*inputs) if graph is None else _Replay.apply(self, graph, *inputs, *graph.parameters)

    def _captured(self, function: Function, inputs: Sequence[Any]) -> Optional[TrainGraph]:
        if self.failure is None and sum(graph is not None for graph in self.graphs.values()) == MOST_GRAPHS:
            self.failure = f"batches have more than {MOST_GRAPHS} shapes; --required-seq-len-multiple makes them fewer"
        if self.failure is not None:
            self._log(self.failure, logging.WARNING)
            return None
        device, values = inputs[0].device, [t.clone() for t in self.buffers]
        gpus = [device] if device.type == "cuda" else []
        before = share_of_memory(device)
        if gpus and self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        try:
            with torch.random.fork_rng(gpus):
                capture = partial(capture_on(device), pool=self.pool)
                make = partial(TrainGraph, function, inputs, self.parameters, self.storage, capture)
                graph, reason = try_capture(make)
        except torch.cuda.OutOfMemoryError:
            self.failure = "the GPU ran out of memory"  # fairseq leaves out this batch, but the next one may fit
            raise
        finally:  # running statistics, which the run before the capture changed
            with torch.no_grad():
                for t, value in zip(self.buffers, values):
                    t.copy_(value)
        if graph is None:
            self.failure = reason
            self._log(reason, logging.WARNING)
        self.memory += share_of_memory(device) - before
        if self.memory > MOST_MEMORY:
            self.failure = f"graphs of these batches need more than {MOST_MEMORY:.0%} of the GPU's memory"
            self.graphs, graph = {}, None
        return graph

    def _log(self, reason: str, level: int) -> None:
        if reason not in self.logged:
            logger.log(level, "training without CUDA graphs, which is slower: %s", reason)
            self.logged.add(reason)

    def __reduce__(self) -> Tuple:
        return TrainGraphs, (self.eager,)


def obstacle(stack: Any, modules: List[nn.Module], parameters: List[Tensor]) -> Optional[str]:
    """Why the layers of a stack cannot be captured, or None."""
    if getattr(stack.cfg, f"{stack.side}_layerdrop") > 0.0:
        return f"--{stack.side}-layerdrop leaves out other layers in each step"
    if stack.cfg.checkpoint_activations or stack.cfg.offload_activations:
        return "--checkpoint-activations and --offload-activations run Python in backward"
    if getattr(stack, "group", None) is not None:
        return "processes that share sequences exchange states in each layer"
    if any(parameter._backward_hooks for parameter in parameters):
        return "hooks of weights would change gradients twice"
    for module in modules:
        if has_hooks(module):
            return "a replay would not call the hooks of modules"
        if isinstance(module, nn.SyncBatchNorm):
            return "syncbatchnorm exchanges statistics between processes"
    return None


def share_of_memory(device: torch.device) -> float:
    """The share of a GPU's memory that torch has reserved."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory


def _of_leaves(function: Function, structure: TreeSpec, *leaves: Any) -> Tensor:
    return function(*tree_unflatten(leaves, structure))


def _signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _nobody() -> None:
    return None
