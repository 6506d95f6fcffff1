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
OpenCL and WebGPU compute polynomials, of their own tensors or by name (device="opencl"). Their random coefficients come
from the host and the shares return to it, since tensors there have no uint64; sums of shares are the host's.

Shares of sums: `x + y`, `x - y` and `-x` of shares at one index, and `x + c`, `x - c`, `c * x` for public c, are shares
of the result. Each holder computes them alone; products of shares are in beaver.py. The field wraps: a result out of an
element's range is wrong, unseen. A product of two floats has twice the fraction bits.

Tampering: with exactly `threshold` plain shares a changed share gives another secret, and no one can tell. With more,
combine checks that all are on one polynomial; verifiable shares (pedersen.py) are checked one by one. Whoever splits
and whoever combines sees the secret. Elements and bytes do not reach repr or errors. Combining is not meant to hide its
timing. Not audited.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.algebra.curve import curve_of
from accelerant.algebra.field.field import FieldArray, PrimeField, prime_field
from accelerant.algebra.field.launch import first_unreduced
from accelerant.algebra.field.memory_space import HOST, signed_view, space_at
from accelerant.algebra.field.parameters import Field
from accelerant.errors import ConfigError, FormatError, ProtocolError, ShapeError, UnsupportedDtype
from accelerant.privacy.mpc import pedersen
from accelerant.privacy.random import SecureStream
from accelerant.runtime.files import clipped
from accelerant.runtime.host import refuse_masked, refuse_without_values
from accelerant.runtime.registry import DeviceLike, find_device
from accelerant.tensors import DeviceTensor
from accelerant.tensors.tensor import serves

__all__ = [
    "FIELDS", "Share", "Sharing", "combine", "deal", "lagrange_weights", "opened", "refresh", "split",
    "uniform", "zero_shares",
]  # fmt: skip

FIELDS = ("goldilocks", "mersenne61", "bn254_fr", "bls12_381_fr")  # names; the position is the code in messages

_CURVES = ("", "bn254_g1", "bls12_381_g1")
_DTYPES = ("bytes", "int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64")
_MOST_AXES, _MOST_FRACTION_BITS = 16, 62
_SIGN = -(2**63)
_HEAD, _MAGIC, _VERSION = struct.Struct("<8s9H16s"), b"ACSHARE\0", 1
_stream = SecureStream()


@dataclass(frozen=True)
class Sharing:
    """The public facts that all shares of a split have in common."""

    field: str  # its name
    threshold: int  # shares needed
    count: int  # shares dealt
    dtype: str  # of the secret's tensor, without "torch."; "bytes" for bytes
    shape: tuple[int, ...]  # of the secret's tensor; (length,) for bytes
    fraction_bits: int  # floats are multiples of 2^-fraction_bits; 0 for integers and bytes
    split_id: bytes  # 16 random bytes; those of a result are derived from its operands'
    curve: str = ""  # of the commitments; "" for plain shares

    @property
    def elements(self) -> tuple[int, ...]:
        """The shape of the field elements: several bytes are one, and verifiable shares have a blinding of each."""
        inner = (-(-self.shape[0] // _chunk(self.field)),) if self.dtype == "bytes" else self.shape
        return (2, *inner) if self.curve else inner


@dataclass(frozen=True, eq=False, repr=False)
class Share:
    """One holder's share: the values at `index` of the polynomials that share a secret's elements."""

    sharing: Sharing  # what the shares of this split have in common
    index: int  # 1 to sharing.count
    words: Tensor  # canonical words of the elements, uint64, (*sharing.elements[, 4]); secret
    commitments: Tensor | None = None  # canonical points (threshold, *elements of the secret, 2, limbs); public
    __array_ufunc__ = None  # array + share is the share's __radd__

    def __repr__(self) -> str:
        of = self.sharing
        return f"Share({self.index} of {of.count}, threshold {of.threshold}, {of.dtype} {of.shape}, {of.field})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Share) and hmac.compare_digest(self.to_bytes(), other.to_bytes())

    def __hash__(self) -> int:
        return hash((self.sharing, self.index))

    def __reduce__(self) -> tuple[Any, ...]:  # as secret as the share
        return Share.from_bytes, (self.to_bytes(), str(self.words.device))

    def verify(self, commitments: Tensor) -> bool:
        """Return whether this share is the dealer's, by commitments that all holders have compared."""
        if not self.sharing.curve:
            raise ConfigError("a plain share cannot be verified: split with verifiable=True")
        if self.commitments is None or commitments.shape != self.commitments.shape:
            return False
        own = pedersen.commit(self.sharing.curve, self.words)
        return _same(own, pedersen.evaluate(self.sharing.curve, commitments, self.index))

    def to_bytes(self) -> bytes:
        """Return the share as versioned bytes, little-endian, for from_bytes; they are as secret as the share."""
        of = self.sharing
        codes = (_VERSION, FIELDS.index(of.field), _DTYPES.index(of.dtype), _CURVES.index(of.curve))
        sizes = (of.threshold, of.count, self.index, of.fraction_bits, len(of.shape))
        arrays = [self.words] if self.commitments is None else [self.words, self.commitments]
        data = b"".join(array.cpu().numpy().astype("<u8").tobytes() for array in arrays)
        return _HEAD.pack(_MAGIC, *codes, *sizes, of.split_id) + struct.pack(f"<{len(of.shape)}Q", *of.shape) + data

    @staticmethod
    def from_bytes(data: bytes, device: DeviceLike = "cpu") -> Share:
        """Return the share of to_bytes; FormatError for other bytes, which may be hostile, before it allocates."""
        if len(data) < _HEAD.size or not data.startswith(_MAGIC):
            raise FormatError(f"not a share: wanted {_MAGIC!r} and {_HEAD.size} bytes of header, got {len(data)} bytes")
        _, version, *codes, threshold, count, index, bits, axes, split_id = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise FormatError(f"a share of version {version}; this program reads version {_VERSION}")
        start = _HEAD.size + 8 * axes
        if any(code >= len(table) for code, table in zip(codes, (FIELDS, _DTYPES, _CURVES), strict=True)):
            raise FormatError(f"a share with unknown codes of field, dtype and curve: {codes}")
        if not 1 <= max(threshold, index) <= count or not threshold * index or axes > _MOST_AXES or len(data) < start:
            raise FormatError(f"a share with index {index}, threshold {threshold}, count {count} and {axes} axes")
        name, dtype, curve = FIELDS[codes[0]], _DTYPES[codes[1]], _CURVES[codes[2]]
        shape = struct.unpack_from(f"<{axes}Q", data, _HEAD.size)
        if (
            (dtype == "bytes" and axes != 1) or bits > _MOST_FRACTION_BITS * ("float" in dtype)
            or (curve and curve_of(curve).scalars.name != name) or math.prod(max(size, 1) for size in shape) > 2**48
        ):  # fmt: skip
            # Sizes are not shown: in a damaged share they may be words of the secret.
            raise FormatError(f"a share of {dtype}, {axes} axes, {bits} fraction bits, {name}, {curve or 'no curve'}")
        sharing, field = Sharing(name, threshold, count, dtype, shape, bits, split_id, curve), prime_field(name)
        sizes = [(*sharing.elements, field.limbs)[: None if field.limbs > 1 else -1]]
        if curve:
            sizes.append((threshold, *sharing.elements[1:], *curve_of(curve).shape))
        if len(data) - start != 8 * sum(map(math.prod, sizes)):
            raise FormatError(f"a share whose {len(data) - start} bytes are not the elements of its shape")
        raw = np.frombuffer(data, "<u8", offset=start).astype(np.uint64)
        arrays = np.split(raw, [math.prod(sizes[0])])[: len(sizes)]
        words, *points = (torch.from_numpy(array.reshape(size)) for array, size in zip(arrays, sizes, strict=True))
        if (wrong := first_unreduced(HOST, field.parameters, words.numpy())) is not None:
            raise FormatError(f"element {wrong} (flattened) of a share is not below the modulus of {name}")
        for each in points:
            pedersen.check_points(curve, each)
        place = torch.device(find_device(device, torch_tensors=True).torch_device)
        return Share(sharing, index, words.to(place), points[0].to(place) if curve else None)

    # --- arithmetic --------------------------------------------------------------------------------------------------
    def __add__(self, other: Any) -> Share:
        of, field, points = self.sharing, prime_field(self.sharing.field), self.commitments
        if isinstance(other, Share):
            same = replace(other.sharing, split_id=of.split_id)
            if other.index != self.index or same != of:
                raise ProtocolError(f"{self} and {other} cannot be added: wanted one holder's, alike but for the split")
            ids = sorted((of.split_id, other.sharing.split_id))
            if points is not None and other.commitments is not None:
                points = pedersen.add(of.curve, points, other.commitments)
            return self._result("add", *ids, words=field.add(self.words, other.words), commitments=points)
        public = self._public(other, of.fraction_bits)
        if points is not None:
            public = _stacked([public, torch.zeros_like(signed_view(public))])
            first = pedersen.add(of.curve, points[0], pedersen.commit(of.curve, public))
            points = _stacked([first, *points[1:]])
        return self._result("add public", of.split_id, public, words=field.add(self.words, public), commitments=points)

    def __mul__(self, other: Any) -> Share:
        of, points = self.sharing, self.commitments
        other = _tensor(other, "a public operand")
        bits = of.fraction_bits if other.is_floating_point() else 0  # an integer needs none
        if of.fraction_bits + bits > _MOST_FRACTION_BITS:
            raise ConfigError(f"a product has {of.fraction_bits} + {bits} fraction bits; 62 are possible")
        public = self._public(other, bits)
        if points is not None:
            points = pedersen.scale(of.curve, points, public)
        words = prime_field(of.field).mul(self.words, public)
        result = self._result("multiply", of.split_id, public, words=words, commitments=points)
        return replace(result, sharing=replace(result.sharing, fraction_bits=of.fraction_bits + bits))

    def __neg__(self) -> Share:
        return self * -1

    def __sub__(self, other: Any) -> Share:
        return self + other * -1 if isinstance(other, Share) else (self * -1 + other) * -1

    def __rsub__(self, other: Any) -> Share:
        result: Share = self * -1 + other
        return result

    __radd__, __rmul__ = __add__, __mul__

    def _public(self, value: Any, fraction_bits: int) -> Tensor:
        """Return canonical words of a public value, in the shape of the secret's elements."""
        of = self.sharing
        tensor = _tensor(value, "a public operand").to(self.words.device)
        if of.dtype == "bytes" or ("float" in str(tensor.dtype) and "float" not in of.dtype):
            raise ConfigError(f"shares of {of.dtype} take no public operand of {tensor.dtype}")
        try:
            tensor = tensor.expand(of.shape)
        except RuntimeError:
            raise ShapeError(f"a public operand of shape {(*tensor.shape,)} for shares of shape {of.shape}") from None
        words: Tensor = _elements_of(prime_field(of.field), tensor, fraction_bits).canonical()
        return words

    def _result(self, operation: str, *ids: bytes | Tensor, words: Tensor, commitments: Tensor | None) -> Share:
        parts = (part.cpu().numpy().tobytes() if isinstance(part, Tensor) else part for part in ids)
        split_id = hashlib.sha256(b"".join((operation.encode(), *parts))).digest()[:16]
        return Share(replace(self.sharing, split_id=split_id), self.index, words, commitments)


# --- split, combine, refresh -----------------------------------------------------------------------------------------
def split(
    secret: Any, threshold: int, count: int, *, field: str | None = None, fraction_bits: int = 24,
    verifiable: bool = False, curve: str = "bls12_381_g1", device: DeviceLike = None,
) -> list[Share]:  # fmt: skip
    """Split a secret into `count` shares, of which any `threshold` give it and fewer tell nothing.

    Args:
        secret: tensor or NumPy array of int8 to int64, uint8 or float16 to float64, a number, or bytes. The shares are
            on its device, the CPU or a CUDA device; those of a tensor on OpenCL or WebGPU on the CPU.
        threshold: 1 to count; each share of threshold 1 is the secret.
        count: at most 65535.
        field: one of FIELDS, by default goldilocks; for verifiable shares the scalar field of the curve.
        fraction_bits: floats are rounded to multiples of 2^-fraction_bits; 0 to 62.
        verifiable: add commitments (pedersen.py): `threshold` points for each element, for keys and short vectors.
        curve: of the commitments: bls12_381_g1, or bn254_g1, whose logarithms take some 2^100 operations.
        device: "opencl", "webgpu:0", ...: where the polynomials are evaluated, by default on the secret's device.

    Raises:
        ConfigError: an argument out of range, or a value that the field cannot hold: names the range, never the value.
        ShapeError, UnsupportedDtype: more than 16 axes, another dtype.
    """
    if verifiable and curve not in _CURVES[1:]:
        raise ConfigError(f"unknown curve {clipped(curve)} for shares; known are {', '.join(_CURVES[1:])}")
    wanted = curve_of(curve).scalars.name if verifiable else "goldilocks" if field is None else field
    if wanted not in FIELDS or field not in (None, wanted):
        known = wanted if verifiable else ", ".join(FIELDS)
        raise ConfigError(f"unknown field {clipped(field)} for {'verifiable ' * verifiable}shares; known are {known}")
    limits = ("count", count, 1, 2**16 - 1), ("threshold", threshold, 1, count)
    for name, value, least, most in (*limits, ("fraction_bits", fraction_bits, 0, _MOST_FRACTION_BITS)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"{name} must be an integer from {least} to {most}, got {clipped(value)}")
    chosen = prime_field(wanted)
    if device is None and isinstance(secret, DeviceTensor):
        device = secret.place.label
    space = None if device is None else space_at(device)
    if isinstance(secret, (bytes, bytearray, memoryview)):
        data = bytes(secret)
        dtype, bits, values = "bytes", 0, _bytes_elements(chosen, data)
        shape: tuple[int, ...] = (len(data),)
    else:
        tensor = _tensor(secret, "the secret")
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if len(shape) > _MOST_AXES:
            raise ShapeError(f"a secret has at most {_MOST_AXES} axes, got {len(shape)}")
        bits = int(fraction_bits) if tensor.is_floating_point() else 0
        values = _elements_of(chosen, tensor, bits)
    if verifiable:
        blinding = uniform(chosen.parameters, values.size, values.home).reshape(*values.shape, 4)
        values = chosen.array(_stacked([values.canonical(), blinding]))
    sharing = Sharing(wanted, int(threshold), int(count), dtype, shape, bits, os.urandom(16), curve * verifiable)
    return deal(sharing, values if space is None else values.moved(space))


def combine(shares: Sequence[Share], commitments: Tensor | None = None, *, device: DeviceLike = None) -> Any:
    """Return the secret of at least `threshold` shares of one split: a tensor on their device, or bytes.

    All shares beyond the threshold are checked against the others.

    Args:
        commitments: what verifiable shares must match; by default their own, which must be equal.
        device: where polynomials are interpolated, as for split; by default on the shares' device.

    Raises:
        ProtocolError: too few, one index twice, shares of different splits, shares that do not match the commitments or
            are not on one polynomial, or values that the dtype cannot hold.
    """
    words, sharing = opened(shares, commitments, device)
    field = prime_field(sharing.field)
    secret = words[0] if sharing.curve else words
    return _bytes_of(sharing, field, secret) if sharing.dtype == "bytes" else _values_of(sharing, field, secret)


def zero_shares(sharing: Sharing, device: DeviceLike = "cpu") -> list[Share]:
    """Deal shares of zero to the holders of a split; each adds what it gets, all in the same order: `share + update`.

    If every holder deals, the new shares are unknown to whoever knew fewer than `threshold` old ones, and those do not
    combine with new ones (Herzberg et al. 1995, CRYPTO '95, section 4). Of verifiable updates, check with `verify`, and
    that the first commitments are all zeros: infinity, which commits to zero.
    """
    field = prime_field(sharing.field)
    zeros = torch.zeros(
        (*sharing.elements, field.limbs)[: None if field.limbs > 1 else -1], dtype=torch.int64, device="cpu"
    )
    chosen = find_device(device, torch_tensors=True)
    there = space_at(chosen) if serves(chosen.label) else None
    constant = field.array(zeros.to("cpu" if there else chosen.torch_device).view(torch.uint64))
    return deal(replace(sharing, split_id=os.urandom(16)), constant.moved(there) if there else constant)


def refresh(shares: Sequence[Share]) -> list[Share]:
    """Return new shares of the same secret for the same holders, which do not combine with the old ones.

    The caller, who sees the shares, is trusted; among holders who are not, each deals zero_shares. ProtocolError for
    fewer than `threshold` shares, since those that are not refreshed are lost, or as combine.
    """
    listed = _of_one_split(shares)
    if len(listed) < listed[0].sharing.threshold:
        raise ProtocolError(f"refreshing needs {listed[0].sharing.threshold} shares, got {len(listed)}")
    updates = zero_shares(listed[0].sharing, listed[0].words.device)
    return [share + updates[share.index - 1] for share in listed]


def opened(
    shares: Sequence[Share], commitments: Tensor | None = None, device: DeviceLike = None
) -> tuple[Tensor, Sharing]:
    """Return the words of a secret's elements, with their blindings, and what the shares have in common."""
    shares = _of_one_split(shares)
    sharing, field = shares[0].sharing, prime_field(shares[0].sharing.field)
    if len(shares) < sharing.threshold:
        raise ProtocolError(f"combining needs {sharing.threshold} shares, got {len(shares)}")
    reference = shares[0].commitments if commitments is None else commitments
    for share in shares:
        own = share.commitments
        if reference is not None and (own is None or not _same(own, reference) or not share.verify(reference)):
            raise ProtocolError(f"share {share.index} does not match the commitments: it was changed")
    used, surplus = shares[: sharing.threshold], shares[sharing.threshold :]
    points = tuple(share.index for share in used)
    stack = field.array(_stacked([share.words for share in used]), reduce=True)  # an error would show an element
    if device is not None:
        stack = stack.moved(space_at(device))
    for share in surplus:
        if not _same(_interpolated(stack, points, share.index), share.words):
            others = ", ".join(map(str, points))
            raise ProtocolError(f"share {share.index} is not on the polynomial of shares {others}: one was changed")
    return _interpolated(stack, points, 0), sharing


def _stacked(words: Sequence[Tensor], dim: int = 0) -> Tensor:  # as signed ones: devices join few unsigned dtypes
    return torch.stack([signed_view(each) for each in words], dim).view(torch.uint64)


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(signed_view(x), signed_view(y))


@functools.lru_cache(maxsize=1024)
def lagrange_weights(points: tuple[int, ...], at: int, modulus: int) -> tuple[int, ...]:
    """Return w with f(at) = sum w_i f(points_i) mod p, for each polynomial f of fewer coefficients than points."""
    weights = []
    for i, x in enumerate(points):
        others = [y for j, y in enumerate(points) if j != i]
        top, bottom = (math.prod(a - y for y in others) % modulus for a in (at, x))
        weights.append(top * pow(bottom, -1, modulus) % modulus)
    return tuple(weights)


def deal(sharing: Sharing, constant: FieldArray) -> list[Share]:
    """Return shares of polynomials with this constant term."""
    field, shape, n = constant.field, constant.words.shape, constant.size
    drawn = [field.array(uniform(field.parameters, n, constant.home)) for _ in range(sharing.threshold - 1)]
    coefficients = [each.moved(constant.space).reshape(1, n) for each in (constant, *drawn)]
    points = field.array([[x] for x in range(1, sharing.count + 1)]).moved(constant.space)
    values = coefficients[-1]
    for lower in reversed(coefficients[:-1]):  # Horner, at all points at once
        values = values * points + lower
    words = (values + field.array([[0]] * sharing.count).moved(constant.space)).canonical()
    commitments = None
    if sharing.curve:
        scalars = _stacked([each.canonical().reshape(shape) for each in coefficients], dim=1)
        commitments = pedersen.commit(sharing.curve, scalars)
    # Copies, since a view would take the other shares' memory along when it is saved.
    return [Share(sharing, i + 1, words[i].clone().reshape(shape), commitments) for i in range(sharing.count)]


def _interpolated(stack: FieldArray, points: tuple[int, ...], at: int) -> Tensor:
    """Return the canonical words at `at` of the polynomials through the values at points."""
    weights = stack.field.array(list(lagrange_weights(points, at, stack.field.modulus))).moved(stack.space)
    result: Tensor = (stack * weights.reshape(len(points), *(1 for _ in stack.shape[1:]))).sum(axis=0).canonical()
    return result


def _of_one_split(shares: Sequence[Share]) -> list[Share]:
    """Return shares as a list, or raise ConfigError or ProtocolError: of one split, at different indices."""
    listed = list(shares)
    if wrong := [share for share in listed if not isinstance(share, Share)]:
        raise ConfigError(f"wanted shares, got {type(wrong[0]).__name__}")
    if not listed:
        raise ProtocolError("no shares")
    first, seen = listed[0], set()
    for share in listed:
        for row in fields(Sharing):
            mine, yours = getattr(first.sharing, row.name), getattr(share.sharing, row.name)
            if mine != yours:
                difference = "another split" if row.name == "split_id" else f"{row.name} {yours!r}, not {mine!r}"
                raise ProtocolError(f"share {share.index} does not belong to share {first.index}: it has {difference}")
        if share.index in seen:
            raise ProtocolError(f"share {share.index} is there twice")
        if not 1 <= share.index <= first.sharing.count or share.words.shape != first.words.shape:
            raise ProtocolError(f"share {share.index} of {first.sharing.count} with words {tuple(share.words.shape)}")
        if share.words.device != first.words.device:
            raise ShapeError(f"shares must be on one device, got {first.words.device} and {share.words.device}")
        seen.add(share.index)
    return listed


# --- values as field elements ----------------------------------------------------------------------------------------
def _tensor(value: Any, name: str) -> Tensor:
    refuse_masked(value, name)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{name} is an integer beyond 64 bits: share it as bytes, by int.to_bytes")
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
        if isinstance(tensor, DeviceTensor):
            tensor = tensor.cpu()
    except (TypeError, ValueError, RuntimeError):
        raise UnsupportedDtype(f"{name} must be a tensor, array, number or bytes, got {type(value).__name__}") from None
    refuse_without_values(tensor, name)
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
            held = f"{field.name} with {fraction_bits} fraction bits"
            most = math.ldexp(bound, -fraction_bits)
            raise ConfigError(f"values must be finite and from {-most:g} to {most:g} in {held}")
        values = scaled.to(torch.int64)
    else:
        values = tensor.to(torch.int64)
        lowest = _SIGN >> fraction_bits if limit == 2**63 - 1 else -(limit >> fraction_bits)
        limit >>= fraction_bits
        if bool(((values > limit) | (values < lowest)).any()):
            held = f"{field.name} with {fraction_bits} fraction bits" if fraction_bits else field.name
            raise ConfigError(f"values must be from {lowest} to {limit} in {held}")
        values = values << fraction_bits
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
    if "float" not in sharing.dtype:
        lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        outside = outside | ((values < lowest) | (values > highest)).any()
    if bool(outside):
        raise ProtocolError(f"shares of values that {sharing.dtype} cannot hold: out of range, or a share was changed")
    if "float" in sharing.dtype:
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


def uniform(field: Field, n: int, device: torch.device) -> Tensor:
    """Return canonical words of n uniform elements, by rejection of numbers that are not below p."""
    words = torch.empty((n, field.limbs), dtype=torch.int64, device=device)
    top, missing = field.bits - 64 * (field.limbs - 1), torch.arange(n, device=device)
    while len(missing):
        drawn = _stream.words(2 * field.limbs * len(missing), device).view(torch.int64).reshape(-1, field.limbs).clone()
        drawn[:, -1] &= 2**top - 1 if top < 64 else -1
        words[missing], above = drawn, torch.ones(len(missing), dtype=torch.bool, device=device)
        for column, limb in zip((drawn ^ _SIGN).T, field.words(field.modulus, 64, field.limbs), strict=True):
            above = (column > limb + _SIGN) | ((column == limb + _SIGN) & above)  # unsigned, the lowest limb first
        missing = missing[above]
    return (words if field.limbs > 1 else words[:, 0]).view(torch.uint64)
