"""Bytes in live tensors, counted op by op, for real and for fake tensors alike.

While a LiveSet is active, each storage that an op returns is counted until it dies; aliases count once. Memory that a
kernel allocates and frees inside one op is not seen. Counting does not change what runs: fused layers stay so
(`only_counts`), also on the fake tensors of a prediction (`predicting`), where kernels are not launched.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from accelerant.errors import OutOfMemory, UnsupportedCase

CUDA_GRANULARITY = 512
"""torch's CUDA allocator rounds each request up to a multiple of this."""

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
        self._storages: dict[int, _LiveStorage] = {}
        self._clock = 0
        self._peak_clock = 0

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
        return sum(storage.size_bytes for storage in storages if storage.born <= self._peak_clock)

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
        if tensor.device.type != self._device_type:
            return
        key = _key(tensor)
        if key is None:  # no storage: sparse tensors, some subclasses
            return
        storage = tensor.untyped_storage()
        rounded = -(-storage.nbytes() // self._granularity) * self._granularity
        known = self._storages.get(key)
        if known is None:
            self._clock += 1
            reference = weakref.ref(storage, lambda _: self._drop(key))
            self._storages[key] = _LiveStorage(reference, rounded, self._clock)
            self.live_bytes += rounded
        elif known.size_bytes != rounded:  # resized in place
            self.live_bytes += rounded - known.size_bytes
            known.size_bytes = rounded
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_clock = self.live_bytes, self._clock

    def _drop(self, key: int) -> None:
        storage = self._storages.pop(key, None)
        if storage is not None:
            self.live_bytes -= storage.size_bytes


@dataclass(slots=True)
class _LiveStorage:
    """A storage that is alive: a weak reference to it, its size, and when it was first seen."""

    reference: object
    size_bytes: int
    born: int


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
