"""What a multi-tensor kernel reads its tensors by: addresses, sizes and groups on the device, made once and kept.

A table holds addresses and no tensors, so that a gradient that is freed is free. It is found again by the addresses
themselves: while gradients come back to where they were, a step copies nothing. Where they moved, the new table goes
through pinned memory, and nothing waits. Under CUDA graph capture that copy becomes part of the graph, from pinned
memory that was set aside before and is never reused.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops._launch import ceil_div
from accelerant.ops._library import name_of
from accelerant.runtime.streams.stream import capturing

__all__ = ["DTYPES", "Part", "Share", "Table", "Tensors", "Values", "Workspace", "alike", "capturing", "check"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Of parameters and gradients."""

COLUMNS = 8
COEFFICIENTS = 16
_TABLES_LIMIT = 8
_data_ptr = torch.Tensor.data_ptr  # a third faster through map than as methods of each
_is_contiguous = torch.Tensor.is_contiguous
_SPARES = 4


class Tensors(NamedTuple):
    """The tensors of one device that one call takes; the lists are of one length, or empty where there is nothing.

    Attributes:
        params, grads: the parameters and their gradients; the norm and the clipping take gradients alone.
        first, second: exp_avg and exp_avg_sq, or momentum buffers (None for a group without) and nothing.
        masters: float32 copies of the parameters, None where there is none.
        counters: AdamW's step counters, float32 scalars on the device.
        groups: of each tensor, the number of its group.
        new: the places of momentum buffers that were made for this step.
    """

    params: list[Tensor]
    grads: list[Tensor]
    first: list[Tensor | None]
    second: list[Tensor]
    masters: list[Tensor | None]
    counters: list[Tensor]
    groups: list[int]
    new: tuple[int, ...] = ()


class Share(NamedTuple):
    """What one launch serves: the tensors of one combination of dtypes.

    Attributes:
        param, grad, state: dtypes, None for what is not there.
        master: whether a float32 copy of the parameter is updated.
        layout: "aligned" to 16 bytes, "unaligned", or "strided": with gaps, or parameter, gradient and state not alike.
        tensors, elements: how many.
    """

    param: torch.dtype | None
    grad: torch.dtype
    state: torch.dtype | None
    master: bool
    layout: str
    tensors: int
    elements: int

    def __str__(self) -> str:
        named = (("param", self.param), ("grad", self.grad), ("state", self.state))
        words = [f"{name} {name_of(dtype)}" for name, dtype in named if dtype is not None]
        return f"{self.elements} ({', '.join(words + ['master'] * self.master)}, {self.layout})"


@dataclass(slots=True)
class Part:
    """A share with the places of its tensors."""

    share: Share
    members: tuple[int, ...]
    numels: tuple[int, ...]


class Workspace:
    """Tables of one device, for one optimiser.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.values = Values(device)
        self.norm = torch.zeros((), dtype=torch.float32, device=device)
        self._tables: OrderedDict[Any, Table] = OrderedDict()
        self._spares: list[Tensor] = []
        self._spare_size = 0
        self._captured: list[object] = []

    def table(self, tensors: Tensors) -> Table:
        """The table of these tensors, kept from before or made."""
        try:
            key = _key(tensors)
        except RuntimeError:  # sparse: there is no address
            check(tensors)
            raise
        found = self._tables.get(key)
        if found is None:
            check(tensors)
            found = Table(self, tensors, key[0])
            if not capturing(self.device):
                self._tables[key] = found
                while len(self._tables) > _TABLES_LIMIT:
                    self._tables.popitem(last=False)[1].retire()
        if self.device.type == "cuda":
            if len(self._spares) < _SPARES:
                self.set_aside(self._spare_size)
            found.used_on(torch._C._cuda_getCurrentRawStream(self.device.index))
            if capturing(self.device):
                self._captured.append(found)
        return found

    def to_device(self, values: np.ndarray[Any, Any]) -> Tensor:
        """Integers on the device, by a copy that waits for nothing; under capture by one that the graph repeats.

        Raises:
            ConfigError: a capture for which nothing was set aside, since no step went before it.
        """
        flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
        if self.device.type != "cuda":
            return flat.clone()
        size = flat.numel()
        if capturing(self.device):
            place = next((i for i, spare in enumerate(self._spares) if spare.numel() >= size), None)
            if place is None:
                raise ConfigError(
                    "no memory is set aside for a step under graph capture: run a step before the capture, with the "
                    f"same parameters; it serves {_SPARES} captured steps"
                )
            pinned = self._spares.pop(place)
            self._captured.append(pinned)
        else:
            pinned = _pinned(size)
        pinned[:size].copy_(flat)
        moved = torch.empty(size, dtype=torch.int64, device=self.device)
        moved.copy_(pinned[:size], non_blocking=True)
        return moved

    def keep(self, captured: object) -> None:
        """Hold what a captured graph uses for as long as this is."""
        self._captured.append(captured)

    def set_aside(self, size: int) -> None:
        """Keep pinned memory ready for a capture; nothing where enough is there."""
        self._spare_size = size
        if not size or self.device.type != "cuda" or capturing(self.device):
            return
        self._spares = [spare for spare in self._spares if spare.numel() >= size]
        while len(self._spares) < _SPARES:
            self._spares.append(_pinned(size))


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)


def _copy(source: Tensor, device: torch.device) -> Tensor:
    """From the CPU to a device, waiting for nothing."""
    return source.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else source.to(device)


def _lists(tensors: Tensors) -> tuple[Sequence[Tensor | None], ...]:
    """In the order of the table's columns."""
    return tensors.params, tensors.grads, tensors.first, tensors.second, tensors.masters, tensors.counters


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    try:
        return list(map(_data_ptr, tensors))  # type: ignore[arg-type]
    except TypeError:  # None among them
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _key(tensors: Tensors) -> tuple[tuple[int, ...], Any, tuple[torch.dtype, ...], Any, tuple[int, ...]]:
    """What a table depends on: addresses, and what may change at an address."""
    addresses = tuple(chain.from_iterable([_addresses(each) for each in _lists(tensors)]))
    dense = all(map(_is_contiguous, tensors.grads))
    strides = () if dense else tuple([grad.stride() for grad in tensors.grads])
    return addresses, strides, tuple([grad.dtype for grad in tensors.grads]), tuple(tensors.groups), tensors.new


class Table:
    """Where a call's tensors are; on the device when a kernel first asks.

    Attributes:
        parts: the tensors by combination of dtypes, the largest first.
        shape: tensors and elements, for a Case.
        by_group: for torch's updates, what they found out about the groups; None before.
    """

    def __init__(self, workspace: Workspace, tensors: Tensors, addresses: tuple[int, ...]) -> None:
        self._workspace = workspace
        self._streams: set[int] = set()
        self._groups = tensors.groups
        self._new = tensors.new
        self._lengths = tuple([len(each) for each in _lists(tensors)])
        self._addresses = addresses
        self.numels = tuple([grad.numel() for grad in tensors.grads])
        self.parts = _parts(tensors, self.numels)
        self.shape = (len(tensors.grads), sum(self.numels))
        self.shares = tuple(part.share for part in self.parts)
        self.by_group: Any = None
        self._rows: Tensor | None = None
        self._coefficients: Tensor | None = None
        self._partials: dict[int, Tensor] = {}
        self._maps: dict[tuple[int, int], Tensor] = {}

    def rows(self) -> Tensor:
        """(tensors, 8) int64, as the header of the kernels says."""
        if self._rows is None:
            count = len(self.numels)
            rows = np.zeros((count, COLUMNS), dtype=np.int64)
            start = 0
            for column, length in enumerate(self._lengths):
                if length:
                    rows[:, column] = self._addresses[start : start + length]
                start += length
            if self._new:
                rows[list(self._new), 5] = 1
            rows[:, 6] = self.numels
            rows[:, 7] = self._groups or 0
            self._workspace.set_aside(rows.size)
            self._rows = self._workspace.to_device(rows)
        return self._rows

    def coefficients(self) -> Tensor:
        """(tensors, 16) float32, for a _prepare kernel to fill."""
        if self._coefficients is None:
            self._coefficients = torch.empty(
                len(self.numels) * COEFFICIENTS, dtype=torch.float32, device=self._workspace.device
            )
        return self._coefficients

    def partials(self, count: int, block: int) -> Tensor:
        """Zeros for one number a chunk, a multiple of block."""
        size = max(1, ceil_div(count, block)) * block
        found = self._partials.get(size)
        if found is None:
            device = self._workspace.device
            found = torch.zeros(size, dtype=torch.float32, device=device)
            if capturing(device):  # zeros only once the graph has run
                self._workspace.keep(found)
            else:
                self._partials[size] = found
        return found

    def chunks(self, place: int, chunk: int) -> Tensor:
        """The map of a part: int64, one a chunk."""
        found = self._maps.get((place, chunk))
        if found is None:
            part = self.parts[place]
            found = self._maps[place, chunk] = _map(self._workspace.device, part.members, part.numels, chunk)
        return found

    def used_on(self, stream: int) -> None:
        """Remember a stream that reads the table."""
        self._streams.add(stream)

    def retire(self) -> None:
        """Before the table is freed: the allocator must wait for every stream that still reads it."""
        if len(self._streams) > 1:
            own = (self._rows, self._coefficients, *self._partials.values(), *self._maps.values())
            held = [each for each in own if each is not None]
            for tensor in held:
                for stream in self._streams:
                    tensor.record_stream(torch.cuda.ExternalStream(stream, device=tensor.device))


@functools.lru_cache(maxsize=64)
def _map(device: torch.device, members: tuple[int, ...], numels: tuple[int, ...], chunk: int) -> Tensor:
    """The chunks of some tensors; an empty tensor has one, where its counter is stepped."""
    if capturing(device):
        raise ConfigError("a step under graph capture with parameters that none before had: run it once before")
    counts = np.maximum(1, -(-np.array(numels, dtype=np.int64) // chunk))
    tensor = np.repeat(np.array(members, dtype=np.int64), counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    found = _copy(torch.from_numpy((tensor << 32) | number), device)
    if device.type == "cuda":  # other streams may use it too
        torch.cuda.current_stream(device).synchronize()
    return found


# --- what may be asked ------------------------------------------------------------------------------------------------


def check(tensors: Tensors) -> None:
    """Whether gradients fit their parameters.

    Raises:
        ConfigError: a sparse gradient.
        ShapeError: a gradient of another shape or on another device.
        UnsupportedDtype: other than float16, bfloat16, float32, float64.
    """
    for place, (param, grad) in enumerate(zip(tensors.params or tensors.grads, tensors.grads, strict=True)):
        if grad.layout != torch.strided:
            raise ConfigError(f"gradient {place} is {grad.layout}: use torch.optim.SparseAdam, or dense gradients")
        if grad.shape != param.shape or grad.device != param.device:
            wanted, got = (f"{tuple(each.shape)} on {each.device}" for each in (param, grad))
            raise ShapeError(f"gradient {place} must be {wanted}, got {got}")
        for name, tensor in (("parameter", param), ("gradient", grad)):
            if tensor.dtype not in DTYPES:
                allowed = ", ".join(map(name_of, DTYPES))
                raise UnsupportedDtype(f"optimisers take {allowed}; {name} {place} is {name_of(tensor.dtype)}")


# --- what a table is made from ---------------------------------------------------------------------------------------


def _parts(tensors: Tensors, numels: tuple[int, ...]) -> list[Part]:
    places: dict[tuple[Any, ...], list[int]] = {}
    for place in range(len(tensors.grads)):
        places.setdefault(_kind(tensors, place), []).append(place)
    parts = []
    for kind, members in places.items():
        sizes = tuple([numels[place] for place in members])
        param, grad, state, master, layout = kind
        share = Share(param, grad, state, master, layout, len(members), sum(sizes))
        parts.append(Part(share, tuple(members), sizes))
    return sorted(parts, key=lambda part: -part.share.elements)


def _kind(tensors: Tensors, place: int) -> tuple[Any, ...]:
    """dtypes, master and layout of one tensor's share."""
    grad = tensors.grads[place]
    param = tensors.params[place] if tensors.params else None
    first = tensors.first[place] if tensors.first else None
    second = tensors.second[place] if tensors.second else None
    master = tensors.masters[place] if tensors.masters else None
    state = None if first is None else first.dtype
    together = [each for each in (param, grad, first, second, master) if each is not None]
    if not alike(together):
        layout = "strided"
    elif second is not None and second.dtype != state:
        layout = "strided"  # no kernel for two dtypes of state either
    else:
        layout = "unaligned" if any(each.data_ptr() % 16 for each in together) else "aligned"
    return None if param is None else param.dtype, grad.dtype, state, master is not None, layout


def alike(tensors: Sequence[Tensor | None]) -> bool:
    """Whether tensors of one shape lie alike, without gaps; None is passed over."""
    there = [each for each in tensors if each is not None]
    if all(each.is_contiguous() for each in there):
        return True
    layout = _layout(there[0])
    return _dense(there[0]) and all(_layout(each) == layout for each in there)


def _layout(x: Tensor) -> tuple[tuple[int, int], ...]:
    """Sizes and strides of the dimensions that matter to where elements lie."""
    return tuple((size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1)


def _dense(x: Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in _layout(x)):
        if stride != expected:
            return False
        expected *= size
    return True


# --- the values of parameter groups ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Values:
    """The numbers of the parameter groups on a device: one memory, that graphs read again at each replay."""

    device: torch.device
    _known: tuple[tuple[float, ...], ...] | None = None
    _memory: Tensor | None = None
    _keep: list[Tensor] = field(default_factory=list)

    def refresh(self, rows: tuple[tuple[float, ...], ...]) -> Tensor:
        """(groups, 8) int64 on the device: seven float64 as bits, and the address of a learning rate or 0.

        Raises:
            ConfigError: they changed, and the stream is being captured.
        """
        if self._memory is not None and rows == self._known:
            return self._memory
        if capturing(self.device):
            raise ConfigError(
                "the values of the parameter groups changed since the last step, and this one is being captured: call "
                "refresh() before the capture, or keep the learning rate in a tensor on the device"
            )
        bits = np.zeros((len(rows), COLUMNS), dtype=np.int64)
        for row, values in zip(bits, rows, strict=True):
            row[:7].view(np.float64)[:] = values[:7]
            row[7] = int(values[7])
        source = torch.from_numpy(bits.reshape(-1))
        if self._memory is None or self._memory.numel() != source.numel():
            if self._memory is not None:
                self._keep.append(self._memory)  # a graph may read it
            self._memory = torch.empty(source.numel(), dtype=torch.int64, device=self.device)
        self._memory.copy_(source.pin_memory() if self.device.type == "cuda" else source, non_blocking=True)
        self._known = rows
        return self._memory
