"""Curves y^2 = x^3 + b over a prime field Fq or over Fq2 = Fq[u] / (u^2 + 1), and their group law, on Python integers.

Elements are ints in [0, q), or pairs (c0, c1). Points are affine (x, y), None for infinity, or Jacobian (X, Y, Z) with
x = X/Z^2, y = Y/Z^3 and Z = 0 for infinity. Not constant-time. Costs: M multiplications, S squarings, I inversions.

Source: Bernstein and Lange, Explicit-Formulas Database, hyperelliptic.org/EFD, short Weierstrass curves, "jacobian-0",
by the names in each function.

Points as arrays of limbs and as bytes, to and from Python integers.

Arrays: canonical little-endian 64-bit limbs, affine, (n, 2, limbs) for G1 and (n, 2, 2, limbs) for G2 with c0 before
c1; infinity is all zeros, which is on no curve here (b is not 0).

Bytes, by layout, points contiguous:

    evm           x then y, big-endian. EIP-196 and EIP-197 for bn254: 32 bytes a coefficient, c1 before c0. EIP-2537
                  for bls12_381: 64 bytes a coefficient, the first 16 zero, c0 before c1. Infinity is all zeros.
    uncompressed  x then y, big-endian, c1 before c0, 32 or 48 bytes a coefficient, flags in the top bits of byte 0.
    compressed    x only, in the same way; the flags choose y.

The flags of bls12_381 are ZCash's (draft-irtf-cfrg-pairing-friendly-curves-11, appendix C): 0x80 compressed,
0x40 infinity, 0x20 y is the larger root (compressed only). Those of bn254 are gnark-crypto's (ecc/bn254/marshal.go,
commit 186d567), since there is no third spare bit: 0x00 uncompressed, 0x40 compressed infinity, 0x80 compressed with
the smaller root, 0xc0 with the larger one; an uncompressed infinity is all zeros. The larger of y and -y is the one
with the larger c1, or c0 where c1 is zero.

Input is untrusted, and checked but for points off the curve or the subgroup (launch.first_off). Not constant-time.
"""

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.words import decode
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.runtime.files import clipped

E = TypeVar("E")
Pair = tuple[int, int]
Affine = tuple[E, E] | None  # (x, y), reduced; None is the point at infinity
SCALAR_WORDS = 4  # 64-bit words of a scalar, on every curve


class Coordinates(Protocol[E]):
    """The field of a curve's coordinates, Fq (degree 1) or Fq2 (2) over `base`.

    `times` multiplies by an integer (or an element of Fq). `inv` raises ZeroDivisionError for zero. `sqrt` returns None
    for an element that is not a square. `parts` are the coefficients over Fq, c0 first; `join` is its inverse.
    """

    base: Field
    degree: int
    zero: E
    one: E

    def add(self, a: E, b: E) -> E: ...
    def sub(self, a: E, b: E) -> E: ...
    def neg(self, a: E) -> E: ...
    def times(self, a: E, k: int) -> E: ...
    def mul(self, a: E, b: E) -> E: ...
    def square(self, a: E) -> E: ...
    def inv(self, a: E) -> E: ...
    def sqrt(self, a: E) -> E | None: ...
    def parts(self, a: E) -> tuple[int, ...]: ...
    def join(self, parts: Sequence[int]) -> E: ...

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.base == self.base

    def __hash__(self) -> int:
        return hash((self.degree, self.base))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base.name})"

    def power(self, a: E, exponent: int) -> E:
        """Return a^exponent for exponent >= 0, by squaring and multiplying."""
        result = self.one
        for bit in bin(exponent)[2:]:
            result = self.square(result)
            if bit == "1":
                result = self.mul(result, a)
        return result

    def is_larger(self, a: E) -> bool:
        """Return whether a > -a, comparing c1 first, as the compressed encodings do."""
        for part in reversed(self.parts(a)):
            if part:
                return part > self.base.modulus // 2
        return False


class PrimeCoordinates(Coordinates[int]):
    """The prime field Fq."""

    def __init__(self, field: Field) -> None:
        self.base, self.degree = field, 1
        self.zero, self.one = 0, 1
        self._q = field.modulus

    def add(self, a: int, b: int) -> int:
        return (a + b) % self._q

    def sub(self, a: int, b: int) -> int:
        return (a - b) % self._q

    def neg(self, a: int) -> int:
        return -a % self._q

    def times(self, a: int, k: int) -> int:
        return a * k % self._q

    def mul(self, a: int, b: int) -> int:
        return a * b % self._q

    def square(self, a: int) -> int:
        return a * a % self._q

    def inv(self, a: int) -> int:
        if not a:
            raise ZeroDivisionError("zero has no inverse")
        return pow(a, -1, self._q)

    def sqrt(self, a: int) -> int | None:
        """Return a square root, or None: a power for q = 3 mod 4, else by Shanks 1973.

        With q - 1 = 2^s m, m odd: r = a^((m + 1) / 2) has r^2 = a t with t = a^m of order 2^k, k < s for a square; r is
        corrected by powers of a generator of the group of order 2^s until t is 1. Source: "Five number-theoretic
        algorithms".
        """
        q = self._q
        if q % 4 == 3:
            root = pow(a, (q + 1) // 4, q)
            return root if root * root % q == a else None
        if pow(a, (q - 1) // 2, q) == q - 1:
            return None
        s = self.base.two_adicity
        m = (q - 1) >> s
        z, t, root = pow(self.base.generator, m, q), pow(a, m, q), pow(a, (m + 1) // 2, q)
        while t > 1:
            k, power = 0, t
            while power != 1:
                k, power = k + 1, power * power % q
            factor = pow(z, 1 << s - k - 1, q)
            s, z = k, factor * factor % q
            t, root = t * z % q, root * factor % q
        return root

    def parts(self, a: int) -> tuple[int, ...]:
        return (a,)

    def join(self, parts: Sequence[int]) -> int:
        (a,) = parts
        return a


class QuadraticCoordinates(Coordinates[Pair]):
    """The quadratic extension Fq2 = Fq[u] / (u^2 + 1), for q = 3 mod 4."""

    def __init__(self, field: Field) -> None:
        if field.modulus % 4 != 3:  # then u^2 + 1 factors
            raise ValueError(f"{field.name}: -1 is a square mod {field.modulus}")
        self.base, self.degree = field, 2
        self.zero, self.one = (0, 0), (1, 0)
        self._q = field.modulus
        self._prime = PrimeCoordinates(field)

    def add(self, a: Pair, b: Pair) -> Pair:
        return (a[0] + b[0]) % self._q, (a[1] + b[1]) % self._q

    def sub(self, a: Pair, b: Pair) -> Pair:
        return (a[0] - b[0]) % self._q, (a[1] - b[1]) % self._q

    def neg(self, a: Pair) -> Pair:
        return -a[0] % self._q, -a[1] % self._q

    def times(self, a: Pair, k: int) -> Pair:
        return a[0] * k % self._q, a[1] * k % self._q

    def mul(self, a: Pair, b: Pair) -> Pair:
        low, high = a[0] * b[0], a[1] * b[1]
        return (low - high) % self._q, ((a[0] + a[1]) * (b[0] + b[1]) - low - high) % self._q

    def square(self, a: Pair) -> Pair:
        return (a[0] + a[1]) * (a[0] - a[1]) % self._q, 2 * a[0] * a[1] % self._q

    def inv(self, a: Pair) -> Pair:
        scale = self._prime.inv((a[0] * a[0] + a[1] * a[1]) % self._q)
        return a[0] * scale % self._q, -a[1] * scale % self._q

    def conjugate(self, a: Pair) -> Pair:
        """Return c0 - c1 u, which is a^q."""
        return a[0], -a[1] % self._q

    def sqrt(self, a: Pair) -> Pair | None:
        """Return a square root, or None, by the complex method.

        For c1 = 0 the root is that of c0, or u times that of -c0: one of them is a square. Otherwise, with n^2 = c0^2 +
        c1^2, the root is x + c1 / (2 x) u, where x^2 is (c0 + n) / 2 or (c0 - n) / 2: their product, -c1^2 / 4, is no
        square, so exactly one of them is. Source: Adj and Rodriguez-Henriquez, eprint 2012/685, algorithm 8.
        """
        prime, (c0, c1) = self._prime, a
        if c1 == 0:
            x = prime.sqrt(c0)
            return (x, 0) if x is not None else (0, pow(-c0, (self._q + 1) // 4, self._q))
        if (norm := prime.sqrt((c0 * c0 + c1 * c1) % self._q)) is None:
            return None
        half = (self._q + 1) // 2
        if (x := prime.sqrt((c0 + norm) * half % self._q)) is None:
            x = pow((c0 - norm) * half, (self._q + 1) // 4, self._q)
        return x, c1 * half * prime.inv(x) % self._q

    def parts(self, a: Pair) -> tuple[int, ...]:
        return a

    def join(self, parts: Sequence[int]) -> Pair:
        c0, c1 = parts
        return c0, c1


@dataclass(frozen=True, slots=True, repr=False)
class Curve(Generic[E]):
    """A curve y^2 = x^3 + b and its subgroup of odd prime order r, the size of the field `scalars`.

    With an odd cofactor, the order of the curve's group divided by r, no point has y = 0 and kernels add any points of
    the curve; with an even one only points of the subgroup, of which `generator` is an affine generator.
    """

    name: str
    coordinates: Coordinates[E]
    scalars: Field
    b: E
    generator: tuple[E, E]
    cofactor: int

    def __repr__(self) -> str:
        return f"Curve({self.name})"

    @property
    def order(self) -> int:
        """Return r, the order of the subgroup."""
        return self.scalars.modulus

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a point in arrays of canonical 64-bit limbs: (2, limbs), or (2, 2, limbs) over Fq2."""
        return (2, *(2,) * (self.coordinates.degree - 1), self.coordinates.base.limbs)

    def is_on_curve(self, point: Affine[E]) -> bool:
        """Return whether y^2 = x^3 + b; infinity is on the curve."""
        if point is None:
            return True
        x, y = point
        return self.coordinates.square(y) == self.right_side(x)

    def right_side(self, x: E) -> E:
        """Return x^3 + b."""
        k = self.coordinates
        return k.add(k.mul(k.square(x), x), self.b)

    def canonical_text(self) -> str:
        """Return all parameters, one per line: a key, and integers in lower-case hexadecimal (c0 before c1)."""
        k, (x, y) = self.coordinates, self.generator
        rows = {"modulus": (k.base.modulus,), "degree": (k.degree,), "b": k.parts(self.b), "x": k.parts(x)}
        rows |= {"y": k.parts(y), "order": (self.order,), "cofactor": (self.cofactor,)}
        lines = (" ".join((key, *(f"{value:x}" for value in values))) for key, values in rows.items())
        return "\n".join((f"curve {self.name}", *lines, ""))

    def parameters_hash(self) -> str:
        """Return the SHA-256 of canonical_text in hexadecimal, which identifies a curve to other programs."""
        return hashlib.sha256(self.canonical_text().encode("ascii")).hexdigest()


def signed_windows(number: int, width: int) -> list[int]:
    """Return the width-w non-adjacent form, lowest digit first: 0 or odd, below 2^(width - 1) (Solinas 2000)."""
    digits, rest, base = [], number, 1 << width
    while rest:
        digit = rest % base if rest % 2 else 0
        if digit > base // 2:
            digit -= base
        digits.append(digit)
        rest = (rest - digit) // 2
    return digits


# --- the group law ----------------------------------------------------------------------------------------------------
Jacobian = tuple[E, E, E]


def in_subgroup(curve: Curve[E], point: Affine[E]) -> bool:
    """Return whether r times a point of the curve is infinity."""
    return multiply(curve, curve.order, point) is None


def negate(curve: Curve[E], point: Affine[E]) -> Affine[E]:
    """Return -P = (x, -y)."""
    return None if point is None else (point[0], curve.coordinates.neg(point[1]))


def add(curve: Curve[E], p: Affine[E], q: Affine[E]) -> Affine[E]:
    """Return P + Q by the chord; I + 2M + S."""
    k = curve.coordinates
    if p is None:
        return q
    if q is None:
        return p
    if p[0] == q[0]:
        return double(curve, p) if p[1] == q[1] else None
    return _third(curve, p, q[0], k.mul(k.sub(q[1], p[1]), k.inv(k.sub(q[0], p[0]))))


def double(curve: Curve[E], p: Affine[E]) -> Affine[E]:
    """Return 2 P by the tangent; I + 2M + 2S."""
    k = curve.coordinates
    if p is None or p[1] == k.zero:
        return None
    x, y = p
    return _third(curve, p, x, k.mul(k.times(k.square(x), 3), k.inv(k.times(y, 2))))


def _third(curve: Curve[E], p: tuple[E, E], other_x: E, slope: E) -> tuple[E, E]:
    k = curve.coordinates
    x = k.sub(k.sub(k.square(slope), p[0]), other_x)
    return x, k.sub(k.mul(slope, k.sub(p[0], x)), p[1])


def multiply(curve: Curve[E], scalar: int, point: Affine[E]) -> Affine[E]:
    """Return the multiple by any integer, not reduced mod r: double-and-add, correct outside the subgroup too."""
    if point is None or scalar == 0:
        return None
    base = point if scalar > 0 else negate(curve, point)
    total = jacobian_from_affine(curve, None)
    for bit in bin(abs(scalar))[2:]:
        total = jacobian_double(curve, total)
        if bit == "1":
            total = jacobian_add_mixed(curve, total, base)
    return jacobian_to_affine(curve, total)


def jacobian_from_affine(curve: Curve[E], point: Affine[E]) -> Jacobian[E]:
    """Return (x, y, 1), or (1, 1, 0) for infinity."""
    k = curve.coordinates
    return (k.one, k.one, k.zero) if point is None else (*point, k.one)


def jacobian_to_affine(curve: Curve[E], p: Jacobian[E]) -> Affine[E]:
    """Return (X/Z^2, Y/Z^3); I + 3M + S."""
    k = curve.coordinates
    if p[2] == k.zero:
        return None
    inverse = k.inv(p[2])
    square = k.square(inverse)
    return k.mul(p[0], square), k.mul(p[1], k.mul(square, inverse))


def jacobian_double(curve: Curve[E], p: Jacobian[E]) -> Jacobian[E]:
    """Return 2 P by dbl-2009-l; 2M + 5S. Infinity needs no special case: Z3 = 2 Y Z."""
    k = curve.coordinates
    x, y, z = p
    a, b = k.square(x), k.square(y)
    c = k.square(b)
    d = k.times(k.sub(k.sub(k.square(k.add(x, b)), a), c), 2)
    e = k.times(a, 3)
    x3 = k.sub(k.square(e), k.times(d, 2))
    return x3, k.sub(k.mul(e, k.sub(d, x3)), k.times(c, 8)), k.times(k.mul(y, z), 2)


def jacobian_add(curve: Curve[E], p: Jacobian[E], q: Jacobian[E]) -> Jacobian[E]:
    """Return P + Q by add-2007-bl; 11M + 5S."""
    k = curve.coordinates
    if p[2] == k.zero:
        return q
    if q[2] == k.zero:
        return p
    zz1, zz2 = k.square(p[2]), k.square(q[2])
    u1, u2 = k.mul(p[0], zz2), k.mul(q[0], zz1)
    s1, s2 = k.mul(k.mul(p[1], q[2]), zz2), k.mul(k.mul(q[1], p[2]), zz1)
    if u1 == u2:
        return jacobian_double(curve, p) if s1 == s2 else jacobian_from_affine(curve, None)
    h = k.sub(u2, u1)
    i = k.square(k.times(h, 2))
    j, v = k.mul(h, i), k.mul(u1, i)
    r = k.times(k.sub(s2, s1), 2)
    x3 = k.sub(k.sub(k.square(r), j), k.times(v, 2))
    y3 = k.sub(k.mul(r, k.sub(v, x3)), k.times(k.mul(s1, j), 2))
    return x3, y3, k.mul(k.sub(k.sub(k.square(k.add(p[2], q[2])), zz1), zz2), h)


def jacobian_add_mixed(curve: Curve[E], p: Jacobian[E], q: Affine[E]) -> Jacobian[E]:
    """Return P + Q, Q affine, by madd-2007-bl; 7M + 4S."""
    k = curve.coordinates
    if q is None:
        return p
    if p[2] == k.zero:
        return jacobian_from_affine(curve, q)
    zz1 = k.square(p[2])
    u2, s2 = k.mul(q[0], zz1), k.mul(k.mul(q[1], p[2]), zz1)
    if u2 == p[0]:
        return jacobian_double(curve, p) if s2 == p[1] else jacobian_from_affine(curve, None)
    h = k.sub(u2, p[0])
    hh = k.square(h)
    i = k.times(hh, 4)
    j, v = k.mul(h, i), k.mul(p[0], i)
    r = k.times(k.sub(s2, p[1]), 2)
    x3 = k.sub(k.sub(k.square(r), j), k.times(v, 2))
    y3 = k.sub(k.mul(r, k.sub(v, x3)), k.times(k.mul(p[1], j), 2))
    return x3, y3, k.sub(k.sub(k.square(k.add(p[2], h)), zz1), hh)


# --- points as limbs and bytes ---------------------------------------------------------------------------------------
U64 = npt.NDArray[np.uint64]
PointLayout = Literal["evm", "uncompressed", "compressed"]

_EVM_WORD = 32


def encode_points(curve: Curve[E], points: Sequence[Affine[E]]) -> U64:
    """Return affine points as canonical limbs, (n, *curve.shape), on the curve or not; FormatError if not reduced."""
    size = curve.coordinates.base.size_bytes
    coefficients = (value for i, point in enumerate(points) for value in _coefficients(curve, point, i))
    data = b"".join(value.to_bytes(size, "little") for value in coefficients)
    return np.frombuffer(data, dtype="<u8").astype(np.uint64).reshape(len(points), *curve.shape)


def decode_points(curve: Curve[E], array: U64) -> list[Affine[E]]:
    """Return the points of canonical limbs, (n, *curve.shape), on the curve or not; FormatError if not reduced."""
    if array.dtype != np.uint64:
        raise UnsupportedDtype(f"points must be uint64, got {array.dtype}")
    if array.shape[1:] != curve.shape or array.ndim != len(curve.shape) + 1:
        wanted = ", ".join(map(str, curve.shape))
        raise ShapeError(f"points of {curve.name} must be (n, {wanted}), got {array.shape}")
    base = curve.coordinates.base
    coefficients = decode(base, array.reshape(len(array), 2 * curve.coordinates.degree, base.limbs))
    return [_point(curve, values, index) for index, values in enumerate(coefficients)]


def point_bytes(curve: Curve[E], layout: PointLayout) -> int:
    """Return the size of one point in bytes; ConfigError for an unknown layout."""
    return _coefficient_bytes(curve, layout) * curve.coordinates.degree * (1 if layout == "compressed" else 2)


def points_to_bytes(curve: Curve[E], points: Sequence[Affine[E]], layout: PointLayout) -> bytes:
    """Return affine points as bytes in a layout; reduced, but not checked to be on the curve."""
    size, codes = _coefficient_bytes(curve, layout), _flags_of(curve, layout)
    kept = curve.coordinates.degree * (1 if layout == "compressed" else 2)
    result = bytearray()
    for index, point in enumerate(points):
        ordered = _reordered(curve, layout, _coefficients(curve, point, index))
        data = bytearray(b"".join(value.to_bytes(size, "big") for value in ordered[:kept]))
        if point is None:
            data[0] |= codes.infinity
        else:
            data[0] |= codes.larger if curve.coordinates.is_larger(point[1]) else codes.smaller
        result += data
    return bytes(result)


def points_from_bytes(curve: Curve[E], data: bytes, layout: PointLayout) -> list[Affine[E]]:
    """Return the points of bytes in a layout, on the curve or not; FormatError names the first that is none."""
    size = point_bytes(curve, layout)
    if len(data) % size:
        raise FormatError(f"{layout} points of {curve.name} are {size} bytes each; {len(data)} is no multiple of that")
    return [_from_bytes(curve, data[i * size : (i + 1) * size], layout, i) for i in range(len(data) // size)]


def _from_bytes(curve: Curve[E], data: bytes, layout: PointLayout, index: int) -> Affine[E]:
    codes = _flags_of(curve, layout)
    flags, rest = data[0] & codes.mask, bytes([data[0] & ~codes.mask]) + data[1:]
    if flags not in (codes.infinity, codes.smaller, codes.larger):
        wanted = ", ".join(f"{flag:#04x}" for flag in sorted({codes.infinity, codes.smaller, codes.larger}))
        raise FormatError(f"points[{index}] has flags {flags:#04x} in byte 0; {layout} {curve.name} has {wanted}")
    if (infinity_is_flagged := codes.infinity != codes.smaller) and flags == codes.infinity:
        if any(rest):
            raise FormatError(
                f"points[{index}] is flagged as infinity but is 0x{data.hex()}, not zero except its flags"
            )
        return None
    size = _coefficient_bytes(curve, layout)
    coefficients = [int.from_bytes(rest[i : i + size], "big") for i in range(0, len(rest), size)]
    values = _reordered(curve, layout, coefficients)
    if layout != "compressed":
        if (point := _point(curve, values, index)) is None and infinity_is_flagged:
            raise FormatError(f"points[{index}] is all zeros without the flag of infinity, {codes.infinity:#04x}")
        return point
    x = _element(curve, values, "x", index)
    if (y := curve.coordinates.sqrt(curve.right_side(x))) is None:
        raise FormatError(f"points[{index}] has x = {hexadecimal(x)}, with which no point is on {curve.name}")
    return x, y if curve.coordinates.is_larger(y) == (flags == codes.larger) else curve.coordinates.neg(y)


@dataclass(frozen=True, slots=True)
class _Flags:
    """The flag bits of byte 0: their mask, and the values for infinity and for the smaller or larger of y and -y."""

    mask: int
    infinity: int
    smaller: int
    larger: int


_ZCASH = {"compressed": _Flags(0xE0, 0xC0, 0x80, 0xA0), "uncompressed": _Flags(0xE0, 0x40, 0x00, 0x00)}
_GNARK = {"compressed": _Flags(0xC0, 0x40, 0x80, 0xC0), "uncompressed": _Flags(0xC0, 0x00, 0x00, 0x00)}
_NO_FLAGS = _Flags(0x00, 0x00, 0x00, 0x00)


def _flags_of(curve: Curve[E], layout: PointLayout) -> _Flags:
    field = curve.coordinates.base
    spare_bits = 8 * field.size_bytes - field.bits
    return (_ZCASH if spare_bits >= 3 else _GNARK).get(layout, _NO_FLAGS)


def _coefficient_bytes(curve: Curve[E], layout: PointLayout) -> int:
    if not isinstance(layout, str) or layout not in get_args(PointLayout):
        raise ConfigError(f"unknown layout {clipped(layout)}; known are {', '.join(get_args(PointLayout))}")
    size = curve.coordinates.base.size_bytes
    return -(-size // _EVM_WORD) * _EVM_WORD if layout == "evm" else size


def _reordered(curve: Curve[E], layout: PointLayout, values: Sequence[int]) -> list[int]:
    """Return coefficients (c0 first, x before y) in the layout's order, or back: the permutation is an involution."""
    degree = curve.coordinates.degree
    if layout == "evm" and _coefficient_bytes(curve, layout) != curve.coordinates.base.size_bytes:
        return list(values)  # EIP-2537
    return [value for i in range(0, len(values), degree) for value in reversed(values[i : i + degree])]


def _coefficients(curve: Curve[E], point: Affine[E], index: int) -> list[int]:
    """Return the coefficients, checked, x before y and c0 before c1; zeros for infinity."""
    k = curve.coordinates
    x, y = (
        # of a subclass of int, whose methods may be others, the value
        [operator.index(part) for part in k.parts(element)]
        for element in ((k.zero, k.zero) if point is None else point)
    )
    for name, parts in (("x", x), ("y", y)):
        _element(curve, parts, name, index)
    return x + y


def _point(curve: Curve[E], values: Sequence[int], index: int) -> Affine[E]:
    """Return the point with these coefficients, c0 first; None if all are zero."""
    degree = curve.coordinates.degree
    x, y = _element(curve, values[:degree], "x", index), _element(curve, values[degree:], "y", index)
    return (x, y) if any(values) else None


def _element(curve: Curve[E], parts: Sequence[int], name: str, index: int) -> E:
    """Return the element with these coefficients, the coordinate `name` of point `index`, or raise FormatError."""
    modulus = curve.coordinates.base.modulus
    for i, value in enumerate(parts):
        if not 0 <= value < modulus:
            where = f"points[{index}] {name}" + f".c{i}" * (len(parts) > 1)
            raise FormatError(
                f"{where} is {clipped(value, hexadecimal=True)}, not reduced: it must be from 0 to below the modulus "
                f"{modulus:#x}"
            )
    return curve.coordinates.join(parts)


def hexadecimal(value: object) -> str:
    """Return a coordinate, or an affine point, for a message."""
    if isinstance(value, tuple):
        return f"({', '.join(map(hexadecimal, value))})"
    return "infinity" if value is None else f"{value:#x}"
