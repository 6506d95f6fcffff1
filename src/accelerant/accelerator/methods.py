"""The operations of the facade: what runs, how calls may be cut or merged, what they cost."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from accelerant import ops
from accelerant.algebra.field import op as field_op
from accelerant.errors import ShapeError

__all__ = ["METHODS", "Method", "Operations", "result_bytes"]

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """One operation.

    Attributes:
        run: on tensors of one device.
        merge: how many calls become one. "elements": each element for itself, so that flattened arguments are joined;
            "rows": each row (last dimension) for itself, further arguments shared; "stack": calls of one shape become
            a batch; None: they do not.
        example: arguments for Accelerator.benchmark: random, on a device, of so many rows.
        flops: operations of a call, from the tensors and the result.
        dtype: what plain Python numbers become.
    """

    run: Callable[..., torch.Tensor]
    merge: Literal["elements", "rows", "stack"] | None
    example: Callable[[torch.device, int], Tensors]
    flops: Callable[[Tensors, torch.Tensor], int]
    dtype: type[np.generic] = np.float32


def _floats(*shapes: tuple[int, ...]) -> Callable[[torch.device, int], Tensors]:
    """Random float32 tensors; a dimension of -1 is the number of rows that is asked for."""

    def make(device: torch.device, rows: int) -> Tensors:
        return tuple(torch.randn([rows if n < 0 else n for n in shape], device=device) for shape in shapes)

    return make


def _elements(device: torch.device, rows: int) -> Tensors:
    x = torch.randint(0, 2**62, (rows * 1024,), device=device).view(torch.uint64)
    return x, x.clone()


METHODS: dict[str, Method] = {
    "gelu": Method(ops.gelu, "elements", _floats((-1, 1024)), lambda args, y: 10 * y.numel()),
    "softmax": Method(ops.softmax, "rows", _floats((-1, 1024)), lambda args, y: 5 * y.numel()),
    "layer_norm": Method(ops.layer_norm, "rows", _floats((-1, 1024), (1024,), (1024,)), lambda args, y: 8 * y.numel()),
    "matmul": Method(
        ops.matmul,
        "stack",
        _floats((-1, 1024), (1024, 1024)),
        lambda args, y: 2 * y.numel() * args[0].shape[-1],
    ),
    "field_add": Method(field_op.add, "elements", _elements, lambda args, y: y.numel(), np.uint64),
}


class Operations(ABC):
    """The operations by name, for whatever can call them."""

    @abstractmethod
    def _call(self, name: str, arrays: tuple[Any, ...], **options: Any) -> Any:
        """Do or note a call."""

    def gelu(self, x: Any, approximate: str = "none") -> Any:
        """Multiply x by the normal distribution function at x; see accelerant.ops.gelu."""
        return self._call("gelu", (x,), approximate=approximate)

    def softmax(self, x: Any, dim: int = -1) -> Any:
        """Exponentials of x over their sum along dim; see accelerant.ops.softmax."""
        return self._call("softmax", (x,), dim=dim)

    def layer_norm(self, x: Any, weight: Any, bias: Any = None, *, eps: float = 1e-5) -> Any:
        """Rows of x at mean 0 and variance 1, times weight, plus bias; see accelerant.ops.layer_norm."""
        return self._call("layer_norm", (x, weight) if bias is None else (x, weight, bias), eps=eps)

    def matmul(self, a: Any, b: Any) -> Any:
        """The matrix product; see accelerant.ops.matmul."""
        return self._call("matmul", (a, b))

    def field_add(self, x: Any, y: Any, *, field: str = "goldilocks") -> Any:
        """The sum of field elements; see accelerant.algebra.field.add."""
        return self._call("field_add", (x, y), field=field)


def result_bytes(name: str, arrays: tuple[Any, ...]) -> int:
    """Bytes of a call's inputs and result, from the inputs alone.

    Raises:
        ShapeError: matmul of scalars.
    """
    sizes = [_nbytes(array) for array in arrays]
    if name != "matmul":
        return sum(sizes) + sizes[0]
    a, b = (x if hasattr(x, "shape") else np.asarray(x) for x in arrays)
    if a.ndim < 1 or b.ndim < 1:
        raise ShapeError(f"matmul wants at least one dimension, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    rows, columns = math.prod(a.shape[:-1]), b.shape[-1] if b.ndim > 1 else 1
    return sum(sizes) + int(rows * columns * sizes[0] // max(1, math.prod(a.shape)))


def _nbytes(x: Any) -> int:
    return int(x.nbytes) if hasattr(x, "nbytes") else int(np.asarray(x).nbytes)
