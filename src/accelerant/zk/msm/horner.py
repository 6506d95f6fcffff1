"""The end of a sum on a device, on one core of the host: the sums of windows, added up by Horner's rule.

On the device the doublings, one after the other, would take longer than all sums of 2^16 points. The CPU's kernel takes
0.1 ms for 254 bits, but LLVM and the kernel take 40 ms to load. Python's integers need nothing and take 1.1 ms (BN254
G1; BLS12-381 G1 1.5, the groups over Fq2 2.5 and 3.8): they do the first sums of a process, of which there may be no
more.

Time depends on the points.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.encoding import decode_points, encode_points
from accelerant.algebra.curve.reference import jacobian_add, jacobian_double, jacobian_from_affine, jacobian_to_affine
from accelerant.algebra.curve.weierstrass import Affine, Curve
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.program import montgomery_radix
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.zk.msm.llvm_kernels import kernel_source

__all__ = ["by_kernel", "by_python", "canonical", "horner"]

U64 = npt.NDArray[np.uint64]

_FEW = 4
"""Sums of a curve that Python makes. A process of more of them loads the kernel, and has lost a tenth of what that
takes; more than a few would be seen in what one sum takes after another."""


def horner(curve: Curve[Any], window: int, sums: U64) -> U64:
    """The sum over windows w and pieces of 2^(window w) times a window's sum.

    Args:
        curve: of the points.
        window: bits of a digit.
        sums: (pieces, windows, 3 coordinates), projective, Montgomery form, the lowest window first.

    Returns:
        (2 coordinates,) words: affine, Montgomery form.
    """
    alone = sums.shape[1] == 1  # nothing is doubled
    return (by_python if alone or next(_made(curve.name)) < _FEW else by_kernel)(curve, window, sums)


def by_python(curve: Curve[Any], window: int, sums: U64) -> U64:
    """As horner. Homogeneous coordinates have R as a common factor, so that only the affine ones need be scaled."""
    k, (pieces, windows) = curve.coordinates, sums.shape[:2]
    size, data = k.base.size_bytes, sums.astype("<u8").tobytes()
    values = [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
    elements = [k.join(values[i : i + k.degree]) for i in range(0, len(values), k.degree)]
    total = jacobian_from_affine(curve, None)
    for w in reversed(range(windows)):
        for _ in range(window if w < windows - 1 else 0):
            total = jacobian_double(curve, total)
        for piece in range(pieces):
            x, y, z = elements[3 * (piece * windows + w) :][:3]
            total = jacobian_add(curve, total, (k.mul(x, z), k.mul(y, k.square(z)), z))
    return _scaled(curve, [jacobian_to_affine(curve, total)], montgomery_radix(k.base)).reshape(-1)


def by_kernel(curve: Curve[Any], window: int, sums: U64) -> U64:
    """As horner."""
    pieces, windows = sums.shape[:2]
    partials = np.ascontiguousarray(sums[:, ::-1].swapaxes(0, 1))
    z = np.empty(2 * sums.shape[2] // 3, np.uint64)
    arrays = (HOST.pointer(partials), HOST.pointer(_doublings(pieces, windows, window)))
    HOST.provider.launch(_finish(curve.name), (1,), (1,), (*arrays, windows * pieces, HOST.pointer(z)))
    return z


def canonical(curve: Curve[Any], points: U64) -> U64:
    """Points (n, *shape) of Montgomery form."""
    base = curve.coordinates.base
    return _scaled(curve, decode_points(curve, points, check=False), pow(montgomery_radix(base), -1, base.modulus))


def _scaled(curve: Curve[Any], points: Iterable[Affine[Any]], factor: int) -> U64:
    """Words of points with their coordinates multiplied."""
    times, factor = curve.coordinates.times, factor % curve.coordinates.base.modulus
    return encode_points(curve, [p if p is None else (times(p[0], factor), times(p[1], factor)) for p in points])


@functools.cache
def _made(curve: str) -> itertools.count[int]:
    """Counts the curve's sums in this process."""
    return itertools.count()


@functools.lru_cache(maxsize=256)
def _doublings(pieces: int, windows: int, window: int) -> npt.NDArray[np.int64]:
    """Before each partial sum, those of the highest window first, which need none; not to be written."""
    found = np.where(np.arange(windows * pieces) % pieces == 0, window, 0).astype(np.int64)
    found[0] = 0
    return found


@functools.cache
def _finish(curve: str) -> Kernel:
    """Of the scalar form, which keeps elements as the C kernels do."""
    return HOST.provider.compile(kernel_source(curve, "msm_finish", "scalar"))
