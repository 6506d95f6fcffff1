"""What contributors of a ceremony leave about themselves: a kind and parameters, alike in .zkey and .ptau.

u32 kind (0 a contribution, 1 a random beacon), u32 length of the parameters, the parameters in ascending order:
1, u8 length, name in UTF-8;  2, u8 log2 of the beacon's iterations;  3, u8 length, the beacon's bytes
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from accelerant.errors import ConfigError
from accelerant.zk.formats.container import Cursor

__all__ = ["KINDS", "Label", "label_bytes", "read_label"]

KINDS = {0: "contribution", 1: "beacon"}
_NAME, _ITERATIONS, _BEACON = 1, 2, 3
_LONGEST = 255


@dataclass(frozen=True, slots=True)
class Label:
    """What a contribution says of itself; nothing of it is proved.

    Attributes:
        kind: 0 a contribution, 1 a random beacon.
        name: as its author gave it; may hold any characters.
        iterations_exp: log2 of how often the beacon was hashed; a beacon's only.
        beacon: its bytes; a beacon's only.
    """

    kind: int = 0
    name: str = ""
    iterations_exp: int | None = None
    beacon: bytes | None = None


def read_label(cursor: Cursor) -> Label:
    """The label that comes next.

    Raises:
        FormatError: an unknown kind or parameter, parameters out of order or cut.
    """
    at = cursor.at
    kind = cursor.u32("a contribution's kind")
    if kind not in KINDS:
        raise cursor.error(f"contribution of kind {kind}; known are 0 and 1 (a beacon)", at)
    length = cursor.u32("the length of a contribution's parameters")
    if length > cursor.left:
        raise cursor.error(f"{length} bytes of a contribution's parameters, {cursor.left} are left", cursor.at - 4)
    end, last = cursor.at + length, 0
    found: dict[int, bytes] = {}
    while cursor.at < end:
        at = cursor.at
        key = cursor.number(1, "a contribution's parameter")
        if not last < key <= _BEACON:
            raise cursor.error(f"contribution's parameter {key} after {last}; wanted 1 to 3, ascending", at)
        size = 1 if key == _ITERATIONS else cursor.number(1, "a parameter's length")
        found[key] = cursor.take(size, "a contribution's parameter")
        last = key
    if cursor.at != end:
        raise cursor.error("a contribution's parameters are longer than they say", at)
    # snarkjs cuts names at 64 bytes, be it inside a character
    name = found.get(_NAME, b"").decode("utf-8", errors="replace")
    iterations = found.get(_ITERATIONS)
    return Label(kind, name, None if iterations is None else iterations[0], found.get(_BEACON))


def label_bytes(label: Label) -> bytes:
    """What read_label reads.

    Raises:
        ConfigError: a name or a beacon of more than 255 bytes, another kind, iterations of more than a byte.
    """
    if label.kind not in KINDS:
        raise ConfigError(f"a contribution's kind must be 0 or 1, got {label.kind}")
    data = b""
    if label.name:
        data += _long(_NAME, "name", label.name.encode("utf-8", errors="replace"))
    if label.iterations_exp is not None:
        if not 0 <= label.iterations_exp <= _LONGEST:
            raise ConfigError(f"a beacon's iterations_exp must be 0 to 255, got {label.iterations_exp}")
        data += bytes((_ITERATIONS, label.iterations_exp))
    if label.beacon is not None:
        data += _long(_BEACON, "beacon", label.beacon)
    return struct.pack("<II", label.kind, len(data)) + data


def _long(key: int, what: str, value: bytes) -> bytes:
    if len(value) > _LONGEST:
        raise ConfigError(f"a contribution's {what} must have at most {_LONGEST} bytes, got {len(value)}")
    return bytes((key, len(value))) + value
