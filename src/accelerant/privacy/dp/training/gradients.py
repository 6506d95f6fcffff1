"""Clip, sum, noise and divide per-example gradients that a program already has: for a given noise, or a target epsilon.

Unlike the clipper, which never forms most of them, it can round each clipped gradient to the grid and sum integers: the
bound on an example's contribution holds in the computer's arithmetic, not only in real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accelerant.errors import BudgetExceeded, ConfigError, ShapeError, UnsupportedDtype
from accelerant.privacy.dp.ledger import LedgerLike, PrivacyLedger
from accelerant.privacy.dp.ledger.accounting import (
    DEFAULT_DELTA,
    Allowance,
    Budget,
    Sampling,
    calibrate,
    check_number,
    check_whole,
)
from accelerant.privacy.dp.noise.mechanisms import (
    INSECURE,
    NoiseParameters,
    NoisySum,
    make_source,
    require_clipped_unit,
)
from accelerant.runtime.files import plain
from accelerant.runtime.host import refuse_masked

Gradients = Tensor | NDArray[Any] | Mapping[str, Tensor | NDArray[Any]] | Sequence[Tensor | NDArray[Any]]
"""One tensor or array, or several by name or in a list."""

_CHUNK_NUMBERS = 1 << 22  # held in float64 at once
_ROUNDED_UP = 1.0 + 2.0**-40  # bound on the growth of a clipped norm in float64 by a few roundings
_LEAST_NORM = 1e-100
_USUAL_NUMBERS = 1 << 20  # numbers of a release for which the noise is found at first


@INSECURE
class Privatizer:
    """The mechanism of DP-SGD for per-example gradients of any program, with a target epsilon or a noise multiplier.

        privatizer = Privatizer(epsilon=8, delta=1e-5, max_grad_norm=1.0, steps=2000, sample_rate=256 / 60000,
                                expected_batch_size=256)
        weights -= 0.5 * privatizer.step(per_example_gradients)         # (B, ...) in, (...) out

    With a target, batches must be drawn by Poisson sampling at the rate (`dp.PoissonSampler` does): each example is in
    each batch with that probability, independently. This is not checked here. At a rate of 1 each batch is all data.

    Args:
        max_grad_norm: L2 norm to which an example's gradient, over all tensors together, is clipped; or one for each
            tensor by name ("0", "1", ... in a list), and then the sensitivity is the root of the sum of their squares.
        expected_batch_size: divisor of the sum, also for batches of other sizes.
        epsilon, delta: of all steps, with what the ledger holds already; the least noise is found for them.
        noise_multiplier: instead of epsilon: standard deviation of the noise over the sensitivity; 0: no noise, no
            privacy.
        steps: planned releases: calls of `step` and `release_sum` together; needed with epsilon.
        sampling: how the examples of a call were chosen: "poisson" with sample_rate, "none" (all data, each time),
            "shuffled", "unknown". Only "poisson" is amplified. None: "poisson" with epsilon, else "unknown".
        sample_rate: probability of each example to be in a batch of Poisson sampling, in (0, 1].
        insecure: Philox in floating point, which the ledger records, instead of ChaCha20 on an integer grid.
        ledger: a PrivacyLedger or its file; None: in memory.

    Attributes:
        steps, made: planned releases, None without a plan, and those that were made.
        ledger: what was spent.
        clipped: share of the last call's examples that were clipped; not private.
        dropped: examples of the last call whose gradient was not finite and counted as 0; not private.

    Raises:
        ConfigError: an invalid value.
        BudgetExceeded: the ledger holds epsilon already.
        UnsupportedCase: no noise suffices for epsilon, or hardly any is needed.
    """

    def __init__(
        self, *, max_grad_norm: float | Mapping[str, float], expected_batch_size: float, epsilon: float | None = None,
        delta: float | None = None, noise_multiplier: float | None = None, steps: int | None = None,
        sampling: Sampling | None = None, sample_rate: float | None = None, insecure: bool = False,
        ledger: LedgerLike = None,
    ) -> None:  # fmt: skip
        if (epsilon is None) == (noise_multiplier is None):
            raise ConfigError(f"give either epsilon or noise_multiplier; got {epsilon!r} and {noise_multiplier!r}")
        planned = epsilon is not None
        if planned or delta is not None:
            delta = check_number("delta", delta, most=0.5)
        if planned or steps is not None:
            steps = check_whole("steps", steps, 1)
        self._delta, self.steps, self.made = delta, steps, 0
        self._multiplier = check_number("noise_multiplier", 1.0 if planned else noise_multiplier, open_below=False)
        self._target = None if delta is None or epsilon is None else Budget(epsilon=epsilon, delta=delta)
        norms = max_grad_norm if isinstance(max_grad_norm, Mapping) else {"": max_grad_norm}
        self._norms = {name: check_number(f"max_grad_norm {name}".strip(), norm) for name, norm in norms.items()}
        if not self._norms:
            raise ConfigError("max_grad_norm names no tensor")
        if not all(_LEAST_NORM <= norm <= 1 / _LEAST_NORM for norm in self._norms.values()):
            raise ConfigError(
                f"max_grad_norm must be {_LEAST_NORM:g} to {1 / _LEAST_NORM:g}, whose squares float64 holds, got "
                f"{max_grad_norm!r}: multiply gradients and max_grad_norm by a constant"
            )
        self._expected = check_number("expected_batch_size", expected_batch_size)
        self._sampling: Sampling = sampling or ("poisson" if planned else "unknown")
        if self._sampling not in ("poisson", "none", "shuffled", "unknown"):
            raise ConfigError(f"sampling must be poisson, none, shuffled or unknown, got {sampling!r}")
        if planned and self._sampling != "poisson":
            raise ConfigError(f"the noise for an epsilon is that of sampling='poisson', got {sampling!r}")
        if (self._sampling == "poisson") != (sample_rate is not None):
            raise ConfigError(f"sample_rate goes with sampling='poisson'; got {sample_rate!r} with {self._sampling!r}")
        self._rate = 1.0 if sample_rate is None else check_number("sample_rate", sample_rate, most=1.0)
        self._source = make_source(insecure=insecure)
        self.clipped, self.dropped = 0.0, 0
        self.ledger = ledger if isinstance(ledger, PrivacyLedger) else PrivacyLedger(ledger, budget=self._target)
        try:
            require_clipped_unit(self.ledger)
            if self._target is not None:
                self._calibrate(self._target, _USUAL_NUMBERS)
            self.ledger.describe(delta=delta)
        except BaseException:
            if self.ledger is not ledger:
                self.ledger.close()
            raise
        self._allowance = None if self._target is None else Allowance(self._target, self.ledger.neighbouring)

    def __repr__(self) -> str:
        plan = "" if self.steps is None else f" of {self.steps}"
        return (
            f"Privatizer(noise_multiplier={self._multiplier:.6g}, sensitivity={self.sensitivity:g}, "
            f"sampling={self._sampling!r}, sample_rate={self._rate:.6g}, steps made {self.made}{plan})"
        )

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity."""
        return self._multiplier

    @property
    def sensitivity(self) -> float:
        """The most that one example adds to the sum, in L2 norm."""
        return math.hypot(*self._norms.values())

    def __call__(self, gradients: Gradients) -> Any:
        """Return the private mean of a batch, as `step` does."""
        return self.step(gradients)

    def step(self, gradients: Gradients) -> Any:
        """Return the private mean of a batch.

        An example whose gradient is not finite counts as 0, and in `dropped`.

        Args:
            gradients: (B, ...), or several by name or in a list with the same B, which may be 0; floating point, on one
                device; torch tensors or NumPy arrays. They are not changed, and no autograd graph goes through.

        Returns:
            (...), or several by name or in a list, in the types and dtypes of the gradients.

        Raises:
            ShapeError, UnsupportedDtype, ConfigError: no tensors, or they do not match one another or max_grad_norm.
            BudgetExceeded: all planned steps were made, or the budget does not allow it; nothing was computed.
        """
        named = _tensors(gradients)
        examples = self._check(named)
        sizes = {name: each.shape[1:].numel() for name, each in named.items()}
        release, plan = self._begin(sum(sizes.values()), self.sensitivity * _ROUNDED_UP)
        device = next(iter(named.values())).device
        sums = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}
        self.clipped, self.dropped = 0.0, 0
        rows = max(1, _CHUNK_NUMBERS // max(1, release.dimensions))
        for start in range(0, examples, rows):
            self._add({name: each[start : start + rows] for name, each in named.items()}, plan.grid, sums)
        self.clipped /= max(1, examples)
        release.add_(list(sums.values()), plan, 1.0 / self._expected)
        return _like(gradients, {n: sums[n].reshape(each.shape[1:]).to(each.dtype) for n, each in named.items()})

    def release_sum(self, total: Gradients, *, sensitivity: float) -> Any:
        """Return a sum that the caller has clipped and added up, with noise; it is not divided.

        Args:
            total: a tensor or an array, or several by name or in a list, as `step` takes them, without B.
            sensitivity: the L2 norm by which one example that is added or removed changes all of total. The caller
                guarantees it: it cannot be seen here. The ledger records that the sum was made in floating point.

        Returns:
            The sum with noise, in the types, shapes and dtypes of total.

        Raises:
            ConfigError: total is not finite, or an invalid sensitivity.
            UnsupportedDtype, BudgetExceeded: as `step`.
        """
        named = _tensors(total)
        sensitivity = check_number("sensitivity", sensitivity)
        if not all(bool(each.isfinite().all()) for each in named.values()):
            raise ConfigError("the sum is not finite: leave out examples whose gradients are not, and clip the others")
        release, plan = self._begin(sum(each.numel() for each in named.values()), sensitivity, idealised=True)
        sums = {n: each.detach().to(torch.float64, copy=True).reshape(-1) for n, each in named.items()}
        release.add_(list(sums.values()), plan, 1.0)
        return _like(total, {n: sums[n].reshape(each.shape).to(each.dtype) for n, each in named.items()})

    def _begin(
        self, dimensions: int, sensitivity: float, *, idealised: bool = False
    ) -> tuple[NoisySum, NoiseParameters]:
        """Plan a release and record it."""
        if self.steps is not None and self.made >= self.steps:
            chosen = self._delta or self.ledger.delta or DEFAULT_DELTA
            raise BudgetExceeded(
                f"all {self.steps} planned steps were made: epsilon {plain(self.epsilon(), 6, up=True)} at delta "
                f"{chosen:g}. The noise was found for so many; plan more steps from the start"
            )
        if self._target is not None and not self.made and dimensions > _USUAL_NUMBERS:
            self._calibrate(self._target, dimensions)
        release = NoisySum(self._source, self._multiplier, dimensions)
        plan = release.plan(sensitivity)
        event = release.event(plan, self._sampling, self._rate, idealised=idealised or not plan.grid)
        if self._allowance is not None:  # the ledger checks its own budgets
            self._allowance.require(self.ledger.counts, event)
        self.ledger.record(event)
        self.made += 1
        return release, plan

    def _calibrate(self, target: Budget, dimensions: int) -> None:
        """Find the noise of the target; the tails of the discrete noise charge a delta for each number released."""
        charged = 2 * NoisySum(self._source, 1.0, dimensions).plan(self.sensitivity).delta
        assert self.steps is not None  # for the type checker: a target has steps
        self._multiplier = least_noise(target, self._rate, self.steps, self.ledger, charged)

    def epsilon(self, delta: float | None = None) -> float:
        """Return the epsilon of all that the ledger holds, at the target's delta or another."""
        return self.ledger.epsilon(self._delta if delta is None else delta)

    def _check(self, named: Mapping[str, Tensor]) -> int:
        """Return the number of examples; errors as of `__call__`."""
        if "" not in self._norms and self._norms.keys() != named.keys():
            raise ConfigError(f"max_grad_norm names {sorted(self._norms)}, the gradients {sorted(named)}")
        shapes = {name: tuple(each.shape) for name, each in named.items()}
        if any(not shape for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) != 1:
            raise ShapeError(f"the first dimension of each tensor must be the examples, as many in each; got {shapes}")
        return next(iter(shapes.values()))[0]

    def _add(self, part: Mapping[str, Tensor], grid: float, sums: Mapping[str, Tensor]) -> None:
        """Add some examples' clipped gradients, rounded to the grid where there is one."""
        wide = {
            name: each.detach().to(torch.float64).reshape(len(each), each.shape[1:].numel())
            for name, each in part.items()
        }
        squares = {name: (each * each).sum(1) for name, each in wide.items()}
        finite = torch.stack([each.isfinite() for each in squares.values()]).all(0)
        if "" in self._norms:
            together = torch.stack(list(squares.values())).sum(0)
            squares = dict.fromkeys(squares, together)
        clipped = torch.zeros_like(finite)
        for name, each in wide.items():
            norms, bound = squares[name].sqrt(), self._norms.get(name, self._norms.get("", 0.0))
            clipped |= norms > bound
            factors = torch.where(finite, (bound / norms).clamp_(max=1.0), 0.0)  # 0 / 0 is not chosen by clamp: below
            factors = torch.where(norms == 0, 1.0, factors)
            values = torch.where(finite[:, None], each, 0.0) * factors[:, None]
            # Sums of whole numbers below 2^53 are exact in float64.
            sums[name].add_((values / grid).round_().sum(0) * grid if grid else values.sum(0))
        self.clipped += float((clipped & finite).sum())
        self.dropped += int((~finite).sum())


def least_noise(target: Budget, sample_rate: float, steps: int, ledger: PrivacyLedger, charged: float) -> float:
    """Return the least noise multiplier with which `steps` more events of a ledger end within a target."""
    if ledger.events and (before := ledger.epsilon(target.delta)) >= target.epsilon:
        raise BudgetExceeded(
            f"the ledger holds epsilon {plain(before, up=True)} at delta {target.delta:g} already: {steps} more steps "
            f"cannot end at {target.epsilon:g}"
        )
    return calibrate(
        target_epsilon=target.epsilon, delta=target.delta, sample_rate=sample_rate, steps=steps, charged=charged,
        before=ledger.events,
    )  # fmt: skip


def _tensors(gradients: Gradients) -> dict[str, Tensor]:
    """Return gradients as floating-point tensors on one device by name, in a list by position."""
    given: dict[str, Any] = {"": gradients}
    if isinstance(gradients, Mapping):
        given = dict(gradients)
    elif isinstance(gradients, list | tuple):
        given = {str(position): each for position, each in enumerate(gradients)}
    if not given:
        raise ConfigError("gradients name no tensor")
    found: dict[str, Tensor] = {}
    for name, each in given.items():
        refuse_masked(each, f"gradient {name}".strip())
        if isinstance(each, np.ndarray):
            if each.dtype.kind != "f" or each.dtype.itemsize > 8:
                raise UnsupportedDtype(
                    f"gradients must be floating point of at most 64 bits, {name or 'they'} got {each.dtype}"
                )
            native = each.astype(each.dtype.newbyteorder("="), copy=False)
            each = torch.from_numpy(np.require(native, requirements=["C", "W"]))
        elif not isinstance(each, Tensor):
            raise UnsupportedDtype(
                f"gradients must be torch tensors or NumPy arrays, {name or 'they'} got {type(each).__name__}"
            )
        if not each.is_floating_point():
            raise UnsupportedDtype(f"gradients must be floating point, {name or 'they'} got {each.dtype}")
        found[name] = each
    if len({each.device for each in found.values()}) > 1:
        places = {name: str(each.device) for name, each in found.items()}
        raise ConfigError(f"gradients must be on one device, got {places}")
    return found


def _like(given: Gradients, found: Mapping[str, Tensor]) -> Any:
    """Return tensors in the form that gradients were given in."""

    def back(each: Any, tensor: Tensor) -> Any:
        return tensor.numpy() if isinstance(each, np.ndarray) else tensor

    if isinstance(given, Mapping):
        return {name: back(each, found[name]) for name, each in given.items()}
    if isinstance(given, list | tuple):
        return type(given)([back(each, tensor) for each, tensor in zip(given, found.values(), strict=True)])
    return back(given, found[""])
