""".ptau version 1: the powers of tau of a ceremony's first phase.

     1  u32 n8, q, u32 power, u32 ceremonyPower
     2  tau^i G1          2^(power+1) - 1   points of G1
     3  tau^i G2          2^power           of G2
     4  alpha tau^i G1    2^power           of G1
     5  beta tau^i G1     2^power           of G1
     6  beta G2           1                 of G2
     7  u32 count, contributions: tau G1, tau G2, alpha G1, beta G1, beta G2 after it, the public key (g1_s and g1_sx of
        tau, alpha and beta, then g2_spx of each), a hash's state (216 bytes), next challenge (64 bytes), label
    12  Lagrange forms of section 2: of 2^0 points, 2^1, ..., 2^(power+1)   of G1
    13  of section 3: of 2^0, ..., 2^power points                           of G2
    14, 15  of sections 4 and 5, as 13                                      of G1

Sections 12 to 15 are there once `snarkjs powersoftau prepare phase2` has run. Points are as elements.py has them.
Source: files of snarkjs 0.7.6, read byte by byte; the key's points of tau and beta in G1 found by pairings.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.encoding import encode_points
from accelerant.algebra.curve.parameters import Curve, Family, family_of
from accelerant.errors import ConfigError, FormatError
from accelerant.zk.formats.container import Container, Cursor, FilePath, Layout, MappedFile
from accelerant.zk.formats.contributions import Label, label_bytes, read_label
from accelerant.zk.formats.elements import (
    check_points,
    hash_bytes,
    montgomery_points,
    point_words,
    prime_bytes,
    read_family,
    read_point,
    scalar_field,
    words_of,
)
from accelerant.zk.formats.writing import Piece, write_container

__all__ = ["CONTRIBUTION_POINTS", "Powers", "Ptau", "PtauContribution", "write_ptau"]

U64 = npt.NDArray[np.uint64]
Powers = Literal["tau_g1", "tau_g2", "alpha_g1", "beta_g1"]

_HEADER, _TAU_G1, _TAU_G2, _ALPHA_G1, _BETA_G1, _BETA_G2, _CONTRIBUTIONS = range(1, 8)
_POWERS: dict[str, tuple[int, int]] = {"tau_g1": (2, 1), "tau_g2": (3, 2), "alpha_g1": (4, 1), "beta_g1": (5, 1)}
"""Name -> section, degree of its points."""

_LAGRANGE = 10
"""Added to the section of powers: that of their Lagrange forms."""

_NAMES = {
    _HEADER: "header", **{number: name for name, (number, _) in _POWERS.items()}, _BETA_G2: "beta_g2",
    _CONTRIBUTIONS: "contributions",
    **{number + _LAGRANGE: f"Lagrange {name}" for name, (number, _) in _POWERS.items()},
}  # fmt: skip
_LAYOUT = Layout("ptau", b"ptau", 1, _NAMES, (*range(_HEADER, _CONTRIBUTIONS + 1),))

CONTRIBUTION_POINTS: dict[str, int] = {
    "tau_g1": 1, "tau_g2": 2, "alpha_g1": 1, "beta_g1": 1, "beta_g2": 2,
    "tau_g1_s": 1, "tau_g1_sx": 1, "alpha_g1_s": 1, "alpha_g1_sx": 1, "beta_g1_s": 1, "beta_g1_sx": 1,
    "tau_g2_spx": 2, "alpha_g2_spx": 2, "beta_g2_spx": 2,
}  # fmt: skip
"""What a contribution has, in the file's order: name -> 1 of G1, 2 of G2."""

_STATE_BYTES, _CHALLENGE_BYTES = 216, 64
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class PtauContribution:
    """One of the ceremony's first phase, as the file tells it; nothing of it is verified here.

    Attributes:
        label: its kind and name.
        points: CONTRIBUTION_POINTS by name, words.
        partial_hash: 216 bytes, the state of a hash of what was contributed.
        next_challenge: 64 bytes.
    """

    label: Label
    points: Mapping[str, U64]
    partial_hash: bytes
    next_challenge: bytes


class Ptau(MappedFile):
    """A .ptau file, mapped.

    Points are words in Montgomery form; arrays are read-only, lie in the file, and need not begin at a multiple of 8.

    Attributes:
        path: of the file.
        family: "bn254" or "bls12_381", by q.
        power: log2 of the most constraints of a circuit.
        ceremony_power: that of the ceremony which the file was cut from.
        prepared: whether the Lagrange forms are there.
        contributions: of the ceremony.
    """

    layout = _LAYOUT

    def _read(self, container: Container) -> None:
        cursor = container.cursor(_HEADER)
        self._family = read_family(cursor, "q")
        self.family = self._family.name
        at = cursor.at
        self.power, self.ceremony_power = cursor.u32("power"), cursor.u32("ceremonyPower")
        most = scalar_field(self._family).two_adicity
        if not 1 <= self.power <= self.ceremony_power <= most:  # before 2^power is made
            message = f"power {self.power}, ceremonyPower {self.ceremony_power}; wanted 1 to {most}, ascending"
            raise cursor.error(message, at)
        cursor.end()
        self._check_sizes()
        self.contributions = self._read_contributions(container.cursor(_CONTRIBUTIONS))

    def _check_sizes(self) -> None:
        container = self._container
        container.expect_size(_BETA_G2, point_words(self._family, 2) * 8, "one point")
        for name, (number, degree) in _POWERS.items():
            count, width = _count(name, self.power), point_words(self._family, degree)
            container.expect_size(number, count * width * 8, f"{count} points")
        lagrange = [number + _LAGRANGE for number, _ in _POWERS.values()]
        self.prepared = any(number in container.sections for number in lagrange)
        if self.prepared:
            for name, (number, degree) in _POWERS.items():
                count, width = _lagrange_count(name, self.power), point_words(self._family, degree)
                container.require(number + _LAGRANGE)
                container.expect_size(number + _LAGRANGE, count * width * 8, f"{count} points")

    def _read_contributions(self, cursor: Cursor) -> tuple[PtauContribution, ...]:
        found = []
        for _ in range(cursor.u32("the number of contributions")):  # each takes bytes of the section, which ends them
            points = {
                name: read_point(cursor, self._family, degree, f"a contribution's {name}")
                for name, degree in CONTRIBUTION_POINTS.items()
            }
            state = cursor.take(_STATE_BYTES, "a contribution's hash")
            challenge = cursor.take(_CHALLENGE_BYTES, "a contribution's next challenge")
            found.append(PtauContribution(read_label(cursor), points, state, challenge))
        cursor.end()
        return tuple(found)

    # --- sections ------------------------------------------------------------------------------------------------

    def powers(self, name: Powers) -> U64:
        """Points times ascending powers of tau, from tau^0: (2^(power+1) - 1, words) of tau_g1, (2^power, words) else.

        Args:
            name: "tau_g1", "tau_g2", "alpha_g1" or "beta_g1".

        Raises:
            ConfigError: another name.
        """
        number, degree = _power_section(name)
        return self._container.rows(number, point_words(self._family, degree), count=_count(name, self.power))

    def lagrange(self, name: Powers, log_n: int) -> U64:
        """The Lagrange form of the first 2^log_n powers: (2^log_n, words).

        Args:
            name: as powers().
            log_n: 0 to power; of tau_g1 to power + 1.

        Raises:
            ConfigError: another name or size.
            FormatError: the file was not prepared for the second phase.
        """
        number, degree = _power_section(name)
        if not self.prepared:
            raise FormatError(f"{self.path} has no Lagrange forms: run snarkjs powersoftau prepare phase2 on it first")
        most = self.power + (name == "tau_g1")
        if not 0 <= log_n <= most:
            raise ConfigError(f"log_n must be 0 to {most} of {name}, got {log_n}")
        width = point_words(self._family, degree)
        start = ((1 << log_n) - 1) * width * 8
        return self._container.rows(number + _LAGRANGE, width, start=start, count=1 << log_n)

    @property
    def beta_g2(self) -> U64:
        """(4 limbs,) words of beta G2."""
        words: U64 = self._container.rows(_BETA_G2, point_words(self._family, 2), count=1)[0]
        return words

    @property
    def points(self) -> dict[str, U64]:
        """All sections of points by name, the Lagrange forms whole."""
        shift = (0, _LAGRANGE) if self.prepared else (0,)
        found = {
            _NAMES[number + more]: self._container.rows(number + more, point_words(self._family, degree))
            for more in shift
            for number, degree in _POWERS.values()
        }
        return found | {"beta_g2": self.beta_g2[None]}

    def check(self, *, subgroup: bool = True) -> None:
        """Read the whole file and refuse points off the curve, and powers of tau that do not begin with the generator.

        That the powers are of one tau is not asked: `snarkjs powersoftau verify` does.

        Args:
            subgroup: ask for points out of the subgroup too.

        Raises:
            FormatError: a coordinate that is not reduced, a point off the curve or out of the subgroup, another
                generator, a last contribution that left other points; names section and offset.
        """
        container = self._container
        for number, words in ((number, self.points[name]) for number, name in _NAMES.items() if name in self.points):
            check_points(container, number, self._curve(words), words, subgroup=subgroup)
        for number, words in ((_TAU_G1, self.powers("tau_g1")), (_TAU_G2, self.powers("tau_g2"))):
            first = words[:1]
            curve = self._curve(first)
            if not np.array_equal(first, montgomery_points(curve, encode_points(curve, [curve.generator]))):
                at = container.sections[number].offset
                raise container.error(number, at, f"tau^0 is not the generator of {curve.name}")
        self._check_last_contribution()

    def _curve(self, words: U64) -> Curve[Any]:
        return self._family.g2 if words.shape[1] == point_words(self._family, 2) else self._family.g1

    def _check_last_contribution(self) -> None:
        if not self.contributions:
            return
        left = {
            "tau_g1": self.powers("tau_g1")[1], "tau_g2": self.powers("tau_g2")[1],
            "alpha_g1": self.powers("alpha_g1")[0], "beta_g1": self.powers("beta_g1")[0], "beta_g2": self.beta_g2,
        }  # fmt: skip
        for name, words in left.items():
            if not np.array_equal(self.contributions[-1].points[name], words):
                at = self._container.sections[_CONTRIBUTIONS].offset
                message = f"the last contribution leaves another {name} than the powers have"
                raise self._container.error(_CONTRIBUTIONS, at, message)

    def __repr__(self) -> str:
        return f"Ptau({str(self.path)!r}, {self.family}, power {self.power}{', prepared' * self.prepared})"


def _power_section(name: str) -> tuple[int, int]:
    if name not in _POWERS:
        raise ConfigError(f"unknown powers {name!r}; known are {', '.join(_POWERS)}")
    return _POWERS[name]


def _count(name: str, power: int) -> int:
    return (2 << power) - 1 if name == "tau_g1" else 1 << power


def _lagrange_count(name: str, power: int) -> int:
    return (4 << power) - 1 if name == "tau_g1" else (2 << power) - 1


# --- writing ---------------------------------------------------------------------------------------------------------


def write_ptau(
    path: FilePath,
    family: str,
    *,
    power: int,
    ceremony_power: int | None = None,
    tau_g1: Any,
    tau_g2: Any,
    alpha_g1: Any,
    beta_g1: Any,
    beta_g2: Any,
    contributions: Sequence[PtauContribution] = (),
    lagrange: Mapping[Powers, Any] | None = None,
) -> None:
    """Write a .ptau, whole or not at all. The arrays are as Ptau has them and are not checked to be points.

    Args:
        path: of the file; what is there is replaced.
        family: "bn254" or "bls12_381".
        power: at least 1.
        ceremony_power: power by default.
        tau_g1: (2^(power+1) - 1, 2 limbs) uint64, Montgomery form.
        tau_g2: (2^power, 4 limbs).
        alpha_g1, beta_g1: (2^power, 2 limbs).
        beta_g2: (4 limbs,).
        contributions: of the ceremony.
        lagrange: all forms of each of the four, one after another; without it the file is not prepared.

    Raises:
        ConfigError: no such family, a power out of range, hashes of another length, forms of not all four.
        ShapeError, UnsupportedDtype: an array of another shape or dtype.
        OSError: the file cannot be written.
    """
    pairing = family_of(family)
    of_ceremony = power if ceremony_power is None else ceremony_power
    most = scalar_field(pairing).two_adicity
    if not 1 <= power <= of_ceremony <= most:
        raise ConfigError(f"power and ceremony_power must be 1 to {most}, ascending, got {power} and {of_ceremony}")
    if lagrange is not None and set(lagrange) != set(_POWERS):
        raise ConfigError(f"lagrange must have {', '.join(_POWERS)}, got {', '.join(lagrange) or 'none'}")
    given = {"tau_g1": tau_g1, "tau_g2": tau_g2, "alpha_g1": alpha_g1, "beta_g1": beta_g1}
    sections: dict[int, list[Piece]] = {
        _HEADER: [prime_bytes(pairing, "q") + struct.pack("<II", power, of_ceremony)],
        **{
            number: [words_of(given[name], point_words(pairing, degree), _count(name, power), name)]
            for name, (number, degree) in _POWERS.items()
        },
        _BETA_G2: [words_of(beta_g2, point_words(pairing, 2), None, "beta_g2")],
        _CONTRIBUTIONS: [_COUNT.pack(len(contributions))],
    }
    for each in contributions:
        sections[_CONTRIBUTIONS] += _contribution_pieces(pairing, each)
    for name, words in (lagrange or {}).items():
        number, degree = _POWERS[name]
        count = _lagrange_count(name, power)
        sections[number + _LAGRANGE] = [words_of(words, point_words(pairing, degree), count, f"lagrange {name}")]
    write_container(path, _LAYOUT, sections)


def _contribution_pieces(family: Family, each: PtauContribution) -> list[Piece]:
    if set(each.points) != set(CONTRIBUTION_POINTS):
        raise ConfigError(f"a contribution's points must be {', '.join(CONTRIBUTION_POINTS)}, got {list(each.points)}")
    words = (
        words_of(each.points[name], point_words(family, degree), None, name)
        for name, degree in CONTRIBUTION_POINTS.items()
    )
    hashes = (
        hash_bytes(each.partial_hash, _STATE_BYTES, "partial_hash"),
        hash_bytes(each.next_challenge, _CHALLENGE_BYTES, "next_challenge"),
    )
    return [*words, *hashes, label_bytes(each.label)]
