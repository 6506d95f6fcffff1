"""Noise on tensors and on the answers to queries, for a sensitivity that the caller states.

>>> release(count, mechanism="laplace", sensitivity=1, epsilon=0.5, ledger=ledger)
>>> release(means, mechanism="gaussian", sensitivity=2 / n, noise_multiplier=4.0, ledger=ledger)

The caller guarantees the sensitivity: how far the answer moves, in L1 norm (Laplace) or L2 norm (Gaussian), when one
record is added or removed. Clip each record's contribution before summing; this cannot be checked here.
Source: Dwork, McSherry, Nissim and Smith 2006 (doi:10.1007/11681878_14), Laplace; Balle and Wang 2018,
arXiv:1805.06530, Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError, UnsupportedDtype
from accelerant.privacy.dp.ledger import Ledger
from accelerant.privacy.dp.ledger.accounting import calibrate
from accelerant.privacy.dp.ledger.events import check_number
from accelerant.privacy.dp.noise.noisy_sum import Kind, NoisePlan, NoisySum, delta_of, grid_of, make_source, rounding_of

__all__ = ["gaussian_noise_", "laplace_noise_", "release"]

_EXACT = 2.0**53
_T = TypeVar("_T", Tensor, Sequence[Tensor])


def gaussian_noise_(
    x: _T, std: float, *, sensitivity: float | None = None, secure: bool = True, ledger: Ledger | None = None
) -> _T:
    """Add Gaussian noise to tensors, in place.

    Args:
        x: a tensor or several, floating point, on one device.
        std: standard deviation, in the units of x.
        sensitivity: L2 norm by which one record changes all of x; required with a ledger.
        secure: discrete Gaussian from ChaCha20, x rounded to the noise's grid; False: Philox in floating point.
        ledger: records the event first: std over sensitivity and rounding.

    Returns:
        x.

    Raises:
        ConfigError: an invalid value; a ledger without a sensitivity.
        UnsupportedDtype: x is no floating-point tensor.
        BudgetExceeded: the ledger's budget does not allow it; x is unchanged.
    """
    return _noise_(x, "gaussian", check_number("std", std), sensitivity, secure, ledger)


def laplace_noise_(
    x: _T, scale: float, *, sensitivity: float | None = None, secure: bool = True, ledger: Ledger | None = None
) -> _T:
    """Add Laplace noise to tensors, in place; like `gaussian_noise_`, with the scale b instead of the deviation.

    Args:
        scale: b, in the units of x; the variance is 2 b^2.
        sensitivity: L1 norm by which one record changes all of x; epsilon is sensitivity (and rounding) over b.
    """
    return _noise_(x, "laplace", check_number("scale", scale), sensitivity, secure, ledger)


def release(
    value: Any, *, mechanism: Kind, sensitivity: float, epsilon: float | None = None, delta: float | None = None,
    noise_multiplier: float | None = None, secure: bool = True, ledger: Ledger | None = None, note: str = "",
) -> Any:  # fmt: skip
    """Return the answer to a query with noise; the value itself is not changed.

    Args:
        value: a number, a NumPy array or a tensor. Whole numbers stay whole.
        mechanism: "laplace" or "gaussian".
        sensitivity: how far one record moves the value: L1 norm for laplace, L2 for gaussian.
        epsilon: of this release. With gaussian, delta is required too; the least noise is found for the pair.
        noise_multiplier: scale of the noise (b, or the standard deviation) over the sensitivity, instead of epsilon.
        secure: as for `gaussian_noise_`.
        ledger: records the event before anything is drawn.
        note: for the ledger's reader, such as the query.

    Returns:
        int, float, array or tensor like value, with its dtype and shape.

    Raises:
        ConfigError: an invalid value, or one that is not finite; whole numbers past 2^53.
        BudgetExceeded: the ledger's budget does not allow it; nothing was drawn.
    """
    if mechanism not in ("gaussian", "laplace"):
        raise ConfigError(f"mechanism must be gaussian or laplace, got {mechanism!r}")
    multiplier = _multiplier(mechanism, epsilon, delta, noise_multiplier)
    sensitivity = check_number("sensitivity", sensitivity)
    exact = torch.as_tensor(value)
    if exact.is_complex() or exact.dtype == torch.bool:
        raise ConfigError(f"value must be of real numbers, got {exact.dtype}")
    answer = exact.detach().to(torch.float64, copy=True)
    if not bool(answer.isfinite().all()):
        raise ConfigError("value must be finite: clip it first")
    whole = not exact.is_floating_point()
    if whole and answer.numel() and float(answer.abs().max()) >= _EXACT:
        raise ConfigError("whole numbers must be below 2^53 in absolute value")
    noisy = NoisySum(make_source(secure), multiplier, answer.numel(), mechanism)
    plan = _whole_plan(noisy, sensitivity) if whole else noisy.plan(sensitivity)
    if ledger is not None:
        ledger.record(noisy.event(plan, "none", 1.0, note=note))
    flat = answer.reshape(-1)
    if flat.numel():
        noisy.add_([flat], plan, 1.0)
    if whole:  # within the dtype: a small count of dtype uint8 plus noise below 0 would become 253
        limits = torch.iinfo(exact.dtype)
        flat = flat.round().clamp_(max(-_EXACT, limits.min), min(_EXACT, limits.max))
    noised = flat.reshape(exact.shape).to(exact.dtype)
    if isinstance(value, Tensor):
        return noised
    if isinstance(value, np.ndarray | np.generic):
        return noised.numpy() if isinstance(value, np.ndarray) else noised.numpy()[()]
    return noised.tolist()


def _noise_(x: _T, kind: Kind, scale: float, sensitivity: float | None, secure: bool, ledger: Ledger | None) -> _T:
    tensors = [x] if isinstance(x, Tensor) else list(x)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise UnsupportedDtype(
                f"noise is added in place to torch tensors, got {type(x).__name__} of {type(tensor).__name__}: convert "
                "it by torch.from_numpy, which shares its memory, or use release()"
            )
        if not tensor.is_floating_point():
            raise UnsupportedDtype(f"noise is added to floating-point tensors, got {tensor.dtype}")
    dimensions = sum(tensor.numel() for tensor in tensors)
    if ledger is not None and sensitivity is None:
        raise ConfigError("a ledger needs the sensitivity: how far one record moves the tensors")
    bound = scale if sensitivity is None else check_number("sensitivity", sensitivity)
    if not dimensions:
        return x
    source = make_source(secure)
    grid = grid_of(kind, scale, bound, dimensions) if secure else 0.0
    if ledger is not None:
        rounding = rounding_of(kind, scale, grid, dimensions) if secure else 0.0
        delta = delta_of(kind, scale, grid, dimensions) if secure else 0.0
        named = NoisySum(source, scale / (bound + rounding), dimensions, kind)
        ledger.record(named.event(NoisePlan(scale, grid, delta), "none", 1.0))
    with torch.no_grad():
        NoisySum(source, 1.0, dimensions, kind).add_(tensors, NoisePlan(scale, grid, 0.0), 1.0)
    return x


def _multiplier(mechanism: Kind, epsilon: float | None, delta: float | None, given: float | None) -> float:
    if (epsilon is None) == (given is None):
        raise ConfigError(f"give either epsilon or noise_multiplier; got {epsilon!r} and {given!r}")
    if given is not None:
        if delta is not None:
            raise ConfigError("delta goes with epsilon: leave it out with noise_multiplier")
        return check_number("noise_multiplier", given)
    epsilon = check_number("epsilon", epsilon)
    if mechanism == "laplace":
        if delta is not None:
            raise ConfigError("the Laplace mechanism needs no delta: leave it out")
        return 1.0 / epsilon
    if delta is None:
        raise ConfigError("the Gaussian mechanism needs delta with epsilon")
    return calibrate(epsilon, check_number("delta", delta, most=0.5), 1.0, 1, sampling="none")


def _whole_plan(noisy: NoisySum, sensitivity: float) -> NoisePlan:
    """Plan noise on a grid of 1 or a fraction of it: whole numbers are multiples, so no rounding is charged."""
    scale = noisy.noise_multiplier * sensitivity
    if not noisy.source.secure or not noisy.dimensions:
        return NoisePlan(scale, 0.0, 0.0)
    grid = min(1.0, 2.0 ** math.floor(math.log2(scale / 8)))
    return NoisePlan(scale, grid, delta_of(noisy.kind, scale, grid, noisy.dimensions))
