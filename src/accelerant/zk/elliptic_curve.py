"""Elliptic curves for users: points as arrays of canonical words, added and multiplied on the CPU, CUDA and OpenCL.

A point is affine words (2, limbs), x then y, or (2, 2, limbs) where coordinates are pairs c0 + c1 u, c0 first;
infinity is all zeros. Arrays have any dimensions before those. In Python a point is (x, y), the coordinates integers or
pairs of such, or None for infinity, or all zeros; a list of points is an array of them.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve import parameters as table
from accelerant.algebra.curve.encoding import Layout, decode_points, encode_points, points_from_bytes, points_to_bytes
from accelerant.algebra.curve.parameters import Curve, curve_of
from accelerant.algebra.field import PrimeField, prime_field
from accelerant.algebra.field.memory_space import HOST, MemorySpace, space_at
from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.runtime.provider import ComputeDevice
from accelerant.zk.operands import (
    Operand,
    encoded_points,
    montgomery_points,
    moved,
    point_operand,
    points_inward,
    points_outward,
    scalar_operand,
    spread,
)

if TYPE_CHECKING:
    from accelerant.zk.msm.fixed import FixedBase

__all__ = ["EllipticCurve", "curve", "host_points", "register_curve"]

Device = str | ComputeDevice | None


class EllipticCurve:
    """A curve y^2 = x^3 + b and its subgroup of prime order r; curve(name) makes the one of a name.

    Functions of arrays take NumPy's and torch's, and points and scalars of Python; leading dimensions broadcast as
    NumPy's. `device=` ("cpu", "cuda:1", "opencl", ...) says where to compute, by default where the arrays are. What
    comes back is of the first array's library, on its device. They raise

        UnsupportedDtype    not uint64, nor Python integers; says the type alone
        ShapeError          the last axes are not a point's, shapes that do not broadcast, arrays on two devices
        FormatError         a coordinate not below the modulus; with check, a point off the curve, or, where it says so,
                            out of the subgroup. Names the first one's flattened index
        BackendUnavailable  the device is not there; says why

    check=False leaves out what it says; answers for such points mean nothing. Time depends on the shape alone in mul on
    words, after its checks; on the values in the checks, in encode, decode and bytes, and with Python's integers.

    Attributes:
        parameters: the row of the table that all follows from.
        field: of the coordinates, or of their coefficients.
        scalar_field: of r elements.
    """

    def __init__(self, parameters: Curve[Any]) -> None:
        self.parameters = parameters
        self.field: PrimeField = prime_field(parameters.coordinates.base.name)
        self.scalar_field: PrimeField = prime_field(parameters.scalars.name)

    def __repr__(self) -> str:
        return f"curve({self.name!r})"

    def __reduce__(self) -> tuple[Callable[[str], EllipticCurve], tuple[str]]:
        return curve, (self.name,)

    # --- facts ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """As curve takes it."""
        return self.parameters.name

    @property
    def order(self) -> int:
        """Of the subgroup, r."""
        return self.parameters.order

    @property
    def cofactor(self) -> int:
        """Points of the curve over r; where it is 1, all points of the curve are in the subgroup."""
        return self.parameters.cofactor

    @property
    def degree(self) -> int:
        """Coefficients of a coordinate: 1, or 2 over Fq2."""
        return self.parameters.coordinates.degree

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one point's words: (2, limbs) or (2, 2, limbs)."""
        return self.parameters.shape

    @property
    def generator(self) -> npt.NDArray[np.uint64]:
        """Of the subgroup: canonical words, a new array."""
        return self.encode(self.parameters.generator)

    @property
    def parameters_hash(self) -> str:
        """SHA-256, in hexadecimal, of the canonical text of all parameters: equal where two programs mean one curve."""
        return self.parameters.parameters_hash()

    # --- in and out ----------------------------------------------------------------------------------------------

    def encode(self, points: Any) -> npt.NDArray[np.uint64]:
        """Canonical words of a point or of a list of points. (0, 0) is infinity, as for Ethereum's precompiles.

        Raises:
            UnsupportedDtype: not points; names the index.
            FormatError: a coordinate is not from 0 to below the modulus. Whether points are on the curve is not asked.
        """
        return encoded_points(self.parameters, points, "points", single="point")

    def decode(self, points: Any) -> Any:
        """Python points of canonical words: one, or nested lists in the array's leading dimensions.

        Raises:
            FormatError: a coordinate is not reduced. Whether points are on the curve is not asked.
        """
        words = host_points(self, points, "points")
        shape = words.shape[: words.ndim - len(self.shape)]
        return _nested(decode_points(self.parameters, words.reshape(math.prod(shape), *self.shape), check=False), shape)

    def to_bytes(self, points: Any, layout: Layout = "compressed") -> bytes:
        """Points one after another; algebra/curve/encoding.py has the layouts "evm", "uncompressed" and "compressed".

        Raises:
            ConfigError: no such layout.
        """
        words = host_points(self, points, "points")
        words = words.reshape(words.size // math.prod(self.shape), *self.shape)
        return points_to_bytes(self.parameters, decode_points(self.parameters, words, check=False), layout)

    def from_bytes(
        self, data: bytes | bytearray | memoryview, layout: Layout = "compressed", *, check: bool = True
    ) -> npt.NDArray[np.uint64]:
        """Canonical words (n, *shape) of points in a layout.

        Args:
            data: bytes, bytearray or memoryview; from a stranger, as like as not: flags, padding and coordinates are
                always checked.
            layout: as to_bytes has them.
            check: refuse points off the curve or out of the subgroup.

        Raises:
            ConfigError: no such layout.
            UnsupportedDtype: not bytes.
            FormatError: what is refused; names the point's index.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise UnsupportedDtype(f"data must be bytes, a bytearray or a memoryview, got {type(data).__name__}")
        words = encode_points(self.parameters, points_from_bytes(self.parameters, bytes(data), layout, check=False))
        if check:
            points_inward(self.parameters, Operand(words, words.shape[:1], HOST), HOST, "points", "subgroup")
        return words

    # --- questions -----------------------------------------------------------------------------------------------

    def is_on_curve(self, points: Any, *, device: Device = None) -> Any:
        """Which points are on the curve, booleans in the array's leading dimensions; infinity is."""
        operand, place = self._placed(points, device)
        return self._answer(operand, ~self._off(place, "off_curve", montgomery_points(self.parameters, operand, place)))

    def is_in_subgroup(self, points: Any, *, device: Device = None) -> Any:
        """Which points are on the curve and in the subgroup of order r; infinity is."""
        operand, place = self._placed(points, device)
        words = montgomery_points(self.parameters, operand, place)
        wrong = self._off(place, "off_curve", words)
        if wrong.any():  # the other question may be asked of points of the curve only
            kept = place.store(words)
            kept[wrong] = 0
            words = place.load(kept)
        return self._answer(operand, ~(wrong | self._off(place, "off_subgroup", words)))

    def _off(self, place: MemorySpace, test: launch.Test, words: Any) -> npt.NDArray[np.bool_]:
        return launch.off(place, self.parameters, test, words)

    def _answer(self, operand: Operand, flat: npt.NDArray[np.bool_]) -> Any:
        found = flat.reshape(operand.leading)
        if operand.tensor is None:
            return found if found.ndim else bool(found)
        return sys.modules["torch"].from_numpy(found).to(operand.tensor.device)

    # --- the group -----------------------------------------------------------------------------------------------

    def add(self, p: Any, q: Any, *, check: bool = True, device: Device = None) -> Any:
        """The sum P + Q: of equal, opposite and infinite points too. check: points must be on the curve."""
        return self._binary(p, q, check, device)

    def sub(self, p: Any, q: Any, *, check: bool = True, device: Device = None) -> Any:
        """The difference P - Q; as add."""
        return self._binary(p, q, check, device, negated=True)

    def double(self, p: Any, *, check: bool = True, device: Device = None) -> Any:
        """The double, 2P. check: points must be on the curve."""
        return self._unary(p, check, device, lambda place, x: launch.add(place, self.parameters, x, x))

    def neg(self, p: Any, *, check: bool = True, device: Device = None) -> Any:
        """The opposite, -P. check: points must be on the curve."""
        return self._unary(p, check, device, lambda place, x: launch.neg(place, self.parameters, x))

    def mul(self, points: Any, scalars: Any, *, check: bool = True, device: Device = None) -> Any:
        """The multiples sP; on words, after its checks, in a time that depends on the shape alone.

        Args:
            points: (..., *shape), or points of Python.
            scalars: (..., 4) canonical uint64 words, or integers of Python, also in lists; from 0 to below 2^256, and
                not reduced modulo r. Or a FieldArray of scalar_field, for its canonical words.
            check: points must be on the curve and in the subgroup.
            device: as everywhere.

        Raises:
            FormatError: also for a Python integer below 0, or of more than 256 bits; names the index, not the value.
            ConfigError: a FieldArray of another field.
        """
        operands = (point_operand(self.parameters, points, "points"), scalar_operand(self.parameters.scalars, scalars))
        place, shape = self._together(("points", "scalars"), operands, device)
        x = points_inward(self.parameters, operands[0], place, "points", "subgroup" if check else "")
        both = ((x, operands[0], self.shape), (moved(operands[1], place), operands[1], (launch.SCALAR_WORDS,)))
        x, factors = (
            place.reshape(each, (1, *tail))  # the kernel takes one of one for all of the other
            if math.prod(operand.leading) == 1
            else spread(place, each, operand.leading, shape, tail)
            for each, operand, tail in both
        )
        words = launch.multiply(place, self.parameters, x, factors)
        return points_outward(self.parameters, words, place, shape, *operands)

    def sum(self, points: Any, *, check: bool = True, device: Device = None) -> Any:
        """The sum of all points of an array, one point; infinity for none. check: points must be on the curve."""
        operand, place = self._placed(points, device)
        words = points_inward(self.parameters, operand, place, "points", "curve" if check else "")
        while (n := int(words.shape[0])) != 1:
            half = max(1, -(-n // 2))
            words = place.pad(words, 0, 2 * half)  # by infinity
            first, second = (place.getitem(words, (slice(i, i + half),)) for i in (0, half))
            words = launch.add(place, self.parameters, first, second)
        return points_outward(self.parameters, words, place, (), operand)

    def precompute(self, points: Any, *, check: bool = True, device: Device = None) -> FixedBase:
        """Points that many sums of multiples share, kept as kernels take them: its .msm(scalars) is their sum.

        Args:
            points: (n, *shape), as everywhere.
            check: points must be on the curve and in the subgroup.
            device: as everywhere.
        """
        from accelerant.zk.msm.fixed import FixedBase

        return FixedBase(self.name, points, device, check=check)

    # --- parts ---------------------------------------------------------------------------------------------------

    def _placed(self, points: Any, device: Device) -> tuple[Operand, MemorySpace]:
        operand = point_operand(self.parameters, points, "points")
        return operand, operand.place if device is None else space_at(device)

    def _together(
        self, names: tuple[str, str], operands: tuple[Operand, Operand], device: Device
    ) -> tuple[MemorySpace, tuple[int, ...]]:
        """Where two arguments meet, and the shape they broadcast to."""
        placed = [operand for operand in operands if not operand.free]
        home = placed[0].place if placed else HOST
        if any(operand.place != home for operand in placed):
            first, second = (operand.place.label for operand in operands)
            raise ShapeError(f"{names[0]} and {names[1]} must be on one device, got {first} and {second}")
        try:
            shape = np.broadcast_shapes(*(operand.leading for operand in operands))
        except ValueError:
            first, second = (str(operand.leading) for operand in operands)
            raise ShapeError(
                f"{names[0]} and {names[1]} must have leading dimensions that broadcast, got {first} and {second}"
            ) from None
        return home if device is None else space_at(device), shape

    def _unary(self, p: Any, check: bool, device: Device, run: Callable[[MemorySpace, Any], Any]) -> Any:
        operand, place = self._placed(p, device)
        words = points_inward(self.parameters, operand, place, "points", "curve" if check else "")
        return points_outward(self.parameters, run(place, words), place, operand.leading, operand)

    def _binary(self, p: Any, q: Any, check: bool, device: Device, negated: bool = False) -> Any:
        operands = (point_operand(self.parameters, p, "p"), point_operand(self.parameters, q, "q"))
        place, shape = self._together(("p", "q"), operands, device)

        def inward(operand: Operand, name: str) -> Any:
            words = points_inward(self.parameters, operand, place, name, "curve" if check else "")
            return spread(place, words, operand.leading, shape, self.shape)

        x, y = inward(operands[0], "p"), inward(operands[1], "q")
        if negated:
            y = launch.neg(place, self.parameters, y)
        return points_outward(self.parameters, launch.add(place, self.parameters, x, y), place, shape, *operands)


def _nested(points: list[Any], shape: tuple[int, ...]) -> Any:
    """A flat list in a shape; the one point of it, where that is ()."""
    if len(shape) < 2:
        return points if shape else points[0]
    size = math.prod(shape[1:])
    return [_nested(points[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def host_points(group: EllipticCurve, points: Any, name: str) -> npt.NDArray[np.uint64]:
    """Canonical words on the host of what EllipticCurve's functions take; reduced, not asked for more."""
    operand = point_operand(group.parameters, points, name)
    return np.asarray(operand.place.store(operand.words))


def curve(name: str) -> EllipticCurve:
    """Return the curve of a name: bn254_g1, bn254_g2, bls12_381_g1, bls12_381_g2, or one of register_curve.

    Raises:
        ConfigError: no curve has that name; lists those there are.
    """
    return _curve(name if isinstance(name, str) else repr(name))


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
