"""Device memory: limits, statistics of the pool, measured peaks, and the message when memory runs out.

Torch's CUDA allocator keeps limits itself. On other backends buffers are checked by `ComputeProvider.check_limit`, and
torch's CPU tensors inside `limit` are counted op by op, by a LiveSet. Counting does not change what runs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from accelerant.config import settings
from accelerant.errors import ConfigError, OutOfMemory, UnsupportedCase
from accelerant.runtime import registry
from accelerant.runtime.files import JsonRecord
from accelerant.runtime.host import control_group_room
from accelerant.runtime.monitoring.readers import cuda_reader
from accelerant.runtime.provider import (
    Buffer,
    ComputeDevice,
    allocation_failures,
    allocation_limit,
    allocation_limits,
    lacks_host_memory,
)
from accelerant.runtime.registry import DeviceLike, find_device

_CUDA_ROUNDING = 22 << 20
"""The CUDA allocator takes memory from the device in segments of 2 and 20 MiB, so up to this much beyond a request."""

_former_peaks: dict[int, int] = {}  # CUDA index -> the peak before peak_recorded() restarted the allocator's own


@dataclass(frozen=True, slots=True)
class MemoryStatistics(JsonRecord):
    """A device's memory and this process's pool on it, in bytes; None for a figure that the backend does not report.

    Attributes:
        total_bytes, free_bytes: size of the device's memory, and the part available to any process.
        allocated_bytes: in live tensors and buffers (on the CPU only buffers; torch does not count its tensors).
        reserved_bytes: held by the pool, in use or cached.
        live_blocks, pool_blocks: blocks in use, and segments that the pool took from the device.
        fragmentation: share of the reserved bytes, 0 to 1, that is free but in partly used segments, which trim()
            cannot return.
        out_of_memory, retries: allocations that failed, and those that succeeded after the pool was emptied for them.
    """

    device: str
    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    limit_bytes: int | None
    live_blocks: int | None
    pool_blocks: int | None
    fragmentation: float | None
    out_of_memory: int
    retries: int

    def __str__(self) -> str:
        pool = f"{size_text(self.reserved_bytes)} in its pool"
        if self.fragmentation is not None:
            pool += f" ({self.fragmentation:.0%} in fragments)"
        lines = [
            f"{self.device}  {size_text(self.free_bytes)} of {size_text(self.total_bytes)} free",
            f"  held  {size_text(self.allocated_bytes)} by this process, {size_text(self.peak_bytes)} at most, {pool}",
            f"  refused  {self.out_of_memory}, after {self.retries} retries",
        ]
        if self.limit_bytes is not None:
            lines.insert(2, f"  limit  {size_text(self.limit_bytes)}")
        return "\n".join(lines)


# --- limits ----------------------------------------------------------------------------------------------------------
def apply_limit(fraction: float | Literal["auto"] | None = None, device: DeviceLike = None) -> int:
    """Limit this process to a fraction of a device's memory, and return the limit in bytes.

    On CUDA the limit holds for tensors and buffers, elsewhere for buffers. The fraction is by default the setting
    memory_fraction; "auto" is 95 % of what other processes leave now; 1 lifts the limit, and one outside (0, 1] raises
    ConfigError.
    """
    chosen = settings().memory_fraction if fraction is None else fraction
    if chosen != "auto" and not (isinstance(chosen, (int, float)) and 0.0 < chosen <= 1.0):
        raise ConfigError(f'fraction must be "auto", or above 0 and at most 1, got {chosen!r}')
    target = find_device(device)
    provider = registry.create(target.backend)
    fraction = provider.free_fraction(target) if chosen == "auto" else chosen
    provider.limit_fraction(fraction, target)
    return int(target.memory_bytes * fraction)


def allocate(size_bytes: int, device: DeviceLike = None) -> Buffer:
    """Allocate a buffer within the limits; if the device is full, try once more after trim().

    Raises OutOfMemory where a limit would be passed, or the device is full; the message says what may help.
    """
    target = find_device(device)
    provider = registry.create(target.backend)
    provider.check_limit(size_bytes, target.index)
    with contextlib.suppress(OutOfMemory):
        return provider.allocate(size_bytes, target.index)
    trim(target)
    counts = allocation_failures.setdefault((target.backend, target.index), [0, 0])
    try:
        buffer = provider.allocate(size_bytes, target.index)
    except OutOfMemory as error:
        counts[0] += 1
        raise OutOfMemory(describe_out_of_memory("allocate", size_bytes, target)) from error
    counts[1] += 1
    return buffer


@contextmanager
def limit(limit_bytes: int, device: DeviceLike = None) -> Iterator[None]:
    """Limit the memory that a block of code may hold beyond what is held at its start.

    CUDA: tensors and buffers of the whole process. A request is refused at once if the allocator would have to take
    memory from the device beyond the limit by more than 22 MiB (a segment of its own). Any other excess, such as a
    tensor placed in memory that the allocator holds, raises at the end of the block. Other backends: buffers, when they
    are allocated; on the CPU also this thread's tensors, after the op that made them. Past the limit, OutOfMemory is
    raised.
    """
    if not limit_bytes >= 0:  # NaN too
        raise ConfigError(f"limit_bytes must be 0 or more, got {limit_bytes}")
    target = find_device(device)
    if target.backend == "cuda":
        with _cuda_limit(limit_bytes, target):
            yield
        return
    limit_total = registry.create(target.backend).memory(target.index).allocated_bytes + limit_bytes
    tensors = LiveSet("cpu", limit_bytes=limit_bytes) if target.backend == "cpu" else contextlib.nullcontext()
    with allocation_limit(target, limit_total), tensors:
        yield


@contextmanager
def _cuda_limit(limit_bytes: int, device: ComputeDevice) -> Iterator[None]:
    index = device.index
    before = torch.cuda.get_per_process_memory_fraction(index)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved(index) + limit_bytes + _CUDA_ROUNDING
    torch.cuda.set_per_process_memory_fraction(min(before, allowed / device.memory_bytes), index)
    try:
        with peak_recorded(device) as record:
            yield
    except torch.OutOfMemoryError as error:
        asked = bytes_asked_by(error)
        named = "an allocation" if asked is None else f"an allocation of {asked:,} bytes"
        raise OutOfMemory(f"{named} on {device.label} passes the limit of {limit_bytes:,} more bytes") from error
    finally:
        torch.cuda.set_per_process_memory_fraction(before, index)
    if record.growth_bytes > limit_bytes:
        raise OutOfMemory(
            f"{record.growth_bytes:,} more bytes were held on {device.label}; the limit is {limit_bytes:,}"
        )


# --- figures ---------------------------------------------------------------------------------------------------------
def statistics(device: DeviceLike = None) -> MemoryStatistics:
    """Return the state of a device's memory and of this process's pool on it."""
    target = find_device(device)
    info = registry.create(target.backend).memory(target.index)
    key = (target.backend, target.index)
    limits = allocation_limits.get(key)
    failures, retries = allocation_failures.get(key, (0, 0))
    blocks = segments = fragmentation = None
    limit_bytes, peak = min(limits) if limits else None, info.peak_bytes
    if target.backend == "cuda":
        figures = torch.cuda.memory_stats(target.index)
        failures, retries = int(figures.get("num_ooms", 0)), int(figures.get("num_alloc_retries", 0))
        blocks, segments = int(figures.get("active.all.current", 0)), int(figures.get("segment.all.current", 0))
        stuck = int(figures.get("inactive_split_bytes.all.current", 0))
        fragmentation = stuck / info.reserved_bytes if info.reserved_bytes else 0.0
        fraction = torch.cuda.get_per_process_memory_fraction(target.index)
        limit_bytes = int(fraction * info.total_bytes) if fraction < 1.0 else None
        peak = max(peak, _former_peaks.get(target.index, 0))
    return MemoryStatistics(
        device=target.label, total_bytes=info.total_bytes, free_bytes=info.free_bytes,
        allocated_bytes=info.allocated_bytes, reserved_bytes=info.reserved_bytes, peak_bytes=peak,
        limit_bytes=limit_bytes, live_blocks=blocks, pool_blocks=segments, fragmentation=fragmentation,
        out_of_memory=failures, retries=retries,
    )  # fmt: skip


@dataclass(slots=True)
class PeakRecord:
    """The bytes allocated when a block began, and the most at once inside it; complete once the block has ended."""

    before_bytes: int
    peak_bytes: int

    @property
    def growth_bytes(self) -> int:
        """The most that was allocated at once beyond what was allocated before."""
        return self.peak_bytes - self.before_bytes


@contextmanager
def peak_recorded(device: DeviceLike) -> Iterator[PeakRecord]:
    """Measure the peak of allocated memory inside a block.

    CUDA and ROCm: the allocator's, of the whole process. Its peak is restarted, though `statistics` still reports the
    former one, and cuBLAS's workspaces are freed first, so that the block's own count whatever ran before. CPU:
    storages that ops of this thread return, counted one op at a time, and buffers. Other backends raise
    UnsupportedCase.
    """
    target = find_device(device)
    if target.torch_type == "cuda":  # ROCm's allocator has the same interface
        index = target.index
        torch.cuda.synchronize(index)
        torch._C._cuda_clearCublasWorkspaces()
        _former_peaks[index] = max(_former_peaks.get(index, 0), torch.cuda.max_memory_allocated(index))
        torch.cuda.reset_peak_memory_stats(index)
        before_bytes = torch.cuda.memory_allocated(index)
        record = PeakRecord(before_bytes, before_bytes)
        try:
            yield record
        finally:
            record.peak_bytes = torch.cuda.max_memory_allocated(index)
        return
    if target.backend != "cpu":
        raise UnsupportedCase(f"peaks are measured on cuda, rocm and cpu; {target.label} reports none")
    provider = registry.create("cpu")
    before_bytes = provider.memory().allocated_bytes
    record = PeakRecord(before_bytes, before_bytes)
    with LiveSet("cpu") as live:
        try:
            yield record
        finally:
            buffers = max(before_bytes, provider.memory().allocated_bytes)
            record.peak_bytes = buffers + live.peak_bytes


def available_bytes(device: DeviceLike = None) -> int:
    """Return the bytes that this process can still allocate within its limits, its own unused pool included."""
    target = find_device(device)
    info = registry.create(target.backend).memory(target.index)
    room = info.free_bytes + info.reserved_bytes - info.allocated_bytes
    if (limit_bytes := statistics(target).limit_bytes) is not None:
        room = min(room, limit_bytes - info.allocated_bytes)
    if target.backend == "cpu":
        room = min(room, control_group_room())
    return max(0, room)


def trim(device: DeviceLike = None) -> int:
    """Return the pool's unused memory to the device, and the number of bytes returned."""
    target = find_device(device)
    provider = registry.create(target.backend)
    before = provider.memory(target.index).reserved_bytes
    provider.trim(target.index)
    return max(0, before - provider.memory(target.index).reserved_bytes)


# --- when it runs out ------------------------------------------------------------------------------------------------
_ASKED = re.compile(r"([\d.,]+) (bytes|KiB|MiB|GiB|TiB)(?= asked)|ried to allocate ([\d.,]+) (bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports exhausted memory: of this library, torch (device or host) or Python."""
    return isinstance(error, (OutOfMemory, torch.OutOfMemoryError)) or lacks_host_memory(error)


def bytes_asked_by(error: BaseException) -> int | None:
    """Return the size that could not be allocated, parsed from the error's text, with the text's precision."""
    if (match := _ASKED.search(str(error))) is None:
        return None
    number, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
    return int(float(number.replace(",", "")) * 2 ** _UNITS[unit])


def describe_out_of_memory(op: str, asked: int | BaseException | None, device: DeviceLike) -> str:
    """Return the message for an op that ran out of memory; allocates nothing on the device.

    `asked` has the bytes requested, or the error of the allocation, or None.
    """
    target = find_device(device)
    size = bytes_asked_by(asked) if isinstance(asked, BaseException) else asked
    size_asked = "an unknown size" if size is None else f"{size:,} bytes ({size_text(size)})"
    try:
        figures = statistics(target)
        owners = largest_owners(target, 5)
    except RuntimeError as error:  # the device itself no longer answers
        return f"{op}: out of memory on {target.label}; asked for {size_asked}; no figures: {error}"
    unused = figures.reserved_bytes - figures.allocated_bytes
    lines = [
        f"{op}: out of memory on {target.label}",
        f"  asked   {size_asked}",
        f"  free    {figures.free_bytes:,} of {figures.total_bytes:,} bytes",
        f"  held    {figures.allocated_bytes:,} by this process, and {unused:,} unused in its pool",
    ]
    if figures.limit_bytes is not None:
        lines.append(f"  limit   {figures.limit_bytes:,} bytes for this process")
    lines += [f"  largest {owner}" for owner in owners]
    lines += [f"  others  {text}" for text in _others(target, figures)]
    lines += [f"  try     {text}" for text in _advice(figures, unused, size)]
    return "\n".join(lines)


def _advice(figures: MemoryStatistics, unused: int, size: int | None) -> list[str]:
    advice = ["a smaller batch: optimal_batch_size() finds the largest that fits"]
    if figures.limit_bytes is not None:
        advice.append("a higher limit: memory_fraction, apply_limit() or memory_limit_bytes")
    if unused and (size is None or unused >= size // 2):
        advice.append(f"trim(): {size_text(unused)} lie unused in the pool")
    if (figures.fragmentation or 0.0) > 0.2:
        advice.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: much of the pool is in fragments")
    others = figures.total_bytes - figures.free_bytes - figures.reserved_bytes
    if figures.device.startswith("cuda") and others > figures.total_bytes // 10:
        advice.append(f"another device, or fewer processes: others hold {size_text(others)} of this one")
    return advice


def _others(device: ComputeDevice, figures: MemoryStatistics) -> list[str]:
    """Describe the memory of other processes; by process where NVML reports it."""
    if device.backend != "cuda":
        return []
    together = max(0, figures.total_bytes - figures.free_bytes - figures.reserved_bytes)
    lines = [f"{size_text(together)} by other processes and CUDA's own contexts"]
    figures_by_name, _ = cuda_reader(device).read(("processes",))
    others = [process for process in figures_by_name.get("processes", ()) if process.pid != os.getpid()]
    for process in others[:3]:
        size = "an unknown size" if process.memory_bytes is None else size_text(process.memory_bytes)
        lines.append(f"{size} by process {process.pid}{f' ({process.name})' if process.name else ''}")
    return lines


def size_text(size_bytes: int) -> str:
    """Format a size for people: "1.5 GiB"."""
    value = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


# --- owners ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class MemoryOwner:
    """A live storage on a device.

    The size is that of the whole storage, of which the largest tensor has the shape and dtype (empty for a buffer).
    `kind` is "Tensor", "Parameter", "Buffer", ...; `held_by` says what refers to it, if that is cheap to find, else it
    is empty.
    """

    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    held_by: str = ""

    def __str__(self) -> str:
        what = f"{self.dtype} {self.shape} {self.kind}".strip() if self.dtype else self.kind
        return f"{self.size_bytes:,} bytes: {what}" + (f", {self.held_by}" if self.held_by else "")


def largest_owners(device: DeviceLike = None, n: int = 5) -> list[MemoryOwner]:
    """Return the n largest live storages on a device, the largest first.

    Walks all objects that Python's garbage collector tracks: some 50 ms in a large process.
    """
    if n < 0:
        raise ConfigError(f"n must be 0 or more, got {n}")
    target = find_device(device)
    largest: dict[int, tuple[int, Any]] = {}
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    with torch._C.DisableTorchFunctionSubclass():  # subclasses may refuse to be looked at
        for candidate in gc.get_objects():
            kind = type(candidate)  # not isinstance, which would resolve lazy proxies
            if issubclass(kind, Tensor):
                storage = None if issubclass(kind, FakeTensor) else _tensor_storage(candidate, target)
            elif issubclass(kind, Buffer):
                owner = candidate.owner
                backend = "cuda" if issubclass(type(owner), Tensor) else getattr(owner, "backend", "")
                here = (backend, candidate.device) == (target.backend, target.index) and candidate.size_bytes
                storage = (candidate.data_ptr(), candidate.size_bytes) if here else None
            else:
                if issubclass(kind, nn.Module):
                    modules.append(candidate)
                elif issubclass(kind, torch.optim.Optimizer):
                    optimizers.append(candidate)
                continue
            if storage is not None and _extent(candidate) > _extent(largest.get(storage[0], (0, None))[1]):
                largest[storage[0]] = storage[1], candidate
        top = sorted(largest.values(), key=lambda pair: -pair[0])[:n]
        names = _names(modules, optimizers) if top else {}
        own = {id(pair) for pair in top}
        return [_owner(size, candidate, names, own) for size, candidate in top]


def _tensor_storage(tensor: Tensor, device: ComputeDevice) -> tuple[int, int] | None:
    if tensor.device.type != device.torch_type or (tensor.device.index or 0) != device.index:
        return None
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
    except (NotImplementedError, RuntimeError, UnsupportedCase):  # no storage: sparse tensors, some subclasses
        return None


def _extent(candidate: Any) -> int:
    """Return the bytes that a tensor or buffer shows of its storage; of several views, the largest is reported."""
    if candidate is None:
        return -1
    return int(candidate.size_bytes if isinstance(candidate, Buffer) else candidate.numel() * candidate.element_size())


def _names(modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[int, str]:
    """Return the names of parameters, their gradients, buffers and optimizer state, by the tensor's id."""
    names: dict[int, str] = {}
    inner = {id(child) for module in modules for child in module._modules.values()}
    for module in modules:
        if id(module) in inner:
            continue
        root = type(module).__name__
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{root}.{name}")
            if parameter.grad is not None:
                names.setdefault(id(parameter.grad), f"gradient of {root}.{name}")
        for name, constant in module.named_buffers():
            names.setdefault(id(constant), f"{root}.{name}")
    for optimizer in optimizers:
        for stepped, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    parameter_name = names.get(id(stepped), "a parameter")
                    names.setdefault(id(value), f"{type(optimizer).__name__} {key} of {parameter_name}")
    return names


def _owner(size: int, candidate: Any, names: dict[int, str], own: set[int]) -> MemoryOwner:
    shape, dtype = tuple(getattr(candidate, "shape", ())), str(getattr(candidate, "dtype", "")).removeprefix("torch.")
    return MemoryOwner(
        size, shape, dtype, type(candidate).__name__, names.get(id(candidate)) or _referrer(candidate, own)
    )


def _referrer(candidate: Any, own: set[int]) -> str:
    """Return the module variable, container or object that refers to an object, other than those in `own`."""
    for name, module in list(sys.modules.items()):
        for variable, value in list(getattr(module, "__dict__", {}).items()):
            if value is candidate:
                return f"{name}.{variable}"
    for referrer in gc.get_referrers(candidate):
        if id(referrer) in own:
            continue
        if isinstance(referrer, (list, tuple, set)):
            return f"in a {type(referrer).__name__} of {len(referrer)}"
        inside = referrer if isinstance(referrer, dict) else getattr(referrer, "__dict__", {})
        for key, value in list(inside.items()):
            if value is candidate:
                kind = type(referrer).__name__
                return f"in a dict under {key!r}" if inside is referrer else f"{kind}.{key}"
    return ""


CUDA_GRANULARITY = 512  # torch's CUDA allocator rounds each request up to a multiple of this

predictions: list[FakeTensorMode] = []
"""The fake-tensor modes of predictions under way, in any thread. While it is empty, launches need not look further."""

_active_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class _CountingModes(threading.local):
    """This thread's active modes that only count or predict, its predictions, and whether counting is paused."""

    modes = 0
    fakes = 0
    paused = 0


_thread = _CountingModes()


def only_counts(x: Tensor) -> bool:
    """Return whether x is an ordinary or fake tensor and every active mode is a LiveSet or a prediction."""
    return 0 < _thread.modes == _active_modes() and (
        type(x) is Tensor or isinstance(x, (torch.nn.Parameter, FakeTensor))
    )


def predicts_here() -> bool:
    """Return whether this thread runs a prediction: nothing may be launched."""
    return _thread.fakes > 0


def has_fakes(args: Any) -> bool:
    """Return whether there is a fake tensor among nested arguments."""
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(args))


@contextmanager
def predicting() -> Iterator[FakeTensorMode]:
    """Make tensors fake: they have shapes and no memory. Kernels of Accelerant are not launched on them."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    predictions.append(fake)
    _thread.modes += 1
    _thread.fakes += 1
    try:
        with fake, warnings.catch_warnings():  # an address is read for its alignment, and is 0
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield fake
    finally:
        _thread.fakes -= 1
        _thread.modes -= 1
        predictions.remove(fake)


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors inside the block that outlive it real, in a prediction too, and no inference tensors."""
    with _disable_current_modes(), torch.inference_mode(False):
        yield


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing in this thread inside the block: for temporaries that the real run does not have."""
    _thread.paused += 1
    try:
        yield
    finally:
        _thread.paused -= 1


class LiveSet(TorchDispatchMode):
    """The storages of one device type that are alive, for one thread, as torch's dispatch modes are.

    Args:
        granularity: each storage counts as the next multiple of this.
        limit_bytes: raise OutOfMemory after an op that leaves more than this alive; None for no limit.
        watch: called after each op with its name, arguments and result.
    """

    def __init__(
        self, device_type: str, *, granularity: int = 1, limit_bytes: int | None = None,
        watch: Callable[[str, Sequence[Any], Any], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.live_bytes = 0
        self.peak_bytes = 0
        self._device_type = device_type
        self._granularity = granularity
        self._limit = limit_bytes
        self._watch = watch
        self._storages: dict[int, tuple[object, int, int]] = {}  # a weak reference, the size, and when first seen
        self._clock = 0
        self._peak_clock = 0

    def __repr__(self) -> str:
        return f"LiveSet({self._device_type}: {self.live_bytes:,} bytes, {self.peak_bytes:,} at most)"

    def __enter__(self) -> LiveSet:
        _thread.modes += 1
        super().__enter__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _thread.modes -= 1
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def hold(self, tree: Any) -> int:
        """Count the storages of a tree of tensors from now on, and return the bytes added."""
        before = self.live_bytes
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return self.live_bytes - before

    def reset_peak(self) -> None:
        """Restart the peak from the bytes alive now."""
        self.peak_bytes, self._peak_clock = self.live_bytes, self._clock

    def alive_at_peak(self, tree: Any) -> int:
        """Return the bytes of the tree's storages that existed when the peak was reached."""
        keys = {_key(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}
        storages = [self._storages[key] for key in keys if key in self._storages]
        return sum(size_bytes for _, size_bytes, born in storages if born <= self._peak_clock)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _thread.paused:
            return result
        aliased = {_key(leaf) for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)}
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and (_key(leaf) in self._storages or _key(leaf) not in aliased):
                self._count(leaf)
        if self._watch is not None:
            self._watch(func.name(), args, result)
        if self._limit is not None and self.live_bytes > self._limit:
            raise OutOfMemory(
                f"{func.name()} leaves {self.live_bytes:,} bytes alive on {self._device_type}; "
                f"the limit is {self._limit:,}"
            )
        return result

    def _count(self, tensor: Tensor) -> None:
        key = _key(tensor) if tensor.device.type == self._device_type else None
        if key is None:  # no storage: sparse tensors, some subclasses
            return
        storage = tensor.untyped_storage()
        if key not in self._storages:
            self._clock += 1
            self._storages[key] = weakref.ref(storage, lambda _: self._drop(key)), 0, self._clock
        reference, size_bytes, born = self._storages[key]
        rounded = -(-storage.nbytes() // self._granularity) * self._granularity
        if size_bytes != rounded:  # new, or resized in place
            self._storages[key] = reference, rounded, born
            self.live_bytes += rounded - size_bytes
        if self.live_bytes > self.peak_bytes:
            self.reset_peak()

    def _drop(self, key: int) -> None:
        if (storage := self._storages.pop(key, None)) is not None:
            self.live_bytes -= storage[1]


def _key(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's storage while it lives; None for a tensor without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, UnsupportedCase):
        return None


def count(tree: Any) -> None:
    """Count the storages of a tree of tensors in this thread's active LiveSets, as results of an op are."""
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, LiveSet):
            mode.hold(tree)


def storage_bytes(tree: Any, device_type: str, granularity: int = 1) -> int:
    """Return the bytes of all storages in a tree of tensors on a type of device, each counted once."""
    return LiveSet(device_type, granularity=granularity).hold(tree)
