"""Many small calls of an Accelerator: one by one, and merged by its batch()."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.bench.record import Row
from accelerant.bench.timer import Timing, wall_ms
from accelerant.errors import AccelerantError

__all__ = ["rows"]

_CALLS = 256
_SIZE = 1024


def rows(accelerator: Callable[[], Any], where: torch.device, budget_s: float) -> list[Row]:
    """Both ways on the host's clock, from an idle device to an idle device, and the gain.

    Args:
        accelerator: makes the Accelerator.
        where: its device.
        budget_s: seconds for each figure.

    Raises:
        AccelerantError: the batch gave something else than the single calls.
    """
    base = Row("runtime", "batch", f"{_CALLS} calls of gelu on {_SIZE} float32", "", "")
    xs = list(torch.randn(_CALLS, _SIZE, device=where).unbind())
    with accelerator() as acc:
        if not hasattr(acc, "batch"):
            return [replace(base, runner="accelerant", note="this Accelerator has no batch()")]
        one_by_one: Callable[[], list[Tensor]] = lambda: [acc.gelu(x) for x in xs]  # noqa: E731 - a runner like the next

        def batched() -> list[Tensor]:
            with acc.batch() as batch:
                pending = [batch.gelu(x) for x in xs]
            return [each.result() for each in pending]

        torch.testing.assert_close(batched(), one_by_one(), rtol=1e-5, atol=1e-6, msg=_differs)
        merged, single = (wall_ms(call, where, budget_s=budget_s) for call in (batched, one_by_one))
        plain = wall_ms(lambda: [F.gelu(x) for x in xs], where, budget_s=budget_s)
    gain = Timing(single.p20_ms / merged.p80_ms, single.p50_ms / merged.p50_ms, single.p80_ms / merged.p20_ms, 1)
    gain_row = replace(
        base, op="batch gain", runner="accelerant", implementation="one by one / batch()", unit="x", better="higher"
    )
    return [
        _timed(replace(base, runner="accelerant", implementation="batch()"), merged),
        _timed(replace(base, runner="one by one", implementation="Accelerator.gelu"), single),
        _timed(replace(base, runner="torch", implementation="gelu, one by one"), plain),
        _timed(gain_row, gain),
    ]


def _differs(message: str) -> str:
    raise AccelerantError(f"batch() gave something else than single calls: {message.splitlines()[0]}")


def _timed(row: Row, timing: Timing) -> Row:
    return replace(row, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms)
