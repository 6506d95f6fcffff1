"""Requests that wait for room: one queue a key, served in turns."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items that wait, by key: `pop` takes the first one of each key in turns.

    Args:
        most: items that may wait. Keys share it: each has at most `most` divided by the keys that wait, so that a key
            that sends few requests is not refused because another has filled the queue.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._keys: OrderedDict[str, deque[T]] = OrderedDict()  # the next one first

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def has_room(self, key: str) -> bool:
        """Return whether a key may add an item."""
        waiting = self._keys.get(key, ())
        return len(waiting) < max(1, self.most // len(self._keys.keys() | {key}))

    def add(self, key: str, item: T) -> None:
        """Let an item wait."""
        self._keys.setdefault(key, deque()).append(item)

    def first(self) -> T:
        """Return what `pop` would; IndexError if nothing waits."""
        for waiting in self._keys.values():
            return waiting[0]
        raise IndexError("nothing waits")

    def pop(self) -> T:
        """Take the first item of the key whose turn it is; IndexError if nothing waits."""
        if not self._keys:
            raise IndexError("nothing waits")
        key, waiting = self._keys.popitem(last=False)
        item = waiting.popleft()
        if waiting:
            self._keys[key] = waiting  # behind the others
        return item

    def remove(self, item: T) -> bool:
        """Take an item out of its turn; return whether it waited."""
        for key, waiting in self._keys.items():
            if item in waiting:
                waiting.remove(item)
                if not waiting:
                    del self._keys[key]
                return True
        return False
