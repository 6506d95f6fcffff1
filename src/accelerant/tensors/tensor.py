"""Torch tensors on devices that torch has no tensors for: a subclass, the devices, and how aten operations run on them.

Autograd, modules and optimizers work as usual, since the subclass is below autograd. Views share the buffer of their
base, with offset and strides. Torch knows no device type for such a tensor and reports "cpu"; tensors of the host that
meet one in an operation are copied to its device.

`TABLE` maps an aten operation to a function of a TensorDevice and the operation's arguments, which returns
NotImplemented for a call that the kernels do not serve. Such a call, and an operation that the table lacks, runs on the
host, is counted with its bytes, and raises under the policy "forbid".

A device gives the table memory and five kernels; `map`, `reduce`, `matmul`, `gather` and `scatter` are templates. Their
operands are DeviceTensors with any strides. Expressions are in the language that C and WGSL share: infix operators, the
operands `x0`, `x1`, ..., floating scalars `s0`, ..., integers `n0`, ..., the linear index `i` of the result, and the
functions of `FUNCTIONS`.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any, ClassVar, TypeVar
from weakref import getweakrefcount

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from accelerant.config import settings
from accelerant.errors import FallbackWarning, UnsupportedCase, UnsupportedDtype
from accelerant.ops._library import composed, composite_of
from accelerant.runtime import registry
from accelerant.runtime.dispatch.operation import recoverable
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import Decision, FallbackRecord, OpRecord, RecordedLaunch, ledger, observers
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
    if (place := tensor_device(device)) is not None:
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


aten = torch.ops.aten
_Handler = Callable[..., Any]
TABLE: dict[Any, _Handler] = {}
"""Aten operation -> func(device, *args, **kwargs)."""

_ledger = ledger()
_handlers: dict[tuple[Any, type], _Handler | None] = {}
"""Operation and class of the device -> the function that runs it; None for one that the table lacks."""

_records: dict[tuple[Any, TensorDevice], OpRecord] = {}


def register(*names: str) -> Callable[[_Handler], _Handler]:
    """Decorate a function as the table's entry of aten operations, by name: "mm", all overloads; "sum.dim_IntList".

    With a function that takes `out`, "name_" is served in place.
    """

    def decorate(function: _Handler) -> _Handler:
        for name in names:
            base, _, overload = name.partition(".")
            packet = getattr(aten, base)
            for each in [overload] if overload else packet.overloads():
                op = getattr(packet, each)
                if not any(argument.is_out for argument in op._schema.arguments):  # those copy another's result
                    TABLE[op] = _in_place(function) if base.endswith("_") else function
        return function

    return decorate


def _in_place(function: _Handler) -> _Handler:
    def run(place: TensorDevice, target: DeviceTensor, *args: Any, **kwargs: Any) -> Any:
        return function(place, target, *args, out=target, **kwargs)

    return run


def _run(_: type, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Run an aten operation, some of whose arguments are DeviceTensors."""
    kwargs = kwargs or {}
    place = _place(args) or _place(kwargs.values())
    if place is None:  # a list of lists: rare
        place = next(x.place for x in tree_flatten((args, kwargs))[0] if isinstance(x, DeviceTensor))
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return _elsewhere(func, args, kwargs, torch.device(device))
    try:
        handler = _handlers[func, type(place)]
    except KeyError:
        handler = _handlers[func, type(place)] = _handler(func, place)
    if handler is None:
        return _on_host(func, place, args, kwargs)
    if (written := _written(func)) and _writes_host(written, args, kwargs):
        return _on_host(func, place, args, kwargs, reason="it writes a tensor of the host")
    if handler is _view or handler is _reshape:
        return handler(func, place, args, kwargs)
    if (record := _records.get((func, place))) is None:
        kind = "composite" if func.namespace == "accelerant" else "aten table"
        name = place.provider.name
        new = OpRecord(str(func), kind, name, place.label, "", True, reason=f"the table of {name}")
        record = _records[func, place] = _ledger.record(new)
    try:
        with RecordedLaunch(record, place.provider, place.index):
            result = handler(place, *args, **kwargs)
    except Exception as error:
        if not recoverable(error) or settings().fallback == "forbid" or not _can_repeat(func):
            raise
        return _on_host(func, place, args, kwargs, failure=f"{type(error).__name__}: {error}")
    if result is NotImplemented:
        _ledger.discount(record)
        return _on_host(func, place, args, kwargs)
    return result


DeviceTensor.__torch_dispatch__ = classmethod(_run)  # type: ignore[assignment]


def _place(args: Any) -> TensorDevice | None:
    for arg in args:
        if isinstance(arg, DeviceTensor):
            return arg.place
        if isinstance(arg, (list, tuple)):
            for each in arg:
                if isinstance(each, DeviceTensor):
                    return each.place
    return None


def _handler(func: Any, place: TensorDevice) -> _Handler | None:
    if func.namespace == "accelerant":
        _nested.add(func)
        composite = composite_of[func._schema.name.partition("::")[2]]
        return lambda _, *args: composite(*args)
    if (known := place.overrides.get(func) or TABLE.get(func)) is not None:
        return known
    if "c10d" in func.namespace:  # its operations write arguments that their schemas do not mark, and some later
        raise UnsupportedCase(f"{func}: torch.distributed moves no tensors of {place.label}; pass x.cpu()")
    if (functional := _without_out(func)) is not None:
        _nested.add(func)
        return partial(_into, func, functional)
    if func._schema.name.startswith("aten::_foreach_"):
        _nested.add(func)
        return partial(_each, func)
    if func._can_decompose():  # before views: reshape is one or a copy
        _nested.add(func)
        return lambda _, *args, **kwargs: func.decompose(*args, **kwargs)
    if func is torch.ops.aten._unsafe_view.default:
        return _view
    if torch.Tag.inplace_view in func.tags and not func._schema.name.startswith(("aten::resize", "aten::set_")):
        return _reshape
    aliases = [returned.alias_info for returned in func._schema.returns]
    return _view if any(alias is not None and not alias.is_write for alias in aliases) else None


def _without_out(func: Any) -> Any:
    """Return the functional overload of an out= overload; None for an operation without out=."""
    given = [(each.name, str(each.type)) for each in func._schema.arguments if not each.is_out]
    if len(given) == len(func._schema.arguments):
        return None
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        arguments = other._schema.arguments
        if [(each.name, str(each.type)) for each in arguments] == given and not other._schema.is_mutable:
            return other
    return None


def _into(func: Any, functional: Any, _: TensorDevice, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of new tensors, and copy them to those of out=."""
    names = [each.name for each in func._schema.arguments if each.is_out]
    targets = [kwargs.pop(name) for name in names]
    results = functional(*args, **kwargs)
    whole = [results] if isinstance(results, Tensor) else results
    for target, result in zip(targets, whole, strict=True):
        if not torch.can_cast(result.dtype, target.dtype):
            raise UnsupportedCase(f"{func}: the result is {result.dtype}, which out= of {target.dtype} cannot hold")
        if target.shape != result.shape:
            raise UnsupportedCase(
                f"{func}: out= has shape {tuple(target.shape)}, the result {tuple(result.shape)}; a tensor on "
                f"{target.place.label} is not resized: pass one of that shape"
            )
    for target, result in zip(targets, whole, strict=True):
        target.copy_(result)
    return targets[0] if isinstance(results, Tensor) else tuple(targets)


def _each(func: Any, _: TensorDevice, *args: Any, **kwargs: Any) -> Any:
    """Run a _foreach operation as one operation for each position of its lists."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    single = torch.linalg.vector_norm if name == "norm" else getattr(torch.ops.aten, name)
    count = next(len(arg) for arg in args if isinstance(arg, (list, tuple)))
    rows = [arg if isinstance(arg, (list, tuple)) else [arg] * count for arg in args]
    if name.startswith(("addcmul", "addcdiv")) and len(rows) == 4:  # the single one takes its fourth argument by name
        results = [single(*row, value=value) for *row, value in zip(*rows, strict=True)]
    else:
        results = [single(*row, **kwargs) for row in zip(*rows, strict=True)]
    return results if func._schema.returns else None


_STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default)


def _view(func: Any, place: TensorDevice, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that returns views, on shapes alone; the results share the buffer."""
    base = args[0]
    if not isinstance(base, DeviceTensor):
        raise UnsupportedCase(f"{func}: wanted a view of a tensor on {place.label}, got {type(base).__name__}")
    shape = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    if base.storage_offset():
        shape = shape.as_strided(base.shape, base.stride(), base.storage_offset())
    results = func(shape, *args[1:], **kwargs)
    whole = (results,) if isinstance(results, Tensor) else results
    for result in whole:
        if result.dtype != base.dtype or result.is_conj() or result.is_neg():
            raise UnsupportedCase(
                f"{func}: {place.label} has no view of {base.dtype} as {result.dtype}; make a copy, or use .cpu()"
            )
    if func in _STRIDED:
        end = int(results.storage_offset()) + span(results)
        if results.numel() and not 0 <= (end + 1) * base.dtype.itemsize <= base.buffer.size_bytes:
            raise RuntimeError(
                f"as_strided: sizes {tuple(results.shape)}, strides {results.stride()} and offset "
                f"{results.storage_offset()} end behind the memory, which has {base.buffer.size_bytes} bytes"
            )
    made = [DeviceTensor(place, base.buffer, x.shape, x.stride(), int(x.storage_offset()), x.dtype) for x in whole]
    return made[0] if isinstance(results, Tensor) else made


def _reshape(func: Any, place: TensorDevice, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an in-place view, such as `t_`: torch changes the sizes and strides of the tensor."""
    _view(func, place, args, kwargs)  # its checks
    with no_dispatch():
        func(*args, **kwargs)
    return args[0]


def _elsewhere(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Any:
    """Run an operation whose result belongs to another of torch's devices, from copies there."""

    def moved(x: Any) -> Any:
        if not isinstance(x, DeviceTensor):
            return x
        if device.type == "meta":
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return x.place.download(x)

    return func(*tree_map(moved, args), **tree_map(moved, dict(kwargs)))


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation writes."""
    return tuple(
        (at, each.name)
        for at, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )


def _writes_host(written: Sequence[tuple[int, str]], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    for at, name in written:
        given = args[at] if at < len(args) else kwargs.get(name)
        for each in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(each, Tensor) and not isinstance(each, DeviceTensor):
                return True
    return False


_nested: set[Any] = set()
"""Operations that run as others, each of which falls back by itself."""


@cache
def _can_repeat(func: Any) -> bool:
    """Return whether a failed operation left its arguments as they were: it writes one at most, in its last launch."""
    written = [each for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    one = len(written) == 1 and isinstance(written[0].type, torch.TensorType)
    return func not in _nested and (not written or one)


def _on_host(
    func: Any, place: TensorDevice, args: Sequence[Any], kwargs: Mapping[str, Any], *, reason: str = "",
    failure: str = "",
) -> Any:  # fmt: skip
    """Run an operation on host copies and write changed arguments back; without a `reason` it counts as a fallback."""
    lacking = "" if reason else failure or f"{place.label} has no kernel for this call"
    if lacking and settings().fallback == "forbid":
        raise UnsupportedCase(f"{func}: {lacking}, and the setting fallback='forbid' refuses the host")
    leaves, spec = tree_flatten((args, dict(kwargs)))
    moved = [place.download(x) if isinstance(x, DeviceTensor) else x for x in leaves]
    size = sum(x.numel() * x.dtype.itemsize for x in leaves if isinstance(x, DeviceTensor))
    host_args, host_kwargs = tree_unflatten(moved, spec)
    results = func(*host_args, **host_kwargs)
    sources = {id(host): x for host, x in zip(moved, leaves, strict=True) if isinstance(x, DeviceTensor)}
    size += _write_back(func, args, kwargs, host_args, host_kwargs)

    def uploaded(x: Any) -> Any:
        nonlocal size
        if not isinstance(x, Tensor):
            return x
        if id(x) in sources:  # an argument that was changed in place
            return sources[id(x)]
        if any(x is own for own in leaves):
            return x
        if x.dtype not in place.dtypes:
            raise UnsupportedDtype(
                f"{func}: the result is {x.dtype}, and {place.label} has no tensors of it; compute it from x.cpu()"
            )
        size += x.numel() * x.dtype.itemsize
        return place.upload(x)

    results = tree_map(uploaded, results)
    _count_host(func, place, leaves, size, reason or lacking, fallback=not reason)
    return results


def _write_back(func: Any, args: Any, kwargs: Any, host_args: Any, host_kwargs: Any) -> int:
    """Copy arguments that the operation changed to the device; return their bytes."""
    written = 0
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        pair = (
            (args[at], host_args[at]) if at < len(args) else (kwargs.get(argument.name), host_kwargs.get(argument.name))
        )
        targets, hosts = ([each] if isinstance(each, Tensor) else each or [] for each in pair)
        for target, host in zip(targets, hosts, strict=True):
            if isinstance(target, DeviceTensor):
                if target.shape != host.shape:
                    raise UnsupportedCase(f"{func}: the host's result has another shape, {tuple(host.shape)}")
                target.place.copy(target, target.place.upload(host))
                written += host.numel() * host.dtype.itemsize
    return written


def note_fallback(func: Any, place: TensorDevice, ran: str, reason: str, text: str) -> None:
    """Count a fallback in the ledger; warn at the first one, or at each under the setting "warn"."""
    entry = FallbackRecord(str(func), place.label, "aten table", ran, reason)
    if _ledger.fallback(entry) or settings().fallback == "warn":
        warnings.warn(text, FallbackWarning, stacklevel=3)


def _count_host(
    func: Any, place: TensorDevice, leaves: Sequence[Any], size_bytes: int, reason: str, *, fallback: bool
) -> None:
    shapes = " ".join(str(tuple(x.shape)).replace(" ", "") for x in leaves if isinstance(x, Tensor))
    key = (str(func), "host", place.provider.name, place.label, shapes)
    record = _ledger.record(OpRecord(*key, False, (("aten table", reason),), size_bytes, reason=reason))
    with _ledger.lock:
        record.calls += 1
    if fallback:
        text = f"{func} ({shapes}): {reason}; torch runs it on the host, with {size_bytes:,} bytes copied"
        note_fallback(func, place, "torch on the host", reason, text)
    for observer in list(observers):
        names = (str(func), shapes, place.label, "host")
        observer(Decision(*names, own=False, refused=(("aten table", reason),), reason=reason))
