"""The Groth16 proving key of a circuit: .zkey version 1.

     1  u32 1 (Groth16)
     2  u32 n8q, q, u32 n8r, r, u32 nVars, u32 nPublic, u32 domainSize, alpha1 beta1 beta2 gamma2 delta1 delta2
     3  IC   nPublic + 1           points of G1
     4  u32 count, then {u32 matrix (0 A, 1 B), u32 row, u32 signal, value R^2 mod r}
     5  A    nVars                 of G1
     6  B1   nVars                 of G1
     7  B2   nVars                 of G2
     8  C    nVars - nPublic - 1   of G1
     9  H    domainSize            of G1
    10  circuit hash (64 bytes), u32 count, contributions: deltaAfter, g1_s, g1_sx of G1, g2_spx of G2,
        transcript (64 bytes), label

container.py has the encoding of points and labels. A has nPublic + 1 more rows than the circuit: row nConstraints + s
has the value 1 for signal s. Source: files of snarkjs 0.7.6.

docs/groth16.md lists the relations of points by which anyone can forge proofs. The factors that are tested are 1 to 16
over 1 to 16, of either sign, times the eigenvalues of endomorphisms: the cube roots of 1 in G1, psi of
algebra/curve/parameters.py in G2. Source: Groth 2016, eprint 2016/260, section 3.2.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.parameters import Curve, Family, endomorphism, family_of
from accelerant.algebra.curve.weierstrass import add, decode_points
from accelerant.algebra.field.program import montgomery_radix
from accelerant.algebra.field.words import not_below
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.zk.formats import container
from accelerant.zk.formats.container import U64, Payload, check_points, point_words, prime_bytes, read_family, words_of

_MOST = 16  # Largest numerator and denominator of a factor
_ORBIT = 6  # Images of a point of G2 that differ by more than their sign: psi has order 12 and psi^6 = -1
_MOST_COMPARED = 1 << 8  # points in IC beyond which only equal and opposite ones are looked for

_ANYONE = "anyone can forge proofs for it"


def why_forgeable(
    family: Family, ic: U64, *, alpha: U64, beta: U64, gamma: U64, delta: U64, montgomery: bool = False
) -> str | None:
    """Explain why proofs for a key with these points can be forged, or return None; all are reduced, of one form."""
    if np.array_equal(gamma, delta):
        return "gamma2 equals delta2: nobody has contributed to this key, so anyone can forge proofs for it"
    words = {"alpha1": alpha, "beta2": beta, "gamma2": gamma, "delta2": delta}
    for name, each in words.items():
        if not each.any():
            return f"{name} of this key is infinity, so {_ANYONE}"
    g1, g2 = family.g1, family.g2
    points = {name: _point(g1 if name == "alpha1" else g2, each, montgomery) for name, each in words.items()}
    second = {"gamma2": points["gamma2"], "delta2": points["delta2"], "beta2": points["beta2"]}
    found = _related(g2, second | {"the generator of G2": g2.generator}, {frozenset(("gamma2", "the generator of G2"))})
    found = found or _related(g1, {"alpha1": points["alpha1"], "the generator of G1": g1.generator})
    if found:
        return f"{' and '.join(found)} of this key are related by a small factor, so {_ANYONE}"
    return _related_inputs(family, ic, points["alpha1"], montgomery)


def _related_inputs(family: Family, ic: U64, alpha: Any, montgomery: bool) -> str | None:
    rows = np.ascontiguousarray(ic).reshape(len(ic), -1)
    infinite = np.flatnonzero(~rows.any(axis=1))
    if infinite.size and infinite[0] == 0:
        return f"IC[0] of this key is infinity, so {_ANYONE} with all public inputs 0"
    if infinite.size:
        index = int(infinite[0])
        return (
            f"IC[{index}] of this key is infinity, so its proofs are valid with any public[{index - 1}]: the circuit "
            "ignores that input, or the key is not of an honest ceremony"
        )
    if _related(family.g1, {"IC[0]": _point(family.g1, rows[0], montgomery), "alpha1": alpha}):
        return f"IC[0] and alpha1 of this key are related by a small factor, so {_ANYONE} with all public inputs 0"
    found = _same_row(rows[:, : rows.shape[1] // 2])  # x, of a point and its opposite
    if found is None and len(rows) <= _MOST_COMPARED:
        points = {str(i): _point(family.g1, row, montgomery) for i, row in enumerate(rows)}
        related = _related(family.g1, points)
        found = None if related is None else (int(related[0]), int(related[1]))
    if found is None:
        return None
    if found[0] == 0:
        what = f"{_ANYONE} with some public inputs"
    else:
        what = (
            "its proofs are valid with other public inputs, too: the circuit takes only a combination of the two, or "
            "the key is not of an honest ceremony"
        )
    return f"IC[{found[0]}] and IC[{found[1]}] of this key are related by a small factor, so {what}"


def _same_row(rows: U64) -> tuple[int, int] | None:
    """Return the indices of two equal rows, ascending, or None."""
    order = np.lexsort(rows.T)
    same = np.flatnonzero((rows[order[1:]] == rows[order[:-1]]).all(axis=1))
    if not same.size:
        return None
    one, other = sorted((int(order[same[0]]), int(order[same[0] + 1])))
    return one, other


def _point(curve: Curve[Any], words: U64, montgomery: bool) -> Any:
    (point,) = decode_points(curve, np.array(words, np.uint64).reshape(1, *curve.shape))
    if point is None or not montgomery:
        return point
    base = curve.coordinates.base
    inverse = pow(montgomery_radix(base), -1, base.modulus)
    return tuple(curve.coordinates.times(coordinate, inverse) for coordinate in point)


def _related(
    curve: Curve[Any], points: dict[str, Any], harmless: set[frozenset[str]] | None = None
) -> tuple[str, str] | None:
    """Return the names of two points of which known multiples are equal or opposite, or None."""
    seen: dict[Any, set[str]] = {}
    for name, point in points.items():
        for x in _multiples(curve, point):
            for other in seen.setdefault(x, set()):
                if other != name and frozenset((name, other)) not in (harmless or ()):
                    return other, name
            seen[x].add(name)
    return None


def _multiples(curve: Curve[Any], point: Any) -> set[Any]:
    """Return what k P, k = 1 to 16, share with their images under phi (x^3 in G1) or powers of psi (all x in G2)."""
    found: set[Any] = set()
    multiple, k = point, curve.coordinates
    test = endomorphism(curve) if k.degree == 2 else None
    for _ in range(_MOST):
        if multiple is None:
            break
        x = multiple[0]
        if test is None:
            found.add(k.mul(k.square(x), x))
        else:
            for _ in range(_ORBIT):
                found.add(x)
                x = k.mul(test.x_factor, k.join((x[0], -x[1] % k.base.modulus)))
        multiple = add(curve, multiple, point)
    return found


# --- the file --------------------------------------------------------------------------------------------------------
_PROTOCOL, _HEADER, _IC, _COEFFICIENTS, _A, _B1, _B2, _C, _H, _CONTRIBUTIONS = range(1, 11)
_NAMES = {
    _PROTOCOL: "protocol", _HEADER: "header", _IC: "IC", _COEFFICIENTS: "coefficients", _A: "A", _B1: "B1", _B2: "B2",
    _C: "C", _H: "H", _CONTRIBUTIONS: "contributions",
}  # fmt: skip
_LAYOUT = container.FileFormat("zkey", b"zkey", 1, _NAMES, (*range(_PROTOCOL, _CONTRIBUTIONS),))
_GROTH16 = 1
_OTHER_PROTOCOLS = {2: "PLONK", 10: "FFLONK"}
_HEADER_POINTS = {"alpha1": 1, "beta1": 1, "beta2": 2, "gamma2": 2, "delta1": 1, "delta2": 2}
_CONTRIBUTION_POINTS = {"delta_after": 1, "g1_s": 1, "g1_sx": 1, "g2_spx": 2}
_HASH_BYTES = 64
_HASHES = {"transcript": _HASH_BYTES}
_COUNT = struct.Struct("<I")
_CHUNK = 1 << 16

COEFFICIENT = np.dtype([("matrix", "<u4"), ("row", "<u4"), ("signal", "<u4"), ("value", "<u8", (4,))])
"""An entry of the matrices A (0) and B (1); r takes four words in both supported families."""


@dataclass(frozen=True, slots=True, eq=False)
class ZkeyContribution:
    """A contribution to the second phase of a ceremony, as recorded in the file; it is not verified.

    Attributes:
        delta_after: delta1 after the contribution, words of G1.
        g1_s: a random point of G1.
        g1_sx: g1_s times the contributor's secret.
        g2_spx: the point of G2 derived from the transcript, times the secret.
        transcript: hash of the preceding contributions.
    """

    label: container.Label
    delta_after: U64
    g1_s: U64
    g1_sx: U64
    g2_spx: U64
    transcript: bytes


def _point_sections(n_vars: int, n_public: int, domain_size: int, words: int) -> dict[int, tuple[int, int]]:
    """Return for each section of points their number and the words of each; `words` are those of a point of G1."""
    counts = {_IC: n_public + 1, _A: n_vars, _B1: n_vars, _B2: n_vars, _C: n_vars - n_public - 1, _H: domain_size}
    return {number: (count, words * (1 + (number == _B2))) for number, count in counts.items()}


def _section(number: int, description: str) -> Any:
    """Return a property, the points of a section."""

    def points(self: Zkey) -> U64:
        count, width = self._sections[number]
        return self.rows(number, width, count=count)

    return property(points, doc=description)


class Zkey(container.MappedFile):
    """A memory-mapped Groth16 .zkey file.

    Points are words in Montgomery form, as the kernels use them. Arrays are read-only views of the file and may be
    unaligned.

    Attributes:
        family: "bn254" or "bls12_381", from q and r.
        n_vars: number of signals, including w[0] = 1.
        n_public: number of outputs and public inputs.
        domain_size: a power of two above the number of constraints.
        n_coefficients: number of entries of A and B.
        alpha1, beta1, delta1: (2 limbs,) words.
        beta2, gamma2, delta2: (4 limbs,) words.
        circuit_hash: 64 bytes; empty if the file has no contributions section.
        contributions: contributions to the second phase of the ceremony.
    """

    layout = _LAYOUT

    def _read(self) -> None:
        self._entries_checked = False
        cursor = self.cursor(_PROTOCOL)
        if (protocol := cursor.number("the protocol")) != _GROTH16:
            name = _OTHER_PROTOCOLS.get(protocol)
            raise cursor.error(f"protocol {protocol}{f' ({name})' if name else ''}; only 1 (Groth16) is read", 0)
        cursor.end()
        self._read_header()
        sizes = (self.n_vars, self.n_public, self.domain_size)
        self._sections = _point_sections(*sizes, point_words(self._family, 1))
        for number, (count, width) in self._sections.items():
            self.expect_size(number, count * width * 8, f"{count} points")
        self.n_coefficients = self.cursor(_COEFFICIENTS).number("the number of coefficients")
        needed = _COUNT.size + self.n_coefficients * COEFFICIENT.itemsize
        self.expect_size(_COEFFICIENTS, needed, f"{self.n_coefficients} coefficients")
        container.check_below(self, _IC, self._family.fq, self.ic)
        self.circuit_hash, contributions = b"", list[ZkeyContribution]()
        if _CONTRIBUTIONS in self.sections:
            cursor = self.cursor(_CONTRIBUTIONS)
            self.circuit_hash = cursor.take(_HASH_BYTES, "the circuit's hash")
            for label, points, hashes in container.read_contributions(
                cursor, self._family, _CONTRIBUTION_POINTS, _HASHES
            ):
                contributions.append(ZkeyContribution(label, **points, transcript=hashes["transcript"]))
        self.contributions = tuple(contributions)

    def _read_header(self) -> None:
        cursor = self.cursor(_HEADER)
        family = read_family(cursor, "q")
        at = cursor.at
        if read_family(cursor, "r") is not family:
            raise cursor.error(f"r is not the group order of {family.name}, the curve of q", at)
        at = cursor.at
        self.family, self._family = family.name, family
        self.n_vars, self.n_public, self.domain_size = map(cursor.number, ("nVars", "nPublic", "domainSize"))
        if self.n_public >= self.n_vars:
            raise cursor.error(f"{self.n_public} public signals and w[0] exceed {self.n_vars} signals", at)
        size, most = self.domain_size, family.g1.scalars.two_adicity
        if size & (size - 1) or not self.n_public < size <= 1 << most:
            bounds = f"greater than the {self.n_public} public signals and at most 2^{most}"
            raise cursor.error(f"domainSize is {size}; it must be a power of two {bounds}", at + 8)
        points = container.read_points(cursor, family, _HEADER_POINTS)
        self.alpha1, self.beta1, self.beta2, self.gamma2, self.delta1, self.delta2 = points.values()
        cursor.end()

    # --- sections ------------------------------------------------------------------------------------------------
    ic = _section(_IC, "Points of the public inputs, (n_public + 1, 2 limbs).")
    a = _section(_A, "A in G1, (n_vars, 2 limbs); may contain infinity.")
    b1 = _section(_B1, "B in G1, (n_vars, 2 limbs); may contain infinity.")
    b2 = _section(_B2, "B in G2, (n_vars, 4 limbs); may contain infinity.")
    c = _section(_C, "Points of the private signals, (n_vars - n_public - 1, 2 limbs).")
    h = _section(_H, "Points of the quotient polynomial, (domain_size, 2 limbs).")

    @property
    def points(self) -> dict[str, U64]:
        """All sections of points by name: IC, A, B1, B2, C, H."""
        return {_NAMES[number]: getattr(self, _NAMES[number].lower()) for number in self._sections}

    def chunks(self, name: str, rows: int) -> Iterator[U64]:
        """Yield aligned copies of up to `rows` points of a section, releasing the file's pages in between."""
        words = self.points[name]
        for start in range(0, len(words), rows):
            chunk = np.array(words[start : start + rows])
            self.forget()
            yield chunk

    @property
    def coefficients(self) -> npt.NDArray[np.void]:
        """Entries of A and B, (n_coefficients,) of COEFFICIENT.

        The first access validates matrix, row and signal, and raises FormatError.
        """
        entries: npt.NDArray[np.void] = self.array(
            _COEFFICIENTS, COEFFICIENT, start=_COUNT.size, count=self.n_coefficients
        )
        if self._entries_checked:
            return entries
        bounds = {"matrix": 2, "row": self.domain_size, "signal": self.n_vars}
        for start in range(0, len(entries), _CHUNK):
            part = entries[start : start + _CHUNK]
            for name, bound in bounds.items():
                wrong = part[name] >= bound
                if wrong.any():
                    index = int(wrong.argmax())
                    at = _COUNT.size + (start + index) * COEFFICIENT.itemsize
                    at += COEFFICIENT.fields[name][1]  # type: ignore[index]
                    message = f"coefficient {start + index}: {name} {part[name][index]} is not below {bound}"
                    raise self.error(_COEFFICIENTS, at, message)
        self._entries_checked = True
        return entries

    @property
    def n_constraints(self) -> int:
        """Number of constraints, derived from the last row of A, which belongs to the last public signal."""
        rows = self.coefficients["row"]
        return max(0, int(rows.max()) - self.n_public) if len(rows) else 0

    @property
    def forgeable(self) -> str | None:
        """Why anyone can forge proofs for this key; None if its header and IC give no reason."""
        points = {"alpha": self.alpha1, "beta": self.beta2, "gamma": self.gamma2, "delta": self.delta2}
        return why_forgeable(self._family, self.ic, montgomery=True, **points)

    def check(self, *, subgroup: bool = True) -> None:
        """Validate the whole key; required for a key from an untrusted source.

        The subgroup's check takes most of the time.

        Raises:
            FormatError: an unreduced coordinate or value, a point off the curve or outside the subgroup, infinity in
                the header, or a delta1 that differs from the last contribution's; names section and offset.
        """
        family = self._family
        self.check_header(subgroup=subgroup)
        for number in self._sections.keys() - {_IC}:
            curve = family.g2 if number == _B2 else family.g1
            check_points(self, number, curve, self.points[_NAMES[number]], subgroup=subgroup)
        entries = self.coefficients
        for start in range(0, len(entries), _CHUNK):
            wrong = not_below(np.ascontiguousarray(entries["value"][start : start + _CHUNK]), family.r)
            if wrong.size:
                index = start + int(wrong[0])
                at = _COUNT.size + index * COEFFICIENT.itemsize
                raise self.error(_COEFFICIENTS, at, f"coefficient {index}: the value is not below r")
        if self.contributions and not np.array_equal(self.contributions[-1].delta_after, self.delta1):
            raise self.error(_CONTRIBUTIONS, 0, "delta1 of the last contribution differs from the header's")

    def check_header(self, *, subgroup: bool = True) -> None:
        """Check that the points of the header are finite, and that they and IC are on the curve and in the subgroup.

        It takes about a millisecond. Proving requires it: r delta1 and s delta2 hide the witness in a proof. If delta1
        is infinity or has small order they do not, although the proof may verify.

        Raises:
            FormatError: names the point and its offset.
        """
        points: dict[str, U64] = {name: getattr(self, name) for name in _HEADER_POINTS}
        ends = list(itertools.accumulate(words.nbytes for words in points.values()))
        before = self.sections[_HEADER].size - ends[-1]
        places = {name: before + end - points[name].nbytes for name, end in zip(points, ends, strict=True)}
        for name, words in points.items():
            if not words.any():
                raise self.error(_HEADER, places[name], f"{name} is infinity")
        for degree, curve in ((1, self._family.g1), (2, self._family.g2)):
            group = [name for name in points if _HEADER_POINTS[name] == degree]
            words = np.stack([points[name] for name in group])
            named = [(places[name], name) for name in group]
            check_points(self, _HEADER, curve, words, named=named, subgroup=subgroup)
        check_points(self, _IC, self._family.g1, self.ic, subgroup=subgroup)

    def facts(self) -> dict[str, Any]:
        """Return what formats.describe says of the key."""
        return {
            "protocol": "groth16", "constraints": self.n_constraints, "signals": self.n_vars,
            "public_inputs": self.n_public, "domain_size": self.domain_size, "coefficients": self.n_coefficients,
            "circuit_hash": self.circuit_hash.hex(), "forgeable": self.forgeable,
            **container.points_facts(self.points, self.contributions),
        }  # fmt: skip

    def __repr__(self) -> str:
        sizes = f"{self.n_vars} signals, {self.n_public} public, domain {self.domain_size}"
        return f"Zkey({str(self.path)!r}, {self.family}, {sizes})"


def write_zkey(
    path: container.FilePath, family: str, *, n_public: int, alpha1: Any, beta1: Any, beta2: Any, gamma2: Any,
    delta1: Any, delta2: Any, ic: Any, a: Any, b1: Any, b2: Any, c: Any, h: Any, coefficients: npt.NDArray[np.void],
    circuit_hash: bytes = bytes(_HASH_BYTES), contributions: Sequence[ZkeyContribution] = (),
) -> None:  # fmt: skip
    """Write a .zkey file atomically; an existing one is replaced.

    Arguments have the names and shapes of Zkey's attributes: points are uint64 words in Montgomery form, and are not
    validated. The lengths of a and h give n_vars and domain_size, a power of two.

    Raises:
        ConfigError: unknown family, a hash or transcript of another length, impossible sizes, or path does not name a
            regular file.
        ShapeError, UnsupportedDtype: an array of another shape or dtype.
        OSError: the file cannot be written.
    """
    pairing = family_of(family)
    n_vars, domain_size = len(a), len(h)
    if not 0 <= n_public < n_vars:
        raise ConfigError(f"n_public must be 0 to {n_vars - 1}, below the number of signals, got {n_public}")
    if domain_size & (domain_size - 1) or domain_size <= n_public:
        raise ConfigError(
            f"the number of points of h must be a power of two above n_public = {n_public}, got {domain_size}"
        )
    if coefficients.dtype != COEFFICIENT:
        raise UnsupportedDtype(f"coefficients must be {COEFFICIENT}, got {coefficients.dtype}")
    if coefficients.ndim != 1:
        raise ShapeError(f"coefficients must be (n,), got {coefficients.shape}")
    g1 = point_words(pairing, 1)
    arrays = {_IC: ic, _A: a, _B1: b1, _B2: b2, _C: c, _H: h}
    points: dict[int, list[Payload]] = {
        number: [words_of(arrays[number], width, count, _NAMES[number].lower())]
        for number, (count, width) in _point_sections(n_vars, n_public, domain_size, g1).items()
    }
    header = {"alpha1": alpha1, "beta1": beta1, "beta2": beta2, "gamma2": gamma2, "delta1": delta1, "delta2": delta2}
    sections: dict[int, list[Payload]] = {
        _PROTOCOL: [_COUNT.pack(_GROTH16)],
        _HEADER: [
            prime_bytes(pairing, "q") + prime_bytes(pairing, "r"),
            struct.pack("<III", n_vars, n_public, domain_size),
            *(words_of(header[name], g1 * degree, None, name) for name, degree in _HEADER_POINTS.items()),
        ],
        _IC: points.pop(_IC),
        _COEFFICIENTS: [_COUNT.pack(len(coefficients)), np.ascontiguousarray(coefficients)],
        **points,
        _CONTRIBUTIONS: [
            container.check_size(circuit_hash, _HASH_BYTES, "circuit_hash"),
            _COUNT.pack(len(contributions)),
        ],
    }
    for contribution in contributions:
        given = {name: getattr(contribution, name) for name in _CONTRIBUTION_POINTS}
        sections[_CONTRIBUTIONS] += container.contribution_payloads(
            pairing, _CONTRIBUTION_POINTS, given, _HASHES, contribution
        )
    container.write_container(path, _LAYOUT, sections)
