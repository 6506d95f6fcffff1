"""Multi-tensor updates, which the optimizers of accelerant.nn.optim call: AdamW, SGD, the gradients' norm and clipping.

A kernel reads its tensors by a table of addresses on the device. Tables are kept and found by the addresses: while
gradients return to the same memory, a step copies nothing. Under CUDA graph capture the copy of a new one becomes part
of the graph, from pinned memory that was reserved before and is never reused.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from accelerant import errors
from accelerant.ops._launch import ceil_div, triton_operation
from accelerant.ops._library import FLOATING, composed, name_of, refuses_float64
from accelerant.runtime.compilation.triton import TritonKernel, refuses_triton
from accelerant.runtime.dispatch import Case, Cost
from accelerant.runtime.streams.stream import capturing

DTYPES = FLOATING  # of parameters and gradients

_COLUMNS = 8
_COEFFICIENTS = 16
_MAX_TABLES = 8
_RESERVED = 4  # pinned buffers kept for captures
_data_ptr = torch.Tensor.data_ptr  # map with the unbound method is a third faster than calling each tensor's
_is_contiguous = torch.Tensor.is_contiguous


class Tensors(NamedTuple):
    """The tensors of one call, on one device; the lists have one length, or are empty if not applicable.

    `first` and `second` are exp_avg and exp_avg_sq, or momentum buffers and nothing; `masters` float32 copies or None;
    `new` indices of momentum buffers that were allocated for this step.
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
        if (table := self._tables.get(key)) is None:
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
                raise errors.ConfigError(
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
    return tensors.params, tensors.grads, tensors.first, tensors.second, tensors.masters, tensors.counters


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    try:
        return list(map(_data_ptr, tensors))  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # None among them, or memory that has no address here
        return [_address(tensor) for tensor in tensors]


def _address(tensor: Tensor | None) -> int:
    try:
        return 0 if tensor is None else tensor.data_ptr()
    except errors.UnsupportedCase:  # on OpenCL or WebGPU
        return 0


def _key(tensors: Tensors, device: torch.device) -> tuple[Any, ...]:
    """Return all that a table depends on: addresses, and the properties that may change at an address."""
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
        if (partials := self._partials.get(size)) is None:
            device = self._workspace.device
            partials = torch.zeros(size, dtype=torch.float32, device=device)
            if capturing(device):  # zeros only once the graph has run
                self._workspace.captured.append(partials)
            else:
                self._partials[size] = partials
        return partials

    def chunks(self, bucket: int, chunk: int) -> Tensor:
        """Return the chunk map of a bucket: int64, one per chunk."""
        if (chunks := self._maps.get((bucket, chunk))) is None:
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
        raise errors.ConfigError("a step under graph capture with parameters that none before had: run it once before")
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
            raise errors.ConfigError(f"gradient {i} is {grad.layout}: use torch.optim.SparseAdam, or dense gradients")
        if grad.shape != param.shape or grad.device != param.device:
            expected, got = (f"{tuple(x.shape)} on {x.device}" for x in (param, grad))
            raise errors.ShapeError(f"gradient {i} must be {expected}, got {got}")
        for name, tensor in (("parameter", param), ("gradient", grad)):
            if tensor.dtype not in DTYPES:
                allowed = ", ".join(map(name_of, DTYPES))
                raise errors.UnsupportedDtype(f"optimizers take {allowed}; {name} {i} is {name_of(tensor.dtype)}")


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
            raise errors.ConfigError(
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

    `max_norm`: clip to it without changing the gradients. `found_inf`: not 0 if the step is to change nothing; None
    with grad_scale and max_norm: it changes nothing where the norm is not finite.
    """

    tensors: Tensors
    groups: Sequence[AdamWGroup | SGDGroup]
    workspace: Workspace
    table: Table | None = None
    max_norm: float | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


def adamw_reference(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the parameter and its two moments after a step; `step` counts from 1.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, in the form of torch.optim.AdamW.
    """
    g = -g if maximize else g
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    return p - lr * weight_decay * p - lr * m_hat / (v_hat.sqrt() + eps), m, v


_FUSED_DEVICES = ("cpu", "cuda", "mps")
_fused_adamw: Callable[..., None] = torch._fused_adamw_
_fused_sgd: Callable[..., None] = torch._fused_sgd_


def torch_norm(grads: Sequence[Tensor], max_norm: float = 1.0) -> Tensor:
    """Return the norm of all gradients and the clipping coefficient, two float32 (float64 for float64)."""
    norm = _total_norm(grads)
    return torch.stack([norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)])


def _total_norm(grads: Sequence[Tensor]) -> Tensor:
    if type(grads[0]) in composed:
        norm = torch.nn.utils.get_total_norm(list(grads))
    else:  # the same without its sorting by device and dtype
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads))))
    return norm if norm.dtype == torch.float64 else norm.float()


def torch_clip(grads: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply the gradients in place."""
    torch._foreach_mul_(list(grads), scale)


def torch_adamw(update: Update) -> None:
    """Apply AdamW to every tensor."""
    scale = _scale(update)
    for number, (indices, fused) in _by_group(update).items():
        group = cast(AdamWGroup, update.groups[number])
        if not fused:
            for i in indices:
                _adamw_one(update.tensors, i, group, scale, update.found_inf)
            continue
        lists = _select(update.tensors, indices)
        torch._foreach_add_(lists.counters, 1)
        # torch on the CPU, which runs where found_inf is given, would write the gradients
        divided = scale is not None and update.found_inf is None and type(lists.grads[0]) in composed
        grad_scale = scale.reciprocal() if scale is not None and divided else None
        for part in (lists,) if scale is None or divided else _scaled(lists, scale):
            _fused_adamw(
                part.params, part.grads, part.first, part.second, [], part.counters,
                amsgrad=False, lr=group.lr, beta1=group.beta1, beta2=group.beta2, weight_decay=group.weight_decay,
                eps=group.eps, maximize=group.maximize, grad_scale=grad_scale,
                found_inf=update.found_inf,
            )  # fmt: skip
        if update.found_inf is not None:
            torch._foreach_sub_(lists.counters, [update.found_inf] * len(indices))


def torch_sgd(update: Update) -> None:
    """Apply SGD to every tensor."""
    scale = _scale(update)
    for number, (indices, fused) in _by_group(update).items():
        group = cast(SGDGroup, update.groups[number])
        new = [i in update.tensors.new for i in indices] if update.tensors.new else [False]
        lists = _select(update.tensors, indices)
        # torch 2.13's fused SGD on the CPU is wrong in half precision from 16 elements on.
        half_on_cpu = lists.params[0].device.type == "cpu" and lists.params[0].dtype in (torch.float16, torch.bfloat16)
        one_by_one = half_on_cpu or type(lists.params[0]) in composed  # which have no fused SGD
        if not fused or one_by_one or (any(new) and not all(new)):
            for i in indices:
                _sgd_one(update.tensors, i, group, scale, update.found_inf)
            continue
        lists = lists if group.momentum else lists._replace(first=[])
        for part in (lists,) if scale is None else _scaled(lists, scale):
            _fused_sgd(
                part.params, part.grads, part.first,
                weight_decay=group.weight_decay, momentum=group.momentum, lr=group.lr, dampening=group.dampening,
                nesterov=group.nesterov, maximize=group.maximize, is_first_step=all(new) and group.momentum != 0,
                grad_scale=None, found_inf=update.found_inf,
            )  # fmt: skip


def _by_group(update: Update) -> dict[int, tuple[list[int], bool]]:
    """Return for each group the indices of its tensors, and whether torch's fused update can take them."""
    table = update.table
    if table is not None and table.by_group is not None:
        return cast("dict[int, tuple[list[int], bool]]", table.by_group)
    members: dict[int, list[int]] = {}
    for i, number in enumerate(update.tensors.groups):
        members.setdefault(number, []).append(i)
    groups = {number: (indices, _can_fuse(_select(update.tensors, indices))) for number, indices in members.items()}
    if table is not None:
        table.by_group = groups
    return groups


def _scale(update: Update) -> Tensor | None:
    """Return the factor of all gradients, None for 1, and store the norm in workspace.norm as the kernels do."""
    scale = None if update.grad_scale is None else update.grad_scale.double().reciprocal().float().reshape(())
    if update.max_norm is None:
        return scale
    norm = _total_norm(update.tensors.grads)
    if scale is not None:
        norm = norm * scale
        if update.found_inf is None:
            update.found_inf = norm.isfinite().logical_not().float().reshape(())
    update.workspace.norm.copy_(norm)
    clip = (update.max_norm / (norm + 1e-6)).clamp(max=1.0)
    return clip if scale is None else clip * scale


_SCALED_AT_ONCE = 2**18  # elements of the gradients that are scaled at a time on a CPU: they stay in its cache


def _scaled(lists: Tensors, scale: Tensor) -> Iterator[Tensors]:
    """Yield parts of an update with scaled gradients; on a CPU small ones, since writing all takes longer than AdamW.

    A tensor of more elements than a part comes in views of a part each, with one counter.
    """
    factor = scale.to(lists.grads[0].dtype)
    if not lists.grads[0].is_cpu:
        yield lists._replace(grads=list(torch._foreach_mul(lists.grads, factor)))
        return
    if bool(factor == 1):
        yield lists
        return
    columns = [column for column in (lists.params, lists.grads, lists.first, lists.second, lists.counters) if column]
    rows: list[tuple[Any, ...]] = []
    elements = 0
    for row in zip(*columns, strict=True):
        if (size := row[1].numel()) > _SCALED_AT_ONCE and all(x.is_contiguous() for x in row):
            pieces = [x.view(-1).split(_SCALED_AT_ONCE) if x.dim() else repeat(x) for x in row]
            for piece in zip(*pieces, strict=False):  # the counter is repeated without end
                yield _part(lists, [piece], factor)
            continue
        if rows and elements + size > _SCALED_AT_ONCE:
            yield _part(lists, rows, factor)
            rows, elements = [], 0
        rows.append(row)
        elements += size
    if rows:
        yield _part(lists, rows, factor)


def _part(lists: Tensors, rows: Sequence[tuple[Any, ...]], factor: Tensor) -> Tensors:
    """Return an update of some rows of another, of the columns that it has, with gradients times a factor."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    columns[1] = list(torch._foreach_mul(columns[1], factor))
    taken = iter(columns)
    params, grads, first, second, counters = (
        next(taken) if column else []
        for column in (lists.params, lists.grads, lists.first, lists.second, lists.counters)
    )
    return Tensors(params, grads, first, second, [], counters, groups=[])


def _select(tensors: Tensors, indices: Sequence[int]) -> Tensors:
    if len(indices) == len(tensors.groups):
        return tensors

    def pick(column: list[Any]) -> list[Any]:
        return [column[i] for i in indices] if column else column

    return Tensors(
        pick(tensors.params), pick(tensors.grads), pick(tensors.first), pick(tensors.second), pick(tensors.masters),
        pick(tensors.counters), groups=[],
    )  # fmt: skip


def _can_fuse(tensors: Tensors) -> bool:
    """Return whether torch's fused updates can take these: plain or composed ones of one floating dtype and layout."""
    if any(master is not None for master in tensors.masters) or tensors.params[0].device.type not in _FUSED_DEVICES:
        return False
    columns = [column for column in (tensors.params, tensors.grads, tensors.first, tensors.second) if column]
    if len({x.dtype for column in columns for x in column if x is not None}) != 1:
        return False
    if not all(type(param) in (torch.nn.Parameter, Tensor, *composed) for param in tensors.params):
        return False
    return all(same_layout(row) for row in zip(*columns, strict=True))


def _adamw_one(tensors: Tensors, i: int, group: AdamWGroup, scale: Tensor | None, found_inf: Tensor | None) -> None:
    first, counter, second = cast(Tensor, tensors.first[i]), tensors.counters[i], tensors.second[i]
    p, g = _wide(tensors, i, scale, group.maximize)
    step = counter + 1
    m = group.beta1 * first.to(p.dtype) + (1 - group.beta1) * g
    v = group.beta2 * second.to(p.dtype) + (1 - group.beta2) * g * g
    wide = step.double() if p.device.type != "mps" else step  # 1 - beta^step cancels in float32
    root = (1 - group.beta2**wide).sqrt().to(p.dtype)
    size = (group.lr / (1 - group.beta1**wide)).to(p.dtype)
    p = p * (1 - group.lr * group.weight_decay) - size * m / (v.sqrt() / root + group.eps)
    targets = [(first, m), (second, v), (counter, step), *_targets(tensors, i, p)]
    _store(targets, found_inf)


def _sgd_one(tensors: Tensors, i: int, group: SGDGroup, scale: Tensor | None, found_inf: Tensor | None) -> None:
    p, g = _wide(tensors, i, scale, group.maximize)
    if group.weight_decay:
        g = g + group.weight_decay * p
    targets = []
    buffer = tensors.first[i] if tensors.first else None
    if group.momentum and buffer is not None:
        new = i in tensors.new
        b = g if new else group.momentum * buffer.to(p.dtype) + (1 - group.dampening) * g
        targets.append((buffer, b))
        g = g + group.momentum * b if group.nesterov else b
    _store([*targets, *_targets(tensors, i, p - group.lr * g)], found_inf)


def _wide(tensors: Tensors, i: int, scale: Tensor | None, maximize: bool) -> tuple[Tensor, Tensor]:
    """Return the parameter and its scaled gradient in the dtype to compute in."""
    master = tensors.masters[i] if tensors.masters else None
    param = tensors.params[i] if master is None else master
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    g = tensors.grads[i].to(dtype)
    if scale is not None:
        g = g * scale
    return param.to(dtype), -g if maximize else g


def _targets(tensors: Tensors, i: int, p: Tensor) -> list[tuple[Tensor, Tensor]]:
    master = tensors.masters[i] if tensors.masters else None
    return [(x, p) for x in (tensors.params[i], master) if x is not None]


def _store(targets: list[tuple[Tensor, Tensor]], found_inf: Tensor | None) -> None:
    for target, value in targets:
        target.copy_(value if found_inf is None else torch.where(found_inf != 0, target.to(value.dtype), value))


_NAMES = ("norm", "total", "scale", "adamw_prepare", "adamw", "sgd_prepare", "sgd")
KERNELS = {name: TritonKernel("accelerant.ops.multi_tensor.triton_kernels", f"multi_tensor_{name}") for name in _NAMES}
KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """The work of a program: `chunk` elements in steps of `block`, powers of two of at least 16, by num_warps warps."""

    chunk: int
    block: int
    num_warps: int


PLANS = {
    "norm": ChunkTile(16384, 4096, 8), "scale": ChunkTile(4096, 4096, 8),
    "adamw": ChunkTile(1024, 1024, 4), "sgd": ChunkTile(1024, 1024, 4),
}  # fmt: skip
"""By kernel; tests and measurements replace entries."""

SMALL = {"BLOCK_T": 256, "BLOCK_P": 8192}
_SMALL_WARPS = 16


def launch_norm(grads: Sequence[Tensor], table: Table, max_norm: float) -> Tensor:
    """Return the norm of the gradients and the clipping coefficient, two float32."""
    out = torch.empty(2, dtype=torch.float32, device=grads[0].device)
    partials = _launch_partials(table)
    args = (partials, partials.numel(), out, max_norm)
    KERNELS["total"].launch((1,), args, {"BLOCK_P": SMALL["BLOCK_P"]}, num_warps=_SMALL_WARPS)
    return out


def launch_clip(grads: Sequence[Tensor], table: Table, scale: Tensor) -> None:
    """Multiply the gradients in place; a scale of 1 costs a launch and no traffic."""
    _launch_buckets("scale", table, [{"GRAD": KINDS[bucket.grad]} for bucket in table.buckets], scale)


def launch_update(name: str, update: Update) -> None:
    """Launch the norm if max_norm is set, the coefficients, and the update of "adamw" or "sgd"."""
    if (table := update.table) is None:
        raise errors.AccelerantError(f"{name}: a launch without a table")
    values = update.workspace.values.refresh(tuple([group.row() for group in update.groups]))
    partials = None if update.max_norm is None else _launch_partials(table)
    norm = (None, 0, None) if partials is None else (partials, partials.numel(), update.workspace.norm)
    KERNELS[f"{name}_prepare"].launch(
        (1,),
        (
            table.rows(), values, table.coefficients(), len(table.numels), *norm, update.max_norm or 0.0,
            update.grad_scale, update.found_inf,
        ),
        {**SMALL, "CLIP": partials is not None},
        num_warps=_SMALL_WARPS,
    )  # fmt: skip
    constants: list[dict[str, object]] = []
    for bucket in table.buckets:
        param, state = KINDS[bucket.param or torch.float32], KINDS[bucket.state or torch.float32]
        buffer = {"BUFFER": bucket.state is not None} if name == "sgd" else {}
        constants.append(
            {"PARAM": param, "GRAD": KINDS[bucket.grad], "STATE": state, **buffer, "MASTER": bucket.master}
        )
    _launch_buckets(name, table, constants, table.coefficients())


def _launch_buckets(name: str, table: Table, constants: Sequence[Mapping[str, object]], last: Tensor) -> None:
    """Launch a kernel for each bucket of tensors; CompileError and LaunchError only before a change."""
    plan = PLANS[name]
    maps = [table.chunks(i, plan.chunk) for i in range(len(table.buckets))]  # all allocations before the first launch
    for i, (bucket, chunks) in enumerate(zip(table.buckets, maps, strict=True)):
        try:
            fixed = {**constants[i], **_sizes(plan, bucket.layout)}
            args = (chunks, table.rows(), last)
            KERNELS[name].launch((chunks.numel(),), args, fixed, num_warps=plan.num_warps)
        except (errors.CompileError, errors.LaunchError) as error:
            if not i:
                raise
            raise errors.AccelerantError(f"{name}: {i} of {len(maps)} launches ran, then: {error}") from error


def _launch_partials(table: Table) -> Tensor:
    plan = PLANS["norm"]
    maps = [table.chunks(i, plan.chunk) for i in range(len(table.buckets))]
    partials = table.partials(sum(chunks.numel() for chunks in maps), SMALL["BLOCK_P"])
    first = 0
    for bucket, chunks in zip(table.buckets, maps, strict=True):
        fixed = {"GRAD": KINDS[bucket.grad], **_sizes(plan, bucket.layout)}
        args = (chunks, table.rows(), partials, first)
        KERNELS["norm"].launch((chunks.numel(),), args, fixed, num_warps=plan.num_warps)
        first += chunks.numel()
    return partials


def _sizes(plan: ChunkTile, layout: str) -> dict[str, int | bool]:
    return {"CHUNK": plan.chunk, "BLOCK": plan.block, "ALIGNED": layout == "aligned"}


def _buckets(case: Case) -> list[Bucket]:
    return [option for option in case.options if isinstance(option, Bucket)]


def _refuses(case: Case) -> str | None:
    for bucket in _buckets(case):
        if torch.float64 in (bucket.param, bucket.grad, bucket.state):
            return refuses_float64(torch.float64)
        if bucket.layout == "strided":
            return "tensors with gaps, or parameters whose layout differs from their gradients and state"
    return refuses_triton(case.device)


def _update_cost(case: Case) -> Cost:
    """Return the cost of reading and writing parameters and state, and of reading gradients, twice with the norm."""
    states = 2 if "sgd" not in case.options else 1
    reads = 2 if "clipped" in case.options else 1
    total = 0
    for bucket in _buckets(case):
        moved = reads * bucket.grad.itemsize
        if bucket.param is not None:
            moved += bucket.param.itemsize + (8 if bucket.master else bucket.param.itemsize)
        if bucket.state is not None:
            moved += 2 * states * bucket.state.itemsize
        total += bucket.elements * moved
    return Cost(total, (15 if states == 2 else 6) * case.shape[1])


def _gradients_cost(passes: int, case: Case) -> Cost:
    return Cost(passes * sum(bucket.elements * bucket.grad.itemsize for bucket in _buckets(case)), 2 * case.shape[1])


adamw_step, sgd_step = (
    triton_operation(
        f"{name}_step", partial(launch_update, name), torch_step, cost=_update_cost, refuses=_refuses, mutates=True
    )
    for name, torch_step in (("adamw", torch_adamw), ("sgd", torch_sgd))
)
global_norm = triton_operation(
    "global_norm",
    launch_norm,
    lambda grads, table, max_norm: torch_norm(grads, max_norm),
    cost=partial(_gradients_cost, 1),
    refuses=_refuses,
)
clip_step = triton_operation(
    "clip_step",
    launch_clip,
    lambda grads, table, scale: torch_clip(grads, scale),
    cost=partial(_gradients_cost, 2),
    refuses=_refuses,
    mutates=True,
)


def case_of(table: Table, device: torch.device, *options: str) -> Case:
    """Return the case of a table: its buckets, the largest first, and the options."""
    largest = table.buckets[0]
    return Case(device, largest.param or largest.grad, table.shape, (*table.buckets, *options))
