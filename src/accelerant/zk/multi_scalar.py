"""Multi-scalar multiplication (the sum of s_i P_i) and transforms for users, computed where points and elements are.

NumPy arrays are summed on the CPU (cpu.py), tensors on their device (device.py). Times and memory accesses depend on
the scalars, which other users of the same machine may be able to measure.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.curve.weierstrass import SCALAR_WORDS, Curve
from accelerant.algebra.field import memory_space
from accelerant.algebra.field.field import FieldArray, PrimeField, prime_field
from accelerant.algebra.field.launch import cuda_space, first_unreduced
from accelerant.algebra.field.memory_space import (
    HOST,
    ArrayOperand,
    DeviceVerdict,
    MemorySpace,
    is_tensor,
    space_at,
    space_of,
)
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.words import check_words, decode, element_shape
from accelerant.algebra.msm.cpu import CpuBases, cpu_plan, shared_cpu_plan
from accelerant.algebra.msm.cpu import scratch_bytes as host_scratch_bytes
from accelerant.algebra.msm.device import DeviceBases, canonical, start_msm
from accelerant.algebra.msm.device_plan import accumulate_source, device_plan
from accelerant.algebra.ntt.launch import LOG_MOST, transform
from accelerant.algebra.ntt.plan import ORDERS
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.runtime.files import clipped
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, sole_record
from accelerant.runtime.registry import DeviceLike
from accelerant.runtime.time_limit import check_time
from accelerant.zk import operands
from accelerant.zk.operands import field_operand, scalar_words, tailed_operand

Words = Any
Devices = Sequence[DeviceLike] | None
_Start = Callable[[Words], Any]  # scalars, points -> the host's words of a point, or what returns them

_Check = Callable[[], FormatError | None]


@operands.either_order("scalars", "points", lambda _, __, curve="bn254_g1", **options: curve_of(curve))
def msm(
    scalars: Any, points: Any, curve: str = "bn254_g1", *, check: bool | str = "curve", device: DeviceLike = None,
    devices: Devices = None,
) -> Any:  # fmt: skip
    """Return the sum of scalars[i] points[i], for each row of scalars.

    Scalars and points may be in either order: they are told apart by what they are.

    Args:
        scalars: (n, 4) uint64, canonical, below the curve's order; or (b, n, 4), for b sums over the same points; or
            Python integers, n or b lists of n; or lists of arrays; or a FieldArray of the curve's scalar_field.
        points: (n, 2, limbs) uint64, canonical affine coordinates, x then y, infinity all zeros; (n, 2, 2, limbs) where
            coordinates are in Fq2, c0 first. A NumPy array or a torch tensor, or a list of such for one point each; or
            Python points.
        curve: bn254_g1, bn254_g2, bls12_381_g1, bls12_381_g2, or a registered curve.
        check: "curve" refuses points off the curve, at a few percent of the sum's time. "subgroup" or True also refuses
            points outside the subgroup of order r: the sum is right with them, but it is not in the subgroup, which
            protocols assume. That takes half as long as the sum for 1,000 points or more on the CPU, and two to ten
            times as long for fewer and on devices; nothing on BN254 G1, where every point of the curve is in the
            subgroup. Where points enter (from_bytes, keys, FixedBase), "subgroup" is the default. False: no check;
            sums with points off the curve are meaningless.
        device: device of the sum; by default that of the points.
        devices: several devices that share the sum, as for FixedBase.

    Returns:
        One point, or (b, ...) of them, canonical, in the library and on the device of `points`.

    Raises:
        ConfigError: unknown curve, check or devices; a FieldArray of another field; or either argument could be the
            points, and neither is named.
        UnsupportedDtype: neither uint64 nor integers.
        ShapeError: other shapes, or different numbers of scalars and points.
        FormatError: a scalar is not below the order, a coordinate is not below the modulus, or a point fails check;
            names the first index, and never a scalar's value.

    Source: Pippenger's method as in Bernstein et al., eprint 2012/549.
    """
    if device is not None or devices is not None:
        return FixedBase(curve, points, device, check=check, multiples=False, devices=devices).msm(scalars)
    parameters, level = curve_of(curve), operands.check_of(check)
    # On curves of even order the kernels take points of the subgroup only
    curve_alone = parameters.cofactor == 1 or (level == "curve" and parameters.cofactor % 2 == 1)
    by_one = curve_alone and bool(level) and is_tensor(points) and points.is_cuda
    operand = operands.point_operand(parameters, points, "points", check=not by_one)
    space, n = operand.space, _count(parameters, operand)
    rows, leading, unchecked, check_sum = _scalar_rows(parameters, scalars, space, n)
    # The check of the points comes last, since it takes longest. Only the returned function keeps their words alive.
    if by_one:
        start, check_sum = _inward_by_one(parameters, operand, unchecked, check_sum)
    else:
        start = starter_of(space, parameters, _point_words(parameters, operand, space, level))
    total = run_sums(space, parameters, rows, start, check_sum)
    return sums_outward(parameters, total, operand.space, leading, operand)


class FixedBase:
    """The points of many multi-scalar multiplications, checked once and kept in the memory and form of the kernels.

    >>> key = FixedBase("bn254_g1", points)
    >>> key.msm(scalars)                                 # msm(scalars, points) without the preparation of points

    Attributes:
        curve: name of the points' curve.
        n: number of points.
        space: memory space of the points.
    """

    def __init__(
        self, curve: str, points: Any, device: DeviceLike = None, *, check: bool | str = True,
        multiples: bool | None = None, devices: Devices = None,
    ) -> None:  # fmt: skip
        """Check the points and convert them.

        Args:
            curve: name of the curve.
            points: (n, *shape), as for msm.
            device: device of the sums; by default that of the points.
            check: as for msm, but "subgroup" by default.
            multiples: also keep the points' multiples by 2^(c j), if they fit, so that all windows of the scalars share
                one set of buckets: about 20 times the memory. By default yes on devices and no on the CPU, where sums
                of 2^12 to 2^16 points become a tenth faster and the multiples take 20 us a point.
            devices: several devices, as in ["cuda:0", "cuda:1"], instead of one. Each keeps an equal part of the points
                and sums it, launched by a thread of its own; the CPU adds the parts' sums. So the points need not fit
                one device.

        Raises:
            As msm; BackendUnavailable: a device is unavailable; ConfigError: no such devices.
        """
        self._parameters, level = curve_of(curve), operands.check_of(check)
        operand = operands.point_operand(self._parameters, points, "points")
        spaces = [operand.space] if device is devices is None else memory_space.spaces_at(device, devices)
        self.curve, self.n, self.space = self._parameters.name, _count(self._parameters, operand), spaces[0]
        bounds = [self.n * i // len(spaces) for i in range(len(spaces) + 1)]
        self._parts = in_threads(
            lambda space, first, last: _DevicePart.of(self._parameters, operand, space, level, multiples, first, last),
            spaces, bounds[:-1], bounds[1:],
        )  # fmt: skip
        self._kind = operand._replace(words=None, tensor=None if operand.tensor is None else operand.tensor[:0])

    def __repr__(self) -> str:
        return f"FixedBase({self.curve!r}, {self.n} points, {'+'.join(part.space.label for part in self._parts)})"

    def __len__(self) -> int:
        return self.n

    def msm(self, scalars: Any) -> Any:
        """Return the sum of scalars[i] times point i, for each row of scalars; arguments, result and errors as msm."""
        curve, parts = self._parameters, self._parts
        if len(parts) == 1:
            rows, leading, _, check = _scalar_rows(curve, scalars, self.space, self.n)
            total = run_sums(self.space, curve, rows, parts[0].start, check)
            return sums_outward(curve, total, self.space, leading, self._kind)
        home = space_of(scalars) if is_tensor(scalars) else HOST
        rows, leading, _, check = _scalar_rows(curve, scalars, home, self.n)
        if (error := check()) is not None:
            raise error
        shares = [[part.share(home, row) for row in rows] for part in parts]
        if home is not HOST:
            home.provider.synchronize(home.index)  # the threads' streams do not wait for the caller's
        sums = in_threads(lambda part, share: run_sums(part.space, curve, share, part.start), parts, shares)
        total = functools.reduce(functools.partial(launch.add, HOST, curve), sums)
        return sums_outward(curve, total, self.space, leading, self._kind)

    def explain(self) -> str:
        """Describe where the points are and how sums are computed, one line a device."""
        return "\n".join(
            f"{part.last - part.first} points of {self.curve} on {part.space.label}, in Montgomery form; "
            f"{part.bases.explain()}"
            for part in self._parts
        )


class _DevicePart(NamedTuple):
    """Points first to last - 1 of a FixedBase, on one device."""

    first: int
    last: int
    space: MemorySpace
    bases: Any
    start: _Start

    @classmethod
    def of(
        cls, curve: Curve[Any], operand: ArrayOperand, space: MemorySpace, check: operands.PointCheck,
        multiples: bool | None, first: int, last: int,
    ) -> _DevicePart:  # fmt: skip
        """Check and convert these points."""
        name = "points"
        if last - first < operand.leading[0]:
            name, words = f"points[{first}:{last}]", operand.space.getitem(operand.words, (slice(first, last),))
            operand = operand._replace(words=words, leading=(last - first,))
        words = _point_words(curve, operand, space, check, name)
        if space is HOST:
            plan = shared_cpu_plan(curve, last - first) if multiples else None
            host = CpuBases(curve, words, shared=plan)
            return cls(first, last, space, host, host.msm)
        bases = DeviceBases(space, curve, words, free_bytes=0 if multiples is False else None)
        return cls(first, last, space, bases, bases.start)

    def share(self, home: MemorySpace, row: Words) -> Words:
        """Return the part's scalars of a row in `home`: on its device, or NumPy's, which it copies itself."""
        if home in (HOST, self.space) or home.backend != "cuda" or self.space.backend != "cuda":
            words = home.getitem(row, (slice(self.first, self.last),))
            return words if home == self.space else home.store(words)
        return row[self.first : self.last].to(self.space.label)


def in_threads(call: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    """Return call(...) of each row of arguments, in a thread each, with the caller's settings; one in the caller's."""
    if len(arguments[0]) == 1:
        return [call(*each) for each in zip(*arguments, strict=True)]
    with ThreadPoolExecutor(len(arguments[0]), "accelerant-msm") as threads:
        tasks = [threads.submit(contextvars.copy_context().run, call, *each) for each in zip(*arguments, strict=True)]
        return [task.result() for task in tasks]


def scratch_bytes(curve: str, n: int, device: DeviceLike) -> int:
    """Return the memory that msm of n points takes on a device, besides its arguments and result."""
    parameters, space = curve_of(curve), space_at(device)
    if not n:
        return 0
    if space is HOST:
        return host_scratch_bytes(parameters, n)
    return 8 * n * math.prod(parameters.shape) + device_plan(parameters, n, 1 << 62).size_bytes(parameters)


# --- sums ------------------------------------------------------------------------------------------------------------
def starter_of(space: MemorySpace, curve: Curve[Any], points: Words) -> _Start:
    """Return a function that computes or starts the sum of scalars, (n, 4) in `space`, times Montgomery points."""
    if space is HOST:
        return CpuBases(curve, points).msm
    return lambda scalars: start_msm(space, curve, scalars, points)


def run_sums(
    space: MemorySpace, curve: Curve[Any], rows: Sequence[Words], start: _Start, check: _Check = lambda: None
) -> Words:
    """Return the sums for rows of scalars, (b, *shape), Montgomery form; `check` gives the error of invalid scalars."""
    n = int(rows[0].shape[0]) if rows else 0
    with RecordedLaunch(msm_record(space, curve, n, len(rows)), space.provider, space.index):
        sums = []
        for row in rows:
            sums.append(start(row))
            if len(sums) < len(rows):
                check_time(f"after {len(sums)} of {len(rows)} sums", lambda: space.provider.synchronize(space.index))
        error = check()
        sums = [total.finish() if hasattr(total, "finish") else total for total in sums]
    if error is not None:
        raise error
    return np.array(sums, np.uint64).reshape(len(rows), *curve.shape)


def sums_outward(
    curve: Curve[Any], sums: Words, space: MemorySpace, leading: tuple[int, ...], operand: ArrayOperand
) -> Any:
    """Return the sums of run_sums as canonical words of the points' library; Python converts those of devices."""
    if space is HOST:
        return operands.points_outward(curve, sums, space, leading, operand)
    words = canonical(curve, sums).reshape(*leading, *curve.shape)
    return words if operand.tensor is None else memory_space.in_kind(space.load(words), space, operand.tensor.device)


@functools.lru_cache(maxsize=4096)
def msm_record(space: MemorySpace, curve: Curve[Any], n: int, rows: int) -> OpRecord:
    """Return the ledger's record of `rows` sums over n points."""
    base, degree = curve.coordinates.base, curve.coordinates.degree
    if space is HOST:
        dialect = "llvm"
    else:
        dialect, _ = accumulate_source(curve).pick(space.provider.dialects)
    return sole_record(
        "msm",
        dialect,
        space.backend,
        space.label,
        f"{rows}x" * (rows != 1) + f"{n} {curve.name}",
        size_bytes=n * (2 * degree * base.size_bytes + rows * curve.scalars.size_bytes),
        operations=rows * cpu_plan(curve.order, n, 1).products(n),
    )


# --- arguments -------------------------------------------------------------------------------------------------------
def _point_words(
    curve: Curve[Any], operand: ArrayOperand, space: MemorySpace, check: operands.PointCheck, name: str = "points"
) -> Words:
    """Return points in Montgomery form in a memory space, (n, words of a point)."""
    n = _count(curve, operand)
    words = operands.points_inward(curve, operand, space, name, check)
    return words.reshape((n, math.prod(curve.shape)))


def _inward_by_one(
    curve: Curve[Any], operand: ArrayOperand, scalars: Words | None, check_scalars: _Check
) -> tuple[_Start, _Check]:
    """Return starter_of points that the kernel which converts them checks, and a function that waits for its error."""
    space, n = operand.space, _count(curve, operand)
    verdict, words = DeviceVerdict.of(space), operand.words.reshape((n, *curve.shape))
    converted = launch.inward(space, curve, words, scalars, verdict)

    def check() -> FormatError | None:
        if not verdict.is_set():
            return None
        try:
            launch.check_reduced(space, curve, words, "points")
            operands.points_inward(curve, operand, space, "points", "curve")
        except FormatError as error:
            return error
        return check_scalars() or FormatError("points or scalars were changed while they were read")

    return starter_of(space, curve, converted.reshape((n, math.prod(curve.shape)))), check


def _count(curve: Curve[Any], operand: ArrayOperand) -> int:
    if len(operand.leading) != 1:
        tail = ", ".join(map(str, curve.shape))
        raise ShapeError(f"points must be (n, {tail}), got {(*operand.leading, *curve.shape)}")
    return operand.leading[0]


def _scalar_rows(
    curve: Curve[Any], scalars: Any, space: MemorySpace, n: int
) -> tuple[list[Words], tuple[int, ...], Words | None, _Check]:
    """Return rows of scalars in a space, (n, 4), leading dimensions of sums, unchecked words, and their check."""
    scalars = memory_space.stacked(scalars, "scalars")
    field, known = curve.scalars, isinstance(scalars, (list, tuple, FieldArray))
    if isinstance(scalars, FieldArray):
        operand = field_operand(field, scalars)
    elif known:
        words = scalar_words(scalars, field.modulus, "the order")
        operand = ArrayOperand(words, HOST, words.shape[:-1])
    else:
        operand = tailed_operand(field, scalars, "scalars", (SCALAR_WORDS,))
    leading = operand.leading
    if len(leading) not in (1, 2) or leading[-1] != n:
        limbs, shape = SCALAR_WORDS, tuple(operand.words.shape)
        raise ShapeError(f"scalars must be ({n}, {limbs}) or (b, {n}, {limbs}) for {n} points, got {shape}")

    def check() -> FormatError | None:
        index = None if known else first_unreduced(operand.space, field, operand.words)
        if index is None:
            return None
        return FormatError(f"scalars[{index}] (flattened) is not below the order of {curve.name}")

    checked = operand.space is HOST or operand.space != space
    if checked and (error := check()) is not None:
        raise error
    words = operand.moved(space)
    rows = [words] if len(leading) == 1 else [space.getitem(words, (i,)) for i in range(leading[0])]
    return rows, leading[:-1], None if checked or known else words, (lambda: None) if checked else check


# --- transforms ------------------------------------------------------------------------------------------------------
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
    if (space := cuda_space(field, x)) is None or not x.numel():
        return None
    _check_points(field, x.shape)
    verdict = memory_space.DeviceVerdict.of(space)
    y = space.unsigned(transform(space, field, x, inverse=inverse, coset=1, order=order, verdict=verdict))
    return None if verdict.is_set() else y


@functools.lru_cache(maxsize=256)
def _check_points(field: Field, shape: Any) -> None:
    if not (elements := element_shape(field, tuple(shape))):
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


_DEVICE_ALIGNMENT = 16  # bytes: kernels on devices load several words at once


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
