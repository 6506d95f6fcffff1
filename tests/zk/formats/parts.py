"""Files taken apart and put together again, by code that shares nothing with what is tested."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from accelerant.errors import FormatError

VECTORS = Path(__file__).parents[2] / "vectors" / "formats"
FAMILIES = ("bn254", "bls12_381")
FILES = ("product.zkey", "product.wtns", "product.r1cs", "prepared.ptau")
EXTENSIONS = {"zkey": "product.zkey", "wtns": "product.wtns", "r1cs": "product.r1cs", "ptau": "prepared.ptau"}


def take_apart(data: bytes) -> tuple[bytes, int, list[tuple[int, bytearray]]]:
    """Magic, version, and the sections in the file's order."""
    magic, version, count = struct.unpack_from("<4sII", data)
    at, sections = 12, []
    for _ in range(count):
        number, size = struct.unpack_from("<IQ", data, at)
        sections.append((number, bytearray(data[at + 12 : at + 12 + size])))
        at += 12 + size
    return magic, version, sections


def put_together(magic: bytes, version: int, sections: list[tuple[int, bytes]]) -> bytes:
    body = b"".join(struct.pack("<IQ", number, len(payload)) + bytes(payload) for number, payload in sections)
    return struct.pack("<4sII", magic, version, len(sections)) + body


def offset_of(data: bytes, wanted: int) -> int:
    """Of a section's payload in the file."""
    at = 12
    for number, payload in take_apart(data)[2]:
        if number == wanted:
            return at + 12
        at += 12 + len(payload)
    raise KeyError(wanted)


def edited(data: bytes, number: int, at: int, new: bytes) -> bytes:
    """Bytes of a section replaced; at counts from its start, or from its end where it is negative."""
    magic, version, sections = take_apart(data)
    payload = dict(sections)[number]
    at += len(payload) if at < 0 else 0
    payload[at : at + len(new)] = new
    return put_together(magic, version, sections)


def resized(data: bytes, number: int, change: int) -> bytes:
    """A section made longer by zeros, or shorter; its size in the file is right."""
    magic, version, sections = take_apart(data)
    payload = dict(sections)[number]
    if change < 0:
        del payload[change:]
    payload += bytes(max(change, 0))
    return put_together(magic, version, sections)


def without(data: bytes, number: int) -> bytes:
    magic, version, sections = take_apart(data)
    return put_together(magic, version, [each for each in sections if each[0] != number])


def refused(number: int, place: int | None, message: str):
    """Expects a FormatError of a section at a byte of the file, or anywhere in the section."""
    at = r"\d+" if place is None else place
    return pytest.raises(FormatError, match=rf"section {number} \(.*\), byte {at}: .*({message})")
