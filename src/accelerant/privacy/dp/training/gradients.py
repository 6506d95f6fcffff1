"""GradientPrivatizer: clip, sum, noise and divide per-example gradients that a program already has.

Unlike the clipper, which never forms most of them, it can round each clipped gradient to the grid and sum integers: the
bound on an example's contribution holds in the computer's arithmetic, not only in real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.privacy.dp.ledger import Ledger
from accelerant.privacy.dp.ledger.events import Sampling, check_number
from accelerant.privacy.dp.noise.noisy_sum import NoisySum, make_source, require_clipped_unit

__all__ = ["GradientPrivatizer"]

_CHUNK_NUMBERS = 1 << 22  # held in float64 at once
_ROUNDED_UP = 1.0 + 2.0**-40
"""Bound on the growth of a clipped norm in float64: a few roundings of 2^-53 in norm, factor and product."""


class GradientPrivatizer:
    """Turns per-example gradients into a private mean.

        privatizer = GradientPrivatizer(noise_multiplier=1.1, max_grad_norm=1.0, expected_batch_size=256,
                                        sampling="poisson", sample_rate=256 / 60000, ledger="spent.jsonl")
        mean = privatizer({"weight": weight_grads, "bias": bias_grads})     # (B, ...) each in, (...) each out

    Args:
        noise_multiplier: standard deviation of the noise over the sensitivity; 0: no noise, no privacy.
        max_grad_norm: L2 norm to which an example's gradient, over all tensors together, is clipped; or one for each
            tensor by name, and then the sensitivity is the root of the sum of their squares.
        expected_batch_size: divisor of the sum, also for batches of other sizes.
        sampling: how the examples of a call were chosen: "poisson" with sample_rate, "none" (all data, each time),
            "shuffled", "unknown". Only "poisson" is amplified.
        sample_rate: of Poisson sampling.
        secure: ChaCha20 on an integer grid; False: Philox in floating point, which the ledger records.
        ledger: a Ledger or its file; None: in memory.

    Attributes:
        ledger: what was spent.
        clipped: share of the last call's examples that were clipped; not private.
        dropped: examples of the last call whose gradient was not finite and counted as 0; not private.

    Raises:
        ConfigError: an invalid value.
    """

    def __init__(
        self, *, noise_multiplier: float, max_grad_norm: float | Mapping[str, float], expected_batch_size: float,
        sampling: Sampling = "unknown", sample_rate: float | None = None, secure: bool = True,
        ledger: Ledger | str | Path | None = None,
    ) -> None:  # fmt: skip
        self._multiplier = check_number("noise_multiplier", noise_multiplier, open_below=False)
        norms = max_grad_norm if isinstance(max_grad_norm, Mapping) else {"": max_grad_norm}
        self._norms = {name: check_number(f"max_grad_norm {name}".strip(), norm) for name, norm in norms.items()}
        if not self._norms:
            raise ConfigError("max_grad_norm names no tensor")
        self._expected = check_number("expected_batch_size", expected_batch_size)
        if sampling not in ("poisson", "none", "shuffled", "unknown"):
            raise ConfigError(f"sampling must be poisson, none, shuffled or unknown, got {sampling!r}")
        if (sampling == "poisson") != (sample_rate is not None):
            raise ConfigError(f"sample_rate goes with sampling='poisson'; got {sample_rate!r} with {sampling!r}")
        self._sampling: Sampling = sampling
        self._rate = 1.0 if sample_rate is None else check_number("sample_rate", sample_rate, most=1.0)
        self._source = make_source(secure)
        self.ledger = require_clipped_unit(ledger if isinstance(ledger, Ledger) else Ledger(ledger))
        self.clipped, self.dropped = 0.0, 0

    @property
    def sensitivity(self) -> float:
        """The most that one example adds to the sum, in L2 norm."""
        return math.sqrt(sum(norm**2 for norm in self._norms.values()))

    def __call__(self, gradients: Tensor | Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Return the private mean of a batch.

        Args:
            gradients: (B, ...), or several by name with the same B, which may be 0; floating point, on one device.

        Returns:
            (...), or several by name, in the dtypes of the gradients.

        Raises:
            ShapeError, UnsupportedDtype, ConfigError: no tensors, or they do not match one another or max_grad_norm.
            BudgetExceeded: the ledger's budget does not allow it; nothing was computed.
        """
        named = dict(gradients) if isinstance(gradients, Mapping) else {"": gradients}
        examples = self._check(named)
        sizes = {name: each.shape[1:].numel() for name, each in named.items()}
        release = NoisySum(self._source, self._multiplier, sum(sizes.values()))
        plan = release.plan(self.sensitivity * _ROUNDED_UP)
        self.ledger.record(release.event(plan, self._sampling, self._rate, idealised=not plan.grid))
        device = next(iter(named.values())).device
        sums = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}
        self.clipped, self.dropped = 0.0, 0
        rows = max(1, _CHUNK_NUMBERS // max(1, release.dimensions))
        for start in range(0, examples, rows):
            self._add({name: each[start : start + rows] for name, each in named.items()}, plan.grid, sums)
        self.clipped /= max(1, examples)
        release.add_(list(sums.values()), plan, 1.0 / self._expected)
        means = {name: sums[name].reshape(each.shape[1:]).to(each.dtype) for name, each in named.items()}
        return means if isinstance(gradients, Mapping) else means[""]

    def _check(self, named: Mapping[str, Tensor]) -> int:
        """Return the number of examples; errors as of `__call__`."""
        if not named:
            raise ConfigError("gradients name no tensor")
        if "" not in self._norms and self._norms.keys() != named.keys():
            raise ConfigError(f"max_grad_norm names {sorted(self._norms)}, the gradients {sorted(named)}")
        for name, gradient in named.items():
            if not isinstance(gradient, Tensor):
                raise UnsupportedDtype(
                    f"gradients must be torch tensors, {name or 'they'} got {type(gradient).__name__}: convert them by "
                    "torch.from_numpy"
                )
            if not gradient.is_floating_point():
                raise UnsupportedDtype(f"gradients must be floating point, {name or 'they'} got {gradient.dtype}")
        shapes = {name: tuple(each.shape) for name, each in named.items()}
        if any(not shape for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) != 1:
            raise ShapeError(f"the first dimension of each tensor must be the examples, as many in each; got {shapes}")
        return next(iter(shapes.values()))[0]

    def _add(self, part: Mapping[str, Tensor], grid: float, sums: Mapping[str, Tensor]) -> None:
        """Add some examples' clipped gradients, rounded to the grid where there is one."""
        wide = {name: each.detach().to(torch.float64).flatten(1) for name, each in part.items()}
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
