"""Number-theoretic transforms for users: acl.zk.ntt."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from accelerant.algebra.field import memory_space
from accelerant.algebra.field.field import FieldArray, PrimeField, prime_field
from accelerant.algebra.field.launch import cuda_space
from accelerant.algebra.field.memory_space import is_tensor, space_at
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.words import check_words, decode, element_shape
from accelerant.algebra.ntt.launch import LOG_MOST, transform
from accelerant.algebra.ntt.plan import ORDERS
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.runtime.files import clipped
from accelerant.runtime.registry import DeviceLike
from accelerant.zk.multi_scalar import Devices, in_threads


def ntt(
    x: Any, field: str | PrimeField | None = None, *, inverse: bool = False, coset: Any = None, order: str = "natural",
    out: Any = None, device: DeviceLike = None, devices: Devices = None, reduce: bool = False,
) -> Any:  # fmt: skip
    """Return number-theoretic transforms along the last axis of elements.

    With n points, w = field.root_of_unity(n) = generator^((p - 1) / n) and the coset's g (default 1),

        forward   y_j = sum_i x_i (g w^j)^i           values at g w^j of the polynomial with coefficients x
        inverse   y_i = g^-i / n sum_j x_j w^(-i j)   coefficients of the polynomial with values x at g w^j

    Args:
        x: canonical words (..., n, limbs), or (..., n) for fields of one word, a NumPy array or a torch tensor; or
            Python integers (..., n), lists or an object array; or a FieldArray (..., n). n is a power of two from 2 to
            2^27 that divides p - 1. Leading axes are a batch.
        field: name or field; not needed for a FieldArray.
        inverse: compute the inverse transform, of the same order and coset.
        coset: g, a Python integer from 1 to below p, the words of one element, or a FieldArray. Public: the first
            transform of a new g computes its table.
        order: "natural": input and output in natural order. "natural_to_bit_reversed": element i of the output is at
            the bit-reversed index of i. "bit_reversed_to_natural": the input is in that order. The last two move no
            data and need no scratch: products of polynomials and provers go forward with one and back with the other.
        out: output, of x's kind, shape and device, contiguous, on devices aligned to 16 bytes; x itself (in place) or
            disjoint from it. In natural order all but small transforms need scratch of the same size.
        device: device of the computation; by default that of x.
        devices: several devices, as in ["cuda:0", "cuda:1"], instead of one: each transforms an equal part of the
            batch, launched by a thread of its own. A single transform is the first one's.
        reduce: reduce elements that are not below p, which are an error otherwise.

    Returns:
        Canonical words of x's shape, kind and device; a FieldArray for a FieldArray; `out` if given.

    Raises:
        ShapeError: n is not a power of two, less than 2, or more than 2^27 or the field allows; out does not fit.
        UnsupportedDtype: neither the field's words nor integers.
        FormatError: an element is not below p; names the flattened index.
        ConfigError: unknown field or order, no field, or a coset that is 0 or not an element of the field.

    Time depends on shape, order and coset only. Plans are cached, up to 256 with 2 GiB of twiddles.
    Source: Pollard 1971, Mathematics of Computation 25(114), pages 365 to 374.
    """
    if not isinstance(order, str) or order not in ORDERS:
        raise ConfigError(f"order must be one of {', '.join(ORDERS)}, got {clipped(order)}")
    for name, flag in (("inverse", inverse), ("reduce", reduce)):
        if not isinstance(flag, bool | np.bool_):
            raise ConfigError(f"{name} must be True or False, got {clipped(flag)}")
    prime = prime_field(field) if field is not None and not isinstance(field, PrimeField) else field
    if isinstance(x, FieldArray):
        if prime not in (None, x.field):
            raise ConfigError(f"x is an array of {x.field.name}, not of {clipped(field)}")
        if out is not None:
            raise ConfigError("FieldArrays do not change: ntt takes no out= for one")
        return _of_array(x, device, devices, inverse=inverse, coset=coset, order=order)
    if prime is None:
        raise ConfigError("ntt needs field=, the name of the elements' field: words do not say it")
    if devices is not None:
        if out is not None:
            raise ConfigError("ntt takes out= or devices=, not both: out says where")
        x = prime(x, reduce=reduce)
        return _of_array(x, device, devices, inverse=inverse, coset=coset, order=order).canonical()
    if coset is None and out is None and device is None and not reduce:
        y = _checked_at_once(prime.parameters, x, inverse, order)
        if y is not None:
            return y
    x = memory_space.stacked(x, "x")
    if not is_tensor(x) and (not isinstance(x, np.ndarray) or x.dtype == object):
        x = prime.encode(x, reduce=reduce)
    _check_points(prime.parameters, x.shape)
    g = _coset(prime, coset)
    target = None if out is None else _target(x, out, device)

    def run(space: memory_space.MemorySpace, parameters: Field, words: Any) -> Any:
        return transform(space, parameters, words, inverse=inverse, coset=g, order=order, out=target)

    answer = prime._each(run, (x,), device, reduce)
    return answer if out is None else out


def _of_array(x: FieldArray, device: DeviceLike, devices: Devices, *, coset: Any, **options: Any) -> FieldArray:
    """Return transforms of a batch, of which each device computes an equal part; they stay in Montgomery form."""
    field, g = x.field.parameters, _coset(x.field, coset)
    _check_points(field, x.words.shape)
    if devices is None:
        x = x if device is None else x.moved(space_at(device))
        return FieldArray(x.field, x.space, transform(x.space, field, x.words, coset=g, **options), home=x.home)
    rows = x.reshape(-1, x.shape[-1])
    used = memory_space.spaces_at(device, devices)[: max(1, len(rows))]
    bounds = [len(rows) * i // len(used) for i in range(len(used) + 1)]
    parts = in_threads(
        lambda space, first, last: ntt(rows[first:last].moved(space), coset=g, **options).moved(x.space).words,
        used, bounds[:-1], bounds[1:],
    )  # fmt: skip
    return FieldArray(x.field, x.space, functools.reduce(x.space.joined, parts), home=x.home).reshape(*x.shape)


def _checked_at_once(field: Field, x: Any, inverse: bool, order: str) -> Any:
    """Transform words on a CUDA device by kernels that also check them; None as in field.launch.checked_at_once."""
    space = cuda_space(field, x)
    if space is None or not x.numel():
        return None
    _check_points(field, x.shape)
    verdict = memory_space.DeviceVerdict.of(space)
    y = space.unsigned(transform(space, field, x, inverse=inverse, coset=1, order=order, verdict=verdict))
    return None if verdict.is_set() else y


@functools.lru_cache(maxsize=256)
def _check_points(field: Field, shape: Any) -> None:
    elements = element_shape(field, tuple(shape))
    if not elements:
        raise ShapeError(f"ntt transforms along the last axis of elements; x of shape {tuple(shape)} has none")
    n, most = elements[-1], min(LOG_MOST, field.two_adicity)
    if n < 2 or n & (n - 1) or n > 1 << most:
        raise ShapeError(f"ntt over {field.name} takes a power of two of points from 2 to 2^{most}, got {n}")


def _coset(field: PrimeField, coset: Any) -> int:
    """Return g, 1 by default, of an integer, a FieldArray of one element or the words of one."""
    if coset is None:
        return 1
    g = coset
    if isinstance(coset, FieldArray):
        if coset.field.parameters != field.parameters:
            raise ConfigError(f"coset must be an element of {field.name}, got one of {coset.field.name}")
        g = coset.ints()
    elif is_tensor(coset) or isinstance(coset, np.ndarray):
        words = coset.detach().cpu().numpy() if is_tensor(coset) else coset
        if words.dtype == object:
            g = words[()]
        else:
            check_words(field.parameters, str(words.dtype), words.shape, "coset")
            g = decode(field.parameters, words)
    if isinstance(g, bool) or not isinstance(g, (int, np.integer)):
        raise UnsupportedDtype(f"coset must be one element of {field.name}, got {type(coset).__name__}")
    if not 0 < g < field.modulus:
        raise ConfigError(f"coset must be from 1 to below the modulus of {field.name}, got {clipped(int(g))}")
    return int(g)


def _target(x: Any, out: Any, device: Any) -> Any:
    """Return the words of out after checking that it can receive the result."""
    if device is not None:
        raise ConfigError("ntt takes out= or device=, not both: out says where")
    if is_tensor(x) != is_tensor(out) or not (is_tensor(out) or isinstance(out, np.ndarray)):
        raise UnsupportedDtype(f"out must be of x's kind, {type(x).__name__}, got {type(out).__name__}")
    if out.dtype != x.dtype:
        raise UnsupportedDtype(f"out must be {x.dtype}, as x is, got {out.dtype}")
    if tuple(out.shape) != tuple(x.shape) or getattr(out, "device", None) != getattr(x, "device", None):
        raise ShapeError(f"out must have x's shape {tuple(x.shape)} and device, got {tuple(out.shape)}")
    plain = out.is_contiguous() if is_tensor(out) else out.flags.c_contiguous and out.flags.writeable
    alignment = out.dtype.itemsize if _on_host(out) else _DEVICE_ALIGNMENT
    if not plain or _extent(out)[0] % alignment:
        raise ShapeError(f"out must be writable, contiguous in memory and aligned to {alignment} bytes")
    first, second = _extent(x), _extent(out)
    contiguous = x.is_contiguous() if is_tensor(x) else x.flags.c_contiguous
    if not (contiguous and first == second) and first[0] < second[1] and second[0] < first[1]:
        raise ShapeError("out must be x or other memory; here it overlaps x")
    if not is_tensor(out):
        return out
    return out.detach().numpy() if _on_host(out) else memory_space.signed_view(out)


_DEVICE_ALIGNMENT = 16
"""Bytes: kernels on devices load several words at once; on the CPU the alignment of an element suffices."""


def _on_host(array: Any) -> bool:
    return not is_tensor(array) or array.device.type == "cpu"


def _extent(array: Any) -> tuple[int, int]:
    """Return the first and the end address of an array's memory, for any strides."""
    tensor, size = is_tensor(array), array.dtype.itemsize
    at: int = array.data_ptr() if tensor else array.ctypes.data
    strides = [stride * size for stride in array.stride()] if tensor else array.strides
    reach = [(count - 1) * stride for count, stride in zip(array.shape, strides, strict=True)]
    if 0 in array.shape:
        return at, at
    return at + sum(step for step in reach if step < 0), at + sum(step for step in reach if step > 0) + size
