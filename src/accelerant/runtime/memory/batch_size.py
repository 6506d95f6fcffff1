"""The largest batch that fits a memory budget: predicted from shapes, confirmed by running, nothing left behind.

    found = optimal_batch_size(model, (idx, targets), call=GPT.loss, optimizer=torch.optim.AdamW)
    loader = DataLoader(data, batch_size=found.batch_size)

The peak of a step is close to linear in the batch (exactly: a maximum of linear functions, one for each moment of the
step), so two predictions give a line, and a few more settle on the largest batch whose prediction fits. Real runs then
confirm it, and move it where the prediction was off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from accelerant.errors import ConfigError, OutOfMemory
from accelerant.runtime.memory.limits import available_bytes, is_out_of_memory, size_text
from accelerant.runtime.memory.live_set import CUDA_GRANULARITY, storage_bytes
from accelerant.runtime.memory.peak import (
    OptimizerLike,
    PeakPrediction,
    Step,
    device_of,
    measure_step,
    predict_step,
    resized,
)

__all__ = ["BatchSizeSearch", "optimal_batch_size"]

_SHARE = {"cuda": 0.9, "cpu": 0.5}
"""The part of the memory at hand that is the budget, where none is given: the CPU's is shared with everything else."""

_RUNS_LIMIT = 8
_CLOSE_ENOUGH = 1 / 64
"""Real runs stop where a larger batch could not be larger by more than this part."""


@dataclass(frozen=True, slots=True)
class BatchSizeSearch:
    """What optimal_batch_size found; stands for the batch size where an integer is wanted.

    Attributes:
        batch_size: the largest that fits.
        budget_bytes: what the peak may be, the model's own memory included.
        predicted_bytes: peak at that batch size, from shapes.
        measured_bytes: peak of the real run at that batch size; None where it was not confirmed.
        bytes_per_row: what one more row of the batch costs.
        runs: the real runs in order: batch size, and the peak or None where memory ran out.
    """

    batch_size: int
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int | None
    bytes_per_row: int
    runs: tuple[tuple[int, int | None], ...]

    def __index__(self) -> int:
        return self.batch_size

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        measured = "not run" if self.measured_bytes is None else f"measured {size_text(self.measured_bytes)}"
        return (
            f"batch size {self.batch_size}: predicted {size_text(self.predicted_bytes)}, {measured}, "
            f"budget {size_text(self.budget_bytes)}, {size_text(self.bytes_per_row)} a row"
        )


def optimal_batch_size(
    model: nn.Module,
    sample: Any,
    *,
    budget: int | float | None = None,
    backward: bool = True,
    call: Callable[..., Any] | None = None,
    optimizer: OptimizerLike | None = None,
    maximum: int = 65536,
    confirm: bool = True,
) -> BatchSizeSearch:
    """Find the largest batch whose step stays within the budget.

    The model, its gradients and buffers, its modes, the random state and the device's memory are afterwards as before.

    Args:
        model: on the device that is asked about.
        sample: one input, or a tuple of them, as for a call; the first dimension of each tensor is the batch. A few
            rows do: they are repeated.
        budget: bytes for the whole peak, or, as a float up to 1.0, the part of the memory that this process could
            have. 0.9 by default, 0.5 on the CPU.
        backward: a training step in train mode; if not, inference in eval mode under no_grad.
        call: how the model is used: call(model, *inputs); let it return the loss.
        optimizer: counts its state and the memory of its step; it is not stepped.
        maximum: the largest batch to consider.
        confirm: run for real. Without, the prediction stands.

    Raises:
        OutOfMemory: not even one row fits; says what it takes.
        ConfigError, ShapeError: an argument without meaning.
        UnsupportedCase: the step cannot be predicted; says why.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: wanted a torch.nn.Module, got {type(model).__name__}")
    if isinstance(maximum, bool) or not isinstance(maximum, int) or maximum < 1:
        raise ConfigError(f"maximum must be a whole number of at least 1, got {maximum!r}")
    step = Step(model, call, backward)
    inputs = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    device = device_of(step, inputs)
    resized(inputs, 1)  # refuses what has no batch
    budget_bytes = _budget(budget, step, device)
    modes = {module: module.training for module in model.modules()}
    try:
        model.train(backward)
        return _Search(step, inputs, device, optimizer, budget_bytes, maximum).run(confirm)
    finally:
        for module, training in modes.items():
            module.training = training


def _budget(budget: int | float | None, step: Step, device: torch.device) -> int:
    share = _SHARE.get(device.type, 0.5) if budget is None else budget
    if isinstance(share, bool) or not isinstance(share, (int, float)) or share <= 0:
        raise ConfigError(f"budget must be bytes above 0, or a part of the memory above 0.0 to 1.0; got {budget!r}")
    if isinstance(share, int):
        return share
    if share > 1.0:
        raise ConfigError(f"budget as a float is a part of the memory, at most 1.0; got {share} (bytes are integers)")
    own = storage_bytes(step.tensors(), device.type, CUDA_GRANULARITY)
    return int(share * (available_bytes(device) + own))


class _Search:
    """One search; see optimal_batch_size."""

    def __init__(
        self,
        step: Step,
        inputs: tuple[Any, ...],
        device: torch.device,
        optimizer: OptimizerLike | None,
        budget_bytes: int,
        maximum: int,
    ) -> None:
        self._step = step
        self._inputs = inputs
        self._device = device
        self._optimizer = optimizer
        self._budget = budget_bytes
        self._maximum = maximum
        self._runs: list[tuple[int, int | None]] = []
        self._predicted = functools.cache(self._predict)

    def run(self, confirm: bool) -> BatchSizeSearch:
        """Predict; confirm if asked."""
        fits = self._predict_largest()
        slope = self._slope(fits)
        found = BatchSizeSearch(fits, self._budget, self._predicted(fits).total, None, slope, ())
        if not confirm:
            return found
        best, measured = self._confirm(fits, max(1, slope))
        return replace(
            found,
            batch_size=best,
            predicted_bytes=self._predicted(best).total,
            measured_bytes=measured,
            runs=tuple(self._runs),
        )

    # --- from shapes -------------------------------------------------------------------------------------------------

    def _predict(self, rows: int) -> PeakPrediction:
        def make(fake: FakeTensorMode) -> tuple[Any, ...]:
            def of(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                shape = (rows, *leaf.shape[1:]) if leaf.dim() else leaf.shape
                empty = torch.empty(shape, dtype=leaf.dtype, device=self._device if leaf.dim() else leaf.device)
                return empty.requires_grad_(leaf.requires_grad)

            made: tuple[Any, ...] = pytree.tree_map(of, self._inputs)
            return made

        return predict_step(self._step, make, self._device, self._optimizer)

    def _predict_largest(self) -> int:
        """The largest batch whose prediction fits: secants between one that fits and one that does not."""
        low, high = 0, self._maximum + 1  # low fits, or is not known to; high does not, or is not allowed
        guess = min(2, self._maximum)
        if guess == 2 and self._maximum >= 4:
            slope = (self._predicted(4).total - self._predicted(2).total) / 2
            room = self._budget - self._predicted(2).total
            guess = 2 + int(room / slope) if slope > 0 else self._maximum
        while high - low > 1:
            guess = min(max(guess, low + 1), high - 1)
            if self._predicted(guess).total <= self._budget:
                low = guess
            else:
                high = guess
            guess = self._between(low, high)
        if low == 0:
            least = self._predicted(1)
            raise OutOfMemory(
                f"not even one row fits {self._budget:,} bytes on {self._device}: it takes {least.total:,} ({least})"
            )
        return low

    def _between(self, low: int, high: int) -> int:
        """Where the line through the two predictions meets the budget."""
        if low == 0 or high > self._maximum:
            return (low + high) // 2
        under, over = self._predicted(low).total, self._predicted(high).total
        return low + int((self._budget - under) / (over - under) * (high - low))

    def _slope(self, rows: int) -> int:
        """Bytes that a row adds, around that batch size."""
        fewer = max(1, rows // 2)
        if fewer == rows:
            return self._predicted(rows).inputs
        return (self._predicted(rows).total - self._predicted(fewer).total) // (rows - fewer)

    # --- for real ----------------------------------------------------------------------------------------------------

    def _confirm(self, first: int, slope: int) -> tuple[int, int]:
        """The largest batch that really fits, and its peak: from the predicted one up or down by what was measured."""
        good, best_peak, bad = 0, 0, self._maximum + 1
        guess = first
        while len(self._runs) < _RUNS_LIMIT or good == 0:
            peak = self._measure(guess)
            if peak is not None and peak <= self._budget:
                good, best_peak = guess, peak
                following = min(bad - 1, guess + (self._budget - peak) // slope)
            else:
                bad = guess
                over = guess // 4 if peak is None else -(-(peak - self._budget) // slope)
                following = max(good + 1, guess - max(1, over)) if good == 0 else (good + bad) // 2
            if bad == 1:
                raise OutOfMemory(
                    f"not even one row fits {self._budget:,} bytes on {self._device} when run; "
                    f"the prediction is {self._predicted(1)}"
                )
            if good and following - good <= good * _CLOSE_ENOUGH:
                break
            guess = following
        return good, best_peak

    def _measure(self, rows: int) -> int | None:
        """Peak of a real run; None where memory ran out."""
        expected = self._predicted(rows)
        state = expected.optimizer_state
        temporaries = expected.activations if expected.phase == "optimizer" else 0
        peak: int | None = None
        try:
            inputs = resized(self._inputs, rows, self._device)
            peak = measure_step(
                self._step, inputs, self._device, limit_bytes=self._budget, placeholder=(state, temporaries)
            )
        except (OutOfMemory, RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # The error is gone here, and with it the tensors that its traceback held.
        self._runs.append((rows, peak))
        return peak
