"""The last step of a multi-scalar multiplication on a device: the sums of windows, combined on one core of the host.

On the device the sequential doublings would take longer than all sums of 2^16 points. The CPU kernel takes 0.1 ms for
254 bits, but LLVM and the kernel take 40 ms to load. Python integers need no loading and take 1.1 ms (BN254 G1;
BLS12-381 G1 1.5, the groups over Fq2 2.5 and 3.8 ms): they serve the first few sums of a process.

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
from accelerant.algebra.curve.reference import (
    Jacobian,
    jacobian_add,
    jacobian_double,
    jacobian_from_affine,
    jacobian_to_affine,
)
from accelerant.algebra.curve.weierstrass import Affine, Curve
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.program import montgomery_radix
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.zk.multi_scalar.llvm_kernels import kernel_source

U64 = npt.NDArray[np.uint64]

_PYTHON_SUMS = 4
"""Sums per curve that Python integers reduce before the kernel is loaded; they cost a tenth of loading it."""


def reduce_windows(curve: Curve[Any], window: int, sums: U64) -> U64:
    """Return the sum over windows w and chunks of 2^(window w) times a window's sum.

    Args:
        window: bits of a digit.
        sums: (chunks, windows, 3 coordinates), projective, Montgomery form, the lowest window first.

    Returns:
        (2 coordinates,) words: affine, Montgomery form.
    """
    no_doublings = sums.shape[1] == 1
    by_python = no_doublings or next(_sums_so_far(curve.name)) < _PYTHON_SUMS
    return (reduce_by_python if by_python else reduce_by_kernel)(curve, window, sums)


def reduce_by_python(curve: Curve[Any], window: int, sums: U64) -> U64:
    """reduce_windows on Python integers.

    R is a common factor of projective coordinates in Montgomery form, so only the affine result is scaled.
    """
    k, (chunks, windows) = curve.coordinates, sums.shape[:2]
    size, data = k.base.size_bytes, sums.astype("<u8").tobytes()
    values = [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
    elements = [k.join(values[i : i + k.degree]) for i in range(0, len(values), k.degree)]
    total = jacobian_from_affine(curve, None)
    for w in reversed(range(windows)):
        total = _doubled(curve, total, window if w < windows - 1 else 0)
        for chunk in range(chunks):
            x, y, z = elements[3 * (chunk * windows + w) :][:3]
            total = jacobian_add(curve, total, (k.mul(x, z), k.mul(y, k.square(z)), z))
    return _scaled(curve, [jacobian_to_affine(curve, total)], montgomery_radix(k.base)).reshape(-1)


def _doubled(curve: Curve[Any], point: Jacobian[Any], times: int) -> Jacobian[Any]:
    """Return 2^times P by jacobian_double; over Fq without calls of methods, which take a third of its time."""
    if curve.coordinates.degree > 1:
        for _ in range(times):
            point = jacobian_double(curve, point)
        return point
    (x, y, z), p = point, curve.coordinates.base.modulus
    for _ in range(times):
        b, e, z = y * y % p, 3 * x * x % p, 2 * y * z % p
        d = 4 * x * b % p
        x = (e * e - 2 * d) % p
        y = (e * (d - x) - 8 * b * b) % p
    return x, y, z


def reduce_by_kernel(curve: Curve[Any], window: int, sums: U64) -> U64:
    """reduce_windows by the CPU kernel msm_finish."""
    chunks, windows = sums.shape[:2]
    partials = np.ascontiguousarray(sums[:, ::-1].swapaxes(0, 1))
    z = np.empty(2 * sums.shape[2] // 3, np.uint64)
    arrays = (HOST.pointer(partials), HOST.pointer(_doublings(chunks, windows, window)))
    HOST.provider.launch(_finish(curve.name), (1,), (1,), (*arrays, windows * chunks, HOST.pointer(z)))
    return z


def canonical(curve: Curve[Any], points: U64) -> U64:
    """Return the canonical words of points (n, *shape) in Montgomery form, by Python integers."""
    base = curve.coordinates.base
    return _scaled(curve, decode_points(curve, points, check=False), pow(montgomery_radix(base), -1, base.modulus))


def _scaled(curve: Curve[Any], points: Iterable[Affine[Any]], factor: int) -> U64:
    times, factor = curve.coordinates.times, factor % curve.coordinates.base.modulus
    return encode_points(curve, [p if p is None else (times(p[0], factor), times(p[1], factor)) for p in points])


@functools.cache
def _sums_so_far(curve: str) -> itertools.count[int]:
    return itertools.count()


@functools.lru_cache(maxsize=256)
def _doublings(chunks: int, windows: int, window: int) -> npt.NDArray[np.int64]:
    """Return the doublings before each partial sum, highest window first; shared, read-only."""
    counts = np.where(np.arange(windows * chunks) % chunks == 0, window, 0).astype(np.int64)
    counts[0] = 0
    return counts


@functools.cache
def _finish(curve: str) -> Kernel:
    """Compile msm_finish in the scalar form, whose elements have the same layout as the C kernels'."""
    return HOST.provider.compile(kernel_source(curve, "msm_finish", "scalar"))
