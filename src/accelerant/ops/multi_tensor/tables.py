"""Tables by which a multi-tensor kernel reads its tensors: addresses, sizes and groups on the device.

A table holds addresses, not tensors, so that gradients can be freed. Tables are kept and found by the addresses: while
gradients return to the same memory, a step copies nothing to the device. A new table is copied from pinned memory
without synchronizing. Under CUDA graph capture the copy becomes part of the graph, from pinned memory that was reserved
before the capture and is never reused.
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

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.ops._launch import ceil_div
from accelerant.ops._library import FLOATING, name_of
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.streams.stream import capturing

__all__ = [
    "DTYPES", "AdamWGroup", "Bucket", "GroupValues", "SGDGroup", "Table", "Tensors", "Update", "Workspace", "capturing",
    "check", "same_layout",
]  # fmt: skip

DTYPES = FLOATING  # of parameters and gradients

_COLUMNS = 8
_COEFFICIENTS = 16
_MAX_TABLES = 8
_RESERVED = 4  # pinned buffers kept for captures
_data_ptr = torch.Tensor.data_ptr  # map with the unbound method is a third faster than calling each tensor's
_is_contiguous = torch.Tensor.is_contiguous


class Tensors(NamedTuple):
    """The tensors of one call, on one device; the lists have one length, or are empty if not applicable.

    Norm and clipping use gradients only. `first` and `second` are exp_avg and exp_avg_sq, or momentum buffers (None in
    groups without) and nothing; `masters` float32 copies or None; `counters` AdamW's, float32 scalars; `groups` each
    tensor's parameter group; `new` indices of momentum buffers that were allocated for this step.
    """

    params: list[Tensor]
    grads: list[Tensor]
    first: list[Tensor | None]
    second: list[Tensor]
    masters: list[Tensor | None]
    counters: list[Tensor]
    groups: list[int]
    new: tuple[int, ...] = ()


class Bucket(NamedTuple):
    """The tensors of one combination of dtypes (None if absent) and layout, which one launch updates.

    `master`: a float32 copy is updated. `layout`: "aligned" to 16 bytes, "unaligned", or "strided": gaps or differing
    ones.
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


class Workspace:
    """The tables, group values and reserved memory of one optimizer on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.values = GroupValues(device)
        self.norm = torch.zeros((), dtype=torch.float32, device=device)
        self._tables: OrderedDict[Any, Table] = OrderedDict()
        self._reserved: list[Tensor] = []
        self._reserved_size = 0
        self.captured: list[object] = []  # what captured graphs use, held as long as the workspace exists

    def table(self, tensors: Tensors) -> Table:
        """Return the table of these tensors, kept or new."""
        try:
            key = _key(tensors, self.device)
        except RuntimeError:  # sparse gradients have no address
            check(tensors)
            raise
        table = self._tables.get(key)
        if table is None:
            check(tensors)
            table = Table(self, tensors, key[0])
            if not capturing(self.device):
                self._tables[key] = table
                while len(self._tables) > _MAX_TABLES:
                    self._tables.popitem(last=False)[1].retire()
        if self.device.type == "cuda":
            if len(self._reserved) < _RESERVED:
                self.reserve(self._reserved_size)
            table.streams.add(torch._C._cuda_getCurrentRawStream(self.device.index))
            if capturing(self.device):
                self.captured.append(table)
        return table

    def to_device(self, values: np.ndarray[Any, Any]) -> Tensor:
        """Copy integers to the device asynchronously; under capture from memory that the graph's replays read again.

        Raises ConfigError for a capture without reserved memory, since no step preceded it.
        """
        flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
        if self.device.type != "cuda":
            return flat.clone()
        size = flat.numel()
        if capturing(self.device):
            index = next((i for i, buffer in enumerate(self._reserved) if buffer.numel() >= size), None)
            if index is None:
                raise ConfigError(
                    "no memory is set aside for a step under graph capture: run a step before the capture, with the "
                    f"same parameters; it serves {_RESERVED} captured steps"
                )
            pinned = self._reserved.pop(index)
            self.captured.append(pinned)
        else:
            pinned = _pinned(size)
        pinned[:size].copy_(flat)
        copy = torch.empty(size, dtype=torch.int64, device=self.device)
        copy.copy_(pinned[:size], non_blocking=True)
        return copy

    def reserve(self, size: int) -> None:
        """Keep pinned memory of at least `size` integers ready for captures."""
        self._reserved_size = size
        if not size or self.device.type != "cuda" or capturing(self.device):
            return
        self._reserved = [buffer for buffer in self._reserved if buffer.numel() >= size]
        while len(self._reserved) < _RESERVED:
            self._reserved.append(_pinned(size))


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)


def _columns(tensors: Tensors) -> tuple[Sequence[Tensor | None], ...]:
    """Return the lists in the order of the table's columns."""
    return tensors.params, tensors.grads, tensors.first, tensors.second, tensors.masters, tensors.counters


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    try:
        return list(map(_data_ptr, tensors))  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # None among them, or memory that has no address here
        return [_address(tensor) for tensor in tensors]


def _address(tensor: Tensor | None) -> int:
    try:
        return 0 if tensor is None else tensor.data_ptr()
    except UnsupportedCase:  # on OpenCL or WebGPU
        return 0


def _key(tensors: Tensors, device: torch.device) -> tuple[Any, ...]:
    """Return all that a table depends on: addresses, and the properties that may change at an address.

    Torch's functions read no address, and autograd gives the gradients new ones in each step: their shapes are
    those of the parameters.
    """
    columns = _columns(tensors)
    if tensors.params and refuses_triton(device) is not None:
        columns = columns[:1] + columns[2:]
    addresses = tuple(chain.from_iterable([_addresses(column) for column in columns]))
    dense = all(map(_is_contiguous, tensors.grads))
    strides = () if dense else tuple([grad.stride() for grad in tensors.grads])
    return addresses, strides, tuple([grad.dtype for grad in tensors.grads]), tuple(tensors.groups), tensors.new


class Table:
    """The addresses of a call's tensors, copied to the device when a kernel first needs them.

    `buckets` come the largest first; `shape` is the number of tensors and of elements, for a Case; `streams` are the
    CUDA streams that read the table; `by_group` caches the classification of the groups for torch's functions.
    """

    def __init__(self, workspace: Workspace, tensors: Tensors, addresses: tuple[int, ...]) -> None:
        self._workspace = workspace
        self.streams: set[int] = set()
        self._groups = tensors.groups
        self._new = tensors.new
        self._lengths = tuple([len(column) for column in _columns(tensors)])
        self._addresses = addresses
        self.numels = tuple([grad.numel() for grad in tensors.grads])
        members: dict[tuple[Any, ...], list[int]] = {}
        for index in range(len(tensors.grads)):
            members.setdefault(_classify(tensors, index), []).append(index)
        buckets = [
            (Bucket._make((*kind, len(indices), sum(self.numels[i] for i in indices))), tuple(indices))
            for kind, indices in members.items()
        ]
        buckets.sort(key=lambda pair: -pair[0].elements)
        self.buckets = tuple([bucket for bucket, _ in buckets])
        self._members = [indices for _, indices in buckets]
        self.shape = (len(tensors.grads), sum(self.numels))
        self.by_group: Any = None
        self._rows: Tensor | None = None
        self._coefficients: Tensor | None = None
        self._partials: dict[int, Tensor] = {}
        self._maps: dict[tuple[int, int], Tensor] = {}

    def rows(self) -> Tensor:
        """Return (tensors, 8) int64, as described in triton_kernels.py."""
        if self._rows is None:
            rows = np.zeros((len(self.numels), _COLUMNS), dtype=np.int64)
            start = 0
            for column, length in enumerate(self._lengths):
                if length:
                    rows[:, column] = self._addresses[start : start + length]
                start += length
            if self._new:
                rows[list(self._new), 5] = 1
            rows[:, 6] = self.numels
            rows[:, 7] = self._groups or 0
            self._workspace.reserve(rows.size)
            self._rows = self._workspace.to_device(rows)
        return self._rows

    def coefficients(self) -> Tensor:
        """Return memory for (tensors, 16) float32, which a _prepare kernel fills."""
        if self._coefficients is None:
            size, device = len(self.numels) * _COEFFICIENTS, self._workspace.device
            self._coefficients = torch.empty(size, dtype=torch.float32, device=device)
        return self._coefficients

    def partials(self, count: int, block: int) -> Tensor:
        """Return zeros for at least `count` partial sums, a multiple of block."""
        size = max(1, ceil_div(count, block)) * block
        partials = self._partials.get(size)
        if partials is None:
            device = self._workspace.device
            partials = torch.zeros(size, dtype=torch.float32, device=device)
            if capturing(device):  # zeros only once the graph has run
                self._workspace.captured.append(partials)
            else:
                self._partials[size] = partials
        return partials

    def chunks(self, bucket: int, chunk: int) -> Tensor:
        """Return the chunk map of a bucket: int64, one per chunk."""
        chunks = self._maps.get((bucket, chunk))
        if chunks is None:
            members = self._members[bucket]
            numels = tuple([self.numels[i] for i in members])
            chunks = self._maps[bucket, chunk] = _chunk_map(self._workspace.device, members, numels, chunk)
        return chunks

    def retire(self) -> None:
        """Tell the allocator, before the table is freed, to wait for every stream that still reads it."""
        if len(self.streams) > 1:
            for tensor in (self._rows, self._coefficients, *self._partials.values(), *self._maps.values()):
                if tensor is not None:
                    for stream in self.streams:
                        tensor.record_stream(torch.cuda.ExternalStream(stream, device=tensor.device))


@functools.lru_cache(maxsize=64)
def _chunk_map(device: torch.device, members: tuple[int, ...], numels: tuple[int, ...], chunk: int) -> Tensor:
    """Return the map of some tensors' chunks; an empty tensor has one, in which its counter is incremented."""
    if capturing(device):
        raise ConfigError("a step under graph capture with parameters that none before had: run it once before")
    counts = np.maximum(1, -(-np.array(numels, dtype=np.int64) // chunk))
    tensor = np.repeat(np.array(members, dtype=np.int64), counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    source = torch.from_numpy((tensor << 32) | number)
    if device.type != "cuda":
        return source.to(device)
    chunks = source.pin_memory().to(device, non_blocking=True)
    torch.cuda.current_stream(device).synchronize()  # other streams may use it too
    return chunks


def check(tensors: Tensors) -> None:
    """Check gradients: ConfigError for a sparse one, ShapeError and UnsupportedDtype if one does not match."""
    for i, (param, grad) in enumerate(zip(tensors.params or tensors.grads, tensors.grads, strict=True)):
        if grad.layout != torch.strided:
            raise ConfigError(f"gradient {i} is {grad.layout}: use torch.optim.SparseAdam, or dense gradients")
        if grad.shape != param.shape or grad.device != param.device:
            expected, got = (f"{tuple(x.shape)} on {x.device}" for x in (param, grad))
            raise ShapeError(f"gradient {i} must be {expected}, got {got}")
        for name, tensor in (("parameter", param), ("gradient", grad)):
            if tensor.dtype not in DTYPES:
                allowed = ", ".join(map(name_of, DTYPES))
                raise UnsupportedDtype(f"optimizers take {allowed}; {name} {i} is {name_of(tensor.dtype)}")


# --- layouts ---------------------------------------------------------------------------------------------------------


def _classify(tensors: Tensors, i: int) -> tuple[Any, ...]:
    """Return the first fields of tensor i's Bucket: dtypes, master and layout."""
    columns = tensors.params, tensors.grads, tensors.first, tensors.second, tensors.masters
    param, grad, first, second, master = (column[i] if column else None for column in columns)
    present = [x for x in (param, grad, first, second, master) if x is not None]
    state = None if first is None else first.dtype
    if not same_layout(present) or (second is not None and second.dtype != state):  # no kernel for two state dtypes
        layout = "strided"
    else:
        layout = "unaligned" if any(_address(x) % 16 for x in present) else "aligned"
    return None if param is None else param.dtype, tensors.grads[i].dtype, state, master is not None, layout


def same_layout(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether tensors of one shape have the same dense memory layout; None is skipped.

    Dense: the elements fill their memory without gaps or overlaps, in any order of dimensions.
    """
    present = [x for x in tensors if x is not None]
    if all(x.is_contiguous() for x in present):
        return True
    layouts = [[(stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1] for x in present]
    expected = 1
    for stride, size in sorted(layouts[0]):
        if stride != expected:
            return False
        expected *= size
    return all(layout == layouts[0] for layout in layouts)


# --- values of the parameter groups ----------------------------------------------------------------------------------


@dataclass(slots=True)
class GroupValues:
    """The hyperparameters of the parameter groups on a device, in memory that captured graphs read at each replay."""

    device: torch.device
    _known: tuple[tuple[float, ...], ...] | None = None
    _memory: Tensor | None = None
    _keep: list[Tensor] = field(default_factory=list)

    def refresh(self, rows: tuple[tuple[float, ...], ...]) -> Tensor:
        """Return (groups, 8) int64 on the device: seven float64 as bits, and the address of a learning rate or 0.

        Raises ConfigError if the values changed while the stream is being captured.
        """
        if self._memory is not None and rows == self._known:
            return self._memory
        if capturing(self.device):
            raise ConfigError(
                "the values of the parameter groups changed since the last step, and this one is being captured: call "
                "refresh() before the capture, or keep the learning rate in a tensor on the device"
            )
        bits = np.zeros((len(rows), _COLUMNS), dtype=np.int64)
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


# --- the arguments of an update --------------------------------------------------------------------------------------


class AdamWGroup(NamedTuple):
    """AdamW's hyperparameters of a parameter group; lr is a number, or a float32 scalar on the device."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool

    def row(self) -> tuple[float, ...]:
        """Return the values in the kernels' order: seven numbers, and the address of lr or 0."""
        lr, address = _rate(self.lr)
        return lr, self.beta1, self.beta2, self.eps, self.weight_decay, -1.0 if self.maximize else 1.0, 0.0, address


class SGDGroup(NamedTuple):
    """SGD's hyperparameters of a parameter group; lr is a number, or a float32 scalar on the device."""

    lr: float | Tensor
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    maximize: bool

    def row(self) -> tuple[float, ...]:
        """Return the values in the kernels' order: seven numbers, and the address of lr or 0."""
        lr, address = _rate(self.lr)
        sign = -1.0 if self.maximize else 1.0
        return lr, self.momentum, self.dampening, float(self.nesterov), self.weight_decay, sign, 0.0, address


def _rate(lr: float | Tensor) -> tuple[float, int]:
    return (0.0, lr.data_ptr()) if isinstance(lr, Tensor) else (lr, 0)


@dataclass(slots=True)
class Update:
    """The arguments of adamw_step and of sgd_step; the table is None if no Triton kernel runs.

    `max_norm`: clip the gradients to it on the fly, without changing them; the norm goes to workspace.norm.
    `grad_scale`: factor by which the gradients are too large (a loss scale). `found_inf`: not 0 if the step is to
    change nothing; None with grad_scale and max_norm: it changes nothing where the norm is not finite.
    """

    tensors: Tensors
    groups: Sequence[AdamWGroup | SGDGroup]
    workspace: Workspace
    table: Table | None = None
    max_norm: float | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
