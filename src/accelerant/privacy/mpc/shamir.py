"""Shamir's secret sharing of whole tensors and of bytes: any `threshold` of `count` shares give the secret.

>>> shares = shamir.split(weights, threshold=3, count=5)
>>> shamir.combine(shares[:3])                          # the weights, rounded to 2^-24

Each element is a number modulo a prime p and the constant term of a polynomial whose other threshold - 1 coefficients
are uniform. Share i has the values at i, for i = 1..count; interpolation at 0 gives the secret. Fewer than `threshold`
shares are uniform whatever the secret is (Shamir 1979, "How to share a secret", Communications of the ACM 22).

    field           elements                              values of an element
    goldilocks      p = 2^64 - 2^32 + 1, 8 bytes          integers of magnitude up to 2^63 - 2^31
    mersenne61      p = 2^61 - 1, 8 bytes                 integers of magnitude up to 2^60 - 1
    bn254_fr        the order of a curve, 32 bytes        64-bit integers
    bls12_381_fr    the order of a curve, 32 bytes        64-bit integers

Floats are rounded to multiples of 2^-fraction_bits, half to even, so the error is at most 2^-(fraction_bits + 1). Bytes
fill elements with 7, or 31, bytes each. Arithmetic runs in the kernels of algebra/field on the tensor's device.

Tampering: with exactly `threshold` plain shares a changed share gives another secret, and no one can tell. With more
shares, combine checks that all are on one polynomial; it cannot say which was changed.

Trust: whoever splits and whoever combines sees the secret; holders see nothing while fewer than `threshold` of them
collude. Elements and bytes do not reach repr or errors. Kernels do not branch on an element; combining is not meant to
hide its timing. Not audited.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.algebra.field import FieldArray, PrimeField, prime_field
from accelerant.algebra.field.memory_space import signed_view
from accelerant.algebra.field.parameters import Field
from accelerant.errors import ConfigError, ProtocolError, ShapeError, UnsupportedDtype
from accelerant.privacy.random import SecureStream

__all__ = ["FIELDS", "Share", "Sharing", "combine", "split"]

FIELDS = ("goldilocks", "mersenne61", "bn254_fr", "bls12_381_fr")
"""Names of the fields; the position is the code in serialised shares."""

_DTYPES = ("bytes", "int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64")
_MOST_SHARES, _MOST_AXES, _MOST_FRACTION_BITS, _ID_BYTES = 2**16 - 1, 16, 62, 16
_SIGN = -(2**63)
_stream = SecureStream()


@dataclass(frozen=True)
class Sharing:
    """The public facts that all shares of a split have in common.

    Attributes:
        field: name of the field.
        threshold, count: shares needed, and dealt.
        split_id: 16 random bytes; those of a result are derived from its operands'.
        dtype: of the secret's tensor, without "torch."; "bytes" for bytes.
        shape: of the secret's tensor; (length,) for bytes.
        fraction_bits: floats are multiples of 2^-fraction_bits; 0 for integers and bytes.
    """

    field: str
    threshold: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    fraction_bits: int
    split_id: bytes

    @property
    def elements(self) -> tuple[int, ...]:
        """The shape of the field elements: several bytes are one element."""
        return (-(-self.shape[0] // _chunk(self.field)),) if self.dtype == "bytes" else self.shape

    @property
    def is_float(self) -> bool:
        """Whether the secret is of floats."""
        return "float" in self.dtype

    def differing(self, other: Sharing) -> str:
        """Return the first difference from another split in words, or ""."""
        for row in fields(self):
            mine, yours = getattr(self, row.name), getattr(other, row.name)
            if mine != yours:
                return "another split" if row.name == "split_id" else f"{row.name} {yours}, not {mine}"
        return ""


@dataclass(frozen=True, eq=False, repr=False)
class Share:
    """One holder's share: the values at `index` of the polynomials that share a secret's elements.

    Attributes:
        sharing: what the shares of this split have in common.
        index: 1 to sharing.count.
        words: canonical words of the elements, uint64, (*sharing.elements[, 4]); secret.
    """

    sharing: Sharing
    index: int
    words: Tensor

    def __repr__(self) -> str:
        of = self.sharing
        return f"Share({self.index} of {of.count}, threshold {of.threshold}, {of.dtype} {of.shape}, {of.field})"


# --- split and combine -----------------------------------------------------------------------------------------------


def split(
    secret: Any, threshold: int, count: int, *, field: str = "goldilocks", fraction_bits: int = 24
) -> list[Share]:
    """Split a secret into `count` shares, of which any `threshold` give it and fewer tell nothing.

    Args:
        secret: tensor or NumPy array of int8 to int64, uint8 or float16 to float64, a number, or bytes. The shares are
            on its device, the CPU or a CUDA device.
        threshold: 1 to count; each share of threshold 1 is the secret.
        count: at most 65535.
        field: one of FIELDS.
        fraction_bits: floats are rounded to multiples of 2^-fraction_bits; 0 to 62.

    Raises:
        ConfigError: threshold, count, field or fraction_bits out of range; a value that the field cannot hold, NaN or
            an infinity. Names the range, never a value.
        ShapeError: more than 16 axes.
        UnsupportedDtype: another dtype.
    """
    chosen = _field(field)
    threshold, count = (_integer(*pair) for pair in (("threshold", threshold), ("count", count)))
    if not 1 <= count <= _MOST_SHARES:
        raise ConfigError(f"count must be 1 to {_MOST_SHARES}, got {count}")
    if not 1 <= threshold <= count:
        raise ConfigError(f"threshold must be 1 to count = {count}, got {threshold}")
    if not 0 <= _integer("fraction_bits", fraction_bits) <= _MOST_FRACTION_BITS:
        raise ConfigError(f"fraction_bits must be 0 to {_MOST_FRACTION_BITS}, got {fraction_bits}")
    if isinstance(secret, (bytes, bytearray, memoryview)):
        data = bytes(secret)
        dtype, values = "bytes", _bytes_elements(chosen, data)
        shape: tuple[int, ...] = (len(data),)
    else:
        tensor = _tensor(secret, "the secret")
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if len(shape) > _MOST_AXES:
            raise ShapeError(f"a secret has at most {_MOST_AXES} axes, got {len(shape)}")
        values = _elements_of(chosen, tensor, fraction_bits if tensor.is_floating_point() else 0)
    bits = fraction_bits if "float" in dtype else 0
    sharing = Sharing(field, threshold, count, dtype, shape, bits, bytes(_random_bytes(_ID_BYTES)))
    return _dealt(sharing, values)


def combine(shares: Sequence[Share]) -> Any:
    """Return the secret of at least `threshold` shares of one split: a tensor on their device, or bytes.

    All shares beyond the threshold are checked against the others.

    Raises:
        ConfigError: not shares.
        ProtocolError: too few, one index twice, shares of different splits, fields, shapes or thresholds, shares that
            are not on one polynomial, or values that the dtype cannot hold.
    """
    shares = _of_one_split(shares)
    sharing, chosen = shares[0].sharing, _field(shares[0].sharing.field)
    if len(shares) < sharing.threshold:
        raise ProtocolError(f"combining needs {sharing.threshold} shares, got {len(shares)}")
    used, surplus = shares[: sharing.threshold], shares[sharing.threshold :]
    points, stack = tuple(share.index for share in used), _stack(chosen, [share.words for share in used])
    for share in surplus:
        if not bool((_interpolated(chosen, stack, points, share.index) == share.words).all()):
            raise ProtocolError(
                f"share {share.index} is not on the polynomial of shares {', '.join(map(str, points))}: one of them "
                "was changed"
            )
    secret = _interpolated(chosen, stack, points, 0)
    return _bytes_of(sharing, chosen, secret) if sharing.dtype == "bytes" else _values_of(sharing, chosen, secret)


def polynomial_values(coefficients: Sequence[int], points: Sequence[int], modulus: int) -> list[int]:
    """Return the values at points of the polynomial with these coefficients, the constant first: the reference."""
    return [functools.reduce(lambda total, c: (total * x + c) % modulus, reversed(coefficients), 0) for x in points]


@functools.lru_cache(maxsize=1024)
def lagrange_weights(points: tuple[int, ...], at: int, modulus: int) -> tuple[int, ...]:
    """Return w with f(at) = sum w_i f(points_i) mod p, for each polynomial f of fewer coefficients than points."""
    weights = []
    for i, x in enumerate(points):
        others = [y for j, y in enumerate(points) if j != i]
        top, bottom = (math.prod(a - y for y in others) % modulus for a in (at, x))
        weights.append(top * pow(bottom, -1, modulus) % modulus)
    return tuple(weights)


def _dealt(sharing: Sharing, constant: FieldArray) -> list[Share]:
    """Return shares of polynomials with this constant term."""
    field, n = constant.field, constant.size
    secret = constant.reshape(1, n)
    device = torch.device("cpu") if constant.home is None else constant.home
    points = field.array([[x] for x in range(1, sharing.count + 1)]).moved(constant.space)
    values = field.array(_uniform(field.parameters, n, device)).reshape(1, n) if sharing.threshold > 1 else secret
    for degree in range(sharing.threshold - 2, -1, -1):  # Horner, at all points at once
        lower = field.array(_uniform(field.parameters, n, device)).reshape(1, n) if degree else secret
        values = values * points + lower
    words = (values + field.array([[0]] * sharing.count).moved(constant.space)).canonical()
    shape = (*sharing.elements, *words.shape[2:])
    # Copies, since a view would take the other shares' memory along when it is saved.
    return [Share(sharing, i + 1, words[i].clone().reshape(shape)) for i in range(sharing.count)]


def _stack(field: PrimeField, words: Sequence[Tensor]) -> FieldArray:
    return field.array(torch.stack(list(words)), reduce=True)  # reduced already: the error would show an element


def _interpolated(field: PrimeField, stack: FieldArray, points: tuple[int, ...], at: int) -> Tensor:
    """Return the canonical words at `at` of the polynomials through the values at points."""
    weights = field.array(list(lagrange_weights(points, at, field.modulus))).moved(stack.space)
    column = weights.reshape(len(points), *(1 for _ in stack.shape[1:]))
    result: Tensor = (stack * column).sum(axis=0).canonical()
    return result


def _of_one_split(shares: Sequence[Share]) -> list[Share]:
    """Return shares as a list, or raise ConfigError or ProtocolError: of one split, at different indices."""
    listed = list(shares)
    for share in listed:
        if not isinstance(share, Share):
            raise ConfigError(f"wanted shares, got {type(share).__name__}")
    if not listed:
        raise ProtocolError("no shares")
    first, seen = listed[0], set()
    for share in listed:
        if difference := first.sharing.differing(share.sharing):
            raise ProtocolError(f"share {share.index} does not belong to share {first.index}: it has {difference}")
        if share.index in seen:
            raise ProtocolError(f"share {share.index} is there twice")
        if share.words.device != first.words.device:
            raise ShapeError(f"shares must be on one device, got {first.words.device} and {share.words.device}")
        seen.add(share.index)
    return listed


# --- values as field elements ----------------------------------------------------------------------------------------


def _field(name: str) -> PrimeField:
    if name not in FIELDS:
        raise ConfigError(f"unknown field {name!r} for shares; known are {', '.join(FIELDS)}")
    return prime_field(name)


def _integer(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError("a boolean")
        return operator.index(value)  # type: ignore[arg-type]  # TypeError for anything else
    except TypeError:
        raise ConfigError(f"{name} must be an integer, got {type(value).__name__}") from None


def _tensor(value: Any, name: str) -> Tensor:
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UnsupportedDtype(
            f"{name} must be a tensor, an array, a number or bytes, got {type(value).__name__}"
        ) from None
    if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        raise UnsupportedDtype(f"{name} must be {', '.join(_DTYPES)}, got {tensor.dtype}")
    return tensor


def _limit(field: Field) -> int:
    """Return the largest magnitude of a value: negative ones are p - |v|, and all pass through 64-bit integers."""
    return min((field.modulus - 1) // 2, 2**63 - 1)


def _elements_of(field: PrimeField, tensor: Tensor, fraction_bits: int) -> FieldArray:
    """Return a tensor's values, times 2^fraction_bits and rounded, as elements; ConfigError if one does not fit."""
    limit = _limit(field.parameters)
    if tensor.is_floating_point():
        scaled = (tensor.to(torch.float64) * 2.0**fraction_bits).round()
        bound = float(limit) if int(float(limit)) <= limit else math.nextafter(float(limit), 0)
        if not bool((scaled.abs() <= bound).all()):  # nor is NaN
            most = math.ldexp(bound, -fraction_bits)
            raise ConfigError(
                f"values must be finite and from {-most:g} to {most:g} in {field.name} with "
                f"{fraction_bits} fraction bits"
            )
        values = scaled.to(torch.int64)
    else:
        values = tensor.to(torch.int64)
        lowest = _SIGN if limit == 2**63 - 1 else -limit
        if bool(((values > limit) | (values < lowest)).any()):
            raise ConfigError(f"values must be from {lowest} to {limit} in {field.name}")
    words = values ^ _SIGN  # the value + 2^63
    if field.limbs > 1:
        words = torch.cat([words[..., None], words.new_zeros((*words.shape, field.limbs - 1))], dim=-1)
    return field.array(words.contiguous().view(torch.uint64), reduce=True) - 2**63 % field.modulus


def _values_of(sharing: Sharing, field: PrimeField, words: Tensor) -> Tensor:
    """Return the tensor of a secret's elements; ProtocolError if one is out of the dtype's range."""
    dtype: torch.dtype = getattr(torch, sharing.dtype)
    offset = min((field.modulus - 1) // 2, 2**63)
    shifted = signed_view((field.array(words, reduce=True) + offset).canonical())
    outside = torch.zeros((), dtype=torch.bool, device=words.device)
    if field.limbs > 1:
        shifted, outside = shifted[..., 0], (shifted[..., 1:] != 0).any()
    values = shifted - (offset - 2**64 if offset >= 2**63 else offset)
    if not sharing.is_float:
        lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        outside = outside | ((values < lowest) | (values > highest)).any()
    if bool(outside):
        raise ProtocolError(
            f"the shares combine to values that {sharing.dtype} cannot hold: a result passed its range, or a share was "
            "changed"
        )
    if sharing.is_float:
        values = values.to(torch.float64) * 2.0**-sharing.fraction_bits
    result: Tensor = values.to(dtype)
    return result


def _chunk(field: str) -> int:
    """Return the bytes of a secret in one element."""
    return (prime_field(field).parameters.bits - 1) // 8


def _bytes_elements(field: PrimeField, data: bytes) -> FieldArray:
    chunk = _chunk(field.name)
    padded = np.frombuffer(data + bytes(-len(data) % chunk), np.uint8).reshape(-1, chunk)
    words = np.zeros((len(padded), field.parameters.size_bytes), np.uint8)
    words[:, :chunk] = padded
    limbs = words.view("<u8").astype(np.uint64).reshape(-1, *(field.limbs,) * (field.limbs > 1))
    return field.array(torch.from_numpy(limbs))


def _bytes_of(sharing: Sharing, field: PrimeField, words: Tensor) -> bytes:
    chunk = _chunk(field.name)
    raw = words.cpu().numpy().astype("<u8").reshape(-1, field.limbs).view(np.uint8)
    data, length = raw[:, :chunk].tobytes(), sharing.shape[0]
    if raw[:, chunk:].any() or any(data[length:]):
        raise ProtocolError("the shares do not combine to bytes: a share was changed")
    return data[:length]


# --- randomness ------------------------------------------------------------------------------------------------------


def _random_bytes(n: int) -> bytes:
    return _stream.words(-(-n // 4)).numpy().tobytes()[:n]


def _uniform(field: Field, n: int, device: torch.device) -> Tensor:
    """Return canonical words of n uniform elements, by rejection of numbers that are not below p."""
    words = _drawn(field, n, device)
    while len(missing := _not_below(field, words).nonzero()[:, 0]):
        words[missing] = _drawn(field, len(missing), device)
    return (words if field.limbs > 1 else words[:, 0].contiguous()).view(torch.uint64)


def _drawn(field: Field, n: int, device: torch.device) -> Tensor:
    """Return (n, limbs) int64, uniform numbers of as many bits as the modulus has."""
    words = _stream.words(2 * field.limbs * n, device).view(torch.int64).reshape(n, field.limbs).clone()
    top = field.bits - 64 * (field.limbs - 1)
    if top < 64:
        words[:, -1] &= 2**top - 1
    return words


def _not_below(field: Field, words: Tensor) -> Tensor:
    """Return the mask of numbers (n, limbs) that are not below the modulus: unsigned, by limbs from the lowest."""
    mask = torch.ones(len(words), dtype=torch.bool, device=words.device)
    for column, limb in zip((words ^ _SIGN).T, field.words(field.modulus, 64, field.limbs), strict=True):
        shifted = limb - 2**63
        mask = (column > shifted) | ((column == shifted) & mask)
    return mask
