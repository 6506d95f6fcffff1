"""The cases of the neural suite: their plan, their tensors and calls, and the check of their results.

The plan has the tables of the ops (their BENCHMARKS, in each requested dtype), requested sizes, odd sizes (their LARGE
samples), and a sweep from 2^10 to 2^28 elements; what matters most comes first. A case is measured forward, backward,
or both together. Errors ||x - reference|| / ||reference|| may be what the dtype allows, or twice that of torch's
function in the same dtype, but never above one half.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from accelerant.bench.record import NAIVE, NUMPY, OURS, UNFUSED
from accelerant.bench.subjects import COMPOSITIONS, NOT_BY_ROWS, OPS, attention_flops, unfused, varlen_flops
from accelerant.errors import ConfigError
from accelerant.ops.registry import Benchmark, Fractions, Indices, SampleInput, Stated, public_op
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
    """Return the first rows of the first argument, and of those with an entry for each, except the indices `shared`."""
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
    if (share := max(total / elements, flops / operations)) <= 1:
        return case.inputs
    if case.name == "attention_decode":  # sequences are independent, each with its caches and its length
        return tuple(None if x is None else x[: max(1, int(len(x) / share))] for x in case.inputs)
    return _cut_to(case.name, case.inputs, 1 / share)


def _cut_to(name: str, inputs: Inputs, share: float) -> Inputs:
    rows = 0 if inputs[0] is None else max(1, int(len(inputs[0]) * share))
    return first_rows(inputs, rows - rows % _ROWS if rows > _ROWS else rows, OPS[name].shared)


# --- the plan --------------------------------------------------------------------------------------------------------
Maker = Callable[[], Callable[..., Any]]
"""Returns a peer's function; raises UnsupportedCase where its library is absent."""

Libraries = Mapping[str, Mapping[str, Maker]]  # op -> peer's name -> its maker, for peers besides those that torch has

BASELINES = {"unfused": UNFUSED, "numpy": NUMPY, "naive": NAIVE}
"""Baselines by the names that --against takes; by default where sizes are requested."""

RUNNERS = {"compile": "torch.compile", **BASELINES}  # runner of a peer, where it differs from the peer's name

_OTHER_DTYPE, _MANY_SIZES = 0.4, 0.1
"""Shares of the budget of each figure: in a further dtype; at odd sizes and in the sweep."""

_SWEEP_PEERS, _ODD_PEERS, _FLOAT32_PEERS = ("torch", "compile"), ("torch",), ("torch",)
"""Peers of the sweep, at odd sizes, and in a further float32: the other libraries are for 16 bits."""

_NOT_AGAIN = ("compile",)
"""Peers left out in a further dtype: torch.compile is as fast in float16 as in bfloat16, and compiles for seconds."""

_FIGURE_S = 0.035
_COMPILED_S = 0.35  # seconds besides the timed calls: of a figure; of loading one torch.compile result from its cache

_COMPILE_S = {"compile": 5.0, "liger": 2.0, "quack": 10.0, "flash_attn_4": 25.0}
"""Seconds of one core that compiling a peer takes."""


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """A case to measure; `part` is Row.part: "", "size", "odd" or "sweep".

    `budget_s` are seconds of calls behind each figure; `race` lets dispatch race first, else it chooses as in a user's
    first call; `deterministic` also measures what that setting costs; `makers` are peers besides torch's.
    """

    part: str
    op: str
    benchmark: Benchmark
    dtype: torch.dtype
    against: tuple[str, ...]
    budget_s: float
    deterministic: bool = False
    race: bool = False
    makers: Mapping[str, Maker] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> str:
        """The case's name, the same in each run that measures the same."""
        dtype = str(self.dtype).removeprefix("torch.")
        options = "".join(f" {key}={value}" for key, value in self.benchmark.sample.options.items())
        words = (self.part, self.op, f"{self.benchmark.sample.name}{options}", dtype, "+".join(self.against))
        return " ".join(filter(None, words))

    @property
    def peers(self) -> tuple[str, ...]:
        """The requested peers that have this op."""
        return tuple(name for name in self.against if name in ("torch", "compile", *self.makers))

    @property
    def baselines(self) -> tuple[str, ...]:
        """The requested baselines that run on the host and have this op."""
        known = {"numpy": self.op in COMPOSITIONS, "naive": self.op in COMPOSITIONS and self.op not in NOT_BY_ROWS}
        return tuple(name for name in self.against if known.get(name))

    @property
    def estimate_s(self) -> float:
        """Approximate seconds on a large GPU, once everything is compiled."""
        figures = 2 * (1 + len(self.peers)) + (1 if self.part == "" else 0)
        elements = sum(math.prod(shape) for shape in self.benchmark.sample.shapes if shape is not None)
        call_s = 4e-4 + elements * 8 / 2e12  # the cache flush, and a few passes over the arguments
        flops = 0.0
        if OPS[self.op].flops is not None:
            first = self.benchmark.sample.shapes[0] or ()
            flops = 2.0 * math.sqrt(max(elements, 1)) * (math.prod(first) or 1)
        call_s += flops / (2e14 if self.dtype != torch.float32 else 3e13)
        timed = max(self.budget_s, 12 * call_s) + 10 * call_s
        compiled = (0.1 if self.part == "sweep" else 2 * _COMPILED_S) if "compile" in self.peers else 0.0
        return figures * (_FIGURE_S + timed) + compiled + (0.25 if self.race else 0.0)

    @property
    def compile_s(self) -> float:
        """Approximate seconds of one core that compiling takes."""
        return 1.0 + sum(_COMPILE_S.get(name, 0.0) for name in self.peers)


def runners_of(case: OpCase, one: PlannedCase) -> dict[str, Maker]:
    """Return the makers of the runners' functions by runner, ours first."""
    subject = OPS[case.name]
    makers: dict[str, Maker] = {OURS: lambda: public_op(case.name).function}
    for peer in one.peers:
        if peer == "torch":
            makers["torch"] = lambda: subject.theirs
        elif peer == "compile":
            makers[RUNNERS[peer]] = lambda: _compiled(case, one.part)
        else:
            makers[RUNNERS.get(peer, peer)] = one.makers[peer]
    return makers


def _compiled(case: OpCase, part: str) -> Callable[..., Any]:
    """Compile torch's function for the case's sizes; in a sweep, for any number of rows with the largest in view."""
    function = OPS[case.name].theirs
    if part != "sweep" or case.inputs[0] is None:
        return torch.compile(function, dynamic=False)
    compiled, rows = torch.compile(function), len(case.inputs[0])

    def with_any_rows(*args: Any, **options: Any) -> Any:
        for x in args:
            if isinstance(x, Tensor) and x.ndim and len(x) == rows > 1:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return compiled(*args, **options)

    return with_any_rows


def plan(
    names: Sequence[str], *, dtypes: Sequence[torch.dtype] = (), against: Sequence[str], budget_s: float, gpu: bool,
    tables: bool = True, odd: bool = False, sweep: Sequence[int] = (), sizes: Sequence[Sequence[int]] = (),
    libraries: Libraries | None = None,
) -> list[PlannedCase]:  # fmt: skip
    """Return the cases in the order of measurement; the first of `dtypes`, by default each case's own, has all peers.

    Further dtypes omit torch.compile and have less than `budget_s` seconds of calls behind a figure. `sweep` (numbers
    of elements) has torch and torch.compile, odd sizes torch; `sizes` are measured in every dtype, see `sized`.
    """
    ops = list(names) or list(OPS)
    first = dtypes[0] if dtypes else None

    def case(part: str, op: str, benchmark: Benchmark, dtype: torch.dtype | None, peers: Sequence[str], budget_s: float,
             **more: bool) -> PlannedCase:  # fmt: skip
        dtype = dtype or (benchmark.dtype if gpu else torch.float32)
        makers = {**OPS[op].peers, **(libraries or {}).get(op, {})}
        if op in COMPOSITIONS and not benchmark.sample.options.get("interleaved"):
            makers["unfused"] = functools.partial(unfused, op)
        return PlannedCase(part, op, benchmark, dtype, tuple(peers), budget_s, makers=makers, **more)

    benchmarks = [(op, one if gpu else for_cpu(op, one)) for op in ops for one in benchmarks_of(op)] if tables else []
    by_dtype: list[list[PlannedCase]] = []
    for i, dtype in enumerate((dtypes or (None,)) if tables else ()):
        budget, peers = budget_s * (_OTHER_DTYPE if i else 1.0), against
        if i:
            kept = _FLOAT32_PEERS if dtype == torch.float32 else set(against) - {*_NOT_AGAIN}
            peers = [name for name in against if name in kept]
        options = {"deterministic": gpu and not i, "race": gpu}
        by_dtype.append([case("", op, one, dtype, peers, budget, **options) for op, one in benchmarks])
    requested = [
        case("size", op, sized(op, size), dtype, against, budget_s, race=gpu)
        for op in ops for size in sizes for dtype in dtypes or (None,)
    ]  # fmt: skip
    few = budget_s * _MANY_SIZES
    uneven, swept = [], []
    for op in ops if odd else ():
        peers = [name for name in against if name in _ODD_PEERS]
        uneven += [case("odd", op, one, first, peers, few) for one in odd_benchmarks_of(op, first or torch.bfloat16)]
    for op in ops:  # the largest first: torch.compile compiles for any number of rows with the largest in view
        for size in sorted(sweep, reverse=True):
            if (resized := _resized(benchmarks_of(op)[0], size)) is not None:
                several = (resized.sample.shapes[0] or ())[0] > 1
                peers = [name for name in against if name in _SWEEP_PEERS and (several or name != "compile")]
                swept.append(case("sweep", op, resized, first, peers, few))
    main, others = [*requested, *itertools.chain(*by_dtype[:1])], list(itertools.chain(*by_dtype[1:]))
    aimed = [each for each in (*main, *others) if has_target(each.benchmark) and each.dtype == each.benchmark.dtype]
    return list({each.key: each for each in (*aimed, *main, *uneven, *others, *swept)}.values())


def has_target(benchmark: Benchmark) -> bool:
    """Return whether a benchmark names a time, speed or memory to reach."""
    times = (benchmark.forward_ms, benchmark.backward_ms, benchmark.both_ms, benchmark.forward_x, benchmark.backward_x)
    return any(target is not None for target in (*times, benchmark.peak_mib))


_CPU_ELEMENTS = 2**20
_CPU_FLOPS = 3 * 10**8  # limits of a case on a CPU, as far as it has rows to spare: some milliseconds on two cores

_CPU_MOST = 40 * 10**6
"""Limit of all elements of a case, weights and tables included; beyond it a smaller, tested size is taken."""

_CPU_HEADS, _CPU_LENGTH = 4, 256  # limits of attention


def for_cpu(op: str, benchmark: Benchmark) -> Benchmark:
    """Return a table's case with fewer rows, or a tested size where the arguments shared by all rows are too large."""
    sample = benchmark.sample
    if op == "attention":
        (_, heads, length, width), (_, key_heads, keys, _) = (sample.shapes[i] or () for i in (0, 1))
        kept = min(key_heads, max(1, _CPU_HEADS * key_heads // heads))
        q = (1, kept * heads // key_heads, min(length, _CPU_LENGTH), width)
        k = (1, kept, min(keys, _CPU_LENGTH), width)
        return replace(benchmark, sample=SampleInput("x".join(map(str, q)), (q, k, k), sample.options))
    tested = min(filter(OPS[op].odd, public_op(op).cases.LARGE), key=_elements)
    if op.startswith("attention_"):  # other arguments hold the positions of their rows
        return replace(benchmark, sample=tested)
    fewer = [_with_fewer_rows(op, each) for each in (sample, tested)]
    return replace(benchmark, sample=next((each for each in fewer if _elements(each) <= _CPU_MOST), fewer[1]))


def _elements(sample: SampleInput) -> int:
    return sum(math.prod(shape) for shape in sample.shapes if shape is not None)


def _with_fewer_rows(op: str, sample: SampleInput) -> SampleInput:
    """Return a sample with as many rows as a CPU has time for."""
    first, shared = sample.shapes[0] or (1,), OPS[op].shared
    row_flops = 1
    if OPS[op].flops is not None:  # the first argument is multiplied by the second
        row_flops = 2 * math.prod(sample.shapes[1] or (1,))
        if op == "conv2d":
            row_flops *= max(1, math.prod(first[2:]) // int(sample.options.get("stride", 1)) ** 2)
    rows = min(first[0], max(1, _CPU_ELEMENTS // max(1, math.prod(first[1:]))), max(1, _CPU_FLOPS // row_flops))
    shapes = [
        (rows, *shape[1:])
        if shape is not None and i not in shared and shape[:1] == first[:1] and shape[1:] in ((), first[1:])
        else shape
        for i, shape in enumerate(sample.shapes)
    ]
    return _reshaped(sample, shapes, sample.name if rows == first[0] else f"{sample.name}, {rows} rows")


def _reshaped(
    sample: SampleInput,
    shapes: Sequence[tuple[int, ...] | None],
    name: str = "",
    high: Callable[[Indices], int] | None = None,
) -> SampleInput:
    """Return a sample with arguments of other shapes, named after them by default; `high` gives the indices' limit."""
    arguments: list[Any] = []
    for argument, shape in zip(sample.arguments, shapes, strict=True):
        if isinstance(argument, Indices):
            argument = replace(argument, high=high(argument) if high else argument.high)
        if isinstance(argument, (Fractions, Indices)) and shape is not None:
            argument = replace(argument, shape=shape)
        arguments.append(shape if isinstance(argument, tuple) else argument)
    name = name or "@".join("x".join(map(str, shape)) for shape in shapes if shape)
    return SampleInput(name, tuple(arguments), sample.options)


# --- requested sizes -------------------------------------------------------------------------------------------------
_NUMBER = r"(2\^\d{1,2}|\d{1,12})"
_MOST_SIZES = 256


def parse_sizes(texts: Sequence[str], flag: str = "--size") -> list[tuple[int, ...]]:
    """Return the sizes of "4096x4096", "2^20" or "128..8192x1024" (by doubling), each once, at most 256."""
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        ranges: list[list[int]] = []
        for factor in text.replace(" ", "").lower().split("x"):
            match = re.fullmatch(rf"{_NUMBER}(?:\.\.{_NUMBER})?", factor)
            low, high = (_number(part or factor) for part in match.groups()) if match else (0, 0)
            if not 0 < low <= high:
                raise ConfigError(f"{flag}: wanted sizes like 4096x4096, or 128..8192 for a range; got {text!r}")
            ranges.append([low << i for i in range((high // low).bit_length())])
        if len(found) + math.prod(map(len, ranges)) > _MOST_SIZES:
            raise ConfigError(f"{flag}: {text!r} makes more than {_MOST_SIZES} sizes")
        found |= dict.fromkeys(itertools.product(*ranges))
    return list(found)


def _number(text: str) -> int:
    base, _, power = text.partition("^")
    return int(base) << int(power) - 1 if power else int(base)


def sized(op: str, size: Sequence[int]) -> Benchmark:
    """Return a benchmark of an op with the size of its first argument; ConfigError if others do not follow.

    Dimensions that agree in all samples of the op are one number, so other arguments follow. A size may also have all
    numbers, in the order of the arguments (M, K, N for a product), or a single one for all if the first is a matrix.
    """
    candidates = [one for one in benchmarks_of(op) if not any(isinstance(x, Stated) for x in one.sample.arguments)]
    if not candidates:
        raise ConfigError(f"--size: arguments of {op} state positions of its rows; `bench {op}` measures its table")
    benchmark, names = max(((one, _names(op, one.sample)) for one in candidates), key=_ties)
    sample, rank = benchmark.sample, len(benchmark.sample.shapes[0] or ())
    old = dict(zip(names, _dimensions(sample), strict=True))
    free = list(old)
    first = dict.fromkeys(names[:rank])
    if len(size) not in (len(first), len(free)) and not (len(size) == 1 and rank <= 2):
        also = f", or {len(free)}" if len(free) > len(first) else ""
        example = "x".join(map(str, (sample.shapes[0] or ())))
        given = "x".join(map(str, size))
        raise ConfigError(f"--size: {op} takes {len(first)} numbers{also}, for example {example}; got {given}")
    new = dict.fromkeys(free, size[0]) if len(size) == 1 else dict(zip(free, size, strict=False))
    for name in free[len(new) :]:
        same = [one for one in first if old[one] == old[name]]
        half = 2 * old[name] == old[names[rank - 1]]  # rope's tables
        new[name] = new[same[-1]] if same else new[names[rank - 1]] // 2 if half else old[name]
    left: Iterator[int] = iter(new[name] for name in names)
    shapes = [None if shape is None else tuple(itertools.islice(left, len(shape))) for shape in sample.shapes]

    def high(argument: Indices) -> int:
        classes = [name for name in free if old[name] == argument.high]
        return new[classes[-1]] if classes and argument.dtype == torch.int64 else argument.high

    return Benchmark(_reshaped(sample, shapes, high=high), benchmark.dtype)


def _dimensions(sample: SampleInput) -> list[int]:
    return [length for shape in sample.shapes if shape is not None for length in shape]


def _names(op: str, sample: SampleInput) -> list[int]:
    """Return, for each dimension, the index of the first that equals it in all samples of the same ranks."""

    def form(one: SampleInput) -> list[int | None]:
        return [None if shape is None else len(shape) for shape in one.shapes]

    cases = public_op(op).cases
    others = [*cases.SAMPLES, *cases.LARGE, *(one.sample for one in cases.BENCHMARKS)]
    columns = list(zip(*(_dimensions(one) for one in others if form(one) == form(sample)), strict=True))
    return [columns.index(column) for column in columns]


def _ties(pair: tuple[Benchmark, list[int]]) -> tuple[int, int]:
    """Return how many other dimensions equal one of the first argument's, and the number of dimensions."""
    benchmark, names = pair
    dimensions, first = _dimensions(benchmark.sample), len(benchmark.sample.shapes[0] or ())
    tied = sum(dimensions[name] in dimensions[:first] for name in set(names) if name >= first)
    return tied, len(dimensions)


def sweep_sizes(largest: int = 28) -> list[int]:
    """Return 2^10 to 2^largest in powers of four, and after every second an odd number, whose tensor has one row."""
    both = ((1 << power, (1 << power) - power % 4 // 2) for power in range(10, largest + 1, 2))
    return [size for pair in both for size in dict.fromkeys(pair)]


def _resized(benchmark: Benchmark, size: int) -> Benchmark | None:
    """Return a benchmark with `size` elements in its first argument; None if others do not follow its rows."""
    first = benchmark.sample.arguments[0]
    if not isinstance(first, tuple) or len(first) != 2:
        return None
    columns = first[1]
    is_round = size & (size - 1) == 0
    shape = (size // columns, columns) if is_round and size >= columns else (1, size)
    shapes: list[tuple[int, ...] | None] = []
    for argument, old in zip(benchmark.sample.arguments, benchmark.sample.shapes, strict=True):
        if isinstance(argument, Indices) and old is not None:
            shapes.append((shape[0], *old[1:]))
        elif old in (first, (columns,)):
            shapes.append(shape if old == first else (shape[1],))
        else:
            return None
    sample = _reshaped(
        benchmark.sample, shapes, high=lambda one: min(one.high, shape[1])
    )  # classes, as many as columns
    return Benchmark(replace(sample, name="x".join(map(str, shape))), benchmark.dtype)
