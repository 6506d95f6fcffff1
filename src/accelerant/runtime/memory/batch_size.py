"""The largest batch that fits a memory budget: predicted from shapes, then confirmed by real runs.

    best = optimal_batch_size(model, (idx, targets), call=GPT.loss, optimizer=torch.optim.AdamW)
    loader = DataLoader(data, batch_size=best.batch_size)

The peak of a step is a maximum of linear functions of the batch, one for each moment of the step, and so nearly linear:
two predictions give a line, and a few more find the largest batch whose prediction fits. Real runs then confirm that
batch or correct it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from accelerant.errors import ConfigError, OutOfMemory
from accelerant.runtime.files import JsonRecord
from accelerant.runtime.memory.limits import available_bytes, is_out_of_memory, size_text
from accelerant.runtime.memory.live_set import CUDA_GRANULARITY, storage_bytes
from accelerant.runtime.memory.peak import (
    ModelStep,
    OptimizerLike,
    PeakPrediction,
    device_of,
    measure_step,
    predict_step,
    with_batch,
)

_SHARE = {"cuda": 0.9, "cpu": 0.5}
"""Default budget as a fraction of the available memory; the CPU's is shared with everything else."""

_RUNS_LIMIT = 8
_CLOSE_ENOUGH = 1 / 64  # real runs stop when the batch could grow by no more than this fraction


@dataclass(frozen=True, slots=True)
class BatchSizeSearch(JsonRecord):
    """The result of optimal_batch_size; usable as an integer, the batch size.

    The peaks at that batch size are predicted from shapes, and measured in a real run (None without one); the budget
    limits them, with the model's own memory. `bytes_per_row` is the cost of one more row. `runs` has the real runs in
    order: batch size, and the peak or None if memory ran out.
    """

    batch_size: int
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int | None
    bytes_per_row: int
    runs: tuple[tuple[int, int | None], ...]

    def __index__(self) -> int:
        return self.batch_size

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

    The model, its gradients, buffers and modes, the random state and the device's memory are unchanged afterwards.

    Args:
        model: on its device.
        sample: one input, or a tuple of them, as for a call; the first dimension of each tensor is the batch. A few
            rows suffice: they are repeated.
        budget: bytes for the whole peak, or, as a float up to 1.0, a fraction of the memory that this process could
            have; 0.9 by default, 0.5 on the CPU.
        backward: whether it is a training step in train mode, or inference in eval mode under no_grad.
        call: how the model is used, call(model, *inputs); it should return the loss.
        optimizer: its state and its step's memory count; it is not stepped.
        maximum: the largest batch to consider.
        confirm: whether to run the step; if not, the prediction is the result.

    Raises:
        OutOfMemory: not even one row fits; says how much it needs.
        ConfigError, ShapeError: an invalid argument.
        UnsupportedCase: the step cannot be predicted; says why.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: wanted a torch.nn.Module, got {type(model).__name__}")
    if isinstance(maximum, bool) or not isinstance(maximum, int) or maximum < 1:
        raise ConfigError(f"maximum must be a whole number of at least 1, got {maximum!r}")
    step = ModelStep(model, call, backward)
    inputs = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    device = device_of(step, inputs)
    with_batch(inputs, 1)  # raises if there is no batch dimension
    budget_bytes = _budget(budget, step, device)
    modes = {module: module.training for module in model.modules()}
    try:
        model.train(backward)
        return _Search(step, inputs, device, optimizer, budget_bytes, maximum).run(confirm)
    finally:
        for module, training in modes.items():
            module.training = training


def _budget(budget: int | float | None, step: ModelStep, device: torch.device) -> int:
    share = _SHARE.get(device.type, 0.5) if budget is None else budget
    if isinstance(share, bool) or not isinstance(share, (int, float)) or share <= 0:
        raise ConfigError(f"budget must be bytes above 0, or a part of the memory above 0.0 to 1.0; got {budget!r}")
    if isinstance(share, int):
        return share
    if share > 1.0:
        raise ConfigError(f"budget as a float is a part of the memory, at most 1.0; got {share} (bytes are integers)")
    own = storage_bytes(step.tensors(), device.type, CUDA_GRANULARITY)
    return int(share * (available_bytes(device) + own))


@dataclass(slots=True)
class _Search:
    """One search: its arguments, the predictions by rows, and the real runs."""

    _step: ModelStep
    _inputs: tuple[Any, ...]
    _device: torch.device
    _optimizer: OptimizerLike | None
    _budget: int
    _maximum: int
    _predictions: dict[int, PeakPrediction] = field(default_factory=dict)
    _runs: list[tuple[int, int | None]] = field(default_factory=list)

    def run(self, confirm: bool) -> BatchSizeSearch:
        fits = self._predict_largest()
        total, fewer = self._predicted(fits).total, max(1, fits // 2)
        slope = self._predicted(fits).inputs
        if fewer < fits:
            slope = (total - self._predicted(fewer).total) // (fits - fewer)
        predicted = BatchSizeSearch(fits, self._budget, total, None, slope, ())
        if not confirm:
            return predicted
        best, measured = self._confirm(fits, max(1, slope))
        return replace(
            predicted, batch_size=best, predicted_bytes=self._predicted(best).total, measured_bytes=measured,
            runs=tuple(self._runs),
        )  # fmt: skip

    def _predicted(self, rows: int) -> PeakPrediction:
        def with_rows(leaf: Tensor) -> Tensor:
            shape = (rows, *leaf.shape[1:]) if leaf.dim() else leaf.shape
            empty = torch.empty(shape, dtype=leaf.dtype, device=self._device if leaf.dim() else leaf.device)
            return empty.requires_grad_(leaf.requires_grad)

        def fake_inputs(fake: FakeTensorMode) -> Any:
            return pytree.tree_map_only(Tensor, with_rows, self._inputs)

        if rows not in self._predictions:
            self._predictions[rows] = predict_step(self._step, fake_inputs, self._device, self._optimizer)
        return self._predictions[rows]

    def _predict_largest(self) -> int:
        """Return the largest batch whose prediction fits, by secants between one that fits and one that does not."""
        low, high = 0, self._maximum + 1  # low fits or is untested; high does not fit or is not allowed
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
            guess = (low + high) // 2
            if low > 0 and high <= self._maximum:  # the batch at which the line through both meets the budget
                under, over = self._predicted(low).total, self._predicted(high).total
                guess = low + int((self._budget - under) / (over - under) * (high - low))
        if low == 0:
            least = self._predicted(1)
            raise OutOfMemory(
                f"not even one row fits {self._budget:,} bytes on {self._device}: it takes {least.total:,} ({least})"
            )
        return low

    def _confirm(self, first: int, slope: int) -> tuple[int, int]:
        """Return the largest batch that fits in real runs, and its peak; `first` is the predicted one."""
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
        """Return the peak of a real run; None if memory ran out."""
        expected = self._predicted(rows)
        optimizer = expected.optimizer_state, expected.activations if expected.phase == "optimizer" else 0
        peak: int | None = None
        try:
            inputs = with_batch(self._inputs, rows, self._device)
            peak = measure_step(self._step, inputs, self._device, limit_bytes=self._budget, placeholder=optimizer)
        except (OutOfMemory, RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # The error is released here, with the tensors of its traceback.
        self._runs.append((rows, peak))
        return peak
