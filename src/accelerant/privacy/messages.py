"""Reads the fields of binary messages from strangers: encrypted tensors, keys, secure aggregation.

Nothing is allocated by a number in a message before it is compared with a limit, or with the bytes that are there.
"""

from __future__ import annotations

import math
from typing import Literal

from accelerant.errors import FormatError

_DIMENSIONS_MOST, _ELEMENTS_MOST = 32, 2**48


class MessageReader:
    """Reads fields in order; FormatError where bytes are missing or left over, or a number is out of range."""

    def __init__(self, data: bytes, order: Literal["big", "little"] = "big") -> None:
        self._data, self._at, self._order = memoryview(data), 0, order

    @property
    def left(self) -> int:
        """Bytes that were not taken yet."""
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        if count > self.left:
            raise FormatError(f"the message is cut off: {count} bytes wanted at {self._at}, {self.left} are there")
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    def number(self, count: int, most: int) -> int:
        """Return an unsigned number of some bytes, at most `most`."""
        value = int.from_bytes(self.take(count), self._order)
        if value > most:
            raise FormatError(f"the number at byte {self._at - count} of the message is larger than allowed")
        return value

    def shape(self) -> tuple[int, ...]:
        """Return a tensor's shape, as `shape_bytes` writes it; FormatError for more than 2^48 elements."""
        shape = tuple(self.number(8, _ELEMENTS_MOST) for _ in range(self.number(1, _DIMENSIONS_MOST)))
        if math.prod(max(1, size) for size in shape) > _ELEMENTS_MOST:
            raise FormatError(f"shape {shape} is too large")
        return shape

    def rest(self) -> bytes:
        """Return all bytes that are left."""
        return self.take(self.left)

    def end(self) -> None:
        """Check that everything was read."""
        if self.left:
            raise FormatError(f"the message has {self.left} bytes too many")


def shape_bytes(shape: tuple[int, ...]) -> bytes:
    """Return the number of dimensions in a byte, and each size in eight."""
    return bytes([len(shape)]) + b"".join(size.to_bytes(8, "big") for size in shape)
