"""Graphs of ONNX operators that are written like formulas, with their weights in one file beside them.

Opset 17 and IR 8, which ONNX Runtime reads since 1.17, although 1.18 fails at some in int8; from com.microsoft only
`MatMulIntegerToFloat`. A graph uses the forms of its operators before opset 18, in which `ReduceMax` and `ReduceMean`
have their axes as attributes.
"""

import hashlib
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET, IR_VERSION, MICROSOFT = 17, 8, "com.microsoft"
EXTERNAL = 1024  # bytes from which an array is stored in the file of weights
ALIGNMENT = 4096  # of arrays in it, so that the system can map them into memory
FORMATS = ("float32", "int8")
LARGEST = 127  # of weights and activations in 8 bits
TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}

Number = Union[int, float]
Shape = Sequence[Union[int, str]]


class Weights:
    """The file with the arrays of all graphs of a folder; equal arrays are stored once."""

    def __init__(self, path: Path):
        self.name, self.file = path.name, open(path, "wb")  # noqa: SIM115 - `close` closes it
        self.stored: Dict[bytes, Tuple[int, int]] = {}

    def store(self, array: np.ndarray) -> Tuple[int, int]:
        """Offset and length of this array in the file."""
        content = array.tobytes()
        key = hashlib.sha256(content).digest()
        if key not in self.stored:
            self.file.write(bytes(-self.file.tell() % ALIGNMENT))
            self.stored[key] = self.file.tell(), len(content)
            self.file.write(content)
        return self.stored[key]

    def close(self) -> None:
        self.file.close()


class Value:
    """The output of an operator. Numbers in formulas with it become constants of the graph."""

    def __init__(self, graph: "Graph", name: str):
        self.graph, self.name = graph, name

    def __add__(self, other: Any) -> "Value":
        return self.graph.op("Add", self, other)

    def __sub__(self, other: Any) -> "Value":
        return self.graph.op("Sub", self, other)

    def __mul__(self, other: Any) -> "Value":
        return self.graph.op("Mul", self, other)

    def __truediv__(self, other: Any) -> "Value":
        return self.graph.op("Div", self, other)

    def __matmul__(self, other: Any) -> "Value":
        return self.graph.op("MatMul", self, other)

    def reshape(self, *shape: int) -> "Value":
        """-1 stands for what is left, and 0 for the size of this value at the same place."""
        return self.graph.op("Reshape", self, np.array(shape, np.int64))

    def transpose(self, *order: int) -> "Value":
        return self.graph.op("Transpose", self, perm=order)

    def unsqueeze(self, *axes: int) -> "Value":
        return self.graph.op("Unsqueeze", self, np.array(axes, np.int64))

    def sum(self, axis: int, keep: bool = False) -> "Value":
        return self.graph.op("ReduceSum", self, np.array([axis], np.int64), keepdims=int(keep))

    def split(self, *sizes: int) -> List["Value"]:
        """Parts of these widths of the last dimension."""
        return self.graph.op("Split", self, np.array(sizes, np.int64), outputs=len(sizes), axis=-1)

    def sizes(self, first: int = 0, stop: Optional[int] = None) -> "Value":
        """Some sizes of this value, as a vector of integers."""
        return self.graph.op("Shape", self, start=first, **({} if stop is None else {"end": stop}))

    def slice(self, start: Any, stop: Any, axis: int) -> "Value":
        """From start up to stop, both vectors of one integer."""
        return self.graph.op("Slice", self, start, stop, np.array([axis], np.int64))


class Graph:
    """A graph under construction: `op` adds an operator, `constant` an array, `save` writes it."""

    def __init__(self, weights: Weights, number_format: str = "float32"):
        self.weights, self.number_format = weights, number_format
        self.nodes: List[onnx.NodeProto] = []
        self.initialisers: Dict[bytes, onnx.TensorProto] = {}
        self.inputs: List[onnx.ValueInfoProto] = []
        self.outputs: List[onnx.ValueInfoProto] = []

    # ---------------------------------------------------------------------------------------- building

    def input(self, name: str, dtype: Any, *shape: Union[int, str]) -> Value:
        self.inputs.append(helper.make_tensor_value_info(name, TYPES[np.dtype(dtype)], shape))
        return Value(self, name)

    def output(self, name: str, value: Value, dtype: Any, *shape: Union[int, str]) -> None:
        """Makes a value an output, under this name from now on: an operator that copies it would take time."""
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [name if n == value.name else n for n in names]
        value.name = name
        self.outputs.append(helper.make_tensor_value_info(name, TYPES[np.dtype(dtype)], shape))

    def constant(self, value: Any) -> Value:
        """An array or number; equal ones are one constant. Python's numbers are float32 or, without a point, int64."""
        array = np.asarray(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        if not array.flags.c_contiguous:  # np.ascontiguousarray would also add a dimension to scalars
            array = array.copy()
        key = hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).digest()
        if key not in self.initialisers:
            self.initialisers[key] = self._stored(array, f"c{len(self.initialisers)}")
        return Value(self, self.initialisers[key].name)

    def _stored(self, array: np.ndarray, name: str) -> onnx.TensorProto:
        if array.nbytes < EXTERNAL:
            return numpy_helper.from_array(array, name)
        tensor = TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
        offset, length = self.weights.store(array)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self.weights.name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def op(self, kind: str, *inputs: Any, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """The output of an operator, or a list of its outputs. Inputs that are no values are constants."""
        given = [x if isinstance(x, Value) else self.constant(x) for x in inputs]
        names = [f"{kind}{len(self.nodes)}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, [x.name for x in given], names, domain=domain, **attributes))
        values = [Value(self, name) for name in names]
        return values[0] if outputs == 1 else values

    def concat(self, *values: Any, axis: int = -1) -> Value:
        return self.op("Concat", *values, axis=axis)

    # ---------------------------------------------------------------------------------------- products

    def linear(self, x: Value, weight: np.ndarray, bias: Optional[np.ndarray] = None) -> Value:
        """x (..., in) with a weight (out, in), as in PyTorch -> (..., out)."""
        if self.number_format == "int8":
            rounded, scale = in_8_bits(weight)
            return self.rounded_product(x, self.constant(rounded.T), scale, bias)
        y = x @ weight.T
        return y if bias is None else y + bias

    def rounded_product(self, x: Value, weight: Value, scale: np.ndarray, bias: Optional[np.ndarray]) -> Value:
        """x (..., in) times a weight (in, out) in 8 bits and its scales (out,).

        Each row of x is rounded with a scale of its own, so no row depends on another one. Sums are exact integers.
        In a row of zeros, the rounded numbers are arbitrary and multiplied by zero.
        """
        largest = self.op("ReduceMax", self.op("Abs", x), axes=[-1], keepdims=1)
        unit, zero = np.float32(1 / LARGEST), np.uint8(128)
        whole = self.op("QuantizeLinear", x / largest, unit, zero)
        y = self.op("MatMulIntegerToFloat", whole, weight, unit, scale, zero, domain=MICROSOFT) * largest
        return y if bias is None else y + bias

    def rows(self, table: np.ndarray, numbers: Value, factor: float = 1.0) -> Value:
        """Rows of a table (types, D), such as embeddings, times a factor, by numbers (...) -> (..., D)."""
        if self.number_format == "int8":
            rounded, scale = in_8_bits(table)
            whole = self.op("Cast", self.op("Gather", rounded, numbers), to=TensorProto.FLOAT)
            return whole * self.op("Gather", (scale * np.float32(factor))[:, None], numbers)
        y = self.op("Gather", table, numbers)
        return y if factor == 1.0 else y * factor

    def scores(self, x: Value, table: np.ndarray, bias: Optional[np.ndarray] = None) -> Value:
        """x (..., D) times the rows of a table (types, D) that `rows` reads, too -> (..., types)."""
        if self.number_format == "int8":
            rounded, scale = in_8_bits(table)
            return self.rounded_product(x, self.constant(rounded).transpose(1, 0), scale, bias)
        y = x @ self.constant(table).transpose(1, 0)
        return y if bias is None else y + bias

    # ---------------------------------------------------------------------------------------- writing

    def save(self, path: Path) -> None:
        graph = helper.make_graph(self.nodes, path.stem, self.inputs, self.outputs, list(self.initialisers.values()))
        imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="mega_fairseq")
        path.write_bytes(model.SerializeToString())


def in_8_bits(weight: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """int8 numbers from -127 to 127 (out, in), and a scale (out,) for each row."""
    largest = np.abs(weight).max(1)
    scale = (np.where(largest > 0, largest, 1.0) / LARGEST).astype(np.float32)
    return np.rint(weight / scale[:, None]).astype(np.int8), scale
