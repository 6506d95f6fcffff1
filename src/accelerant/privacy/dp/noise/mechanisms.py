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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accelerant.errors import ConfigError, UnsupportedDtype
from accelerant.privacy.dp.ledger import Ledger
from accelerant.privacy.dp.ledger.accounting import calibrate
from accelerant.privacy.dp.ledger.events import check_number
from accelerant.privacy.dp.noise.charge import LEAST_STEPS
from accelerant.privacy.dp.noise.noisy_sum import Kind, NoisePlan, NoisySum, charge_of, grid_of, make_source
from accelerant.runtime.host import refuse_masked

_EXACT = 2**53
_WIDEST_ON_WHOLE = 2.0**24
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
        value: a number, numbers in lists, a NumPy array or a tensor, of up to 64 bits. Python's floats are float64.
            Whole numbers stay whole, and exact at any size.
        mechanism: "laplace" or "gaussian".
        sensitivity: how far one record moves the value: L1 norm for laplace, L2 for gaussian.
        epsilon: of this release. With gaussian, delta is required too; the least noise is found for the pair.
        noise_multiplier: scale of the noise (b, or the standard deviation) over the sensitivity, instead of epsilon.
        secure: as for `gaussian_noise_`.
        ledger: records the event before anything is drawn; its statement is at this delta if it has none yet.
        note: for the ledger's reader, such as the query.

    Returns:
        int, float, array or tensor like value, with its dtype and shape.

    Raises:
        ConfigError: an invalid value, or one that is not finite.
        BudgetExceeded: the ledger's budget does not allow it; nothing was drawn.
    """
    if mechanism not in ("gaussian", "laplace"):
        raise ConfigError(f"mechanism must be gaussian or laplace, got {mechanism!r}")
    _check_strength(mechanism, epsilon, delta, noise_multiplier)
    sensitivity = check_number("sensitivity", sensitivity)
    exact = _exact(value)
    whole = exact.dtype.kind != "f"
    if not whole and not np.isfinite(exact).all():
        raise ConfigError("value must be finite: clip it first")
    source = make_source(secure)

    def planned(multiplier: float) -> tuple[NoisySum, NoisePlan]:
        noisy = NoisySum(source, multiplier, exact.size, mechanism)
        return noisy, _whole_plan(noisy, sensitivity) if whole else noisy.plan(sensitivity)

    if noise_multiplier is not None:
        noisy, plan = planned(noise_multiplier)
    elif mechanism == "laplace":
        noisy, plan = planned(1.0 / check_number("epsilon", epsilon))
    else:
        noisy, plan = _calibrated(planned, check_number("epsilon", epsilon), check_number("delta", delta, most=0.5))
    if ledger is not None:
        ledger.record(noisy.event(plan, "none", 1.0, note=note))
        if delta is not None and ledger.delta is None:
            ledger.describe(delta=delta)
    noised = (_whole_with_noise if whole else _with_noise)(exact.reshape(-1), noisy, plan)
    return _like(value, noised, exact.shape)


def _exact(value: Any) -> NDArray[Any]:
    """Return the numbers of a query's answer without rounding: a new array of float64, int64, or Python's integers."""
    refuse_masked(value, "value")
    if isinstance(value, Tensor):
        held = value.detach().cpu()
        numbers = (held.to(torch.float64) if held.is_floating_point() else held).numpy()
    elif isinstance(value, np.ndarray | np.generic):
        numbers = np.asarray(value)
    else:
        numbers = np.array(value, dtype=object)
    if numbers.dtype.kind == "O":  # torch and NumPy would make float32 or float64 of numbers that these cannot hold
        found = [each.item() if isinstance(each, Tensor | np.generic) else each for each in numbers.flat]
        kinds = {type(each) for each in found}
        if not kinds <= {int, float}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds - {int, float}))
            raise ConfigError(f"value must be of real numbers, int or float, got {names}")
        if float in kinds and any(abs(each) > _EXACT for each in found if isinstance(each, int)):
            raise ConfigError("whole numbers past 2^53 do not go with floats, which round them: release them apart")
        numbers = np.array(found, float if float in kinds else object).reshape(numbers.shape)
    if numbers.dtype.kind not in "iufO" or (numbers.dtype.kind == "f" and numbers.itemsize > 8):
        raise ConfigError(f"value must be of real numbers of at most 64 bits, got {numbers.dtype}")
    if numbers.dtype.kind == "f":
        return numbers.astype(np.float64)
    return numbers.astype(object if numbers.dtype in (object, np.uint64) else np.int64)


def _with_noise(exact: NDArray[Any], noisy: NoisySum, plan: NoisePlan) -> NDArray[Any]:
    if exact.size:
        noisy.add_([torch.from_numpy(exact)], plan, 1.0)
    return exact


def _whole_with_noise(exact: NDArray[Any], noisy: NoisySum, plan: NoisePlan) -> NDArray[Any]:
    """Return whole numbers with noise, rounded to whole numbers, in exact arithmetic.

    The noise is added to the number's parity, and the even rest to the sum: the same as the sum rounded to whole
    numbers, halves to even. On a grid above 1 the unit is the grid.
    """
    unit = max(1, int(plan.grid or plan.scale / _WIDEST_ON_WHOLE))  # so that the noise is below 2^31 units
    if exact.dtype != object and not (plan.scale < _EXACT and (np.abs(exact.astype(np.float64)) < _EXACT).all()):
        exact = exact.astype(object)  # sums may pass int64
    units = (exact + unit // 2) // unit
    odd = units % 2
    noised = _with_noise(odd.astype(np.float64) * unit, noisy, plan) / unit
    result: NDArray[Any] = (units - odd + noised.round().astype(np.int64)) * unit
    return result


def _like(value: Any, noised: NDArray[Any], shape: tuple[int, ...]) -> Any:
    """Return the noised numbers in the type, dtype and shape of the value."""
    if not isinstance(value, Tensor | np.ndarray | np.generic) or value.dtype == object:
        return noised.reshape(shape).tolist()
    if noised.dtype.kind != "f":  # within the dtype: a small count of dtype uint8 plus noise below 0 would become 253
        limits = torch.iinfo(value.dtype) if isinstance(value, Tensor) else np.iinfo(value.dtype)
        noised = np.clip(noised, limits.min, limits.max).astype(np.uint64 if limits.max >= 2**63 else np.int64)
    if isinstance(value, Tensor):
        return torch.from_numpy(noised).reshape(shape).to(value.dtype).to(value.device)
    found = noised.astype(value.dtype).reshape(shape)
    return found if isinstance(value, np.ndarray) else found[()]


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
        charge = charge_of(kind, scale, grid, dimensions)
        named = NoisySum(source, charge.std / (bound + charge.sensitivity), dimensions, kind)
        ledger.record(named.event(NoisePlan(scale, grid, charge.delta), "none", 1.0))
    with torch.no_grad():
        NoisySum(source, 1.0, dimensions, kind).add_(tensors, NoisePlan(scale, grid, 0.0), 1.0)
    return x


def _check_strength(mechanism: Kind, epsilon: float | None, delta: float | None, given: float | None) -> None:
    if (epsilon is None) == (given is None):
        raise ConfigError(f"give either epsilon or noise_multiplier; got {epsilon!r} and {given!r}")
    if given is not None:
        if delta is not None:
            raise ConfigError("delta goes with epsilon: leave it out with noise_multiplier")
        check_number("noise_multiplier", given)
    elif mechanism == "laplace":
        if delta is not None:
            raise ConfigError("the Laplace mechanism needs no delta: leave it out")
    elif delta is None:
        raise ConfigError("the Gaussian mechanism needs delta with epsilon")


def _calibrated(
    planned: Callable[[float], tuple[NoisySum, NoisePlan]], epsilon: float, delta: float
) -> tuple[NoisySum, NoisePlan]:
    """Return the least Gaussian noise of epsilon and delta, with the delta that its plan charges."""
    _, plan = planned(1.0)
    while True:
        charged = plan.delta
        noisy, plan = planned(calibrate(epsilon, delta, 1.0, 1, sampling="none", charged=charged))
        if plan.delta <= charged:
            return noisy, plan


def _whole_plan(noisy: NoisySum, sensitivity: float) -> NoisePlan:
    """Plan noise on a grid of 1 or a fraction of it, of which whole numbers are multiples: no rounding is charged.

    Noise that is too wide for it has the grid of `NoisySum.plan`.
    """
    scale = noisy.noise_multiplier * sensitivity
    if not noisy.source.secure or not noisy.dimensions or scale > _WIDEST_ON_WHOLE:
        return noisy.plan(sensitivity)
    return noisy.planned(scale, min(1.0, math.ldexp(1.0, math.frexp(scale / LEAST_STEPS)[1] - 1)))
