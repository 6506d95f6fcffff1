"""`fuse`: a Python function of arrays becomes one kernel, and its gradient another."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from accelerant.accelerator.fusion import recorder
from accelerant.accelerator.fusion.code import C_TYPES, portable_source, triton_kernel
from accelerant.accelerator.fusion.functions import NAMES
from accelerant.accelerator.fusion.graph import (
    OPERATIONS,
    REDUCTIONS,
    FusedProgram,
    Input,
    Output,
    Reads,
    gradient_of,
    reads_of,
    unchanged,
)
from accelerant.accelerator.fusion.recorder import (
    DTYPES,
    ArrayView,
    Domain,
    Recording,
    Viewed,
    launch_of,
    quick_call,
    serves_quick,
    view_of,
)
from accelerant.accelerator.methods import ArrayOrigin, kind_of, to_torch
from accelerant.config import choice_overrides
from accelerant.errors import CompileError, ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.ops._launch import ceil_div, multiprocessors, next_power_of_2
from accelerant.ops._library import is_plain, name_of, refuses_triton_kernel
from accelerant.runtime import registry
from accelerant.runtime.compilation.host_c import c_compiler
from accelerant.runtime.dispatch import Case, Implementation, Operation
from accelerant.runtime.dispatch.plan import DispatchEntry
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import RecordedLaunch, observers, sole_record
from accelerant.runtime.provider import ComputeDevice, ComputeProvider
from accelerant.tensors.tensor import expanded, to

F = TypeVar("F", bound=Callable[..., Any])

_CALLS_LIMIT = 4096
_QUICK_KINDS = 4  # kinds of calls of one function that are quick
_WHOLE_ROW = 16384  # columns up to which a row is held in registers

_BLOCK = 1024
_PER_MULTIPROCESSOR = 8
"""Programs per multiprocessor at most where sums over the rows are kept, so that few are left to add up."""


# --- implementations -------------------------------------------------------------------------------------------------
Shape: TypeAlias = tuple[int, ...]


def _staged(
    run: Callable[..., tuple[Tensor, ...]], program: FusedProgram, shape: Shape, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Run a program whose kernel would need its own sums over the rows in parts; torch computes a last, small one."""
    if not program.over_rows:
        return run(program, shape, *tensors)
    few = all(each.layout in ("row", "scalar") for each in program.results)
    if few and not any(node.op in ("sum0", "max0") for node in program.nodes):
        return program.run_torch(shape, *tensors)
    first, rest, places = program.split
    results = run(first, shape, *tensors)
    leading, pairs = tuple(range(len(shape) - 1)), list(zip(results, places, strict=True))
    sums = tuple(y if place == -1 else y.amax(leading, keepdim=True) for y, place in pairs if place < 0)
    left = iter(_staged(run, rest, shape, (*tensors, *sums)) if rest.results else ())
    known = {place: y for y, place in pairs if place >= 0}
    return tuple(known[i] if i in known else next(left) for i in range(len(program.results)))


def _triton(program: FusedProgram, shape: Shape, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Launch the kernel of a program; arguments and results as FusedProgram.run_torch."""
    if not math.prod(shape):
        return program.run_torch(shape, *tensors)
    return _staged(_triton_part, program, shape, tensors)


def _triton_part(program: FusedProgram, shape: Shape, *tensors: Tensor) -> tuple[Tensor, ...]:
    M, N = _rows_and_columns(shape)
    device = tensors[0].device
    block = next_power_of_2(N)
    schedule, rows, programs, num_warps = "stream", 1, ceil_div(M * N, _BLOCK), 4
    summed = any(result.layout.endswith("sum") for result in program.results)
    if program.reduces:
        whole = block <= _WHOLE_ROW
        schedule = "whole" if whole else "looped"
        rows = max(1, 2048 // block) if whole else 1
        block = block if whole else 4 * _BLOCK
        num_warps = min(16, max(1, rows * block // 512))
        programs = ceil_div(M, rows)
        if summed and whole:
            programs = min(programs, _PER_MULTIPROCESSOR * multiprocessors(device))
    else:
        block = _BLOCK
    outputs = []
    for result in program.results:
        parts = result.layout.endswith("sum") and schedule == "whole"
        height = programs if parts else M
        columns = N if result.layout in ("full", "row sum") else 1
        outputs.append(torch.empty((height, columns), dtype=_kept(result), device=device))
    inputs = [tensors[i].contiguous() for i in program.used]
    constants = {"BLOCK": block} if schedule == "stream" else {"ROWS": rows, "BLOCK": block}
    kernel = triton_kernel(program, schedule)
    kernel.launch((programs,), (*inputs, *outputs, M, N), constants, num_warps=num_warps)
    return _summed(program, shape, outputs)


def _refuses_triton(case: Case) -> str | None:
    if reason := refuses_triton_kernel(case):
        return reason
    program: FusedProgram = case.options[0]
    for node in program.nodes:
        if node.dtype == torch.float64 or (node.op in (*REDUCTIONS, "rows", "columns") and node.dtype != torch.float32):
            return f"{node.op} of {name_of(node.dtype)}"
        if node.op in OPERATIONS and not OPERATIONS[node.op].triton and node.op not in REDUCTIONS:
            return f"no {node.op} in Triton"
    return None


_SCALAR = {
    "elu", "exp2", "expm1", "log", "log2", "log10", "log1p", "softplus", "sin", "cos", "erfc", "pow", "atan2", "mod",
    "floordiv",
}  # fmt: skip
_SCALAR_FLOAT64 = {"exp", "tanh", "sigmoid", "erf", "power"}
"""Functions that the C compiler makes no vectors of; and those of float64."""

_LEAST = 65536
_LEAST_SCALAR = 4096  # elements from which such a function takes longer than torch's call


def _refused_by_c(program: FusedProgram, known: Collection[torch.dtype]) -> str | None:
    dtypes = {x.dtype for x in program.inputs} | {y.dtype for y in program.results}
    dtypes |= {node.dtype for node in program.nodes} | {node.value for node in program.nodes if node.op == "cast"}
    unknown = sorted(name_of(each) for each in dtypes - set(known))
    return f"portable C has no {', '.join(unknown)} here" if unknown else None


def _refuses_portable(case: Case) -> str | None:
    program: FusedProgram = case.options[0]
    if case.device.type != "cpu":
        return f"no portable C on {case.device.type}"
    if len(case.options) > 1 and math.prod(case.shape) < _LEAST:
        return f"fewer than {_LEAST} elements and a gradient: torch's calls take less than ours"
    if reason := _refused_by_c(program, C_TYPES):
        return reason
    if any(node.value == "raises" for node in program.nodes if node.op in ("mod", "floordiv")):
        return "torch raises where an integer is divided by zero"
    floats = [node for node in program.nodes if node.by_column and node.dtype.is_floating_point]
    slow = {node.op for node in floats if node.op in _SCALAR}
    slow |= {node.op for node in floats if node.op in _SCALAR_FLOAT64 and node.dtype == torch.float64}
    if slow and math.prod(case.shape) >= min(_LEAST, _LEAST_SCALAR):
        return f"torch has vector functions for {', '.join(sorted(slow))}"
    try:
        c_compiler()
    except CompileError as error:
        return str(error)
    return None


def _portable(program: FusedProgram, shape: Shape, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Run the program's portable C on the CPU; arguments and results as FusedProgram.run_torch."""
    if not math.prod(shape):
        return program.run_torch(shape, *tensors)
    read = [tensors[i] for i in program.used]
    launch = launch_of(program, shape, tuple(expanded(tuple(x.shape), x.stride(), shape) for x in read))
    outputs = []
    for size, result in zip(launch.shapes, program.results, strict=True):
        if launch.order is None:
            outputs.append(torch.empty(size, dtype=result.dtype))
        else:
            back = [launch.order.index(k) for k in range(len(size))]
            outputs.append(torch.empty([size[k] for k in launch.order], dtype=result.dtype).permute(back))
    launch.run([x.data_ptr() for x in (*read, *outputs)])
    return tuple(outputs)


def _kept(result: Output) -> torch.dtype:
    """Return the dtype of a result before it is summed over the rows."""
    return torch.float32 if result.layout.endswith("sum") else result.dtype


def _summed(program: FusedProgram, shape: Shape, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the results in their shapes, parts of sums over the rows added up."""
    leading = shape[:-1]
    return tuple(
        y.sum(0).to(result.dtype).view(*[1] * len(leading), -1)
        if result.layout.endswith("sum")
        else y.view(*leading, -1)
        for y, result in zip(outputs, program.results, strict=True)
    )


def _rows_and_columns(shape: Shape) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1] if shape else 1


@functools.cache
def _operation(name: str) -> Operation:
    """Return the Operation of the functions of a name; its cases differ by program."""
    return Operation(
        name,
        (
            Implementation("triton", _triton, refuses=_refuses_triton, own=True),
            Implementation("portable", _portable, refuses=_refuses_portable, own=True),
            Implementation("torch", FusedProgram.run_torch, differentiable=True),
        ),
        cost=lambda case: case.options[0].cost(*case.shape),
        bucket=lambda case: (next_power_of_2(max(1, case.shape[0])), case.shape[1], case.options[0].digest),
    )


class _Autograd(torch.autograd.Function):
    """The forward kernel, and the backward kernel, which computes again what it needs from the inputs."""

    @staticmethod
    def forward(ctx: Any, name: str, program: FusedProgram, shape: Shape, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.name, ctx.program, ctx.shape = name, program, shape
        results = _run(f"{name}_fwd", program, shape, tensors)
        ctx.mark_non_differentiable(*(y for y in results if not y.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors, shape = ctx.saved_tensors, ctx.shape
        wanted = tuple(i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed)
        program, found = gradient_of(ctx.program, wanted)
        made: dict[int, Tensor] = {}
        if program is not None:
            args = (*tensors, *gradients)
            again = torch.is_grad_enabled()  # a gradient of the gradient is wanted: torch's functions have one
            results = program.run_torch(shape, *args) if again else _run(f"{ctx.name}_bwd", program, shape, args)
            made = {i: dx.view(tensors[i].shape) for i, dx in zip(found, results, strict=True)}
        for i in set(ctx.program.used).intersection(wanted).difference(made):  # of steps, as floor, and stops
            made[i] = torch.zeros_like(tensors[i])
        return None, None, None, *(made.get(i) for i in range(len(tensors)))


def _case(program: FusedProgram, shape: Shape, device: torch.device, differentiates: bool) -> Case:
    options = (program, "gradient") if differentiates else (program,)
    return Case(device, program.compute, _rows_and_columns(shape), options)


def _run(name: str, program: FusedProgram, shape: Shape, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    case = _case(program, shape, tensors[0].device, False)
    results: tuple[Tensor, ...] = _operation(name)(case, program, shape, *tensors)
    return results


# --- the function ----------------------------------------------------------------------------------------------------
class _Trace(NamedTuple):
    """One run of the function, see Recording; `reads` is what it read besides its arrays, None if unknown."""

    program: FusedProgram
    returned: tuple[recorder.Returned, ...]
    single: bool
    captured: tuple[Any, ...]
    reads: Reads | None
    views: tuple[tuple[ArrayView, Shape], ...] | None
    shape: Shape | None


class _Specialization(NamedTuple):
    """A trace for arrays that broadcast to `shape`; `wide` are their shapes in as many dimensions."""

    trace: _Trace
    shape: Shape
    wide: tuple[Shape, ...]
    results: tuple[Shape, ...]

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the arguments, and the arrays from outside, as the program's inputs."""
        program, views, captured = self.trace.program, self.trace.views, self.trace.captured
        if views is not None:
            tensors = [view_of(tensors[index], steps) for (index, steps), _ in views]
        given = [x.expand(wide) for x, wide in zip(tensors, self.wide, strict=True)]
        given = [x.resolve_neg() if x.is_neg() else x for x in given]
        if not captured:
            return given
        ones, kinds = (1,) * len(self.shape), program.inputs[len(given) :]
        numbers = (torch.as_tensor(x, dtype=each.dtype) for x, each in zip(captured, kinds, strict=True))
        return [*given, *(x.to(tensors[0].device, copy=True).view(ones) for x in numbers)]

    def returned(self, results: Sequence[Any]) -> Any:
        """Return the function's result: one array or several."""
        return results[0] if self.trace.single else tuple(results)


class _Call(NamedTuple):
    """The arguments of one call: `values`, the last ones by `names`; and the `places` of the arrays among them."""

    values: tuple[Any, ...]
    names: tuple[str, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], options: Mapping[str, Any]) -> _Call:
        """Return a call."""
        values = (*args, *options.values())
        places = [i for i, x in enumerate(values) if hasattr(x, "dtype") and not isinstance(x, np.generic)]
        return cls(values, tuple(options), tuple(places))

    @property
    def arrays(self) -> list[Any]:
        """The arrays."""
        return [self.values[i] for i in self.places]

    def filled(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional arguments, and those by name, with other values in the places of the arrays."""
        given = list(self.values)
        for place, x in zip(self.places, arrays, strict=True):
            given[place] = x
        positional = len(given) - len(self.names)
        return tuple(given[:positional]), dict(zip(self.names, given[positional:], strict=True))


class FusedFunction:
    """A function of arrays that runs as one kernel; see `fuse`."""

    def __init__(self, function: Callable[..., Any], device: ComputeDevice | None) -> None:
        functools.update_wrapper(self, function)
        self._function, self.device = function, device
        self._name = f"fused_{getattr(function, '__name__', type(function).__name__).strip('<>')}"
        self._plans: dict[Hashable, _Specialization] = {}
        self._recorded: dict[Hashable, _Trace] = {}
        self._writes_out = "out" not in _parameters(function)
        self._quick: tuple[Callable[[tuple[Any, ...]], Any], ...] = ()
        self._learned: list[_Specialization] = []
        self._lock = fork_safe(threading.RLock())

    def __repr__(self) -> str:
        return f"fuse({self._function!r})"

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the function's result for these arrays and constants."""
        if not (options or observers or choice_overrides or is_dynamo_compiling()):
            for quick in self._quick:
                if (result := quick(args)) is not None:
                    return result
        if torch.compiler.is_compiling() or any(isinstance(x, recorder.Traced) for x in (*args, *options.values())):
            return self._function(*args, **options)
        out = options.pop("out", None) if self._writes_out else None
        call = _Call.of(args, options)
        if not (arrays := call.arrays):
            raise UnsupportedDtype(
                f"{self._name[6:]} takes at least one array of torch, NumPy, CuPy or JAX: numpy.asarray(x)"
            )
        if any(isinstance(x, np.matrix) for x in arrays):
            raise UnsupportedDtype(
                f"{self._name[6:]}: fuse does not multiply matrices: pass np.asarray(x) of np.matrix"
            )
        if self.device is not None and not self.device.torch_device:
            if out is not None:
                raise UnsupportedCase(f"{self._name[6:]}: out= on {self.device.backend}; assign the result")
            return self._without_tensors(self.device, call)
        tensors, origin = self._tensors(arrays)
        plan = self._plan(tensors, call)
        if out is not None:
            return self._written(plan, tensors, arrays[0], out)
        results = self._compute(plan, tensors)
        result = plan.returned([y.view(shape) for y, shape in zip(results, plan.results, strict=True)])
        if origin is None:
            return result
        if not options and len(self._quick) < _QUICK_KINDS and self.device is None:
            self._learn(plan, call, tensors)
        return origin.wrap(result)

    def _written(self, plan: _Specialization, tensors: Sequence[Tensor], first: Any, out: Any) -> Any:
        """Compute into the arrays `out`, in their memory where the kernel can write there; they are checked before."""
        several = not plan.trace.single and isinstance(out, (tuple, list))
        name, targets = self._name[6:], tuple(out) if several else (out,)
        if len(targets) != len(plan.results):
            raise ShapeError(f"{name}: out must be {len(plan.results)} arrays, got {len(targets)}")
        for number, (y, size, made) in enumerate(zip(targets, plan.results, plan.trace.program.results, strict=True)):
            kind = kind_of(first)
            if not hasattr(y, "dtype") or kind_of(y) != kind or kind == "jax":
                raise UnsupportedDtype(f"{name}: out[{number}] must be an array of {kind}, got {type(y).__name__}")
            if str(y.dtype).removeprefix("torch.") != name_of(made.dtype):
                raise UnsupportedDtype(f"{name}: out[{number}] must be {name_of(made.dtype)}, got {y.dtype}")
            if tuple(y.shape) != size:
                raise ShapeError(f"{name}: out[{number}] must have shape {size}, got {tuple(y.shape)}")
            if kind == "numpy" and not y.flags.writeable:
                raise UnsupportedCase(f"{name}: out[{number}] is read-only")
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (*tensors, *targets)):
            raise UnsupportedCase(f"{name}: out= has no gradient; detach the tensors, or call it in torch.no_grad()")
        if not self._written_by_c(plan, tensors, targets):
            results = self._compute(plan, tensors)
            for y, result, size in zip(targets, results, plan.results, strict=True):
                if isinstance(y, np.ndarray):
                    np.copyto(y, result.numpy(force=True).reshape(size))
                else:
                    to_torch(y, None)[0].copy_(result.view(size))
        return out

    def _written_by_c(self, plan: _Specialization, tensors: Sequence[Tensor], targets: Sequence[Any]) -> bool:
        """Run portable C into `targets` if it was chosen before and their layouts allow it; return whether it ran."""
        program, shape = plan.trace.program, plan.shape
        if (chosen := self._served_by_c(plan, tensors)) is None or choice_overrides:
            return False
        inputs = plan.inputs(tensors)
        read = [inputs[i] for i in program.used]
        launch = launch_of(program, shape, tuple(expanded(tuple(x.shape), x.stride(), shape) for x in read))
        arrays = [y if isinstance(y, Tensor) else to_torch(y, None, order="K")[0] for y in targets]
        for y, given, size in zip(arrays, targets, launch.shapes, strict=True):
            address = y.data_ptr()
            if not isinstance(given, Tensor) and address != given.__array_interface__["data"][0]:
                return False  # a copy: of another byte order
            layout = y if launch.order is None else y.permute(launch.order)
            if not layout.is_contiguous() or y.is_neg():
                return False
            for x in (*read, *(other for other in arrays if other is not y)):
                within = len(launch.stages) == 1 and not program.reduces and x.data_ptr() == address
                same = within and tuple(x.shape) == tuple(y.shape) == size and x.stride() == y.stride()
                alike = same and x.itemsize == y.itemsize
                if not alike and np.may_share_memory(x.detach().numpy(), y.detach().numpy()):
                    return False
        with RecordedLaunch(chosen.record, chosen.provider, 0):
            launch.run([x.data_ptr() for x in (*read, *arrays)])
        for each in targets:
            if isinstance(each, Tensor) and not each.is_inference():
                torch.autograd.graph.increment_version(each)
        return True

    def _served_by_c(self, plan: _Specialization, tensors: Sequence[Tensor]) -> DispatchEntry | None:
        """Return the dispatch of such calls without a gradient, if it is to portable C and there are elements."""
        case = _case(plan.trace.program, plan.shape, tensors[0].device, False)
        chosen = _operation(f"{self._name}_fwd").plans.usual.get(case)
        served = chosen is not None and chosen.decision.implementation == "portable" and 0 not in plan.shape
        return chosen if served else None

    def _learn(self, plan: _Specialization, call: _Call, tensors: Sequence[Tensor]) -> None:
        """Remember a call of NumPy's arrays by portable C, so that the next one of its kind takes a microsecond."""
        chosen, trace, arrays = self._served_by_c(plan, tensors), plan.trace, call.arrays
        if chosen is None or trace.reads is None or trace.captured or plan in self._learned or not serves_quick(arrays):
            return
        self._learned.append(plan)
        steps, sources = [], []
        for i in trace.program.used:
            index, chain = (i, ()) if trace.views is None else trace.views[i][0]
            x = arrays[index]
            view = view_of(x, chain)
            wide = np.broadcast_to(view, plan.wide[i])
            sizes = zip(wide.shape, wide.strides, strict=True)
            steps.append(tuple(0 if size == 1 else step // x.itemsize for size, step in sizes))
            sources.append((call.places[index], view.__array_interface__["data"][0] - x.__array_interface__["data"][0]))
        launch = launch_of(trace.program, plan.shape, tuple(steps))
        if launch.parts == 1:
            dtypes = [_NUMPY_ALL[each.dtype] for each in trace.program.results]
            quick = quick_call(
                launch, call.values, sources, plan.results, dtypes, trace.single, chosen.record, trace.reads
            )
            self._quick = (*self._quick, quick)

    def program(self, *args: Any, **options: Any) -> FusedProgram:
        """Return the recorded program for arrays and constants like these."""
        call = _Call.of(args, options)
        return self._plan(self._tensors(call.arrays)[0], call).trace.program

    def _compute(self, plan: _Specialization, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        flat, program, shape = plan.inputs(tensors), plan.trace.program, plan.shape
        if not all(map(is_plain, flat)):
            return program.run_torch(shape, *flat)
        if torch.is_grad_enabled() and any(x.requires_grad for x in flat):
            operation = _operation(f"{self._name}_fwd")
            case = _case(program, shape, flat[0].device, True)
            if (alone := operation.torch_autograd_plan(case)) is not None:
                results: tuple[Tensor, ...] = operation.execute(case, alone, (program, shape, *flat))
                return results
            results = _Autograd.apply(self._name, program, shape, *flat)  # type: ignore[no-untyped-call]
            return results
        return _run(f"{self._name}_fwd", program, shape, flat)

    def _tensors(self, arrays: Sequence[Any]) -> tuple[list[Tensor], ArrayOrigin | None]:
        """Return the arrays as tensors of one device; and the origin of the first, unless all stay torch's."""
        if self.device is None and all(isinstance(x, Tensor) for x in arrays):
            tensors, origin = list(arrays), None
        else:
            target = torch.device(self.device.torch_device) if self.device is not None else _device_of(arrays)
            moved = [to_torch(x, target, order="K") for x in arrays]
            tensors, origin = [tensor for tensor, _ in moved], moved[0][1]
        for x in tensors:
            if x.dtype not in DTYPES:
                known = ", ".join(map(name_of, DTYPES))
                raise UnsupportedDtype(
                    f"{self._name[6:]}: fuse takes arrays of {known}, got {name_of(x.dtype)}: convert it"
                )
            if x.layout is not torch.strided:
                raise UnsupportedCase(f"{self._name[6:]}: fuse takes dense arrays, got {x.layout}: use .to_dense()")
            if x.device != tensors[0].device:
                raise ShapeError(
                    f"{self._name[6:]}: arrays on {tensors[0].device} and {x.device}: move them to one device"
                )
        return tensors, origin

    def _plan(self, arrays: Sequence[Any], call: _Call) -> _Specialization:
        """Return the plan of a call with these arrays, recording the function where it is the first."""
        constants = [x for i, x in enumerate(call.values) if i not in call.places]
        fixed = tuple((type(x), x, str(x) if isinstance(x, float) else None) for x in constants)  # 0.0 == -0.0
        kind = type(call.values[call.places[0]])
        key = (tuple((x.dtype, x.shape) for x in arrays), call.places, fixed, call.names, kind)
        try:
            plan = self._plans.get(key)
        except TypeError:
            odd = next(x for x in constants if not isinstance(x, Hashable))
            wanted = "fuse takes arrays, and constants that are hashable"
            raise UnsupportedDtype(f"{self._name[6:]}: {wanted}, got {type(odd).__name__}") from None
        if plan is None or not unchanged(plan.trace.reads):
            with self._lock:
                plan = self._made(key, arrays, call)
                if len(self._plans) >= _CALLS_LIMIT:
                    self._plans.clear()
                self._plans[key] = plan
        return plan

    def _made(self, key: tuple[Any, ...], arrays: Sequence[Any], call: _Call) -> _Specialization:
        shapes = [tuple(x.shape) for x in arrays]
        try:
            whole: Shape | None = self._whole(shapes)
        except ShapeError:
            whole = None  # views of the arrays may broadcast
        trace = self._traced(key, whole, arrays, call)
        if trace.shape is not None:
            whole = trace.shape
            shapes = [size for _, size in trace.views or ()] or shapes
        elif whole is None:
            self._whole(shapes)  # raises
        domain = Domain(whole or ())
        whole = whole or (1,)
        wide = [
            (*domain.rows, *size[-1:]) if _input(torch.float32, size, domain)[1] else _padded(size, len(whole))
            for size in shapes
        ]
        results = tuple(each.size if trace.shape is not None else domain.shape(each) for each in trace.returned)
        return _Specialization(trace, whole, tuple(wide), results)

    def _whole(self, shapes: Sequence[Shape]) -> Shape:
        try:
            return tuple(torch.broadcast_shapes(*shapes))
        except RuntimeError:
            shown = ", ".join(map(str, shapes))
            raise ShapeError(f"{self._name[6:]}: shapes {shown} do not broadcast") from None

    def _traced(self, key: tuple[Any, ...], whole: Shape | None, arrays: Sequence[Any], call: _Call) -> _Trace:
        """Return the trace of a call, made once for a class of shapes; a function that takes views runs three times."""
        shapes = [tuple(x.shape) for x in arrays]
        inputs = [(_input(x.dtype, size, Domain(whole or ()))[0], size) for x, size in zip(arrays, shapes, strict=True)]
        general = (tuple((each, len(shape)) for each, shape in inputs), *key[1:])
        for known in (key,) if whole is None else (key, general):
            if (found := self._recorded.get(known)) is not None and unchanged(found.reads):
                return found
        kind = kind_of(call.values[call.places[0]])
        begin = functools.partial(
            Recording, inputs=inputs, of_torch=kind == "torch", as_numpy=kind in ("numpy", "cupy")
        )

        def run(recording: Recording) -> tuple[Recording, list[Any], bool]:
            args, options = call.filled(recording.values)
            result = self._function(*args, **options)
            if not (single := not isinstance(result, (tuple, list))) and not result:
                raise UnsupportedCase(f"fuse: {self._name[6:]} returns nothing")
            return recording, [result] if single else list(result), single

        views: tuple[tuple[ArrayView, Shape], ...] | None = None
        try:
            if whole is None:
                raise Viewed
            recording, outputs, single = run(begin(Domain(whole)))
        except Viewed:
            dry, outputs, single = run(begin(Domain(()), views=(), dry=True))
            views = tuple(dry.used(outputs))
            try:
                whole = self._whole([size for _, size in views])
            except ShapeError:
                shown = ", ".join(sorted({str(size) for _, size in views}))
                raise UnsupportedCase(
                    f"{self._name[6:]}: fuse has one shape a kernel, and views of shapes {shown} in one function: "
                    "compute them in functions of their own"
                ) from None
            recording, outputs, single = run(begin(Domain(whole), views=[view for view, _ in views]))
        program, returned = recording.program(outputs)
        reads = reads_of(self._function, *call.filled([None] * len(arrays)), NAMES)  # as they are after its run
        exact = recording.reads_shape
        made = _Trace(program, returned, single, tuple(recording.captured), reads, views, whole if exact else None)
        self._recorded[key if exact else general] = made
        return made

    def _without_tensors(self, device: ComputeDevice, call: _Call) -> Any:
        """Run portable C on NumPy arrays, on a device that torch does not know; copies there and back."""
        provider = registry.create(device.backend)
        host = [to_torch(x, None)[0] for x in call.arrays]
        for x, tensor in zip(call.arrays, host, strict=True):
            if not isinstance(x, np.ndarray) or tensor.dtype not in _NUMPY:
                kind = f"{x.dtype} array of {kind_of(x)}"
                known = ", ".join(map(name_of, _NUMPY))
                raise UnsupportedDtype(f"{device.backend} takes NumPy arrays of {known}, got a {kind}")
        plan = self._plan(host, call)
        if "portable" not in provider.dialects:  # tensors of `acl.to`, operation by operation
            moved = [to(x, device.label) for x in plan.inputs(host)]
            made = plan.trace.program.run_torch(plan.shape, *moved)
            return plan.returned([y.cpu().numpy().reshape(size) for y, size in zip(made, plan.results, strict=True)])
        if reason := _refused_by_c(plan.trace.program, _NUMPY):
            raise UnsupportedCase(f"{self._name[6:]} on {device.backend}: {reason}")
        run = functools.partial(self._on_device, provider, device)
        inputs, shape = plan.inputs(host), plan.shape
        some = math.prod(shape)
        results = (
            _staged(run, plan.trace.program, shape, inputs) if some else plan.trace.program.run_torch(shape, *inputs)
        )
        return plan.returned([y.numpy().reshape(size) for y, size in zip(results, plan.results, strict=True)])

    def _on_device(
        self, provider: ComputeProvider, device: ComputeDevice, program: FusedProgram, shape: Shape, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Run a program's portable C; arguments and results as FusedProgram.run_torch, on the host."""
        M, N = _rows_and_columns(shape)
        cost = program.cost(M, N)
        record = sole_record(
            f"{self._name}_fwd", "portable", device.backend, device.label,
            f"{M}x{N} {name_of(program.compute)} {program}", size_bytes=cost.bytes, operations=cost.flops,
        )  # fmt: skip
        results = [
            np.empty((M, N if each.layout in ("full", "row sum") else 1), _NUMPY[each.dtype])
            for each in program.results
        ]
        kernel = provider.compile(portable_source(program), entry="fused", device=device.index)
        flat = [tensors[i].contiguous().numpy() for i in program.used]
        sources = [provider.copy_to_device(x, device.index) for x in flat]
        targets = [provider.allocate(y.nbytes, device.index) for y in results]
        threads = M if program.reduces else M * N
        with RecordedLaunch(record, provider, device.index):
            provider.launch(kernel, (ceil_div(threads, 256),), (256,), (*sources, *targets, M, N))
        made = [provider.copy_to_host(b, y.dtype, y.shape) for b, y in zip(targets, results, strict=True)]
        return _summed(program, shape, [torch.from_numpy(y) for y in made])


_NUMPY: dict[torch.dtype, Any] = {
    kind: np.dtype(name_of(kind))
    for kind in (torch.float32, torch.bool, torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16)
}
"""Dtypes of portable C on devices, float64 not being on all."""

_NUMPY_ALL = {**_NUMPY, torch.float64: np.dtype(np.float64)}


def _input(dtype: torch.dtype, shape: Shape, domain: Domain) -> tuple[Input, bool]:
    """Return an input of a shape, and whether it is expanded to the leading sizes of the domain."""
    leading, columns = shape[:-1], shape[-1] if shape else 1
    by_row = _padded(leading, len(domain.rows)) == domain.rows
    expands = not by_row and any(size != 1 for size in leading)
    return Input(by_row or expands, columns == domain.N, dtype), expands


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _padded(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (1,) * (length - len(sizes)) + sizes


def _device_of(arrays: Sequence[Any]) -> torch.device:
    """Return the device of the first array that is not on the host, or the CPU."""
    for x in arrays:
        if isinstance(x, Tensor) and x.device.type != "cpu":
            return x.device
        if kind_of(x) in ("cupy", "jax"):
            device = torch.utils.dlpack.from_dlpack(x).device
            if device.type != "cpu":
                return device
    return torch.device("cpu")


@overload
def fuse(function: F, *, device: registry.DeviceLike = None) -> F: ...


@overload
def fuse(function: None = None, *, device: registry.DeviceLike = None) -> Callable[[F], F]: ...


def fuse(function: Callable[..., Any] | None = None, *, device: registry.DeviceLike = None) -> Any:
    """Turn a function of arrays into one kernel, with a gradient that is one kernel too.

    >>> @acl.fuse
    ... def scaled_softmax(x, scale):
    ...     return torch.softmax(x * scale, dim=-1)
    >>> y = scaled_softmax(x, scale)

    The function runs once for each combination of dtypes and kinds of shape, on values that record what it does with
    them: operators, methods, and functions of torch and NumPy that work element by element or on the last dimension.
    It runs again where a number that it reads from outside (globals, closures, default arguments, attributes) has
    changed; arrays of no dimension are read at each call, others must be arguments.

    The record becomes a Triton kernel on CUDA and ROCm, and portable C on OpenCL and, for large arrays of float32, on
    the CPU; elsewhere torch runs it, operation by operation, as the ledger and `explain` say.

    Args:
        function: of arrays of torch, NumPy, CuPy or JAX, and of hashable constants (numbers, strings, None), whose
            value is part of the kernel. It returns an array or a tuple of them.
        device: to which arrays are moved: a name ("cuda:1", "opencl"), a torch.device or an entry of acl.devices();
            "auto" is the best one. By default they stay where they are.

    Returns:
        the function, to be called as before, with `out=` for arrays that take the results. Arrays are of floats, bool
        or integers; their shapes broadcast. Computed in float32 (float64 for float64, integers as they are) and rounded
        once, to the dtype that torch gives, or NumPy for NumPy's arrays; long sums keep their digits. Results are new
        arrays of the first one's library, on its device. Differentiable for torch tensors; second derivatives are
        torch's. The gradient of a maximum is shared equally among the largest elements.

    Raises:
        UnsupportedCase: at the first call: the function does what cannot be recorded (control flow that depends on
            values, unknown functions, reductions over some of the leading dimensions); names the function and the line.
            `out` with a gradient, or read-only.
        ShapeError, UnsupportedDtype: shapes that do not broadcast, several devices, other dtypes; of `out`, too.
        ConfigError, BackendUnavailable: an unknown or absent device.
    """
    if function is None:
        return functools.partial(fuse, device=device)
    if not callable(function):
        raise ConfigError(f"fuse takes a function, got {type(function).__name__}")
    return FusedFunction(function, None if device is None else registry.find_device(device))
