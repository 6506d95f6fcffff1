"""The powers of tau of a ceremony's first phase: .ptau version 1.

     1  u32 n8, q, u32 power, u32 ceremonyPower
     2  tau^i G1          2^(power+1) - 1   points of G1
     3  tau^i G2          2^power           of G2
     4  alpha tau^i G1    2^power           of G1
     5  beta tau^i G1     2^power           of G1
     6  beta G2           1                 of G2
     7  u32 count, contributions: tau G1, tau G2, alpha G1, beta G1, beta G2 after the contribution, the public key
        (g1_s and g1_sx of tau, alpha and beta, then g2_spx of each), a hash state (216 bytes), next challenge (64
        bytes), label
    12  Lagrange forms of section 2, of 2^0, 2^1, ..., 2^(power+1) points   of G1
    13  Lagrange forms of section 3, of 2^0, ..., 2^power points            of G2
    14, 15  Lagrange forms of sections 4 and 5, like 13                     of G1

container.py has the encoding of points and labels. Source: files of snarkjs 0.7.6.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from accelerant.algebra.curve.parameters import Curve, family_of
from accelerant.algebra.curve.weierstrass import encode_points
from accelerant.errors import ConfigError, FormatError
from accelerant.zk.formats import container
from accelerant.zk.formats.container import U64, point_words, words_of

Powers = Literal["tau_g1", "tau_g2", "alpha_g1", "beta_g1"]

_HEADER, _TAU_G1, _TAU_G2, _ALPHA_G1, _BETA_G1, _BETA_G2, _CONTRIBUTIONS = range(1, 8)
_POWERS: dict[str, tuple[int, int]] = {"tau_g1": (2, 1), "tau_g2": (3, 2), "alpha_g1": (4, 1), "beta_g1": (5, 1)}
"""Name -> section id, degree of the points."""

_LAGRANGE = 10  # Offset from the id of a section of powers to the id of its Lagrange forms

_NAMES = {
    _HEADER: "header", **{number: name for name, (number, _) in _POWERS.items()}, _BETA_G2: "beta_g2",
    _CONTRIBUTIONS: "contributions",
    **{number + _LAGRANGE: f"Lagrange {name}" for name, (number, _) in _POWERS.items()},
}  # fmt: skip
_LAYOUT = container.FileFormat("ptau", b"ptau", 1, _NAMES, (*range(_HEADER, _CONTRIBUTIONS + 1),))

CONTRIBUTION_POINTS: dict[str, int] = {  # in file order: name -> degree, 1 for G1 and 2 for G2
    "tau_g1": 1, "tau_g2": 2, "alpha_g1": 1, "beta_g1": 1, "beta_g2": 2,
    "tau_g1_s": 1, "tau_g1_sx": 1, "alpha_g1_s": 1, "alpha_g1_sx": 1, "beta_g1_s": 1, "beta_g1_sx": 1,
    "tau_g2_spx": 2, "alpha_g2_spx": 2, "beta_g2_spx": 2,
}  # fmt: skip

_HASHES = {"partial_hash": 216, "next_challenge": 64}  # Hashes of a contribution in file order: name -> bytes

_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class PtauContribution:
    """A contribution to the first phase of a ceremony, as recorded in the file; it is not verified.

    Attributes:
        points: the points of CONTRIBUTION_POINTS by name, words.
        partial_hash: hash state after the contribution, 216 bytes.
        next_challenge: 64 bytes.
    """

    label: container.Label
    points: Mapping[str, U64]
    partial_hash: bytes
    next_challenge: bytes


class Ptau(container.MappedFile):
    """A memory-mapped .ptau file.

    Points are words in Montgomery form. Arrays are read-only views of the file and may be unaligned.

    Attributes:
        family: "bn254" or "bls12_381", from q.
        power: log2 of the largest supported number of constraints.
        ceremony_power: power of the ceremony that the file was truncated from.
        prepared: the Lagrange forms are present.
        contributions: contributions to the ceremony.
    """

    layout = _LAYOUT

    def _read(self) -> None:
        cursor = self.cursor(_HEADER)
        self._family = container.read_family(cursor, "q")
        self.family = self._family.name
        at = cursor.at
        self.power, self.ceremony_power = cursor.number("power"), cursor.number("ceremonyPower")
        most = self._family.g1.scalars.two_adicity
        if not 1 <= self.power <= self.ceremony_power <= most:  # before computing 2^power
            bounds = f"expected 1 <= power <= ceremonyPower <= {most}"
            raise cursor.error(f"power {self.power}, ceremonyPower {self.ceremony_power}; {bounds}", at)
        cursor.end()
        self.expect_size(_BETA_G2, point_words(self._family, 2) * 8, "one point")
        self.prepared = any(number + _LAGRANGE in self.sections for number, _ in _POWERS.values())
        for shift in self._shifts:
            for name, (number, degree) in _POWERS.items():
                count = _count(name, self.power, lagrange=shift > 0)
                self.require(number + shift)
                self.expect_size(number + shift, count * point_words(self._family, degree) * 8, f"{count} points")
        cursor = self.cursor(_CONTRIBUTIONS)
        found = container.read_contributions(cursor, self._family, CONTRIBUTION_POINTS, _HASHES)
        self.contributions = tuple(PtauContribution(label, points, **hashes) for label, points, hashes in found)

    @property
    def _shifts(self) -> tuple[int, ...]:
        """Differences between the ids of sections of points and those of powers."""
        return (0, _LAGRANGE) if self.prepared else (0,)

    # --- sections ------------------------------------------------------------------------------------------------
    def powers(self, name: Powers) -> U64:
        """Return the multiples of a point by tau^0, tau^1, ...: (2^power, words), or 2^(power+1) - 1 for tau_g1."""
        number, degree = _power_section(name)
        return self.rows(number, point_words(self._family, degree), count=_count(name, self.power))

    def lagrange(self, name: Powers, log_n: int) -> U64:
        """Return the Lagrange form of the first 2^log_n powers: (2^log_n, words).

        Args:
            name: as for powers().
            log_n: 0 to power; to power + 1 for tau_g1.

        Raises:
            ConfigError: unknown name, or log_n out of range.
            FormatError: the file is not prepared for the second phase.
        """
        number, degree = _power_section(name)
        if not self.prepared:
            raise FormatError(f"{self.path} has no Lagrange forms: run snarkjs powersoftau prepare phase2 on it first")
        most = self.power + (name == "tau_g1")
        if not 0 <= log_n <= most:
            raise ConfigError(f"log_n must be 0 to {most} for {name}, got {log_n}")
        width = point_words(self._family, degree)
        start = ((1 << log_n) - 1) * width * 8
        return self.rows(number + _LAGRANGE, width, start=start, count=1 << log_n)

    @property
    def beta_g2(self) -> U64:
        """Beta G2, (4 limbs,) words."""
        words: U64 = self.rows(_BETA_G2, point_words(self._family, 2), count=1)[0]
        return words

    @property
    def points(self) -> dict[str, U64]:
        """All sections of points by name; all Lagrange forms of a section are one array."""
        points = {
            _NAMES[number + more]: self.rows(number + more, point_words(self._family, degree))
            for more in self._shifts
            for number, degree in _POWERS.values()
        }
        return points | {"beta_g2": self.beta_g2[None]}

    def check(self, *, subgroup: bool = True) -> None:
        """Check all points, that the powers begin with the generator, and that they match the last contribution.

        That all powers belong to one tau is not checked; `snarkjs powersoftau verify` does that.

        Raises:
            FormatError: an unreduced coordinate, a point off the curve or outside the subgroup, another generator, or
                points that differ from the last contribution's; names section and offset.
        """

        def curve_of(words: U64) -> Curve[Any]:
            return self._family.g2 if words.shape[-1] == point_words(self._family, 2) else self._family.g1

        for number, words in ((number, self.points[name]) for number, name in _NAMES.items() if name in self.points):
            container.check_points(self, number, curve_of(words), words, subgroup=subgroup)
        for number, words in ((_TAU_G1, self.powers("tau_g1")), (_TAU_G2, self.powers("tau_g2"))):
            curve = curve_of(words)
            generator = container.montgomery_points(curve, encode_points(curve, [curve.generator]))
            if not np.array_equal(words[:1], generator):
                raise self.error(number, 0, f"the first power is not the generator of {curve.name}")
        if not self.contributions:
            return
        left = {
            "tau_g1": self.powers("tau_g1")[1], "tau_g2": self.powers("tau_g2")[1],
            "alpha_g1": self.powers("alpha_g1")[0], "beta_g1": self.powers("beta_g1")[0], "beta_g2": self.beta_g2,
        }  # fmt: skip
        for name, words in left.items():
            if not np.array_equal(self.contributions[-1].points[name], words):
                message = f"{name} of the last contribution differs from that of the powers"
                raise self.error(_CONTRIBUTIONS, 0, message)

    def facts(self) -> dict[str, Any]:
        """Return what formats.describe says of the file."""
        sizes = {"power": self.power, "ceremony_power": self.ceremony_power, "most_constraints": 1 << self.power}
        return sizes | {"prepared": self.prepared} | container.points_facts(self.points, self.contributions)

    def __repr__(self) -> str:
        return f"Ptau({str(self.path)!r}, {self.family}, power {self.power}{', prepared' * self.prepared})"


def _power_section(name: str) -> tuple[int, int]:
    if name not in _POWERS:
        raise ConfigError(f"unknown powers {name!r}; expected one of {', '.join(_POWERS)}")
    return _POWERS[name]


def _count(name: str, power: int, *, lagrange: bool = False) -> int:
    """Return the number of points in a section of powers, or in that of its Lagrange forms."""
    return (1 << power + (name == "tau_g1") + lagrange) - (name == "tau_g1" or lagrange)


def write_ptau(
    path: container.FilePath, family: str, *, power: int, ceremony_power: int | None = None, tau_g1: Any, tau_g2: Any,
    alpha_g1: Any, beta_g1: Any, beta_g2: Any, contributions: Sequence[PtauContribution] = (),
    lagrange: Mapping[Powers, Any] | None = None,
) -> None:  # fmt: skip
    """Write a .ptau file atomically; an existing one is replaced.

    Points have the shapes that Ptau.powers returns: uint64 words in Montgomery form. They are not validated.

    Args:
        ceremony_power: power by default.
        lagrange: all Lagrange forms of each of the four, concatenated; if None, the file is not prepared.

    Raises:
        ConfigError: unknown family, a power out of range, a hash of another length, missing Lagrange forms.
        ShapeError, UnsupportedDtype: an array of another shape or dtype.
        OSError: the file cannot be written.
    """
    pairing = family_of(family)
    of_ceremony = power if ceremony_power is None else ceremony_power
    most = pairing.g1.scalars.two_adicity
    if not 1 <= power <= of_ceremony <= most:
        bounds = f"1 <= power <= ceremony_power <= {most}"
        raise ConfigError(f"power and ceremony_power must satisfy {bounds}, got {power} and {of_ceremony}")
    if lagrange is not None and set(lagrange) != set(_POWERS):
        raise ConfigError(f"lagrange must have {', '.join(_POWERS)}, got {', '.join(lagrange) or 'none'}")
    points = {"tau_g1": tau_g1, "tau_g2": tau_g2, "alpha_g1": alpha_g1, "beta_g1": beta_g1}
    sections: dict[int, list[container.Payload]] = {
        _HEADER: [container.prime_bytes(pairing, "q") + struct.pack("<II", power, of_ceremony)],
        **{
            number: [words_of(points[name], point_words(pairing, degree), _count(name, power), name)]
            for name, (number, degree) in _POWERS.items()
        },
        _BETA_G2: [words_of(beta_g2, point_words(pairing, 2), None, "beta_g2")],
        _CONTRIBUTIONS: [_COUNT.pack(len(contributions))],
    }
    for contribution in contributions:
        if set(contribution.points) != set(CONTRIBUTION_POINTS):
            wanted = ", ".join(CONTRIBUTION_POINTS)
            raise ConfigError(f"a contribution's points must be {wanted}, got {list(contribution.points)}")
        sections[_CONTRIBUTIONS] += container.contribution_payloads(
            pairing, CONTRIBUTION_POINTS, contribution.points, _HASHES, contribution
        )
    for name, words in (lagrange or {}).items():
        number, degree = _POWERS[name]
        count = _count(name, power, lagrange=True)
        sections[number + _LAGRANGE] = [words_of(words, point_words(pairing, degree), count, f"lagrange {name}")]
    container.write_container(path, _LAYOUT, sections)
