"""A case of the neural suite with its tensors: the calls to time, their least work, and the check of their results.

A case is an op on the arguments of a Benchmark. It is measured forward, backward, or both together where a program
never has one without the other. Before a runner is timed, its results are compared with the op's reference in float64:
the error ||x - reference|| / ||reference|| may be what the dtype allows, or twice that of torch's function in the same
dtype, whichever is more, but never above one half.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelerant.bench.subjects import OPS, attention_flops, varlen_flops
from accelerant.ops._cases import Benchmark
from accelerant.ops.registry import public_op
from accelerant.runtime.memory.limits import available_bytes
from accelerant.runtime.provider import ComputeDevice

_TARGETS_OF = "H200"  # the device model for which the benchmarks name targets
_CPU_SHRINK, _CPU_MANY = 32, 4096  # on a CPU, cases of more than _CPU_MANY rows have _CPU_SHRINK times fewer

_WHOLE = frozenset({"attention_varlen", "attention_decode", "attention_paged"})
"""Ops with arguments that hold positions of rows, so that rows cannot be left out."""

Inputs = tuple[Tensor | None, ...]


def benchmarks_of(name: str) -> list[Benchmark]:
    """Return the benchmarks that an op's cases.py, or its part of a family's, declares."""
    return list(public_op(name).cases.BENCHMARKS)


def odd_benchmarks_of(name: str, dtype: torch.dtype) -> list[Benchmark]:
    """Return the odd sizes of an op's GPU tests that torch's function takes, too."""
    return [Benchmark(sample, dtype) for sample in filter(OPS[name].odd, public_op(name).cases.LARGE)]


@dataclass(frozen=True, slots=True)
class OpCase:
    """A benchmark of an op with its tensors; `aims`: whether its targets hold on this device in this dtype."""

    name: str
    label: str
    inputs: Inputs
    options: dict[str, Any]
    benchmark: Benchmark
    aims: bool

    @classmethod
    def of(
        cls, name: str, benchmark: Benchmark, device: ComputeDevice, dtype: torch.dtype, *, whole: bool = False
    ) -> OpCase:
        """Create the tensors on a device; on a CPU with fewer rows, unless the case is to be measured whole."""
        sample, where = benchmark.sample, torch.device(device.torch_device)
        inputs = tuple(sample.tensors(dtype, where))
        if where.type == "cpu" and not whole:
            rows = len(inputs[0]) if inputs[0] is not None and inputs[0].ndim else 1
            inputs = shrunk(name, inputs, rows if rows <= _CPU_MANY else math.ceil(rows / _CPU_SHRINK))
        shapes = shapes_label([None if x is None else tuple(x.shape) for x in inputs])
        options = "".join(
            f" {key}" if value is True else f" not {key}" if value is False else f" {key} {value}"
            for key, value in sample.options.items()
        )
        aims = _TARGETS_OF in device.name and dtype == benchmark.dtype
        label = f"{shapes} {str(dtype).removeprefix('torch.')}{options}"
        return cls(name, label, inputs, dict(sample.options), benchmark, aims)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next(x for x in self.inputs if x is not None).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point argument."""
        return next(x.dtype for x in self.inputs if x is not None and x.is_floating_point())

    @property
    def together(self) -> bool:
        """True if forward and backward are measured as one, as for losses of one number."""
        one_number = self.name.endswith("cross_entropy") and self.options.get("reduction") != "none"
        return self.benchmark.both_ms is not None or one_number


def shapes_label(shapes: Sequence[tuple[int, ...] | None]) -> str:
    """Return arguments as rows have them: "8x16@16x32", without vectors where there are others."""
    present = [shape for shape in shapes if shape is not None]
    shown = [shape for shape in present if len(shape) > 1] or present
    return "@".join("x".join(map(str, shape)) for shape in shown)


def shrunk(name: str, inputs: Sequence[Tensor | None], rows: int) -> Inputs:
    """Return an op's arguments with at most `rows` rows where it works row by row, else unchanged."""
    return tuple(inputs) if name in _WHOLE else first_rows(inputs, rows, OPS[name].shared)


def first_rows(inputs: Sequence[Tensor | None], rows: int, shared: Sequence[int] = ()) -> Inputs:
    """Return the first rows of the first argument, and of the arguments that have one entry for each of its rows.

    `shared` has the indices of arguments that are the same for every row, such as weights.
    """
    first = inputs[0]
    if first is None or not first.ndim or len(first) <= rows:
        return tuple(inputs)

    def goes_along(x: Tensor) -> bool:
        return x.ndim > 0 and len(x) == len(first) and (x.ndim == 1 or x.shape[1:] == first.shape[1:])

    others = [
        x[:rows].contiguous() if x is not None and i not in shared and goes_along(x) else x
        for i, x in enumerate(inputs[1:], 1)
    ]
    return (first[:rows].contiguous(), *others)


# --- calls and their work --------------------------------------------------------------------------------------------


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    """Return an op's results as a tuple."""
    return results if isinstance(results, tuple) else (results,)


def leaves_of(name: str, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return an op's arguments, those with a gradient in training requiring one; tables and scales do not."""
    constants = OPS[name].constants
    return [
        x.detach().requires_grad_() if x is not None and x.is_floating_point() and i not in constants else x
        for i, x in enumerate(inputs)
    ]


def call_of(fn: Callable[..., Any], case: OpCase, direction: str) -> Callable[[], Any]:
    """Return the call to time of an op, ours or a peer's: "forward", "backward", or "both" together."""
    if direction == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return fn(*case.inputs, **case.options)

        return forward
    args = leaves_of(case.name, case.inputs)
    leaves = [x for x in args if x is not None and x.requires_grad]
    if direction == "both":
        return lambda: torch.autograd.grad(as_tuple(fn(*args, **case.options))[0], leaves)
    outs = [y for y in as_tuple(fn(*args, **case.options)) if y.requires_grad]
    dys = [torch.randn_like(y) for y in outs]
    return lambda: torch.autograd.grad(outs, leaves, dys, retain_graph=True)


@dataclass(frozen=True, slots=True)
class CaseWork:
    """The least work of direction "forward", "backward" or "both"; only_reads: far less is written than read."""

    direction: str
    bytes: int
    flops: int
    only_reads: bool = False


def work_of(case: OpCase) -> list[CaseWork]:
    """Return the directions of a case; runs it forward, for its sizes and to see whether it has a gradient."""
    subject, fn = OPS[case.name], public_op(case.name).function
    with torch.no_grad():
        outs = as_tuple(fn(*case.inputs, **case.options))
    written = sum(y.nbytes for y in outs)
    inputs = [x for x in case.inputs if x is not None]
    size = sum(x.nbytes for x in inputs)
    args = leaves_of(case.name, case.inputs)
    gradients = sum(x.nbytes for x in args if x is not None and x.requires_grad)
    causal = bool(case.options.get("causal"))
    if case.name == "attention":
        flops = attention_flops(inputs[0], inputs[1], causal=causal)
    elif case.name == "attention_varlen":
        flops = varlen_flops(inputs[0], inputs[3], inputs[4], causal=causal)
    else:
        flops = subject.flops(inputs, outs[0]) if subject.flops else 0
    if case.together:
        return [CaseWork("both", size + gradients, int(flops * (1 + subject.backward_flops)))]
    forward = CaseWork("forward", size + written, flops, only_reads=32 * written < size)
    if not any(y.requires_grad for y in as_tuple(fn(*args, **case.options))):
        return [forward]
    return [forward, CaseWork("backward", size + gradients + written, int(flops * subject.backward_flops))]


# --- the check of results --------------------------------------------------------------------------------------------

ALLOWED_ERROR = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Allowed error by dtype; float32 products may be TF32's."""

_MOST_ERROR = 0.5  # a larger error is wrong, even if torch's is as large

_MOST_ELEMENTS = 2**28
"""Float64 elements of a reference; a larger case is compared on its first rows. A GPU with much memory holds more."""

_ELEMENT_BYTES = 64  # peak memory of an element of a reference: it, its gradient, and intermediates, in float64

_MOST_FLOPS = 2 * 10**11
_MOST_FLOPS_OF_TENSOR_CORES = 10**13
"""Operations of a reference: float64 products are slow on most devices, but A100, H100 and H200 have tensor cores."""

_MOST_SCORES = 2**27  # elements of attention's scores that its reference holds at a time

_UPSTREAM_SEED = 10_000
"""First seed of upstream gradients, far from the arguments' seeds: with dy = x a sum over rows would be one of squares,
beyond float16's range, and the gradient of a norm next to nothing.
"""

_ROWS = 64  # a cut keeps a multiple of so many rows, if it has them: torch's products ask that of their sizes


class Oracle:
    """The reference results of a case, computed when first needed; of its first rows alone unless it is `whole`."""

    def __init__(self, case: OpCase, flops: int = 0) -> None:
        self.case = case
        self.inputs = _affordable(case, flops)
        self.whole = self.inputs is case.inputs
        self._exact: dict[str, list[Tensor]] = {}
        self._torch: dict[str, float] = {}

    def wrong(self, fn: Callable[..., Any], direction: str) -> tuple[float | None, str]:
        """Return the error of results (None for a random op), and a text that begins with "wrong: " or is empty."""
        if OPS[self.case.name].random:
            return None, ""
        error = self._error(fn, direction)
        allowed = ALLOWED_ERROR[self.case.dtype]
        if error <= allowed:
            return error, ""
        if direction not in self._torch:
            self._torch[direction] = self._error(OPS[self.case.name].theirs, direction)
        allowed = max(allowed, min(2 * self._torch[direction], _MOST_ERROR))
        if error <= allowed:
            return error, ""
        return error, f"wrong: relative error {error:.3g} against the float64 reference, allowed {allowed:.3g}"

    def _error(self, fn: Callable[..., Any], direction: str) -> float:
        exact = self._reference(direction)
        results = _results(self.case, fn, self.inputs, direction)
        if len(results) != len(exact):
            return float("inf")
        return max((_relative(one, other) for one, other in zip(results, exact, strict=True)), default=0.0)

    def _reference(self, direction: str) -> list[Tensor]:
        """Return the results in float64, which are kept for one direction; of fewer rows if memory is short."""
        reference = public_op(self.case.name).reference
        compute = _attention_results if self.case.name == "attention" else _results
        while direction not in self._exact:
            self._exact.clear()
            try:
                wide = tuple(x.double() if x is not None and x.is_floating_point() else x for x in self.inputs)
                self._exact[direction] = compute(self.case, reference, wide, direction)
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)  # its frames hold the memory that is lacking
                first = self.inputs[0]
                if first is None or not first.ndim or len(first) <= 1 or self.case.name.startswith("attention"):
                    raise
            if direction not in self._exact:
                self._torch.clear()
                if self.case.device.type == "cuda":
                    torch.cuda.empty_cache()
                self.inputs = _cut_to(self.case.name, self.inputs, 0.5)
                self.whole = False
        return self._exact[direction]


def _results(case: OpCase, fn: Callable[..., Any], inputs: Sequence[Tensor | None], direction: str) -> list[Tensor]:
    """Return the results of a call, its gradients, or both; on copies, since a call may overwrite its arguments."""
    copies = [None if x is None else x.clone() for x in inputs]
    if direction == "forward":
        with torch.no_grad():
            return list(as_tuple(fn(*copies, **case.options)))
    args = leaves_of(case.name, copies)
    outs = [y for y in as_tuple(fn(*args, **case.options)) if y.requires_grad]
    leaves = [x for x in args if x is not None and x.requires_grad]
    if direction == "both":
        return [outs[0].detach().clone(), *torch.autograd.grad(outs[0], leaves)]
    return list(torch.autograd.grad(outs, leaves, [_upstream(y, case.dtype, i) for i, y in enumerate(outs)]))


def _attention_results(
    case: OpCase, reference: Callable[..., Any], inputs: Sequence[Tensor | None], direction: str
) -> list[Tensor]:
    """Compute attention's reference a few batches or heads at a time: all scores would take tens of GB in float64."""
    q, k, v = (x for x in inputs if x is not None)
    group = q.shape[1] // k.shape[1]
    scores = group * q.shape[2] * k.shape[2]
    heads = max(1, min(k.shape[1], _MOST_SCORES // max(scores, 1)))
    batches = max(1, _MOST_SCORES // max(scores * k.shape[1], 1)) if heads == k.shape[1] else 1
    dy = None if direction == "forward" else _upstream(q.new_empty(*q.shape[:3], v.shape[3]), case.dtype, 0)
    results = [q.new_empty(*q.shape[:3], v.shape[3])] if dy is None else [torch.empty_like(x) for x in (q, k, v)]
    for b in range(0, q.shape[0], batches):
        for h in range(0, k.shape[1], heads):
            kv_slice = (slice(b, b + batches), slice(h, h + heads))
            q_slice = (slice(b, b + batches), slice(h * group, (h + heads) * group))
            parts = [x[index].detach() for x, index in ((q, q_slice), (k, kv_slice), (v, kv_slice))]
            if dy is None:
                results[0][q_slice] = reference(*parts, **case.options)
                continue
            for x in parts:
                x.requires_grad_()
            gradients = torch.autograd.grad(reference(*parts, **case.options), parts, dy[q_slice])
            for whole, part, index in zip(results, gradients, (q_slice, kv_slice, kv_slice), strict=True):
                whole[index] = part
    return results


def _upstream(y: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Return an upstream gradient of a result: the same numbers, rounded to `dtype`, whatever dtype the result has."""
    generator = torch.Generator(y.device).manual_seed(_UPSTREAM_SEED + seed)
    drawn = torch.randn(y.shape, generator=generator, device=y.device, dtype=torch.float32)
    return drawn.to(dtype).to(y.dtype)


def _relative(result: Tensor, exact: Tensor) -> float:
    if result.shape != exact.shape:
        return float("inf")
    exact, wide = exact.double(), result.double()
    if result.dtype == torch.float16:  # a number beyond its range, such as a sum of many rows, is an infinity in it
        most, finite = torch.finfo(torch.float16).max, exact.isfinite()
        exact, wide = (torch.where(finite, x.clamp(-most, most), x) for x in (exact, wide))
    norm = torch.linalg.vector_norm(exact)
    error = float(torch.linalg.vector_norm(wide - exact) / norm.clamp_min(1e-30))
    return error if error == error else float("inf")  # NaN is as wrong as can be


def _affordable(case: OpCase, flops: int) -> Inputs:
    """Return the arguments, cut so that a float64 reference of them fits memory and time."""
    first = case.inputs[0]
    if first is None or not first.ndim or case.name in ("attention", "attention_varlen"):
        return case.inputs  # attention's references hold the scores of a few heads at a time
    elements, operations = float(_MOST_ELEMENTS), float(_MOST_FLOPS)
    if case.device.type == "cpu":
        elements = min(elements, available_bytes("cpu") / 2 / _ELEMENT_BYTES)
    if case.device.type == "cuda":
        about = torch.cuda.get_device_properties(case.device)
        elements = max(elements, about.total_memory / _ELEMENT_BYTES)
        if torch.version.hip is None and (about.major, about.minor) in ((8, 0), (9, 0)):
            operations = _MOST_FLOPS_OF_TENSOR_CORES
    total = sum(x.numel() for x in case.inputs if x is not None)
    if case.name == "linear_cross_entropy" and case.inputs[1] is not None:
        total += len(first) * len(case.inputs[1])  # the logits
    if case.name == "conv2d" and case.inputs[1] is not None:
        total += flops // (2 * len(case.inputs[1]))  # the windows
    share = max(total / elements, flops / operations)
    if share <= 1:
        return case.inputs
    if case.name == "attention_decode":  # sequences are independent, each with its caches and its length
        return tuple(None if x is None else x[: max(1, int(len(x) / share))] for x in case.inputs)
    return _cut_to(case.name, case.inputs, 1 / share)


def _cut_to(name: str, inputs: Inputs, share: float) -> Inputs:
    rows = 0 if inputs[0] is None else max(1, int(len(inputs[0]) * share))
    return first_rows(inputs, rows - rows % _ROWS if rows > _ROWS else rows, OPS[name].shared)
