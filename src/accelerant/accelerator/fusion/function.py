"""`fuse`: a Python function of arrays becomes one kernel, and its gradient another."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from accelerant.accelerator.fusion.code import portable_source, triton_kernel, used_inputs
from accelerant.accelerator.fusion.graph import Input, Program, Result, gradient_of
from accelerant.accelerator.fusion.outside import Reads, reads_of, unchanged
from accelerant.accelerator.fusion.recorder import NAMES, Domain, Recording, Returned
from accelerant.accelerator.methods import ArrayOrigin, kind_of, to_torch
from accelerant.errors import CompileError, ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.ops._launch import ceil_div, multiprocessors, next_power_of_2
from accelerant.ops._library import is_plain, name_of
from accelerant.ops._refusals import FLOATING, refuses_triton_kernel
from accelerant.runtime import registry
from accelerant.runtime.compilation.host_c import c_compiler
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.dispatch import Case, Implementation, Operation
from accelerant.runtime.host import fork_safe
from accelerant.runtime.provider import ComputeDevice
from accelerant.runtime.recorded_launch import RecordedLaunch, sole_record

__all__ = ["FusedFunction", "fuse"]

F = TypeVar("F", bound=Callable[..., Any])

_CALLS_LIMIT = 4096
_WHOLE_ROW = 16384
"""Columns up to which a row is held in registers."""

_BLOCK = 1024
_PER_MULTIPROCESSOR = 8
"""Programs per multiprocessor at most where sums over the rows are kept, so that few are left to add up."""


# --- implementations -------------------------------------------------------------------------------------------------


def _triton(program: Program, M: int, N: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Launch the kernel of a program; arguments and results as Program.run_torch."""
    if not M * N:
        return program.run_torch(N, *tensors)
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
    inputs = [tensors[i] for i in used_inputs(program)]
    constants = {"BLOCK": block} if schedule == "stream" else {"ROWS": rows, "BLOCK": block}
    kernel = triton_kernel(program, schedule)
    kernel.launch((programs,), (*inputs, *outputs, M, N), constants, num_warps=num_warps)
    return _summed(program, outputs)


_SCALAR = {"elu", "exp2", "expm1", "log", "log2", "log10", "log1p", "softplus", "sin", "cos", "erfc", "pow"}
"""Functions that the C compiler makes no vectors of."""

_LEAST = 65536
_CHUNK = 4096
"""Elements of a row that is cut from an array without rows, and elements of a block at least."""


def _refused_by_c(program: Program) -> str | None:
    dtypes = {x.dtype for x in program.inputs} | {y.dtype for y in program.results}
    dtypes |= {node.value for node in program.nodes if node.op == "cast"}
    return None if dtypes <= _NUMPY.keys() else "portable C computes with float32 and bool alone"


def _refuses_portable(case: Case) -> str | None:
    program: Program = case.options[0]
    if case.device.type != "cpu":
        return f"no portable C on {case.device.type}"
    if math.prod(case.shape) < _LEAST:
        return f"fewer than {_LEAST} elements: torch's calls take less than ours"
    if reason := _refused_by_c(program):
        return reason
    slow = sorted({node.op for node in program.nodes if node.op in _SCALAR and node.by_column})
    if slow:
        return f"torch has vector functions for {', '.join(slow)}"
    try:
        c_compiler()
    except CompileError as error:
        return str(error)
    return None


def _portable(program: Program, M: int, N: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Run the program's portable C on the CPU; arguments and results as Program.run_torch."""
    if not M * N:
        return program.run_torch(N, *tensors)
    whole = not program.reduces and all(x.by_row == x.by_column for x in program.inputs)
    rows, columns = (M * N // _CHUNK, _CHUNK) if whole and M * N % _CHUNK == 0 else (M, N)
    outputs = [
        torch.empty((M, N if result.layout in ("full", "row sum") else 1), dtype=_kept(result))
        for result in program.results
    ]
    kernel = _host_kernel(program)
    threads = min(1024, max(1, _CHUNK // columns))
    arrays = [tensors[i] for i in used_inputs(program)]
    registry.create("cpu").launch(kernel, (ceil_div(rows, threads),), (threads,), (*arrays, *outputs, rows, columns))
    return _summed(program, outputs)


@functools.lru_cache(maxsize=1024)
def _host_kernel(program: Program) -> Kernel:
    return registry.create("cpu").compile(portable_source(program, host=True), entry="fused", device=0)


def _kept(result: Result) -> torch.dtype:
    """Return the dtype of a result before it is summed over the rows."""
    return torch.float32 if result.layout.endswith("sum") else result.dtype


def _summed(program: Program, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the results, parts of sums over the rows added up."""
    return tuple(
        y.sum(0, keepdim=True).to(result.dtype) if result.layout.endswith("sum") else y
        for y, result in zip(outputs, program.results, strict=True)
    )


def _torch(program: Program, M: int, N: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return program.run_torch(N, *tensors)


@functools.cache
def _operation(name: str) -> Operation:
    """Return the Operation of the functions of a name; its cases differ by program."""
    return Operation(
        name,
        (
            Implementation("triton", _triton, refuses=refuses_triton_kernel, own=True),
            Implementation("portable", _portable, refuses=_refuses_portable, own=True),
            Implementation("torch", _torch, differentiable=True),
        ),
        cost=lambda case: case.options[0].cost(*case.shape),
        bucket=lambda case: (next_power_of_2(max(1, case.shape[0])), case.shape[1], case.options[0].digest),
    )


class _Autograd(torch.autograd.Function):
    """The forward kernel, and the backward kernel, which computes again what it needs from the inputs."""

    @staticmethod
    def forward(ctx: Any, name: str, program: Program, M: int, N: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.name, ctx.program, ctx.size = name, program, (M, N)
        results = _run(f"{name}_fwd", program, M, N, tensors)
        ctx.mark_non_differentiable(*(y for y in results if not y.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors, (M, N) = ctx.saved_tensors, ctx.size
        wanted = tuple(i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed)
        program, found = gradient_of(ctx.program, wanted)
        made: dict[int, Tensor] = {}
        if program is not None:
            args = (*tensors, *(dy.contiguous() for dy in gradients))
            again = torch.is_grad_enabled()  # a gradient of the gradient is wanted: torch's functions have one
            results = program.run_torch(N, *args) if again else _run(f"{ctx.name}_bwd", program, M, N, args)
            made = dict(zip(found, results, strict=True))
        for i in set(used_inputs(ctx.program)).intersection(wanted).difference(made):  # of steps, as floor, and stops
            made[i] = torch.zeros_like(tensors[i])
        return None, None, None, None, *(made.get(i) for i in range(len(tensors)))


def _run(name: str, program: Program, M: int, N: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    case = Case(tensors[0].device, program.compute, (M, N), (program,))
    results: tuple[Tensor, ...] = _operation(name)(case, program, M, N, *tensors)
    return results


# --- the function ----------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """The part of a call that is constant between arrays of the same shapes and dtypes.

    Attributes:
        shapes: of the inputs as (M or 1, N or 1), after they are expanded to `wide` where that is not None.
        single: the function returns one array, not a tuple.
        captured: arrays of no dimension from outside of the function, which are read at each call.
        reads: what the function read besides its arrays; None where the next run may differ.
    """

    program: Program
    domain: Domain
    shapes: tuple[tuple[int, int], ...]
    wide: tuple[tuple[int, ...] | None, ...]
    results: tuple[tuple[int, ...], ...]
    single: bool
    captured: tuple[Any, ...]
    reads: Reads | None

    def flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the arguments, and the arrays from outside, as the program's inputs."""
        flat = [
            (x if wide is None else x.expand(wide)).resolve_neg().reshape(shape).contiguous()
            for x, shape, wide in zip(tensors, self.shapes, self.wide, strict=True)
        ]
        if not self.captured:
            return flat
        inputs = self.program.inputs[len(flat) :]
        numbers = (torch.as_tensor(x, dtype=each.dtype) for x, each in zip(self.captured, inputs, strict=True))
        return [*flat, *(x.to(tensors[0].device, copy=True).view(1, 1) for x in numbers)]


class _Record(NamedTuple):
    """One run of the function; see Recording and _Plan."""

    program: Program
    returned: tuple[Returned, ...]
    single: bool
    captured: tuple[Any, ...]
    reads: Reads | None


class FusedFunction:
    """A function of arrays that runs as one kernel; see `fuse`."""

    def __init__(self, function: Callable[..., Any], device: ComputeDevice | None) -> None:
        functools.update_wrapper(self, function)
        self._function, self.device = function, device
        self._name = f"fused_{getattr(function, '__name__', type(function).__name__).strip('<>')}"
        self._plans: dict[Hashable, _Plan] = {}
        self._recorded: dict[Hashable, _Record] = {}
        self._lock = fork_safe(threading.RLock())

    def __repr__(self) -> str:
        return f"fuse({self._function!r})"

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the function's result for these arrays and constants."""
        if torch.compiler.is_compiling():
            return self._function(*args, **options)
        values = (*args, *options.values())
        places = [i for i, x in enumerate(values) if hasattr(x, "dtype") and not isinstance(x, np.generic)]
        if not places:
            raise UnsupportedDtype(f"{self._name[6:]} takes at least one array of torch, NumPy, CuPy or JAX")
        arrays = [values[i] for i in places]
        if self.device is not None and not self.device.torch_device:
            return self._without_tensors(arrays, values, places, tuple(options))
        tensors, origin = self._tensors(arrays)
        plan = self._plan(tensors, values, places, tuple(options))
        results = self._compute(plan, tensors)
        results = tuple(y.view(shape) for y, shape in zip(results, plan.results, strict=True))
        result = results[0] if plan.single else results
        return result if origin is None else origin.wrap(result)

    def program(self, *args: Any, **options: Any) -> Program:
        """Return the recorded program for arrays and constants like these."""
        values = (*args, *options.values())
        places = [i for i, x in enumerate(values) if hasattr(x, "dtype") and not isinstance(x, np.generic)]
        return self._plan(self._tensors([values[i] for i in places])[0], values, places, tuple(options)).program

    def _compute(self, plan: _Plan, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        flat, program, M, N = plan.flat(tensors), plan.program, plan.domain.M, plan.domain.N
        if not all(map(is_plain, flat)):
            return program.run_torch(N, *flat)
        if torch.is_grad_enabled() and any(x.requires_grad for x in flat):
            operation = _operation(f"{self._name}_fwd")
            case = Case(flat[0].device, program.compute, (M, N), (program,))
            alone = operation.torch_autograd_plan(case)
            if alone is not None:
                results: tuple[Tensor, ...] = operation.execute(case, alone, (program, M, N, *flat))
                return results
            results = _Autograd.apply(self._name, program, M, N, *flat)  # type: ignore[no-untyped-call]
            return results
        return _run(f"{self._name}_fwd", program, M, N, flat)

    def _tensors(self, arrays: Sequence[Any]) -> tuple[list[Tensor], ArrayOrigin | None]:
        """Return the arrays as tensors of one device; and the origin of the first, unless all stay torch's."""
        if self.device is None and all(isinstance(x, Tensor) for x in arrays):
            tensors, origin = list(arrays), None
        else:
            target = torch.device(self.device.torch_device) if self.device is not None else _device_of(arrays)
            moved = [to_torch(x, target) for x in arrays]
            tensors, origin = [tensor for tensor, _ in moved], moved[0][1]
        for x in tensors:
            if x.dtype not in FLOATING and x.dtype != torch.bool:
                known = ", ".join(map(name_of, FLOATING))
                raise UnsupportedDtype(
                    f"{self._name[6:]}: fuse takes arrays of {known} and bool, got {name_of(x.dtype)}"
                )
            if x.layout is not torch.strided:
                raise UnsupportedCase(f"{self._name[6:]}: fuse takes dense arrays, got {x.layout}: use .to_dense()")
            if x.device != tensors[0].device:
                raise ShapeError(
                    f"{self._name[6:]}: arrays on {tensors[0].device} and {x.device}: move them to one device"
                )
        return tensors, origin

    def _plan(self, arrays: Sequence[Any], values: tuple[Any, ...], places: list[int], names: tuple[str, ...]) -> _Plan:
        """Return the plan of a call with these arrays, recording the function where it is the first."""
        constants = [x for i, x in enumerate(values) if i not in places] if len(places) < len(values) else []
        fixed = tuple((type(x), x, str(x) if isinstance(x, float) else None) for x in constants)  # 0.0 == -0.0
        key = (tuple((x.dtype, x.shape) for x in arrays), tuple(places), fixed, names, type(values[places[0]]))
        try:
            plan = self._plans.get(key)
        except TypeError:
            odd = next(x for x in constants if not isinstance(x, Hashable))
            name, kind = self._name[6:], type(odd).__name__
            raise UnsupportedDtype(f"{name}: fuse takes arrays, and constants that are hashable, got {kind}") from None
        if plan is None or not unchanged(plan.reads):
            with self._lock:
                plan = self._made(key, arrays, values, places, names)
                if len(self._plans) >= _CALLS_LIMIT:
                    self._plans.clear()
                self._plans[key] = plan
        return plan

    def _made(
        self, key: tuple[Any, ...], arrays: Sequence[Any], values: tuple[Any, ...], places: list[int],
        names: tuple[str, ...],
    ) -> _Plan:  # fmt: skip
        shapes = [tuple(x.shape) for x in arrays]
        try:
            whole = torch.broadcast_shapes(*shapes)
        except RuntimeError:
            raise ShapeError(f"{self._name[6:]}: shapes {', '.join(map(str, shapes))} do not broadcast") from None
        domain = Domain(whole)
        inputs: list[tuple[Input, int]] = []
        wide: list[tuple[int, ...] | None] = []
        for x, shape in zip(arrays, shapes, strict=True):
            leading, columns = shape[:-1], shape[-1] if shape else 1
            by_row = _padded(leading, len(domain.rows)) == domain.rows
            expands = not by_row and any(size != 1 for size in leading)
            wide.append((*domain.rows, columns) if expands else None)
            inputs.append((Input(by_row or expands, columns == domain.N, x.dtype), len(shape)))
        program, returned, single, captured, reads = self._record(key, domain, inputs, values, places, names)
        results = tuple(domain.shape(each.ndim, True, each.by_column, each.dropped) for each in returned)
        for number, (shape, each) in enumerate(zip(results, returned, strict=True)):
            if math.prod(shape) != domain.M * (domain.N if each.by_column else 1):
                text = f"result {number} has shape {shape}, the inputs {tuple(whole)}"
                raise UnsupportedCase(f"fuse: {text}: compute it outside of the fused function")
        return _Plan(
            program,
            domain,
            tuple(each.size(domain.M, domain.N) for each, _ in inputs),
            tuple(wide),
            results,
            single,
            captured,
            reads,
        )

    def _record(
        self, key: tuple[Any, ...], domain: Domain, inputs: list[tuple[Input, int]], values: tuple[Any, ...],
        places: list[int], names: tuple[str, ...],
    ) -> _Record:  # fmt: skip
        """Return the program, run the function once for each class of shapes, or each shape if it asks for one.

        It runs again where what it read has changed, or where that is unknown.
        """
        general = (tuple(inputs), *key[1:])
        for known in (general, key):
            if (found := self._recorded.get(known)) is not None and unchanged(found.reads):
                return found
        of_torch = kind_of(values[places[0]]) == "torch"
        recording = Recording(domain, inputs, of_torch=of_torch)
        given = list(values)
        for place, traced in zip(places, recording.values, strict=True):
            given[place] = traced
        positional = len(values) - len(names)
        result = self._function(*given[:positional], **dict(zip(names, given[positional:], strict=True)))
        single = not isinstance(result, (tuple, list))
        if not single and not result:
            raise UnsupportedCase(f"fuse: {self._name[6:]} returns nothing")
        program, returned = recording.program([result] if single else result)
        constants = [None if i in places else x for i, x in enumerate(values)]
        options = dict(zip(names, constants[positional:], strict=True))
        reads = reads_of(self._function, tuple(constants[:positional]), options, NAMES)  # as they are after its run
        made = _Record(program, returned, single, tuple(recording.captured), reads)
        self._recorded[key if recording.reads_shape else general] = made
        return made

    def _without_tensors(
        self, arrays: list[Any], values: tuple[Any, ...], places: list[int], names: tuple[str, ...]
    ) -> Any:
        """Run portable C on NumPy arrays, on a device that torch does not know; copies there and back."""
        device = self.device
        assert device is not None  # for the type checker: the caller's device is one without tensors
        provider = registry.create(device.backend)
        host = [to_torch(x, None)[0] for x in arrays]
        for x, tensor in zip(arrays, host, strict=True):
            if not isinstance(x, np.ndarray) or tensor.dtype not in _NUMPY:
                kind = f"{x.dtype} array of {kind_of(x)}"
                raise UnsupportedDtype(f"{device.backend} takes NumPy arrays of float32 and bool, got a {kind}")
        if "portable" not in provider.dialects:
            raise UnsupportedCase(f"the {device.backend} backend compiles no portable C")
        plan = self._plan(host, values, places, names)
        program, (M, N) = plan.program, (plan.domain.M, plan.domain.N)
        if reason := _refused_by_c(program):
            raise UnsupportedCase(f"{self._name[6:]} on {device.backend}: {reason}")
        cost = program.cost(M, N)
        record = sole_record(
            f"{self._name}_fwd", "portable", device.backend, device.label, f"{M}x{N} float32 {program}",
            size_bytes=cost.bytes, operations=cost.flops,
        )  # fmt: skip
        results = [np.empty((M, N if each.layout == "full" else 1), _NUMPY[each.dtype]) for each in program.results]
        if M * N:
            flat = [x.numpy() for x in plan.flat(host)]
            kernel = provider.compile(portable_source(program, host=False), entry="fused", device=device.index)
            sources = [provider.copy_to_device(flat[i], device.index) for i in used_inputs(program)]
            targets = [provider.allocate(y.nbytes, device.index) for y in results]
            threads = M if program.reduces else M * N
            with RecordedLaunch(record, provider, device.index):
                provider.launch(kernel, (ceil_div(threads, 256),), (256,), (*sources, *targets, M, N))
            results = [provider.copy_to_host(b, y.dtype, y.shape) for b, y in zip(targets, results, strict=True)]
        shaped = tuple(y.reshape(shape) for y, shape in zip(results, plan.results, strict=True))
        return shaped[0] if plan.single else shaped


_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.bool: np.bool_}


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
def fuse(function: F, *, device: str | None = None) -> F: ...


@overload
def fuse(function: None = None, *, device: str | None = None) -> Callable[[F], F]: ...


def fuse(function: Callable[..., Any] | None = None, *, device: str | None = None) -> Any:
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
        device: name of a device as for Accelerator, to which arrays are moved ("cuda", "opencl"); by default they
            stay where they are.

    Returns:
        the function, to be called as before. Arrays are float16, bfloat16, float32, float64 or bool. Their shapes
        broadcast; fastest are arrays of one shape (..., n), rows (n,), columns (..., 1) and scalars. Computed in
        float32 (float64 for float64) and rounded once, to the dtype that torch gives; long sums keep their digits.
        Results are new arrays of the first one's library, on its device. Differentiable for torch tensors; second
        derivatives are torch's. The gradient of a maximum is shared equally among the largest elements.

    Raises:
        UnsupportedCase: at the first call: the function does what cannot be recorded (control flow that depends on
            values, unknown functions, dimensions but the last); names the function and the line.
        ShapeError, UnsupportedDtype: shapes that do not broadcast, several devices, other dtypes.
        ConfigError, BackendUnavailable: an unknown or absent device.
    """
    if function is None:
        return functools.partial(fuse, device=device)
    if not callable(function):
        raise ConfigError(f"fuse takes a function, got {type(function).__name__}")
    return FusedFunction(function, None if device is None else registry.choose(device))
