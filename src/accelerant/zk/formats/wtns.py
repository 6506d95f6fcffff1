""".wtns version 2: the values of a circuit's wires.

1  u32 n8, r (n8 bytes), u32 number of values
2  the values, canonical, n8 bytes each: w[0] = 1, the outputs, the public inputs, everything else
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.parameters import family_of
from accelerant.errors import ConfigError
from accelerant.zk.formats.container import Container, FilePath, Layout, MappedFile
from accelerant.zk.formats.elements import check_below, prime_bytes, read_family, scalar_field, words_of
from accelerant.zk.formats.writing import write_container

__all__ = ["Witness", "write_wtns"]

U64 = npt.NDArray[np.uint64]

_HEADER, _VALUES = 1, 2
_LAYOUT = Layout("wtns", b"wtns", 2, {_HEADER: "header", _VALUES: "values"}, (_HEADER, _VALUES))


class Witness(MappedFile):
    """A .wtns file, mapped. Its values are secret: none is ever shown.

    Attributes:
        path: of the file.
        family: "bn254" or "bls12_381", by r.
        n_values: how many there are, w[0] included.
    """

    layout = _LAYOUT

    def _read(self, container: Container) -> None:
        cursor = container.cursor(_HEADER)
        family = read_family(cursor, "r")
        at = cursor.at
        count = cursor.u32("the number of values")
        cursor.end()
        self._field = scalar_field(family)
        self.family = family.name
        self.n_values = count
        container.expect_size(_VALUES, count * self._field.size_bytes, f"{count} values")
        if not count:
            raise cursor.error("no values; w[0] is always there", at)
        if not _begins_with_one(self.values):
            raise container.error(_VALUES, container.sections[_VALUES].offset, "w[0] is not 1")

    @property
    def values(self) -> U64:
        """(n_values, 4) canonical words, read-only, in the file. The address need not be a multiple of 8."""
        return self._container.rows(_VALUES, self._field.limbs, count=self.n_values)

    def check(self) -> None:
        """Refuse values that are not below r: to be called before they are used.

        Raises:
            FormatError: names the first one's offset.
        """
        check_below(self._container, _VALUES, self._field, self.values)

    def __repr__(self) -> str:
        return f"Witness({str(self.path)!r}, {self.family}, {self.n_values} values)"


def _begins_with_one(words: U64) -> bool:
    return len(words) > 0 and words[0, 0] == 1 and not words[0, 1:].any()


def write_wtns(path: FilePath, family: str, values: Any) -> None:
    """Write a .wtns, whole or not at all; nobody but the owner may read it.

    Args:
        path: of the file; what is there is replaced.
        family: "bn254" or "bls12_381".
        values: (n, 4) uint64, canonical, w[0] = 1.

    Raises:
        ConfigError: no such family, w[0] is not 1, or path names no regular file.
        ShapeError, UnsupportedDtype: values of another shape or dtype.
        OSError: the file cannot be written.
    """
    pairing = family_of(family)
    words = words_of(values, scalar_field(pairing).limbs, len(values), "values")
    if not _begins_with_one(words):
        raise ConfigError("values[0] must be 1: wire 0 of every circuit is")
    header = prime_bytes(pairing, "r") + struct.pack("<I", len(words))
    write_container(path, _LAYOUT, {_HEADER: [header], _VALUES: [words]}, secret=True)
