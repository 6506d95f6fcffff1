"""Torch tensors on devices that torch has no tensors for: a subclass, and the devices in whose memory they are.

Autograd, modules and optimizers work as usual, since the subclass is below autograd: torch's formulas call aten
operations, which `dispatch.py` runs. Views share the buffer of their base, with offset and strides.

Torch knows no device type for such a tensor and reports "cpu". Tensors of the host that meet one in an operation are
copied to its device, so code that makes tensors on `x.device` works.

A device gives the table of aten operations memory and five kernels. `map`, `reduce`, `matmul`, `gather` and `scatter`
are templates. Their operands are DeviceTensors with any strides, so that views and broadcasting cost no copy.
Expressions are in the language that C and WGSL share: infix operators, the operands `x0`, `x1`, ..., floating scalars
`s0`, ..., integers `n0`, ..., the linear index `i` of the result, and the functions of `FUNCTIONS`. A backend evaluates
them in the requested dtype, and defines the functions.
"""

from __future__ import annotations

import importlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, ClassVar, TypeVar
from weakref import getweakrefcount

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from accelerant.errors import UnsupportedCase, UnsupportedDtype
from accelerant.ops._library import composed
from accelerant.runtime import registry
from accelerant.runtime.host import fork_safe
from accelerant.runtime.provider import Buffer, ComputeDevice, ComputeProvider

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
    """A device whose tensors are DeviceTensors of `dtypes`; others stay on the host.

    `overrides` has functions that replace the table's of an aten operation: func(device, *args, **kwargs).
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
        """Return two int32 in which kernels report an index out of range: its dimension's size + 1, then the index.

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

    def contiguous(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> DeviceTensor:
        """Return a contiguous copy, in a dtype if one is given."""
        out = self.empty(x.shape, x.dtype if dtype is None else dtype)
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


def span(x: torch.Tensor) -> int:
    """Return the index in memory of a tensor's last element, the first being 0."""
    return sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


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
    """Return the torch.device that names a device of TENSOR_DEVICES; torch has no tensors on it."""
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


# --- the tensors -----------------------------------------------------------------------------------------------------

_CPU = torch.device("cpu")
_T = TypeVar("_T")
_torch_data: Any = torch._C.TensorBase.data  # the property
_left = WeakTensorKeyDictionary()
"""Tensors that `cpu` returned: `x.data = y`, as in `module.cpu()`, moves x to the host for these, and copies others."""


class DeviceTensor(Tensor):
    """A tensor in `buffer`, memory of the TensorDevice `place` that views share."""

    place: TensorDevice
    buffer: Buffer

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # aten calls alone matter

    @staticmethod
    def __new__(
        cls: type[DeviceTensor], place: TensorDevice, buffer: Buffer, size: Sequence[int], stride: Sequence[int],
        offset: int, dtype: torch.dtype,
    ) -> DeviceTensor:  # fmt: skip
        """Return the tensor of a range of a buffer; offset and strides count elements."""
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=_CPU
        )
        made.place, made.buffer = place, buffer
        torch._C._set_throw_on_mutable_data_ptr(made)  # or code in C++ would write to address 0
        return made

    # --- to the host -------------------------------------------------------------------------------------------------

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """Return a copy on the host; gradients flow back."""
        host = to(self, "cpu")
        _left[host] = None
        return host

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy as a NumPy array."""
        return (self.detach() if force else self).cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError(f"a tensor on {self.place.label} is an array only as a copy, which copy=False refuses")
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __dlpack__(self, *, copy: bool | None = None, **options: Any) -> Any:
        if copy is False:
            raise BufferError(f"a tensor on {self.place.label} leaves it only as a copy, which copy=False refuses")
        return self.cpu().__dlpack__(**options)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.detach().cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # the name is torch's
        host = repr(self.place.download(self.detach()))
        if self.requires_grad:
            host = f"{host[:-1]}, requires_grad=True)" if self.is_leaf else f"{host[:-1]}, grad_fn={self.grad_fn})"
        return f"{host[:-1]}, device='{self.place.label}')"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else format(repr(self), spec)

    # --- the memory, which has no address in this process ------------------------------------------------------------

    def data_ptr(self) -> int:
        """Raise UnsupportedCase: the memory is the device's."""
        raise self._no_address("address")

    def untyped_storage(self) -> Any:
        """Raise UnsupportedCase: the memory is the device's."""
        if sys._getframe(1).f_globals.get("__name__") == "torch._subclasses.meta_utils":  # torch.export: its size alone
            return torch.UntypedStorage(super().untyped_storage().nbytes(), device="meta")
        raise self._no_address("storage")

    def storage(self) -> Any:
        """Raise UnsupportedCase: the memory is the device's."""
        raise self._no_address("storage")

    def share_memory_(self) -> Any:
        """Raise UnsupportedCase: processes share memory of the host alone."""
        raise self._no_address("memory that processes share")

    def is_shared(self) -> bool:
        """Return False: processes share memory of the host alone."""
        return False

    def _no_address(self, what: str) -> UnsupportedCase:
        return UnsupportedCase(f"a tensor on {self.place.label} has no {what}; use x.cpu(), a copy in host memory")

    # --- the content -------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Any:
        """The tensor apart from autograd; torch's own setter would leave `place` and `buffer` as they were."""
        return _torch_data.__get__(self)

    @data.setter
    def data(self, x: Tensor) -> None:
        if not isinstance(x, DeviceTensor) and (x in _left or not x.is_cpu):  # module.cpu(), .cuda()
            grad, moved = self.grad, _like(x.detach(), self)
            torch.utils.swap_tensors(self, moved)
            self.grad = None if grad is None else grad.cpu().to(x.device)
            return
        new = x if isinstance(x, DeviceTensor) else self.place.upload(x)
        _torch_data.__set__(self, new)
        torch._C._set_throw_on_mutable_data_ptr(self)
        self.place, self.buffer = new.place, new.buffer

    # --- copies of objects -------------------------------------------------------------------------------------------

    def __copy__(self) -> Any:
        """Return another tensor of the same memory, as torch does."""
        return _like(self.detach(), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("only leaf tensors (made by the user) can be copied by deepcopy; detach this one")
            with torch.no_grad():
                copied = self.place.contiguous(self.detach())
            memo[id(self)] = _like(copied, self)
            if self.grad is not None:
                memo[id(self)].grad = self.grad.__deepcopy__(memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a tensor of the host, which loads on any machine."""
        return _like(self.place.download(self.detach()), self).__reduce_ex__(protocol)


composed.add(DeviceTensor)
_compatible: Any = torch.ops.aten._has_compatible_shallow_copy_type.default


def _takes_data(keys: Any, x: Tensor, data: Tensor) -> bool:
    """Return whether `x.data = data` is possible: a tensor of the host cannot become one of another class."""
    if isinstance(data, DeviceTensor) and not isinstance(x, DeviceTensor):
        return False
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.PythonTLSSnapshot)
    return bool(_compatible.redispatch(keys & after, x, data))


_torch_library = torch.library.Library("aten", "IMPL")
_torch_library.impl("_has_compatible_shallow_copy_type", _takes_data, "PythonTLSSnapshot", with_keyset=True)
# the key of subclasses alone


def _like(copied: Tensor, original: Tensor) -> Any:
    """Return a copy as a parameter if the original is one, with its requires_grad."""
    if isinstance(original, nn.Parameter):
        return nn.Parameter(copied, original.requires_grad)
    return copied.requires_grad_(original.requires_grad)


# --- between devices -------------------------------------------------------------------------------------------------


class _Transfer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: registry.DeviceLike) -> Tensor:
        ctx.origin = x.place.label if isinstance(x, DeviceTensor) else x.device
        return _moved(x, device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _moved(dy, ctx.origin), None


@cache
def _follow_optimizers() -> None:
    """Install a hook that moves an optimizer's state to the devices of its parameters before each step."""

    def run(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, state in optimizer.state.items():
            for name, value in state.items() if isinstance(parameter, Tensor) else ():
                if name != "step" and isinstance(value, (Tensor, list)):  # a step is a number of the host
                    state[name] = tree_map(partial(_beside, parameter), value)

    register_optimizer_step_pre_hook(run)


def _beside(parameter: Tensor, x: Any) -> Any:
    there = getattr(parameter, "place", None)
    if not isinstance(x, Tensor) or getattr(x, "place", None) is there:
        return x
    return _moved(x, parameter.device if there is None else there.label)


def _moved(x: Tensor, device: registry.DeviceLike) -> Tensor:
    place = tensor_device(device)
    if place is not None:
        _follow_optimizers()
    if isinstance(x, DeviceTensor):
        if x.place is place:
            return x
        x = x.place.download(x.detach())
    return x.to(registry.find_device(device).torch_device) if place is None else place.upload(x)


def to(obj: _T, device: registry.DeviceLike) -> _T:
    """Move a tensor, the tensors of a list, tuple or dict, or a module's parameters and buffers to any device.

    On "opencl" torch's operations run on Accelerant's kernels; docs/backends.md lists them. A module is changed in
    place and keeps its parameter objects, so that optimizers made before stay valid; those of recurrent layers, which
    have weak references, are replaced. Gradients flow through the move of
    a tensor.

    >>> model = acl.to(model, "opencl")
    >>> loss = model(acl.to(x, "opencl")).square().mean()

    Args:
        obj: what to move.
        device: "opencl", "opencl:1", "cuda", "cpu", a torch.device, or an entry of `acl.devices()`; None and "auto" are
            the automatic choice.

    Raises:
        BackendUnavailable: the device is absent; with the reason.
        UnsupportedDtype: a tensor of a dtype that the device does not have.
    """
    if isinstance(obj, nn.Module):
        _move_module(obj, device)
        return obj
    return tree_map(lambda x: _move_tensor(x, device) if isinstance(x, Tensor) else x, obj)  # type: ignore[no-any-return]


def _move_tensor(x: Tensor, device: registry.DeviceLike) -> Tensor:
    moved: Tensor
    if isinstance(x, DeviceTensor) and x.place is tensor_device(device):
        return x
    if x.requires_grad and torch.is_grad_enabled():
        moved = _Transfer.apply(x, device)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return moved
    return _moved(x, device)


def _move_module(module: nn.Module, device: registry.DeviceLike) -> None:
    replaced: dict[int, nn.Parameter] = {}
    for parameter in [*module.parameters()]:  # shared ones once
        moved = _like(_moved(parameter.detach(), device), parameter)
        if parameter.grad is not None:
            moved.grad = _moved(parameter.grad, device)
        if getweakrefcount(parameter):  # torch swaps none that has weak references, as those of an LSTM
            replaced[id(parameter)] = moved
        else:
            torch.utils.swap_tensors(parameter, moved)
    for part in module.modules():
        for name, before in [*part._parameters.items()]:
            if before is not None and id(before) in replaced:
                setattr(part, name, replaced[id(before)])  # an LSTM's own __setattr__ updates its list of weights
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _moved(buffer, device)
