"""Pedersen's commitments to shared polynomials, which let a holder check a share alone.

With generators g and h of a curve's subgroup, a dealer who shares s by f also shares a uniform b by a polynomial f',
and publishes C_k = f_k g + f'_k h for every coefficient. Share i is right if f(i) g + f'(i) h = sum i^k C_k. The
commitments are uniform whatever the secret is; opening one in two ways takes the discrete logarithm of h (Pedersen,
CRYPTO '91, "Non-interactive and information-theoretic secure verifiable secret sharing"). Feldman's commitments f_k g
are not offered: they reveal s g, from which anyone finds a PIN, a label or another value of few bits by trying all.

g is the curve's generator. Nobody knows the logarithm of h: its x is the first SHA-512 of "accelerant pedersen h CURVE
0", "... 1", ..., big-endian mod q, for which a point is on the curve; y is the smaller root; the point is multiplied
by the cofactor. Kernels multiply in a time that depends on shapes only. Not audited.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.algebra.curve import Curve, curve_of, launch
from accelerant.algebra.curve.weierstrass import Affine, encode_points, multiply
from accelerant.algebra.field.launch import first_unreduced
from accelerant.algebra.field.memory_space import HOST, in_kind, signed_view, space_of
from accelerant.errors import FormatError


@functools.cache
def second_generator(name: str) -> Affine[int]:
    """Return h of a curve; not constant-time, nothing here is secret."""
    curve = curve_of(name)
    for counter in itertools.count():
        digest = hashlib.sha512(f"accelerant pedersen h {name} {counter}".encode()).digest()
        x = int.from_bytes(digest, "big") % curve.coordinates.base.modulus
        y = curve.coordinates.sqrt(curve.right_side(x))
        if y is not None:
            smaller = curve.coordinates.neg(y) if curve.coordinates.is_larger(y) else y
            return multiply(curve, curve.cofactor, (x, smaller))
    raise AssertionError


def commit(name: str, words: Tensor) -> Tensor:
    """Return x g + b h of canonical scalars x and b, words (2, ..., 4), as canonical points (..., 2, limbs)."""
    curve, space = curve_of(name), space_of(words)
    bases = encode_points(curve, [curve.generator, second_generator(name)])
    x, b = (
        launch.multiply(space, curve, _montgomery(curve, base[None]), _raw(scalars.reshape(-1, 4)))
        for base, scalars in zip(torch.from_numpy(bases).to(words.device), words, strict=True)
    )
    return _canonical(curve, launch.add(space, curve, x, b), words[0])


def add(name: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the sums of canonical points of one shape."""
    curve = curve_of(name)
    total = launch.add(space_of(x), curve, _montgomery(curve, x), _montgomery(curve, y))
    return _canonical(curve, total, x[..., 0, :])


def scale(name: str, points: Tensor, words: Tensor) -> Tensor:
    """Return canonical points (..., 2, limbs) times canonical scalars, which broadcast to (..., 4)."""
    curve = curve_of(name)
    scalars = _raw(signed_view(words).expand(*points.shape[:-2], 4).reshape(-1, 4))
    product = launch.multiply(space_of(points), curve, _montgomery(curve, points), scalars)
    return _canonical(curve, product, points[..., 0, :])


def evaluate(name: str, commitments: Tensor, at: int) -> Tensor:
    """Return sum at^k C_k of commitments (k, ..., 2, limbs)."""
    scalar = torch.from_numpy(np.array([at, 0, 0, 0], np.uint64)).to(commitments.device)
    return functools.reduce(lambda total, c: add(name, scale(name, total, scalar), c), commitments.unbind(0)[::-1])


def check_points(name: str, points: Tensor) -> None:
    """Raise FormatError unless canonical words are points of the subgroup; names the first one's index."""
    curve, space = curve_of(name), space_of(points)
    index = first_unreduced(space, curve.coordinates.base, _raw(points))
    if index is not None:
        raise FormatError(f"coordinate {index} of the commitments is not below the modulus")
    words = _montgomery(curve, points)
    tests: tuple[launch.Test, ...] = ("off_curve", "off_subgroup")
    for test in tests:
        if (index := launch.first_off(space, curve, test, words)) is not None:
            raise FormatError(f"commitments[{index}] (flattened) is not in the subgroup of {name}")


def _raw(words: Tensor) -> Any:
    space = space_of(words)
    return space.contiguous(words.numpy() if space is HOST else signed_view(words))


def _montgomery(curve: Curve[Any], points: Tensor) -> Any:
    return launch.to_montgomery(space_of(points), curve, _raw(points.reshape(-1, *curve.shape)))


def _canonical(curve: Curve[Any], words: Any, like: Tensor) -> Tensor:
    """Return points on the device and in the leading shape of `like`."""
    space = space_of(like)
    points: Tensor = in_kind(launch.from_montgomery(space, curve, words), space, like.device)
    return points.reshape(*like.shape[:-1], *curve.shape)
