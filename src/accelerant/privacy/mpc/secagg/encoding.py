"""Updates as integers modulo 2^32: clipping, rounding, discrete Gaussian noise, and the cost of the noisy sum.

    q = w * round(clip(x) / step) + Z            x scaled to max_norm first, then clamped to +-clip
    sum of q mod 2^32, read as -2^31 to 2^31 - 1, times step

With weights above 1 allowed, one more element is the sum of the weights. The settings guarantee that the sum of all
clients fits: n (W clip / step + 1) and 12 deviations of the noise are below 2^31. Where noise exceeds that, the sum
wraps, which costs accuracy and no privacy.

Noise (Kairouz, Liu and Steinke 2021, arXiv:2102.06387, "The distributed discrete Gaussian mechanism for federated
learning with secure aggregation", without its rotation: the modulus has room for max_norm in a single element). Each
client adds a discrete Gaussian of deviation s, so that `least` clients add

    least s^2 = (z D)^2 + (r step)^2         D = max_norm + step sqrt(d) / 2, z the noise multiplier, r = 1.58

D bounds what one client adds to the rounded sum in L2 norm. Adding two discrete Gaussians of deviations s and sqrt(i) s
gives that of their common deviation within a factor exp(-+tau_i) of its probabilities, where tau_i is `log_ratio` of
the width s sqrt(i / (i + 1)) / step (Theorem 8 there; discrete.py has the proof). With r it costs no more than the
continuous Gaussian of deviation z D (charge.py). Tables, cut tails and all tau are charged as delta. The noise of
clients that leave is missing: the guarantee counts `least` clients, the fewest honest ones whose sum can be unmasked,
and noise of others only adds. Neighbouring: one client's update is added or removed, that is, exchanged with zeros.
Who takes part, and so the number of survivors, is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError, DivergenceError, ShapeError, UnsupportedDtype
from accelerant.privacy.dp.ledger.events import Event
from accelerant.privacy.dp.noise.charge import charge
from accelerant.privacy.dp.noise.discrete import SMOOTH, WIDEST, log_ratio
from accelerant.privacy.dp.noise.source import SecureSource
from accelerant.runtime.files import clipped
from accelerant.runtime.host import refuse_masked, refuse_without_values
from accelerant.tensors import DeviceTensor

_HALF = 2**31
_TAIL = 12
_LEAST_STEPS = 4  # of a client's deviation, so that sums of the noise are smooth
_FINEST = 2.0**-100


@dataclass(frozen=True, slots=True)
class Encoding:
    """The map from updates to integers; `make_encoding` chooses it.

    Attributes:
        size: elements of an update.
        step: grid of the values, a power of two.
        std: deviation of each client's noise, in the units of the values; 0 without noise.
        least: clients whose noise the guarantee counts.
        noise_multiplier: of the noise of `least` clients; the ledger's.
        delta: charged by a release.
    """

    size: int
    clip: float
    max_norm: float | None
    step: float
    std: float
    least: int
    noise_multiplier: float
    delta: float
    max_weight: int

    @property
    def words(self) -> int:
        """Elements of a masked input: those of an update, and the weight's if there are weights."""
        return self.size + (self.max_weight > 1)

    def encode(self, update: Any, weight: int, device: torch.device) -> Tensor:
        """Return an update as (words,) int32 on a device, with this client's noise.

        Raises:
            UnsupportedDtype, UnsupportedCase: as for real_tensor.
            ShapeError: another number of elements.
            DivergenceError: an element is NaN or infinite.
            ConfigError: a weight out of range.
        """
        x = real_tensor(update, "the update").reshape(-1).to(device, torch.float64)
        if x.numel() != self.size:
            raise ShapeError(f"an update has {self.size} elements, got {x.numel()}")
        whole = isinstance(weight, (int, np.integer)) and not isinstance(weight, bool)
        if not whole or not 1 <= weight <= self.max_weight:
            raise ConfigError(
                f"a weight must be a whole number from 1 to max_weight = {self.max_weight}, got {clipped(weight)}"
            )
        weight = int(weight)
        if not bool(x.isfinite().all()):
            raise DivergenceError("the update has elements that are NaN or infinite: it is not sent")
        if self.max_norm is not None:
            x = scaled_down(x, self.max_norm)
        q = (x.clamp(-self.clip, self.clip) / self.step).round_().to(torch.int64) * weight
        if self.max_weight > 1:
            q = torch.cat((q, torch.tensor([weight], device=device)))
        if self.std:
            q += SecureSource().integers(q.shape, self.std / self.step, device)
        return wrapped(q)

    def decode(self, total: Tensor) -> tuple[Tensor, int | None]:
        """Return the sum, (size,) float64, and the sum of the weights, None without weights."""
        values = total[: self.size].to(torch.float64) * self.step
        return values, int(total[self.size]) if self.max_weight > 1 else None

    def event(self) -> Event:
        """Return the release of one sum for the ledger."""
        return Event(
            "discrete_gaussian" if self.std else "gaussian", self.noise_multiplier, delta=self.delta,
            source=SecureSource.name if self.std else "", secure=True if self.std else None,
            note=f"secure aggregation: noise of at least {self.least} honest clients",
        )  # fmt: skip


def real_tensor(value: Any, name: str) -> Tensor:
    """Return a tensor, array, number or nested list of numbers as a tensor of integers, booleans or floats.

    Raises UnsupportedDtype for complex and quantized numbers, strings, objects and containers of arrays, ShapeError for
    lists of unequal length, UnsupportedCase for a sparse tensor or one without values; names `name`, never a value.
    """
    refuse_masked(value, name)
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise UnsupportedDtype(
            f"{name} must be a tensor or array of real numbers, got {kind} that torch does not read: flatten a model's "
            "parameters with torch.nn.utils.parameters_to_vector, convert other numbers to float64"
        ) from None
    if tensor.is_complex() or tensor.is_quantized:
        remedy = "take torch.view_as_real of it" if tensor.is_complex() else "take its dequantize()"
        raise UnsupportedDtype(f"{name} must be of real numbers, got {tensor.dtype}: {remedy}")
    refuse_without_values(tensor, name)
    return tensor.cpu() if isinstance(tensor, DeviceTensor) else tensor


def scaled_down(x: Tensor, max_norm: float) -> Tensor:
    """Return a float64 vector whose exact L2 norm is at most max_norm.

    In whatever order squares are added, the computed norm is within numel / 2 + 2 roundings of 2^-53. The margin is
    four times as much.
    """
    margin = 1 - (x.numel() + 8) * 2.0**-52
    return x * min(1.0, max_norm * margin / max(float(x.norm()), 1e-300))


def wrapped(x: Tensor) -> Tensor:
    """Return int64 values modulo 2^32 as int32."""
    return ((x + _HALF) % 2**32 - _HALF).to(torch.int32)


def make_encoding(
    clients: int, least: int, fails: float, size: int, clip: float | None, max_norm: float | None,
    noise_multiplier: float, step: float | None, max_weight: int,
) -> Encoding:  # fmt: skip
    """Return the encoding of SecureAggregation's settings; ConfigError where a sum may not fit.

    `fails` bounds the probability that a sum with the noise of fewer than `least` clients is unmasked: part of delta.
    """
    bound = max_norm if clip is None else clip if max_norm is None else min(clip, max_norm)
    if bound is None:
        raise ConfigError("give clip, the largest magnitude of an element, or max_norm, the L2 norm of an update")
    if noise_multiplier and max_norm is None:
        raise ConfigError("noise needs max_norm, the L2 norm to which updates are scaled down")
    if noise_multiplier and max_weight > 1:
        raise ConfigError(f"noise is for sums without weights: max_weight must be 1, got {max_weight}")
    given = step

    def std_of(step: float) -> float:
        sensitivity = (max_norm or 0.0) + step * math.sqrt(size) / 2
        return math.sqrt(((noise_multiplier * sensitivity) ** 2 + (SMOOTH * step) ** 2) / least)

    def room(step: float) -> float:
        noise = std_of(step) / step if noise_multiplier else 0.0
        fits = clients * max_weight * (bound / step + 1) + _TAIL * math.sqrt(clients) * noise
        return max(fits, noise / WIDEST * _HALF)

    if step is None:
        step = math.ldexp(1.0, max(math.frexp(bound)[1] - 32, round(math.log2(_FINEST))))
        while room(step) >= _HALF and step < bound:
            step *= 2
    if math.frexp(step)[0] != 0.5:
        raise ConfigError(f"step must be a power of two, got {step!r}")
    std = std_of(step) if noise_multiplier else 0.0
    if room(step) >= _HALF or step > bound:
        raise ConfigError(
            f"sums of {clients} clients do not fit 32 bits: clip {bound:g} in steps of {step:g}, weights up to "
            f"{max_weight} and noise of deviation {std:g} each need {2 * room(step):.3g} of 2^32 values: take a "
            f"{'larger step' if given else 'smaller clip, weight or noise'}"
        )
    if noise_multiplier and std < _LEAST_STEPS * step:
        raise ConfigError(f"noise of {std / step:.3g} steps for each client is too narrow: take a smaller step or clip")
    delta = 0.0
    if std:
        delta = fails + clients * charge(std, step, size).delta
        delta += 2 * size * (clients - 1) * log_ratio(float(Fraction(std) / Fraction(step)) / math.sqrt(2))
        delta = min(1.0, 2.0 ** math.ceil(math.log2(delta))) if delta else 0.0
    return Encoding(size, bound, max_norm, step, std, least, float(noise_multiplier), delta, max_weight)
