"""Races and tuning of every op on the cases of its benchmark, on smaller ones and at odd sizes, for `accelerant tune`.

Results hold for the shape buckets that were measured, on this model of device (docs/choices.md). The shipped tables are
made this way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from accelerant.bench.subjects import OPS
from accelerant.bench.suite import check_names
from accelerant.bench.suites import neural
from accelerant.bench.suites.neural_cases import benchmarks_of, leaves_of, odd_benchmarks_of, plan
from accelerant.bench.suites.runtime import groups_of, precompile
from accelerant.config import override
from accelerant.errors import AccelerantError, DeviceLost
from accelerant.ops.registry import public_op
from accelerant.runtime.dispatch.plan import Decision, explain_quietly
from accelerant.runtime.dispatch.race import tune
from accelerant.runtime.provider import ComputeDevice

_COMPILE_S, _COMPILE_SHARE = 60.0, 0.3  # seconds that compiling first may take, and its share of the time limit

SHRINKS = (1, 8, 64)  # each case is measured with its rows (or batches) divided by these


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The decisions of one call, forward and backward; `error` is why it failed, "" if it did not."""

    op: str
    case: str
    decisions: tuple[Decision, ...]
    error: str = ""


def count_calls(names: Sequence[str] = (), dtypes: Sequence[torch.dtype] = (torch.bfloat16,)) -> int:
    """Return the number of calls that tune_ops makes for these ops and dtypes."""
    return sum(
        len(SHRINKS) * len(benchmarks_of(name)) + len(odd_benchmarks_of(name, dtype))
        for name in names or OPS
        for dtype in dtypes
    )


def tune_ops(
    device: ComputeDevice, *, names: Sequence[str] = (),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32), launches: bool = True, workers: int = 1,
    until: float | None = None, progress: Callable[[str], None] = lambda _: None,
) -> Iterator[TuneResult]:  # fmt: skip
    """Race and tune ops call by call, none begun after `until`; each result is on disk before the next."""
    check_names("names", "op", names, tuple(OPS))
    where = torch.device(device.torch_device)
    if workers > 1:
        planned = plan(names, dtypes=dtypes, against=(), budget_s=0.0, gpu=where.type == "cuda")
        most_s = _COMPILE_S if until is None else min(_COMPILE_S, _COMPILE_SHARE * (until - time.monotonic()))
        precompile(groups_of(planned), device, workers, limit_s=most_s, progress=progress)
    began, done, count = time.monotonic(), 0, count_calls(names, dtypes)
    for name in names or OPS:
        for dtype in dtypes:
            for label, inputs, options in neural.calls(name, device, dtype, SHRINKS):
                if until is not None and time.monotonic() > until:
                    return
                left_s = (time.monotonic() - began) / done * (count - done) if done else 0.0
                progress(f"[{done + 1}/{count}{f', about {left_s:.0f} s left' if done else ''}] {name} {label}")
                yield _tuned(name, label, inputs, options, launches)
                done += 1
                if where.type == "cuda":
                    torch.cuda.empty_cache()


def _tuned(
    name: str, label: str, inputs: Sequence[torch.Tensor | None], options: dict[str, object], launches: bool
) -> TuneResult:
    function = public_op(name).function
    args = leaves_of(name, inputs)

    def both() -> None:
        with torch.no_grad():
            function(*inputs, **options)
        results = function(*args, **options)
        outs = [y for y in (results if isinstance(results, tuple) else (results,)) if y.requires_grad]
        if outs:
            torch.autograd.backward(outs, [torch.ones_like(y) for y in outs])

    try:
        if launches:
            return TuneResult(name, label, tuple(tune(both).decisions))
        with override(race="first_use"):
            return TuneResult(name, label, tuple(explain_quietly(both).decisions))
    except DeviceLost:
        raise
    except (AccelerantError, RuntimeError) as error:  # torch's lack of memory is one
        return TuneResult(name, label, (), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
