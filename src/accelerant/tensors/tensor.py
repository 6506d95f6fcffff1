"""Torch tensors on devices that torch has no tensors for: a subclass whose aten operations run on a TensorDevice.

Autograd, modules and optimizers work as usual, since the subclass is below autograd: torch's formulas call aten
operations, which `__torch_dispatch__` looks up in the table. Views share the buffer of their base, with offset and
strides. An operation that the table lacks runs on the host, is counted with its bytes, and raises under the policy
"forbid"; so does one that would have to return a view of host memory.

Torch knows no device type for such a tensor and reports "cpu". Tensors of the host that meet one in an operation are
copied to its device, so code that makes tensors on `x.device` works.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar
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
from accelerant.runtime.ledger import Decision, FallbackRecord, OpRecord, ledger, observers
from accelerant.runtime.provider import Buffer
from accelerant.runtime.recorded_launch import RecordedLaunch
from accelerant.tensors.device import TensorDevice, tensor_device

_ledger = ledger()
_CPU, _META = torch.device("cpu"), torch.device("meta")
_T = TypeVar("_T")
_torch_data: Any = torch._C.TensorBase.data  # the property
_left = WeakTensorKeyDictionary()
"""What `cpu` returned: as data of a tensor (`module.cpu()`) it moves that to the host, and other data do not."""


class DeviceTensor(Tensor):
    """A tensor in the memory of a TensorDevice; `acl.to` makes one.

    Attributes:
        place: its device.
        buffer: the memory, which views share.
    """

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

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates the function that disables it
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an aten operation, some of whose arguments are DeviceTensors."""
        return _run(func, args, kwargs or {})

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
            return torch.UntypedStorage(super().untyped_storage().nbytes(), device=_META)
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
    """Have the optimizers of this process move their state to where their parameters are, before each step.

    `Optimizer.load_state_dict` puts it on `x.device`, and a module may have been moved since the last step.
    """

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


# --- operations ------------------------------------------------------------------------------------------------------

_Handler = Callable[..., Any]
_handlers: dict[tuple[Any, type], _Handler | None] = {}
"""Operation and class of the device -> the function that runs it; None for one that the table lacks."""

_records: dict[tuple[Any, TensorDevice], OpRecord] = {}


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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
    record = _records.get((func, place))
    if record is None:
        record = _records[func, place] = _new_record(func, place)
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
    from accelerant.tensors.table import TABLE

    if func.namespace == "accelerant":
        _nested.add(func)
        composite = composite_of[func._schema.name.partition("::")[2]]
        return lambda _, *args: composite(*args)
    known = place.overrides.get(func) or TABLE.get(func)
    if known is not None:
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
    """Return the overload that returns new tensors, of one that writes those of out=; None for other operations."""
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
    """Run an operation of lists of tensors as one operation for each of their places."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    single = torch.linalg.vector_norm if name == "norm" else getattr(torch.ops.aten, name)
    count = next(len(arg) for arg in args if isinstance(arg, (list, tuple)))
    rows = [arg if isinstance(arg, (list, tuple)) else [arg] * count for arg in args]
    if name.startswith(("addcmul", "addcdiv")) and len(rows) == 4:  # the single one takes its fourth argument by name
        results = [single(*row, value=value) for *row, value in zip(*rows, strict=True)]
    else:
        results = [single(*row, **kwargs) for row in zip(*rows, strict=True)]
    return results if func._schema.returns else None


def _new_record(func: Any, place: TensorDevice) -> OpRecord:
    kind = "composite" if func.namespace == "accelerant" else "aten table"
    key = (str(func), kind, place.provider.name, place.label, "")
    return _ledger.record(OpRecord(*key, True, reason=f"the table of {place.provider.name}"))


_STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default)


def _view(func: Any, place: TensorDevice, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that returns views, on shapes alone; the results share the buffer."""
    base = args[0]
    if not isinstance(base, DeviceTensor):
        raise UnsupportedCase(f"{func}: wanted a view of a tensor on {place.label}, got {type(base).__name__}")
    shape = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=_META)
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
        end = int(results.storage_offset()) + sum(
            (n - 1) * s for n, s in zip(results.shape, results.stride(), strict=True)
        )
        if results.numel() and not 0 <= (end + 1) * base.dtype.itemsize <= base.buffer.size_bytes:
            raise RuntimeError(
                f"as_strided: sizes {tuple(results.shape)}, strides {results.stride()} and offset "
                f"{results.storage_offset()} end behind the memory, which has {base.buffer.size_bytes} bytes"
            )
    made = [DeviceTensor(place, base.buffer, x.shape, x.stride(), int(x.storage_offset()), x.dtype) for x in whole]
    return made[0] if isinstance(results, Tensor) else made


def _reshape(func: Any, place: TensorDevice, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that changes the shape of a tensor in place: torch changes sizes and strides alone."""
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
    """Return whether an operation that failed left its arguments as they were.

    The table's operations write an argument in their last launch, and a launch that raises has not run. One that writes
    several may have written the first.
    """
    written = [each for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    one = len(written) == 1 and isinstance(written[0].type, torch.TensorType)
    return func not in _nested and (not written or one)


def _on_host(
    func: Any, place: TensorDevice, args: Sequence[Any], kwargs: Mapping[str, Any], *, reason: str = "",
    failure: str = "",
) -> Any:  # fmt: skip
    """Run an operation on host copies, count it with its bytes, and write changed arguments back.

    A `reason` says why the host is its place; without one it is a fallback, after a `failure` or for want of a kernel.
    """
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
    """Count a fallback of an operation in the ledger, and warn at the first one, or by the setting at each."""
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
