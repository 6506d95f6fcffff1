"""Elliptic curves for users: arrays of points on the CPU, CUDA and OpenCL, and products of pairings.

Points are affine canonical words, (..., 2, limbs), or (..., 2, 2, limbs) where coordinates are pairs, infinity all
zeros; or in Python (x, y), None for infinity.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from accelerant._renamed import renamed_arguments
from accelerant.algebra.curve import launch
from accelerant.algebra.curve import parameters as table
from accelerant.algebra.curve.pairing import Fq12, product, product_is_one
from accelerant.algebra.curve.parameters import Curve, Family, curve_of, family_of
from accelerant.algebra.curve.weierstrass import (
    PointLayout,
    decode_points,
    encode_points,
    points_from_bytes,
    points_to_bytes,
)
from accelerant.algebra.field.field import PrimeField, prime_field
from accelerant.algebra.field.memory_space import HOST, ArrayOperand, MemorySpace, common_space, space_at
from accelerant.algebra.field.words import index_of
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.runtime.registry import DeviceLike
from accelerant.zk import operands
from accelerant.zk.multi_scalar import Devices, FixedBase


class EllipticCurve:
    """A curve y^2 = x^3 + b with a subgroup of prime order r; `curve` returns one by name.

    Functions take NumPy arrays, torch tensors, and Python points and scalars; leading dimensions broadcast as in NumPy.
    `device=` ("cpu", "cuda:1", "opencl", ...) selects the device, by default that of the arrays. Results have the
    library and device of the first array. They raise

        UnsupportedDtype    neither uint64 nor Python integers; names the type only
        ShapeError          the last axes are not a point's, shapes do not broadcast, or arrays are on two devices
        FormatError         a coordinate is not below the modulus; with check, a point is off the curve or, where
                            documented, outside the subgroup. Names the first one's flattened index
        BackendUnavailable  the device is unavailable; says why

    check=False omits these checks of points; results for invalid points are meaningless. The time of mul on words
    depends on the shape alone, after its checks. Other times depend on the values.

    Attributes:
        parameters: the curve's row of the parameter table.
        name: name for `curve`.
        order: order r of the subgroup.
        cofactor: number of points of the curve divided by r; 1 if every point is in the subgroup.
        degree: coefficients of a coordinate: 1, or 2 over Fq2.
        shape: shape of one point's words: (2, limbs) or (2, 2, limbs).
        field: field of the coordinates, or of their coefficients.
        scalar_field: field of r elements.
    """

    def __init__(self, parameters: Curve[Any]) -> None:
        self.parameters = parameters
        self.name, self.order, self.cofactor = parameters.name, parameters.order, parameters.cofactor
        self.degree, self.shape = parameters.coordinates.degree, parameters.shape
        self.field: PrimeField = prime_field(parameters.coordinates.base.name)
        self.scalar_field: PrimeField = prime_field(parameters.scalars.name)

    def __repr__(self) -> str:
        return f"curve({self.name!r})"

    def __reduce__(self) -> tuple[Callable[[str], EllipticCurve], tuple[str]]:
        return curve, (self.name,)

    @property
    def generator(self) -> npt.NDArray[np.uint64]:
        """Generator of the subgroup: canonical words, a new array."""
        return self.encode(self.parameters.generator)

    @property
    def infinity(self) -> npt.NDArray[np.uint64]:
        """The point at infinity, the neutral element: canonical words, a new array."""
        return self.encode(None)

    identity = infinity

    @property
    def parameters_hash(self) -> str:
        """SHA-256, hexadecimal, of the canonical text of all parameters, to compare curves between programs."""
        return self.parameters.parameters_hash()

    # --- conversion ----------------------------------------------------------------------------------------------
    def encode(self, points: Any) -> npt.NDArray[np.uint64]:
        """Return the canonical words of a point or a list of points. (0, 0) is infinity, as in Ethereum's precompiles.

        Points may be off the curve.

        Raises:
            UnsupportedDtype: not points; names the index.
            FormatError: a coordinate is not from 0 to below the modulus.
        """
        return operands.encoded_points(self.parameters, points, "points", single="point")

    def decode(self, points: Any) -> Any:
        """Return Python points: one, or nested lists with the array's leading dimensions. They may be off the curve."""
        words = _host_points(self.parameters, points, "points")
        shape = words.shape[: words.ndim - len(self.shape)]
        return _nested(decode_points(self.parameters, words.reshape(math.prod(shape), *self.shape)), shape)

    def to_bytes(self, points: Any, layout: PointLayout = "compressed") -> bytes:
        """Return points, concatenated, in a layout of algebra/curve/weierstrass.py: evm, uncompressed or compressed."""
        words = _host_points(self.parameters, points, "points")
        words = words.reshape(words.size // math.prod(self.shape), *self.shape)
        return points_to_bytes(self.parameters, decode_points(self.parameters, words), layout)

    def from_bytes(
        self, data: bytes | bytearray | memoryview, layout: PointLayout = "compressed", *, check: bool = True
    ) -> npt.NDArray[np.uint64]:
        """Return the canonical words (n, *shape) of points in a layout.

        Args:
            data: untrusted; flags, padding and coordinates are always checked.
            layout: as for to_bytes.
            check: refuse points off the curve or outside the subgroup.

        Raises:
            ConfigError: unknown layout.
            UnsupportedDtype: not bytes.
            FormatError: invalid data; names the point's index.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise UnsupportedDtype(f"data must be bytes, a bytearray or a memoryview, got {type(data).__name__}")
        words = encode_points(self.parameters, points_from_bytes(self.parameters, bytes(data), layout))
        if check:
            operands.points_inward(
                self.parameters, ArrayOperand(words, HOST, words.shape[:1]), HOST, "points", "subgroup"
            )
        return words

    # --- predicates ----------------------------------------------------------------------------------------------
    def is_on_curve(self, points: Any, *, device: DeviceLike = None) -> Any:
        """Return which points are on the curve, booleans of the leading dimensions; infinity is."""
        operand, space = self._located(points, device)
        words = operands.montgomery_points(self.parameters, operand, space)
        return self._booleans(operand, ~launch.off(space, self.parameters, "off_curve", words))

    def is_in_subgroup(self, points: Any, *, device: DeviceLike = None) -> Any:
        """Return which points are on the curve and in the subgroup of order r; infinity is."""
        operand, space = self._located(points, device)
        words = operands.montgomery_points(self.parameters, operand, space)
        wrong = launch.off(space, self.parameters, "off_curve", words)
        if wrong.any():  # the test of the subgroup is valid on the curve only
            finite = space.store(words)
            finite[wrong] = 0
            words = space.load(finite)
        return self._booleans(operand, ~(wrong | launch.off(space, self.parameters, "off_subgroup", words)))

    def _booleans(self, operand: ArrayOperand, flat: npt.NDArray[np.bool_]) -> Any:
        values = flat.reshape(operand.leading)
        if operand.tensor is None:
            return values if values.ndim else bool(values)
        return sys.modules["torch"].from_numpy(values).to(operand.tensor.device)

    # --- the group -----------------------------------------------------------------------------------------------
    def add(self, p: Any, q: Any, *, check: bool = True, device: DeviceLike = None) -> Any:
        """Return P + Q, complete: also for equal, opposite and infinite points. check: points must be on the curve."""
        return self._binary(p, q, check, device)

    def sub(self, p: Any, q: Any, *, check: bool = True, device: DeviceLike = None) -> Any:
        """Return P - Q; as add."""
        return self._binary(p, q, check, device, negated=True)

    def double(self, p: Any, *, check: bool = True, device: DeviceLike = None) -> Any:
        """Return 2P. check: points must be on the curve."""
        return self._unary(p, check, device, lambda space, x: launch.add(space, self.parameters, x, x))

    def neg(self, p: Any, *, check: bool = True, device: DeviceLike = None) -> Any:
        """Return -P. check: points must be on the curve."""
        return self._unary(p, check, device, lambda space, x: launch.neg(space, self.parameters, x))

    @operands.either_order("points", "scalars", lambda self, *_, **__: self.parameters, own=1, rows=False)
    def mul(self, points: Any, scalars: Any, *, check: bool = True, device: DeviceLike = None) -> Any:
        """Return sP; for words, after the checks, in a time that depends on the shape alone.

        Points and scalars may be in either order: they are told apart by what they are.

        Args:
            points: (..., *shape), or Python points.
            scalars: (..., 4) canonical uint64 words, or Python integers or lists of them, from 0 to below 2^256, not
                reduced modulo r; or a FieldArray of scalar_field.
            check: points must be on the curve and in the subgroup.
            device: see the class.

        Raises:
            FormatError: also a Python integer below 0 or of more than 256 bits; names the index, not the value.
            ConfigError: a FieldArray of another field; or either argument could be the points, and neither is named.
        """
        given = (
            operands.point_operand(self.parameters, points, "points"),
            operands.scalar_operand(self.parameters.scalars, scalars),
        )
        space, shape = self._together(("points", "scalars"), given, device)
        x = operands.points_inward(self.parameters, given[0], space, "points", "subgroup" if check else "")
        both = ((x, given[0], self.shape), (given[1].moved(space), given[1], (launch.SCALAR_WORDS,)))
        x, factors = (
            words.reshape((1, *tail))  # the kernel itself broadcasts a single point or scalar
            if math.prod(operand.leading) == 1
            else operands.spread(space, words, operand.leading, shape, tail)
            for words, operand, tail in both
        )
        words = launch.multiply(space, self.parameters, x, factors)
        return operands.points_outward(self.parameters, words, space, shape, *given)

    def sum(self, points: Any, *, check: bool = True, device: DeviceLike = None) -> Any:
        """Return the sum of all points of an array; infinity for none. check: points must be on the curve."""
        operand, space = self._located(points, device)
        words = operands.points_inward(self.parameters, operand, space, "points", "curve" if check else "")
        while (n := int(words.shape[0])) != 1:
            half = max(1, -(-n // 2))
            words = space.pad(words, 0, 2 * half)  # with infinity
            first, second = (space.getitem(words, (slice(i, i + half),)) for i in (0, half))
            words = launch.add(space, self.parameters, first, second)
        return operands.points_outward(self.parameters, words, space, (), operand)

    def precompute(
        self, points: Any, *, check: bool | str = True, device: DeviceLike = None, devices: Devices = None
    ) -> FixedBase:
        """Prepare points (n, *shape) for many multi-scalar multiplications, by .msm(scalars) of the result.

        check: points must be on the curve and in the subgroup; "curve" omits the subgroup, False both.
        """
        return FixedBase(self.name, points, device, check=check, devices=devices)

    def _located(self, points: Any, device: DeviceLike) -> tuple[ArrayOperand, MemorySpace]:
        operand = operands.point_operand(self.parameters, points, "points")
        return operand, operand.space if device is None else space_at(device)

    def _together(
        self, names: tuple[str, str], given: tuple[ArrayOperand, ArrayOperand], device: DeviceLike
    ) -> tuple[MemorySpace, tuple[int, ...]]:
        """Return the common memory space of two arguments and the shape they broadcast to."""
        space = common_space(device, names, given)
        try:
            shape = np.broadcast_shapes(*(operand.leading for operand in given))
        except ValueError:
            first, second = (str(operand.leading) for operand in given)
            raise ShapeError(
                f"{names[0]} and {names[1]} must have leading dimensions that broadcast, got {first} and {second}"
            ) from None
        return space, shape

    def _unary(self, p: Any, check: bool, device: DeviceLike, run: Callable[[MemorySpace, Any], Any]) -> Any:
        operand, space = self._located(p, device)
        words = operands.points_inward(self.parameters, operand, space, "points", "curve" if check else "")
        return operands.points_outward(self.parameters, run(space, words), space, operand.leading, operand)

    def _binary(self, p: Any, q: Any, check: bool, device: DeviceLike, negated: bool = False) -> Any:
        given = (operands.point_operand(self.parameters, p, "p"), operands.point_operand(self.parameters, q, "q"))
        space, shape = self._together(("p", "q"), given, device)

        def inward(operand: ArrayOperand, name: str) -> Any:
            words = operands.points_inward(self.parameters, operand, space, name, "curve" if check else "")
            return operands.spread(space, words, operand.leading, shape, self.shape)

        x, y = inward(given[0], "p"), inward(given[1], "q")
        if negated:
            y = launch.neg(space, self.parameters, y)
        return operands.points_outward(self.parameters, launch.add(space, self.parameters, x, y), space, shape, *given)


def _nested(points: list[Any], shape: tuple[int, ...]) -> Any:
    """Reshape a flat list to nested lists; shape () gives its only point."""
    if len(shape) < 2:
        return points if shape else points[0]
    size = math.prod(shape[1:])
    return [_nested(points[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def _host_points(parameters: Curve[Any], points: Any, name: str) -> npt.NDArray[np.uint64]:
    """Return canonical words on the host; checked to be reduced only."""
    operand = operands.point_operand(parameters, points, name)
    return np.asarray(operand.space.store(operand.words))


def curve(name: str) -> EllipticCurve:
    """Return a curve by name: bn254_g1, bn254_g2, bls12_381_g1, bls12_381_g2, or one of register_curve.

    An unknown one raises ConfigError, which lists the known ones.
    """
    return _curve(curve_of(name).name)


@functools.cache
def _curve(name: str) -> EllipticCurve:
    return EllipticCurve(curve_of(name))


def register_curve(
    name: str, *, field: str, scalar_field: str, b: int, generator: tuple[int, int], a: int = 0
) -> EllipticCurve:
    """Register the curve y^2 = x^3 + b over a prime field for this process, and return it.

    `curve`, `msm` and all functions of curves take its name from then on, on every backend.

    Args:
        name: an identifier.
        field: name of the field of the coordinates, Fq: built in or registered by register_field.
        scalar_field: name of the field of r elements, r the odd prime order of the generator; of four 64-bit words.
        b: constant of the equation, not 0.
        generator: (x, y), affine.
        a: must be 0; other curves have no kernels.

    Raises:
        ConfigError: another curve has the name, a parameter is out of these limits, or the generator is not on the
            curve or not of order r.
    """
    table.register_curve(name, field=field, scalar_field=scalar_field, b=b, generator=generator, a=a)
    return curve(name)


def register_family(
    name: str, *, kind: Literal["bn", "bls12"], parameter: int, b: int, nonresidue: tuple[int, int],
    twist: Literal["divide", "multiply"], g1_generator: tuple[int, int],
    g2_generator: tuple[tuple[int, int], tuple[int, int]],
) -> tuple[EllipticCurve, EllipticCurve]:  # fmt: skip
    """Register a pairing-friendly curve for this process, and return its two groups, NAME_g1 and NAME_g2.

    The fields NAME_fq and NAME_fr, the cofactors, the pairing and its checks of subgroups follow from the parameters.
    Curves, `msm`, pairings, the files of circom and snarkjs, and Groth16 take the family from then on.

    Args:
        name: an identifier.
        kind: "bn" (Barreto-Naehrig) or "bls12" (Barreto-Lynn-Scott of embedding degree 12).
        parameter: x, of either sign, of the polynomials that give q and r. q must be 3 mod 4 and have an even number of
            64-bit words and a spare bit, r four words.
        b: constant of G1's curve y^2 = x^3 + b.
        nonresidue: (c, 1) for xi = c + u, neither a square nor a cube in Fq2 = Fq[u] / (u^2 + 1); c is small.
        twist: "divide" if the constant of G2's curve is b / xi, "multiply" if it is b xi.
        g1_generator: (x, y), of order r.
        g2_generator: the same, of pairs (c0, c1).

    Raises:
        ConfigError: another family has the name, a parameter is out of these limits, or a generator is not on its curve
            or not of order r. Nothing is registered then.
    """
    table.register_family(
        name, kind=kind, parameter=parameter, b=b, nonresidue=nonresidue, twist=twist, g1_generator=g1_generator,
        g2_generator=g2_generator,
    )  # fmt: skip
    return curve(f"{name}_g1"), curve(f"{name}_g2")


# --- pairings --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PairingValue:
    """A value of the pairing, in the group of r-th roots of unity of Fq12: compared, multiplied, divided, and raised.

    `value == 1` tells the neutral element. Python integers compute: a product takes 0.1 ms, a power 40.

    Attributes:
        family: "bn254" or "bls12_381".
        coefficients: of Fq12 over Fq2, ((a0, a1, a2), (b0, b1, b2)) of a0 + a1 v + a2 v^2 + (b0 + b1 v + b2 v^2) w with
            w^2 = v and v^3 the family's non-residue; each is (c0, c1).
    """

    family: str
    coefficients: Fq12

    def __repr__(self) -> str:
        return f"PairingValue({self.family}, {'1' if self == 1 else f'{self.coefficients[0][0][0]:#x} + ...'})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PairingValue):
            return (self.family, self.coefficients) == (other.family, other.coefficients)
        return other == 1 and self.coefficients == _one(self.family).coefficients

    def __hash__(self) -> int:
        return hash((self.family, self.coefficients))

    def __mul__(self, other: PairingValue) -> PairingValue:
        if not isinstance(other, PairingValue):
            return NotImplemented
        family = family_of(self.family)
        if family.name != other.family:
            raise ConfigError(f"values of two pairings cannot be multiplied: {self.family} and {other.family}")
        k = family.g2.coordinates
        x, y = ([c for pair in zip(*value.coefficients, strict=True) for c in pair] for value in (self, other))
        powers = [k.zero] * 12  # of w, whose sixth power is the non-residue
        for i, j in itertools.product(range(6), repeat=2):
            powers[i + j] = k.add(powers[i + j], k.mul(x[i], y[j]))
        z = [k.add(powers[i], k.mul(powers[i + 6], family.nonresidue)) for i in range(6)]
        return PairingValue(family.name, ((z[0], z[2], z[4]), (z[1], z[3], z[5])))

    def __pow__(self, exponent: int) -> PairingValue:
        result = _one(self.family)
        for bit in bin(index_of(exponent, "the exponent") % family_of(self.family).r)[2:]:
            result *= result
            if bit == "1":
                result *= self
        return result

    def inverse(self) -> PairingValue:
        """Return the inverse, which is the conjugate over Fq6."""
        k, (even, odd) = family_of(self.family).g2.coordinates, self.coefficients
        return PairingValue(self.family, (even, (k.neg(odd[0]), k.neg(odd[1]), k.neg(odd[2]))))

    def __truediv__(self, other: PairingValue) -> PairingValue:
        return self * other.inverse() if isinstance(other, PairingValue) else NotImplemented


def _one(family: str) -> PairingValue:
    k = family_of(family).g2.coordinates
    return PairingValue(family, ((k.one, k.zero, k.zero), (k.zero, k.zero, k.zero)))


def pairing(g1_points: Any, g2_points: Any, family: str = "bn254", *, check: bool = True) -> PairingValue:
    """Return e(P, Q), or the product e(P_1, Q_1) ... e(P_n, Q_n) of arrays; arguments as pairing_product_is_one.

    >>> g1, g2 = curve("bn254_g1"), curve("bn254_g2")
    >>> pairing(g1.mul(g1.generator, 6), g2.generator) == pairing(g1.generator, g2.generator) ** 6
    True
    """
    found, g1_words, g2_words = _pairs(family, g1_points, g2_points)
    g1_words = g1_words[None] if g1_words.shape == found.g1.shape else g1_words
    g2_words = g2_words[None] if g2_words.shape == found.g2.shape else g2_words
    return PairingValue(found.name, product(found, g1_words, g2_words, check=check))


@renamed_arguments(curve="family")
def pairing_product_is_one(g1_points: Any, g2_points: Any, family: str = "bn254", *, check: bool = True) -> bool:
    """Return whether e(P_1, Q_1) e(P_2, Q_2) ... e(P_n, Q_n) = 1, the predicate of EIP-197 and EIP-2537.

    e is the optimal ate pairing. A pair with infinity contributes 1, and the empty product is 1. It runs on the CPU
    wherever the points are; four pairs take one to two milliseconds of a core. Time depends on the number of points and
    on which are infinity.

    Args:
        g1_points: P_i, (n, 2, limbs) canonical words of NumPy or torch, or Python points.
        g2_points: Q_i, (n, 2, 2, limbs). Either group may be first.
        family: "bn254", "bls12_381", or one of register_family.
        check: refuse points off their curve or outside the subgroup of order r; nearly free. Without it, results for
            such points are meaningless.

    Raises:
        ConfigError: unknown family; lists the known ones.
        UnsupportedDtype: neither uint64 nor Python integers.
        ShapeError: other shapes, or different numbers of points.
        FormatError: a coordinate is not below the modulus, or a point fails check; names the first such point.
    """
    found, g1_words, g2_words = _pairs(family, g1_points, g2_points)
    return product_is_one(found, g1_words, g2_words, check=check)


def _pairs(
    family: str, g1_points: Any, g2_points: Any
) -> tuple[Family, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the family and words of n points of G1 and of G2; the arguments may be in the other order."""
    found = family_of(family)

    def fit(first: Any, second: Any) -> bool:
        pairs = ((found.g1, first), (found.g2, second))
        return all(operands.leading_dimensions(curve, points)[0] is not None for curve, points in pairs)

    if not fit(g1_points, g2_points) and fit(g2_points, g1_points):
        g1_points, g2_points = g2_points, g1_points
    return found, _host_points(found.g1, g1_points, "g1_points"), _host_points(found.g2, g2_points, "g2_points")
