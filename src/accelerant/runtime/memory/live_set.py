"""The bytes that live tensors hold, counted op by op: the same on real tensors and on fake ones.

While a LiveSet is active, each storage that an op returns is counted from then on until it dies. What a kernel
allocates and frees inside one op is not seen. Aliases (views, in-place results) count once. What was there before
counts only if `hold` was told of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accelerant.errors import OutOfMemory

__all__ = ["CUDA_GRANULARITY", "LiveSet", "storage_bytes"]

CUDA_GRANULARITY = 512
"""torch's CUDA allocator rounds each request up to a multiple of this."""


class LiveSet(TorchDispatchMode):
    """See the module's docstring. For one thread: torch's dispatch modes are a thread's own.

    Args:
        device_type: count storages on such devices only.
        granularity: each storage counts as the next multiple of this.
        limit_bytes: refuse, after the op that does it, to let more be alive; None for no limit.
        watch: called for each op with its name, arguments and result, for what else is to be known of it.

    Attributes:
        live_bytes: alive now.
        peak_bytes: the most since the start or the last reset_peak().
    """

    def __init__(
        self,
        device_type: str,
        *,
        granularity: int = 1,
        limit_bytes: int | None = None,
        watch: Callable[[str, Sequence[Any], Any], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.live_bytes = 0
        self.peak_bytes = 0
        self._device_type = device_type
        self._granularity = granularity
        self._limit = limit_bytes
        self._watch = watch
        self._seen: dict[int, _Entry] = {}
        self._clock = 0
        self._peak_clock = 0

    def hold(self, tree: Any) -> int:
        """Count what was there before, from now on; returns the bytes that are new."""
        before = self.live_bytes
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return self.live_bytes - before

    def reset_peak(self) -> None:
        """Let the peak start again from what is alive now."""
        self.peak_bytes, self._peak_clock = self.live_bytes, self._clock

    def alive_at_peak(self, tree: Any) -> int:
        """Bytes of the tree's storages that were there already when the peak was reached."""
        keys = {key for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) for key in (_key(leaf),)}
        entries = [self._seen[key] for key in keys if key in self._seen]
        return sum(entry.size_bytes for entry in entries if entry.born <= self._peak_clock)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and not self._was_there(leaf, args):
                self._count(leaf)
        if self._watch is not None:
            self._watch(func.name(), args, result)
        if self._limit is not None and self.live_bytes > self._limit:
            raise OutOfMemory(
                f"{func.name()} leaves {self.live_bytes:,} bytes alive on {self._device_type}; "
                f"the limit is {self._limit:,}"
            )
        return result

    def _was_there(self, tensor: Tensor, args: Sequence[Any]) -> bool:
        """Whether it is an alias of an argument that is not counted."""
        key = _key(tensor)
        return key not in self._seen and any(
            isinstance(leaf, Tensor) and _key(leaf) == key for leaf in pytree.tree_leaves(args)
        )

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device_type:
            return
        key = _key(tensor)
        if key is None:  # no storage: sparse tensors, some subclasses
            return
        storage = tensor.untyped_storage()
        rounded = -(-storage.nbytes() // self._granularity) * self._granularity
        entry = self._seen.get(key)
        if entry is None:
            self._clock += 1
            self._seen[key] = _Entry(weakref.ref(storage, lambda _: self._drop(key)), rounded, self._clock)
            self.live_bytes += rounded
        elif entry.size_bytes != rounded:  # resized in place
            self.live_bytes += rounded - entry.size_bytes
            entry.size_bytes = rounded
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_clock = self.live_bytes, self._clock

    def _drop(self, key: int) -> None:
        entry = self._seen.pop(key, None)
        if entry is not None:
            self.live_bytes -= entry.size_bytes


class _Entry:
    """A storage that is alive."""

    __slots__ = ("born", "reference", "size_bytes")

    def __init__(self, reference: object, size_bytes: int, born: int) -> None:
        self.reference = reference
        self.size_bytes = size_bytes
        self.born = born


def _key(tensor: Tensor) -> int | None:
    """What names a storage while it lives; None for a tensor without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def storage_bytes(tree: Any, device_type: str, granularity: int = 1) -> int:
    """Bytes of all storages in a tree of tensors on such a device, each counted once."""
    counter = LiveSet(device_type, granularity=granularity)
    return counter.hold(tree)
