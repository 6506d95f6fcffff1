"""What a device without torch tensors gives to the table of aten operations: memory, and five kernels.

`map`, `reduce`, `matmul`, `gather` and `scatter` are templates. Their operands are DeviceTensors with any strides, so
that views and broadcasting cost no copy. Expressions are in the language that C and WGSL share: infix operators, the
operands `x0`, `x1`, ..., floating scalars `s0`, ..., integers `n0`, ..., the linear index `i` of the result, and the
functions of `FUNCTIONS`. A backend evaluates them in the requested dtype, and defines the functions.
"""

from __future__ import annotations

import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accelerant.errors import UnsupportedCase, UnsupportedDtype
from accelerant.runtime import registry
from accelerant.runtime.host import fork_safe
from accelerant.runtime.provider import Buffer, ComputeDevice, ComputeProvider

if TYPE_CHECKING:
    from accelerant.tensors.tensor import DeviceTensor

FUNCTIONS = (
    "exp", "log", "exp2", "log2",
    "sqrt", "tanh", "sin", "cos", "floor", "ceil", "trunc", "rint", "pow", "erf",  # of floating values
    "min", "max", "abs",  # of values of any dtype; a NaN is returned where there is one
    "select",  # select(b, a, condition): a where the condition holds, else b; as in WGSL
    "is_nan", "is_inf",
    "div_floor", "rem_floor", "div_trunc",  # Python's // and %, and the division of C; integers by 0 give 0
    "uniform", "normal",  # uniform(i, n0, n1): a value of Philox for this index and this seed; in [0, 1), or N(0, 1)
)  # fmt: skip
"""Functions of expressions."""

TENSOR_DEVICES: dict[str, tuple[str, str]] = {
    "opencl": ("accelerant.tensors.opencl", "OpenclTensors"),
    "webgpu": ("accelerant.tensors.webgpu", "WebgpuTensors"),
}
"""Backend -> module and class of its TensorDevice."""

SEVERAL = -(2**31)
"""The index in `TensorDevice.fault` for several that are flattened to one."""

_TORCH_TYPES = {"webgpu": "vulkan"}
"""Backend -> the type of torch.device that names it, where torch does not know its name; the registry knows both."""


class TensorDevice(ABC):
    """A device whose tensors are DeviceTensors.

    Attributes:
        dtypes: dtypes that tensors may have; others stay on the host.
        overrides: aten operation -> function that replaces the table's, called as func(device, *args, **kwargs).
    """

    dtypes: ClassVar[frozenset[torch.dtype]]
    overrides: ClassVar[dict[Any, Callable[..., Any]]] = {}

    def __init__(self, provider: ComputeProvider, index: int) -> None:
        self.provider, self.index = provider, index
        self.label = f"{provider.name}:{index}"
        self._fault: DeviceTensor | None = None
        self._indexed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label})"

    # --- memory ------------------------------------------------------------------------------------------------------

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> DeviceTensor:
        """Return a contiguous tensor with undefined content."""
        from accelerant.tensors.tensor import DeviceTensor

        if dtype not in self.dtypes:
            raise UnsupportedDtype(f"{self.label} has no tensors of {dtype}; it has {', '.join(map(str, self.dtypes))}")
        count, strides = 1, []
        for length in reversed(size):
            strides.append(count)
            count *= max(length, 1)
        numel = 0 if 0 in size else count
        return DeviceTensor(
            self, self.allocate(numel * dtype.itemsize), tuple(size), tuple(reversed(strides)), 0, dtype
        )

    def allocate(self, size_bytes: int) -> Buffer:
        """Return a buffer."""
        return self.provider.allocate(max(size_bytes, 4), self.index)

    def upload(self, x: torch.Tensor) -> DeviceTensor:
        """Return a copy of a host tensor."""
        if x.layout != torch.strided:
            raise UnsupportedCase(f"{self.label} has dense tensors alone, not of {x.layout}; pass x.to_dense()")
        out = self.empty(x.shape, x.dtype)
        if x.numel():
            dense = x.detach().contiguous().resolve_neg()  # whose strides of dimensions of one element may be any
            flat = dense.as_strided((x.numel(),), (1,)).view(torch.uint8)
            self.provider.copy_to_device(flat.numpy(), self.index, out=out.buffer)
        return out

    def download(self, x: torch.Tensor) -> torch.Tensor:
        """Return a host copy of a tensor; waits for it."""
        if not x.numel():
            return torch.empty(x.shape, dtype=x.dtype)
        whole: Any = x if x.is_contiguous() and not x.storage_offset() else self.contiguous(x)
        content = self.provider.copy_to_host(whole.buffer, "uint8", (x.numel() * x.dtype.itemsize,))
        if self._indexed:
            self._check_indices()
        return torch.from_numpy(content).view(x.dtype).reshape(x.shape)

    def fault(self) -> DeviceTensor:
        """Return two int32 for a kernel that reads indices: one of these out of range, behind its dimension's size + 1.

        They are 0 until then, and read at the next copy to the host.
        """
        if self._fault is None:
            self._fault = self.upload(torch.zeros(2, dtype=torch.int32))
        self._indexed = True
        return self._fault

    def _check_indices(self) -> None:
        """Raise IndexError if an index was out of range since the last copy to the host."""
        fault: Any = self._fault
        self._indexed = False
        size, index = self.provider.copy_to_host(fault.buffer, "int32", (2,)).tolist()
        if size:
            self._fault = None
            found = f"index {index}" if index != SEVERAL else "an index of several dimensions"
            raise IndexError(
                f"{found} is out of bounds for a dimension of size {size - 1}, in an operation on {self.label} since "
                "the last copy to the host"
            )

    def contiguous(self, x: torch.Tensor) -> DeviceTensor:
        """Return a contiguous copy."""
        out = self.empty(x.shape, x.dtype)
        self.copy(out, x)
        return out

    def converted(self, x: torch.Tensor, dtype: torch.dtype) -> DeviceTensor:
        """Return a contiguous copy in a dtype."""
        out = self.empty(x.shape, dtype)
        self.copy(out, x)
        return out

    def copy(self, out: DeviceTensor, x: Any) -> None:
        """Copy x, of any dtype and of a shape that broadcasts, to `out`."""
        same = x.dtype if x.dtype == out.dtype else torch.promote_types(x.dtype, out.dtype)
        if out.numel():
            self.map(out, "x0", (x,), compute=same)

    # --- the kernels -------------------------------------------------------------------------------------------------

    @abstractmethod
    def map(
        self, out: DeviceTensor, expression: str, inputs: Sequence[DeviceTensor] = (), scalars: Sequence[float] = (),
        integers: Sequence[int] = (), *, compute: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Write an expression of each element to `out`; the inputs broadcast to its shape, and may be `out` itself.

        Values are converted to `compute`, by default the dtype of `out`, and the result to the dtype of `out`.
        Comparisons give truth values, which a bool `out` takes. Scalars are of `compute`.
        """

    @abstractmethod
    def reduce(
        self, out: DeviceTensor, kind: str, inputs: Sequence[DeviceTensor], dims: Sequence[int], *, pre: str = "x0",
        post: str = "a", scalars: Sequence[float] = (), compute: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Reduce the expression `pre` of the inputs over `dims`, and write the expression `post` of the result `a`.

        Kinds: sum, prod, max, min, and argmax, argmin, which write the first index along the only one of `dims`. The
        inputs broadcast to one shape; `out` has that shape with sizes of 1 at `dims`. Nothing is reduced to the
        kind's neutral element. `compute` is by default the dtype of the first input.
        """

    @abstractmethod
    def matmul(self, out: DeviceTensor, a: DeviceTensor, b: DeviceTensor) -> None:
        """Write the products of (B, M, K) by (B, K, N) to (B, M, N), all of one dtype."""

    @abstractmethod
    def gather(self, out: DeviceTensor, x: DeviceTensor, dim: int, index: DeviceTensor) -> None:
        """Write x at `index` along `dim`, as torch.gather; `index` broadcasts to the shape of `out`.

        An index out of range gives NaN, of integers the nearest element, and is written to `fault`.
        """

    @abstractmethod
    def scatter(
        self, out: DeviceTensor, dim: int, index: DeviceTensor, source: DeviceTensor, *, add: bool,
        check: bool = True,
    ) -> None:  # fmt: skip
        """Write or add `source` to `out` at `index` along `dim`, as Tensor.scatter_; the index broadcasts to `source`.

        Sums are in the order of the source, the same in each run. An index out of range is left out, and written to
        `fault` with `check`.
        """


# --- layouts ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8192)
def merged(size: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[list[int]]]:
    """Merge dimensions that lie together in each operand; return sizes, and strides by operand."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for at, n in enumerate(size):
        if n == 1:
            continue
        if sizes and all(mine[-1] == each[at] * n for mine, each in zip(steps, strides, strict=True)):
            sizes[-1] *= n
            for mine, each in zip(steps, strides, strict=True):
                mine[-1] = each[at]
        else:
            sizes.append(n)
            for mine, each in zip(steps, strides, strict=True):
                mine.append(each[at])
    return sizes, steps


@lru_cache(maxsize=8192)
def expanded(size: tuple[int, ...], stride: tuple[int, ...], to: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor that broadcasts to a shape."""
    if size == to:
        return stride
    lead = len(to) - len(size)
    return (0,) * lead + tuple(0 if n == 1 and m != 1 else s for n, s, m in zip(size, stride, to[lead:], strict=True))


# --- the devices of this process -------------------------------------------------------------------------------------

_opened: dict[str, TensorDevice] = {}


def named(device: ComputeDevice) -> torch.device:
    """Return a device of TENSOR_DEVICES as a torch.device, which names it but has no tensors."""
    return torch.device(_TORCH_TYPES.get(device.backend, device.backend), device.index)


def serves(name: str) -> bool:
    """Return whether a device's name ("opencl:0") is of a backend in TENSOR_DEVICES."""
    return name.partition(":")[0].lower() in {*TENSOR_DEVICES, *_TORCH_TYPES.values()}


_lock = fork_safe(threading.RLock())


def tensor_device(device: registry.DeviceLike) -> TensorDevice | None:
    """Return the TensorDevice of a device; None where torch has tensors of its own."""
    found: ComputeDevice = registry.find_device(device)
    if found.backend not in TENSOR_DEVICES:
        return None
    with _lock:
        opened = _opened.get(found.label)
        provider = registry.create(found.backend)
        if opened is None or opened.provider is not provider:
            module, name = TENSOR_DEVICES[found.backend]
            opened = _opened[found.label] = getattr(importlib.import_module(module), name)(provider, found.index)
        return opened
