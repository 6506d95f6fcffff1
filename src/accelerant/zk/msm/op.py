"""Multi-scalar multiplication for users: the sum of s_i P_i, where the points are.

NumPy's arrays are summed on the CPU (cpu.py), tensors on a device there (device.py). Times and memory accesses depend
on the scalars: a prover that shares its machine with strangers gives them something to measure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from accelerant.algebra.curve.launch import first_unreduced
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field import words as host
from accelerant.algebra.field.memory_space import HOST, MemorySpace, in_kind, is_tensor, signed_view, space_of
from accelerant.errors import FormatError, ShapeError, UnsupportedDtype
from accelerant.runtime.ledger import OpRecord
from accelerant.runtime.recorded_launch import RecordedLaunch, sole_record
from accelerant.zk.elliptic_curve import EllipticCurve
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.msm.cpu import Bases, plan
from accelerant.zk.operands import Operand, plain_scalars, point_operand, points_inward, points_outward, scalar_words

__all__ = [
    "Pending",
    "msm",
    "msm_record",
    "nothing",
    "points_words",
    "scalars_words",
    "summed",
    "summer",
    "sums_outward",
]

Words = Any

_LIMBS = 4
"""Of a scalar, on every curve."""


def msm(scalars: Any, points: Any, curve: str = "bn254_g1", *, check: bool = True) -> Any:
    """The sum of scalars[i] points[i], for each row of scalars.

    Args:
        scalars: (n, 4) uint64, canonical, below the curve's order; or (b, n, 4), for b sums over the same points; or
            Python integers, n or b lists of n; or a FieldArray of the curve's scalar_field.
        points: (n, 2, limbs) uint64, canonical affine coordinates, x then y, infinity all zeros; (n, 2, 2, limbs) where
            coordinates are in Fq2, c0 first. NumPy's, or a torch tensor.
        curve: bn254_g1, bn254_g2, bls12_381_g1 or bls12_381_g2.
        check: refuse points off the curve or out of its subgroup of order r. Without it sums of such points mean
            nothing. It is next to free on BN254 G1, all of whose points are in the subgroup; elsewhere it takes two to
            five times as long as the sum: FixedBase (fixed.py) asks once.

    Returns:
        One point, or (b, ...) of them, canonical, in the library and on the device of `points`.

    Raises:
        ConfigError: no such curve; a FieldArray of another field.
        UnsupportedDtype: not uint64, nor integers.
        ShapeError: other shapes, or not as many scalars as points.
        FormatError: a scalar is not below the order or a coordinate not below the modulus, or what check refuses;
            names the first one's index, and never a scalar's value.

    Source: Pippenger's method as in Bernstein et al., eprint 2012/549.
    """
    group = curve_named(curve)
    operand = point_operand(group.parameters, points, "points")
    rows, leading, check_scalars = scalars_words(group, scalars, operand.place, _count(group, operand))
    # Last, since check takes longer than all before; held by none but the summer, which on the CPU copies them.
    run = summer(operand.place, group.parameters, points_words(group, operand, operand.place, check))
    total = summed(operand.place, group.parameters, rows, run, check_scalars)
    return sums_outward(group.parameters, total, operand.place, leading, operand)


@runtime_checkable
class Pending(Protocol):
    """A sum that a device is still at."""

    def finish(self) -> Words:
        """The host's words of one point, Montgomery form."""


def summer(place: MemorySpace, curve: Curve[Any], points: Words) -> Callable[[Words], Words | Pending]:
    """What makes a sum of scalars, (n, 4) at the place, or starts one: the host's words of one point, Montgomery form.

    Args:
        place: of the points.
        curve: of the points.
        points: (n, words of a point), Montgomery form.
    """
    if place is HOST:
        return Bases(curve, points).msm
    from accelerant.zk.msm.device import start_msm

    return lambda scalars: start_msm(place, curve, scalars, points)


def nothing() -> FormatError | None:
    """What is wrong with scalars that were checked."""
    return None


def summed(
    place: MemorySpace,
    curve: Curve[Any],
    rows: Sequence[Words],
    run: Callable[[Words], Words | Pending],
    check: Callable[[], FormatError | None] = nothing,
) -> Words:
    """The sums of rows of scalars, (b, *shape) on the host, Montgomery form; counted in the ledger.

    Args:
        place, curve: of the points.
        rows: (n, 4) each.
        run: what makes a sum, or starts one.
        check: what is wrong with the scalars; it may wait for the device, and is asked when all sums are started.

    Raises:
        FormatError: what `check` found.
    """
    n = int(rows[0].shape[0]) if rows else 0
    with RecordedLaunch(msm_record(place, curve, n, len(rows)), place.provider, place.index):
        started = [run(row) for row in rows]
        wrong = check()
        found = [each.finish() if isinstance(each, Pending) else each for each in started]
    if wrong is not None:
        raise wrong
    return np.array(found, np.uint64).reshape(len(rows), *curve.shape)


def sums_outward(curve: Curve[Any], sums: Words, place: MemorySpace, leading: tuple[int, ...], operand: Operand) -> Any:
    """What `summed` gives as users have it: canonical, with these leading dimensions, in the kind of the points given.

    There are as many as there were sums: a device's kernel would take a first call 0.7 ms, Python takes 0.02 for each.
    """
    if place is HOST:
        return points_outward(curve, sums, place, leading, operand)
    from accelerant.zk.msm.horner import canonical

    words = canonical(curve, sums).reshape(*leading, *curve.shape)
    return words if operand.tensor is None else in_kind(place.load(words), place, operand.tensor.device)


def points_words(group: EllipticCurve, operand: Any, place: MemorySpace, check: bool) -> Words:
    """Points as kernels take them: (n, words of a point) at a place, Montgomery form.

    Raises:
        ShapeError: not one row of points.
        FormatError: what check refuses.
    """
    n = _count(group, operand)
    words = points_inward(group.parameters, operand, place, "points", "subgroup" if check else "")
    return place.reshape(words, (n, math.prod(group.shape)))


def _count(group: EllipticCurve, operand: Any) -> int:
    """How many points there are in the one row of them."""
    if len(operand.leading) != 1:
        tail = ", ".join(map(str, group.shape))
        raise ShapeError(f"points must be (n, {tail}), got {(*operand.leading, *group.shape)}")
    n: int = operand.leading[0]
    return n


def scalars_words(
    group: EllipticCurve, scalars: Any, place: MemorySpace, n: int
) -> tuple[list[Words], tuple[int, ...], Callable[[], FormatError | None]]:
    """Rows of n scalars at a place, (n, 4) each, the dimensions that the sums have before a point's own, and a check.

    The check gives the error of scalars that are not below the order, where that waits for the device. Sums may be
    started before: kernels take any scalars, of which then the sums mean nothing. Other scalars are checked here.

    Raises:
        UnsupportedDtype, ShapeError, FormatError: as msm.
    """
    field = group.parameters.scalars
    check: Callable[[], FormatError | None] = nothing
    if isinstance(scalars, (list, tuple)):
        words, home = scalar_words(scalars, field.modulus, "the order"), HOST
        _check_rows(tuple(words.shape), n)
    else:
        scalars = plain_scalars(field, scalars)
        words, home = _array(scalars)
        dtype = str(scalars.dtype).removeprefix("torch.")
        host.check_words(field, dtype, tuple(scalars.shape), "scalars")
        _check_rows(tuple(scalars.shape), n)
        words = home.contiguous(words)
        check = functools.partial(_wrong_scalar, group, home, words)
    if home is HOST or home != place:
        wrong, check = check(), nothing
        if wrong is not None:
            raise wrong
    shape = tuple(words.shape)
    if home != place:
        words = place.load(home.store(words))
    if len(shape) == 2:
        return [words], (), check
    return [place.getitem(words, (i,)) for i in range(shape[0])], (shape[0],), check


def _wrong_scalar(group: EllipticCurve, home: MemorySpace, words: Words) -> FormatError | None:
    index = first_unreduced(home, group.parameters.scalars, words)
    return (
        None if index is None else FormatError(f"scalars[{index}] (flattened) is not below the order of {group.name}")
    )


def _check_rows(shape: tuple[int, ...], n: int) -> None:
    if len(shape) not in (2, 3) or shape[-2:] != (n, _LIMBS):
        raise ShapeError(f"scalars must be ({n}, {_LIMBS}) or (b, {n}, {_LIMBS}) for {n} points, got {shape}")


def _array(scalars: Any) -> tuple[Words, MemorySpace]:
    if isinstance(scalars, np.ndarray):
        return scalars, HOST
    if not is_tensor(scalars):
        raise UnsupportedDtype(
            f"scalars must be a NumPy array, a torch tensor or a list of integers, got {type(scalars).__name__}"
        )
    place = space_of(scalars)
    return (scalars.detach().numpy() if place is HOST else signed_view(scalars)), place


@functools.lru_cache(maxsize=4096)
def msm_record(place: MemorySpace, curve: Curve[Any], n: int, rows: int) -> OpRecord:
    """The ledger's, of `rows` sums over n points."""
    base, degree = curve.coordinates.base, curve.coordinates.degree
    if place is HOST:
        dialect = "llvm"
    else:
        from accelerant.zk.msm.program import accumulate_source

        dialect, _ = accumulate_source(curve).pick(place.provider.dialects)
    return sole_record(
        "msm",
        dialect,
        place.backend,
        place.label,
        f"{rows}x" * (rows != 1) + f"{n} {curve.name}",
        size_bytes=n * (2 * degree * base.size_bytes + rows * curve.scalars.size_bytes),
        operations=rows * plan(curve.order, n, 1).products(n),
    )
