"""Number-theoretic transforms of arrays and tensors: acl.zk.ntt."""

from __future__ import annotations

from typing import Any

import numpy as np

from accelerant.algebra.field import FieldArray, PrimeField, prime_field
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import Place, inward, is_tensor, place_at
from accelerant.algebra.field.words import element_shape
from accelerant.algebra.ntt.launch import LOG_MOST, transform
from accelerant.algebra.ntt.plan import ORDERS
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.runtime.provider import ComputeDevice

__all__ = ["ntt"]


def ntt(
    x: Any,
    field: str | PrimeField | None = None,
    *,
    inverse: bool = False,
    coset: Any = None,
    order: str = "natural",
    out: Any = None,
    device: str | ComputeDevice | None = None,
    reduce: bool = False,
) -> Any:
    """Number-theoretic transforms along the last axis of the elements' shape.

    With n points, w = field.root_of_unity(n) = generator^((p - 1) / n) and a coset's g (else 1),

        forward   y_j = sum_i x_i (g w^j)^i           the values at g w^j of the polynomial with coefficients x
        inverse   y_i = g^-i / n sum_j x_j w^(-i j)   the coefficients of the polynomial with the values x at g w^j

    Args:
        x: canonical words (..., n, limbs), or (..., n) where an element is one word: an array of NumPy or a tensor of
            torch; or a list of Python integers; or a FieldArray (..., n). n is a power of two from 2 to 2^27 that
            divides p - 1. Axes before are a batch.
        field: name or field; a FieldArray has its own.
        inverse: the inverse transform, of the same order and coset.
        coset: g: a Python integer from 1 to below p, or the words of one element, or such a FieldArray. Public: the
            first transform of a new g makes its table.
        order: "natural": input and output in natural order. "natural_to_bit_reversed": the answer's element i stands
            at the index whose log2 n bits are those of i in the opposite order. "bit_reversed_to_natural": the input's
            does. The last two move nothing and need no memory besides the answer's: a product of polynomials, or a
            prover, goes forward with the one and back with the other.
        out: where to write, of x's kind, shape and device; may be x itself, then it is done in place. In natural
            order all but small transforms take as much memory again while they run.
        device: where to compute, as everywhere; where x is by default.
        reduce: take elements that are not below p modulo it, where they would be an error.

    Returns:
        x's shape, of x's kind and on its device: canonical words, a FieldArray of a FieldArray; `out` if given.

    Raises:
        ShapeError: n is no power of two, less than 2, or more than 2^27 or the field allows; out does not fit.
        UnsupportedDtype: not the field's words.
        FormatError: an element not below p; names the flattened index.
        ConfigError: unknown field or order, no field, a coset that is no element or 0.

    The time depends on shape, order and coset alone. Plans are kept, up to 2 GiB of twiddles.
    Source: Pollard 1971, Mathematics of Computation 25(114), pages 365 to 374.
    """
    if order not in ORDERS:
        raise ConfigError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    if isinstance(x, FieldArray):
        return _of_field_array(x, field, inverse, coset, order, out, device)
    if field is None:
        raise ConfigError("ntt needs field=, the name of the elements' field: words do not say it")
    of = field if isinstance(field, PrimeField) else prime_field(field)
    if not isinstance(x, np.ndarray) and not is_tensor(x):
        x = of.encode(x, reduce=reduce)
    _check_points(of.parameters, x.shape)
    g = _coset(of, coset)
    target = None if out is None else _target(x, out, device)

    def run(place: Place, parameters: Field, words: Any) -> Any:
        return transform(place, parameters, words, inverse=inverse, coset=g, order=order, out=target)

    answer = of._each(run, (x,), device, reduce)
    return answer if out is None else out


def _of_field_array(
    x: FieldArray, field: str | PrimeField | None, inverse: bool, coset: Any, order: str, out: Any, device: Any
) -> FieldArray:
    """The answer stays in Montgomery form where x is."""
    if field is not None and (field if isinstance(field, str) else field.name) != x.field.name:
        raise ConfigError(f"x is an array of {x.field.name}, not of {field}")
    if out is not None:
        raise ConfigError("FieldArrays do not change: ntt takes no out= for one")
    _check_points(x.field.parameters, x.words.shape)
    g = _coset(x.field, coset)
    x = x if device is None else x.moved(place_at(device))
    words = transform(x.place, x.field.parameters, x.words, inverse=inverse, coset=g, order=order)
    return FieldArray(x.field, x.place, words, home=x.home)


def _check_points(field: Field, shape: Any) -> None:
    elements = element_shape(field, tuple(shape))
    if not elements:
        raise ShapeError(f"ntt transforms along the last axis of elements; x of shape {tuple(shape)} has none")
    n, most = elements[-1], min(LOG_MOST, field.two_adicity)
    if n < 2 or n & (n - 1) or n > 1 << most:
        raise ShapeError(f"ntt over {field.name} takes a power of two of points from 2 to 2^{most}, got {n}")


def _coset(field: PrimeField, coset: Any) -> int:
    """G as an integer; 1 where there is none."""
    if coset is None:
        return 1
    g = field.decode(coset) if isinstance(coset, (FieldArray, np.ndarray)) or is_tensor(coset) else coset
    if isinstance(g, bool) or not isinstance(g, (int, np.integer)):
        raise UnsupportedDtype(f"coset must be one element of {field.name}, got {type(coset).__name__}")
    if not 0 < g < field.modulus:
        raise ConfigError(f"coset must be from 1 to below the modulus of {field.name}, got {g}")
    return int(g)


def _target(x: Any, out: Any, device: Any) -> Any:
    """The words of out, if it can take the answer to x."""
    if device is not None:
        raise ConfigError("ntt takes out= or device=, not both: out says where")
    if is_tensor(x) != is_tensor(out) or not (is_tensor(out) or isinstance(out, np.ndarray)):
        raise UnsupportedDtype(f"out must be of x's kind, {type(x).__name__}, got {type(out).__name__}")
    if out.dtype != x.dtype:
        raise UnsupportedDtype(f"out must be {x.dtype}, as x is, got {out.dtype}")
    if tuple(out.shape) != tuple(x.shape) or getattr(out, "device", None) != getattr(x, "device", None):
        raise ShapeError(f"out must have x's shape {tuple(x.shape)} and device, got {tuple(out.shape)}")
    plain = out.is_contiguous() if is_tensor(out) else out.flags.c_contiguous and out.flags.writeable
    if not plain or _begins(out) % _ALIGNMENT[is_tensor(out)]:
        raise ShapeError("out must be writable, contiguous in memory and aligned to its elements")
    size, apart = out.nbytes, abs(_begins(out) - _begins(x))
    if 0 < apart < size:
        raise ShapeError("out must be x or other memory; here it overlaps x")
    if not is_tensor(out):
        return out
    return out.detach().numpy() if out.device.type == "cpu" else inward(out)


_ALIGNMENT = (8, 16)
"""Bytes; tensors may be on a device whose kernels read several words at once."""


def _begins(array: Any) -> int:
    address: int = array.data_ptr() if is_tensor(array) else array.ctypes.data
    return address
