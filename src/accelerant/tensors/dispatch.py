"""How an aten operation on DeviceTensors runs: by the table, as others, as a view of the buffer, or on the host.

`TABLE` maps an aten operation to a function of a TensorDevice and the operation's arguments, which returns
NotImplemented for a call that the kernels do not serve. Such a call, and an operation that the table lacks, runs on the
host, is counted with its bytes, and raises under the policy "forbid"; so does one that would have to return a view of
host memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from accelerant.config import settings
from accelerant.errors import FallbackWarning, UnsupportedCase, UnsupportedDtype
from accelerant.ops._library import composite_of
from accelerant.runtime.dispatch.operation import recoverable
from accelerant.runtime.ledger import Decision, FallbackRecord, OpRecord, RecordedLaunch, ledger, observers
from accelerant.tensors.tensor import DeviceTensor, TensorDevice, span

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
    record = _records.get((func, place))
    if record is None:
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
