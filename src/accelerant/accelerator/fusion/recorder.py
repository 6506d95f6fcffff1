"""Records a Python function of arrays as a program, and calls its kernel on the host.

What a Traced value meets is looked up by name in FUNCTIONS; what is not there is refused by that name, with the line of
the user's code. A kernel takes a table of 64-bit integers: the addresses of the inputs that it reads and of the
results; rows M, columns N, rows and columns of a part, parts across, parts; the first stage and the end; scratch
memory; sizes of the dimensions that the rows are made of, but for the first; and of each input the strides of these
dimensions and of a column. A quick call compares the arguments with an earlier call's and computes in one call of C: it
reads NumPy's arrays and tuples in memory, where CPython with its lock has them (`_READABLE`).
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import linecache
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch

from accelerant.accelerator.fusion import graph
from accelerant.accelerator.fusion.code import portable_source, stages_of
from accelerant.accelerator.fusion.graph import REDUCTIONS, Expr, FusedProgram, Input, Reads, computed_in
from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.ops._library import FLOATING, name_of
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.ledger import SAMPLE_EVERY, OpRecord, ledger

_PART = 16384  # elements of a part
_LEAST = 65536  # elements that are shared among cores, at least
_TILE = 64  # rows and columns of a part of arrays whose rows are not next to each other in memory


class HostLaunch(NamedTuple):
    """A kernel's launch on arrays of some shape and strides: its table without addresses, scratch in 8 bytes."""

    kernel: Kernel
    table: np.ndarray[Any, Any]
    order: tuple[int, ...] | None
    shapes: tuple[tuple[int, ...], ...]
    stages: tuple[bool, ...]
    parts: int
    scratch: int
    inputs: int

    def run(self, addresses: Sequence[int]) -> None:
        """Compute from inputs and to results at these addresses."""
        table, count = torch.from_numpy(self.table.copy()), len(addresses)
        numbers: Any = table.numpy()
        numbers[:count] = addresses
        scratch = np.empty(max(1, self.scratch), np.int64)
        numbers[count + 8] = scratch.ctypes.data
        cpu = registry.create("cpu")
        if self.parts == 1:
            cpu.launch(self.kernel, (1,), (1,), (table,))
            return
        for stage, alone in enumerate(self.stages):
            numbers[count + 6], numbers[count + 7] = stage, stage + 1
            cpu.launch(self.kernel, (1 if alone else self.parts,), (1,), (table,))


@functools.lru_cache(maxsize=4096)
def launch_of(program: FusedProgram, shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> HostLaunch:
    """Return the launch for a program's inputs that are read; strides are of the shape's dimensions, in elements."""
    shape, given = shape or (1,), [each or (0,) for each in strides]
    kept = [k for k, size in enumerate(shape) if size != 1] or [len(shape) - 1]
    order: list[int] | None = None
    if not program.reduces and not program.over_rows:
        kept = sorted(kept, key=functools.cmp_to_key(functools.partial(_inner_last, given)))
        order = kept + [k for k, size in enumerate(shape) if size == 1 and k not in kept]
        inner, outer = kept[-1], kept[:-1]
    else:
        inner = len(shape) - 1
        outer = [k for k in kept if k != inner]
    rows: list[list[int]] = []  # size, then the stride of each input
    for k in outer + ([inner] if order is not None else []):
        steps = [each[k] for each in given]
        if rows and all(before == step * shape[k] for before, step in zip(rows[-1][1:], steps, strict=True)):
            rows[-1] = [rows[-1][0] * shape[k], *steps]
        else:
            rows.append([shape[k], *steps])
    columns = rows.pop() if order is not None else [shape[inner], *(each[inner] for each in given)]
    rows = rows or [[1, *([0] * len(given))]]
    if columns[0] == 1:
        columns = [1, *(int(program.inputs[i].by_column) for i in program.used)]
    M, N = math.prod(each[0] for each in rows), columns[0]
    kernel = _kernel(program, "".join({0: "0", 1: "1"}.get(step, "s") for step in columns[1:]), len(rows))
    tall, wide, parts = _parts(program, M, N, any(step not in (0, 1) for step in columns[1:]))
    across = -(-N // wide)
    strided = [step for i in range(len(given)) for step in (*(each[1 + i] for each in rows), columns[1 + i])]
    pointers = len(given) + len(program.results)
    stages = tuple(stage.joining for stage in stages_of(program))
    sizes = [each[0] for each in rows[1:]]
    table = [0] * pointers + [M, N, tall, wide, across, parts, 0, len(stages), 0, *sizes, *strided]
    scratch = parts * sum(N if node.by_column else 1 for node in program.nodes if node.op in ("sum0", "max0"))
    leading = shape[:-1]
    layouts = {
        "full": shape, "column": (*leading, 1), "row": (*[1] * len(leading), shape[-1]), "scalar": (1,) * len(shape),
    }  # fmt: skip
    shapes = tuple(layouts[each.layout] for each in program.results)
    moved = None if order is None or order == sorted(order) else tuple(order)
    return HostLaunch(kernel, np.array(table, np.int64), moved, shapes, stages, parts, scratch, len(given))


def _inner_last(strides: Sequence[Sequence[int]], a: int, b: int) -> int:
    """Compare dimensions by the first input that moves along both: the one with longer steps is further out."""
    for each in strides:
        if each[a] and each[b] and abs(each[a]) != abs(each[b]):
            return abs(each[b]) - abs(each[a])
    return a - b


def _parts(program: FusedProgram, M: int, N: int, scattered: bool) -> tuple[int, int, int]:
    """Return the rows and columns of a part, and the number of parts."""
    cores = registry.create("cpu").cores  # type: ignore[attr-defined]
    if program.over_rows:  # each part has sums of its own
        parts = max(1, min(cores, M, M * N // (_LEAST // 2))) if M * N >= _LEAST else 1
        tall = -(-M // parts)
        return tall, N, -(-M // tall)
    if M * N < _LEAST and not (scattered and M * N > _TILE * _TILE):
        return M, N, 1
    reduces = any(node.op in REDUCTIONS for node in program.nodes)
    tall, wide = max(1, _PART // N), N if reduces else min(N, _PART)
    if scattered and not reduces:
        tall, wide = (_TILE, _TILE) if M > 1 else (1, _PART)
    return tall, wide, -(-M // tall) * -(-N // wide)


@functools.lru_cache(maxsize=1024)
def _kernel(program: FusedProgram, steps: str, outer: int) -> Kernel:
    source = portable_source(program, steps=steps, outer=outer)
    kernel = registry.create("cpu").compile(source, entry="fused", device=0)
    kernel.metadata["least_share"] = 1  # type: ignore[index]  # parts are large
    return kernel


# --- calls in C ------------------------------------------------------------------------------------------------------
_ledger = ledger()
_HEAD = object.__basicsize__
_FIELDS = 6  # words of a PyArrayObject: data, dimensions, sizes, strides, base, dtype


def _readable() -> bool:
    """Return whether NumPy's arrays and tuples are in memory as fused_call reads them."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8 or _HEAD != 16:
        return False
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    x = np.zeros((3, 5, 7), np.float32)[:, ::2]
    data, count, sizes, strides, _, dtype = (ctypes.c_int64 * _FIELDS).from_address(id(x) + _HEAD)
    shown = (ctypes.c_int64 * 3).from_address(sizes), (ctypes.c_int64 * 3).from_address(strides)
    pair = (x, dtype)
    items = (ctypes.c_int64 * 2).from_address(id(pair) + tuple.__basicsize__)
    return (
        data == x.ctypes.data
        and count & 0xFFFFFFFF == 3
        and (tuple(shown[0]), tuple(shown[1])) == (x.shape, x.strides)
        and dtype == id(x.dtype)
        and list(items) == [id(x), id(dtype)]
        and ctypes.c_int64.from_address(id(pair) + _HEAD).value == 2
        and ctypes.c_int64.from_address(id(x) + _HEAD - 8).value == id(type(x))
    )


_READABLE = _readable()
_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.py_object)


def serves_quick(arrays: Sequence[Any]) -> bool:
    """Return whether calls with such arrays can be quick."""
    exact = all(type(x) is np.ndarray and x.dtype.isnative and x.flags.aligned for x in arrays)
    whole = exact and not any(step % x.itemsize for x in arrays for step in x.strides)
    return _READABLE and whole and len(arrays) <= 16


def quick_call(
    launch: HostLaunch, values: tuple[Any, ...], sources: Sequence[tuple[int, int]], shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[np.dtype[Any]], single: bool, record: OpRecord, reads: Reads,
) -> Callable[[tuple[Any, ...]], Any]:  # fmt: skip
    """Return a function of a call's arguments that returns the result, or None if the call is of another kind."""
    table, scratch = launch.table.copy(), np.empty(max(1, launch.scratch), np.int64)
    table[launch.inputs + len(shapes) + 8] = scratch.ctypes.data
    places = [i for i, x in enumerate(values) if type(x) is np.ndarray]
    plan = [_HEAD, tuple.__basicsize__, len(values), table.ctypes.data]
    plan += [len(places), len(values) - len(places), len(sources), len(shapes)]
    for i in places:
        x = values[i]
        plan += [i, id(np.ndarray), id(x.dtype), x.dtype.alignment - 1, x.ndim]
        plan += [number for pair in zip(x.shape, x.strides, strict=True) for number in pair]
    for i, x in enumerate(values):
        if i not in places:
            plan += [i, id(x)]
    for place, offset in sources:
        plan += [places.index(place), offset]
    numbers = np.array(plan, np.int64)
    order = launch.order
    sizes = shapes if order is None else [tuple(size[k] for k in order) for size in launch.shapes]
    back = None if order is None else tuple(order.index(k) for k in range(len(order)))
    kinds = list(zip(sizes, dtypes, strict=True))
    (size, dtype), plain = kinds[0], single and back is None and sizes[0] != ()
    compute, address, empty = _CALL(("fused_call", launch.kernel.handle.library)), numbers.ctypes.data, np.empty
    constants = [x if i not in places else x.dtype for i, x in enumerate(values)]
    provider = registry.create("cpu")

    def call(args: tuple[Any, ...], _kept: object = (table, scratch, numbers, constants)) -> Any:  # addresses are known
        for read, space, name, value in reads:
            if read(space, name) is not value:
                return None
        made = (empty(size, dtype),) if single else tuple([empty(*kind) for kind in kinds])
        calls = record.calls + 1
        if calls > 4 and calls % SAMPLE_EVERY:
            if compute(address, args, made):
                return None
            record.calls += 1  # without the ledger's lock: CPython changes threads at calls and jumps alone
        else:
            start = _ledger.begin(record, provider, 0)
            if compute(address, args, made):
                _ledger.discount(record)
                return None
            if start is not None:
                _ledger.end(record, start, provider, 0)
        if plain:
            return made[0]
        shown = tuple([y[()] if back is None else y.transpose(back) for y in made])  # of no dimension: a number
        return shown[0] if single else shown

    return call


FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Name in torch or NumPy -> function of traced values, which raises TypeError for arguments that it does not know."""

_OURS = tuple(str(Path(path).parent) + os.sep for path in (__file__, torch.__file__, np.__file__))
DTYPES = (*FLOATING, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Dtypes of arrays."""


class Viewed(BaseException):
    """Ends the recording of a function that takes views; it is recorded again, for the shapes of the views."""


ArrayView: TypeAlias = tuple[int, tuple[tuple[str, Any], ...]]
"""An argument, and what was done to it in turn: ("index", key) or ("permute", dimensions)."""


def refuse(text: str) -> NoReturn:
    """Raise UnsupportedCase with the innermost line of the user's own code."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is not None:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        text += f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno}{': ' + line if line else ''})"
    raise UnsupportedCase(f"fuse: {text}")


def _close(name: str) -> str:
    close = difflib.get_close_matches(name, [*FUNCTIONS, *ALIASES], 1, 0.8)
    return f"; did you mean {close[0]}?" if close else "; call it outside of the fused function"


class Traced:
    """An array of the recorded function.

    `dropped` values were reduced without keepdim: they lack the dimension of the columns. `view` says of which argument
    this is a view, and `made` which call made it: a view of the result is the result of views.
    """

    __slots__ = ("_expr", "_size", "dropped", "dtype", "made", "recording", "view")
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]  # as __eq__ returns an array

    def __init__(
        self, recording: Recording, expr: Expr | None, dtype: torch.dtype, size: tuple[int, ...], dropped: bool = False,
        view: ArrayView | None = None,
    ) -> None:  # fmt: skip
        self.recording, self._expr, self.dtype, self._size, self.dropped = recording, expr, dtype, size, dropped
        self.view = view
        self.made: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return f"<array of {name_of(self.dtype)} and shape {self._size}, recorded by fuse>"

    @property
    def expr(self) -> Expr:
        """The value in the graph."""
        if self._expr is None:
            self._expr = self.recording.seen(self)
        return self._expr

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._size)

    @property
    def shape(self) -> torch.Size:
        """The shape; who asks gets a program for it alone."""
        self.recording.reads_shape = True
        return torch.Size(self._size)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        return _call("torch", function.__name__, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "reduce":
            return _call("numpy", REDUCERS.get(ufunc.__name__, ufunc.__name__ + ".reduce"), inputs, options)
        return _call("numpy", ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}", inputs, options)

    def __array_function__(self, function: Callable[..., Any], types: object, args: Any, kwargs: Any) -> Any:
        return _call("numpy", function.__name__, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _READS:
            refuse(f"{name}() reads values, which are not known while the function is recorded")
        if name not in FUNCTIONS and name not in ALIASES:
            refuse(f"{name} of an array is not supported{_close(name)}")
        return lambda *args, **options: _call("array", name, (self, *args), options)

    def _control(self, *_: object) -> NoReturn:
        refuse(
            "a value of an array decides what the function does, and is not known while it is recorded; use "
            "torch.where or numpy.where, and & and | for `and`, `or` and chained comparisons"
        )

    def _number(self, *_: object) -> NoReturn:
        refuse(
            "a number is wanted of an array, whose values are not known while it is recorded; use torch's or NumPy's "
            "functions in place of math's, and astype in place of float() and int()"
        )

    __bool__ = __iter__ = __contains__ = _control
    __int__ = __float__ = __index__ = __complex__ = __array__ = _number

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> Any:
        """NumPy's number of elements; torch's method, which returns the shape or one of its sizes."""
        shape = self.shape
        return (lambda dim=None: shape if dim is None else shape[dim]) if self.recording.of_torch else shape.numel()

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if self.dropped and keys in ((Ellipsis, None), (*[slice(None)] * self.ndim, None)):
            return FUNCTIONS["unsqueeze"](self, -1)
        if any(
            isinstance(each, (bool, np.bool_))
            or not (each is None or each is ... or isinstance(each, (int, slice, np.integer)))
            for each in keys
        ):
            refuse("indexing with arrays is not supported; take slices, numbers, None and ...")
        return viewed(self, "index", keys)

    @property
    def T(self) -> Any:  # noqa: N802  NumPy's name
        """Return the array with its dimensions reversed."""
        return viewed(self, "permute", tuple(reversed(range(self.ndim))))

    def __setitem__(self, key: object, value: object) -> None:
        refuse("an assignment to elements is not supported; select by numpy.where, or write to a view of out=")


def _operator(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Traced, other: Any = None) -> Any:
        args = (self,) if name in ("neg", "abs", "invert", "pos") else (other, self) if reflected else (self, other)
        return _call("operator", name, args, {})

    return method


def _in_place(name: str) -> Callable[..., Any]:
    def method(self: Traced, other: Any) -> Any:
        if self.view is not None:
            refuse("an argument, or a view of one, would change in place; write x = x + y, and pass out=x at the call")
        result = _call("operator", name, (self, other), {})
        if result._size != self._size:
            raise ShapeError(f"a value of shape {self._size} cannot become one of {result._size} in place")
        if result.dtype == self.dtype:
            return result
        if not torch.can_cast(result.dtype, self.dtype):
            refuse(f"a value of {name_of(self.dtype)} cannot become {name_of(result.dtype)} in place; convert it first")
        return _call("array", "to", (result, self.dtype), {})

    return method


for _name, _function in (
    ("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div"), ("pow", "pow"), ("and", "bitwise_and"),
    ("or", "bitwise_or"), ("xor", "bitwise_xor"), ("floordiv", "floor_divide"), ("mod", "remainder"),
    ("matmul", "matmul"),
):  # fmt: skip
    setattr(Traced, f"__{_name}__", _operator(_function))
    setattr(Traced, f"__r{_name}__", _operator(_function, reflected=True))
    setattr(Traced, f"__i{_name}__", _in_place(_function))
for _name in ("divmod", "lshift", "rshift"):
    setattr(Traced, f"__{_name}__", _operator(_name))
    setattr(Traced, f"__r{_name}__", _operator(_name, reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert", "pos"):
    setattr(Traced, f"__{_name}__", _operator(_name))


# --- calls -----------------------------------------------------------------------------------------------------------
def _call(library: str, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Record a call of a function by its name."""
    if (function := FUNCTIONS.get(ALIASES.get(name, name))) is None:
        refuse(f"{name if library == 'operator' else f'{library}.{name}'} is not supported{_close(name)}")
    recording = traced(*args, *options.values())[0].recording
    args = tuple(recording.capture(x) if isinstance(x, (torch.Tensor, np.ndarray)) else x for x in args)
    given = {
        _OPTIONS.get(key, key): recording.capture(x) if isinstance(x, (torch.Tensor, np.ndarray)) else x
        for key, x in options.items()
    }
    if library == "numpy":
        given = {key: value for key, value in given.items() if value is not None and value is not np._NoValue}
    of_torch = library == "torch" or (library == "array" and args[0].recording.of_torch)
    if name in ("max", "min"):
        given["paired"] = of_torch
    if name == "transpose":
        given["swaps"] = of_torch
    if name in ("var", "std"):
        given["correction"] = given.pop("ddof", given.get("correction", 1 if of_torch else 0))
    try:
        result = function(*args, **given)
        if isinstance(result, Traced) and result.made is None and result.view is None and result is not args[0]:
            result.made = None if ALIASES.get(name, name) in _WHOLE else (function, args, given)
        return result
    except TypeError as error:
        refuse(f"{name} with arguments that fuse does not know: {str(error).partition(') ')[2] or error}")


_OPTIONS = {"input": "x", "other": "y", "axis": "dim", "keepdims": "keepdim", "a_min": "min", "a_max": "max"}
ALIASES = {
    "absolute": "abs", "negative": "neg", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "power": "pow", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "equal": "eq", "not_equal": "ne", "invert": "bitwise_not", "positive": "pos", "clip": "clamp", "astype": "to",
    "log_sigmoid": "logsigmoid", "copy": "clone", "arctan2": "atan2", "mod": "remainder",
    "around": "round", "swapdims": "swapaxes",
}  # fmt: skip
REDUCERS = {"add": "sum", "maximum": "amax", "minimum": "amin"}
_READS = ("item", "tolist", "numpy", "cpu", "cuda", "data")


_WHOLE = (
    "sum", "mean", "amax", "amin", "max", "min", "var", "std", "logsumexp", "softmax", "log_softmax", "layer_norm",
    "rms_norm", "unsqueeze",
)  # fmt: skip
"""Functions whose result is not computed element by element."""


def traced(*args: Any) -> list[Traced]:
    """Return the arguments that are traced values."""
    return [x for x in args if isinstance(x, Traced)]


def viewed(x: Traced, kind: str, value: Any) -> Traced:
    """Return a view of an array: of an argument, or of those that it is computed from, element by element."""
    if x.recording.views is None:
        raise Viewed
    shown: Any = np.broadcast_to(np.int8(0), x._size)
    size = (shown[value] if kind == "index" else shown.transpose(value)).shape
    if x.view is not None:
        index, steps = x.view
        return Traced(x.recording, None, x.dtype, size, view=(index, (*steps, (kind, value))))
    if x.made is None or x.dropped:
        refuse("a view of a value that is reduced: take it before the reduction")
    function, args, options = x.made
    inner = functools.partial(_view_of_part, x, kind, value)
    made = tuple(map(inner, args)), {key: inner(each) for key, each in options.items()}
    result: Traced = function(*made[0], **made[1])
    result.made = (function, *made)
    return result


def _view_of_part(x: Traced, kind: str, value: Any, part: Any) -> Any:
    """Return the view of an argument of a call whose result is x."""
    if not isinstance(part, Traced) or not part.ndim:
        return part
    if kind == "permute":
        if part.ndim != x.ndim:
            refuse("a transposed value that is computed from arrays of several numbers of dimensions")
        return viewed(part, kind, value)
    if any(each is None for each in value):
        refuse("None as an index of a computed value: index the arguments")
    if ... in value:
        at = value.index(...)
        value = (*value[:at], *[slice(None)] * (x.ndim - len(value) + 1), *value[at + 1 :])
    value = (*value, *[slice(None)] * (x.ndim - len(value)))[x.ndim - part.ndim :]
    keys = [
        key if size == 1 or own != 1 else slice(None) if isinstance(key, slice) else 0
        for key, own, size in zip(value, part._size, x._size[x.ndim - part.ndim :], strict=True)
    ]
    return viewed(part, kind, tuple(keys))


# --- the recording ----------------------------------------------------------------------------------------------------
_OUTSIDE = 1 << 20  # the first number of a captured array, until the number of the other inputs is known


class Domain:
    """The shape that all inputs broadcast to: `rows` (the leading sizes) of N columns."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.rows = tuple(shape[:-1])
        self.M, self.N = math.prod(self.rows), shape[-1] if shape else 1

    def shape(self, each: Returned) -> tuple[int, ...]:
        """Return the shape of a result."""
        if not each.ndim:
            return ()
        leading = each.ndim if each.dropped else each.ndim - 1
        rows = self.rows[len(self.rows) - leading :] if each.by_row else (1,) * leading
        return rows if each.dropped else (*rows, self.N if each.by_column else 1)


class Returned(NamedTuple):
    """The shape of a result: `size` for the recorded shapes; the other fields give it for any domain."""

    ndim: int
    by_row: bool
    by_column: bool
    dropped: bool
    size: tuple[int, ...]


def view_of(x: Any, steps: Sequence[tuple[str, Any]]) -> Any:
    """Return a view of an array of torch or NumPy; a copy where torch has no view, of steps backwards."""
    for kind, value in steps:
        if kind == "permute":
            x = x.permute(value) if isinstance(x, torch.Tensor) else x.transpose(value)
        elif isinstance(x, torch.Tensor) and any(isinstance(each, slice) and (each.step or 1) < 0 for each in value):
            x = torch.from_numpy(x.numpy(force=True)[value].copy()).to(x.device)
        else:
            x = x[value]
    return x


class Recording:
    """One run of the function on traced values; `captured` arrays become inputs after its own."""

    def __init__(
        self, domain: Domain, inputs: Sequence[tuple[Input, tuple[int, ...]]], *, of_torch: bool, as_numpy: bool,
        views: Sequence[ArrayView] | None = None, dry: bool = False,
    ) -> None:  # fmt: skip
        """Take the domain and each input with its shape; with `views` the inputs are views of the arguments.

        A `dry` run finds all views and their shapes.
        """
        self.graph, self.domain, self.of_torch, self.as_numpy = graph.ExpressionGraph(), domain, of_torch, as_numpy
        self.reads_shape, self.dry = views is not None, dry
        self.views: list[ArrayView] | None = None if views is None else list(views)
        self._wanted = len(views or ())
        self.inputs = [] if views is not None else [each for each, _ in inputs]
        self.sizes: dict[int, tuple[int, ...]] = {}
        self.captured: list[torch.Tensor | np.ndarray[Any, Any]] = []
        self._captured: list[Traced] = []
        self.values = []
        for index, (each, size) in enumerate(inputs):
            expr = self._input(index, each) if views is None else None
            self.values.append(Traced(self, expr, each.dtype, size, view=(index, ())))

    def _input(self, index: int, each: Input) -> Expr:
        dtype = computed_in(each.dtype)
        return self.graph.add("input", value=index, by_row=each.by_row, by_column=each.by_column, dtype=dtype)

    def seen(self, x: Traced) -> Expr:
        """Return the value of a view, which becomes an input."""
        assert self.views is not None  # for the type checker, as the next: others have an expression
        assert x.view is not None
        if x.view not in self.views:
            self.views.append(x.view)
        shape = (*self.domain.rows, self.domain.N)
        padded = (1,) * (len(shape) - len(x._size)) + x._size
        by_row = any(size != 1 for size in padded[:-1]) or all(size == 1 for size in self.domain.rows)
        each = Input(by_row, padded[-1] == shape[-1], x.dtype)
        self.sizes[self.views.index(x.view)] = x._size
        return self._input(self.views.index(x.view), each)

    def capture(self, x: torch.Tensor | np.ndarray[Any, Any]) -> Traced:
        """Return the value of an array from outside, which is read at each call."""
        if x.ndim or (isinstance(x, torch.Tensor) and (x.requires_grad or x.device.type != "cpu")):
            refuse("an array from outside of the function: make it an argument")
        for known, value in zip(self.captured, self._captured, strict=True):
            if known is x:
                return value
        dtype = x.dtype if isinstance(x, torch.Tensor) else getattr(torch, x.dtype.name, None)
        if dtype not in DTYPES:
            refuse(f"a {x.dtype} array from outside of the function: make it an argument")
        expr = self.graph.add("input", value=_OUTSIDE + len(self.captured), dtype=computed_in(dtype))
        self.captured.append(x)
        self._captured.append(Traced(self, expr, dtype, ()))
        return self._captured[-1]

    def program(self, outputs: Sequence[Any]) -> tuple[FusedProgram, tuple[Returned, ...]]:
        """Return the program of the function's results, and their shapes."""
        results, shapes = [], []
        for number, y in enumerate(outputs):
            if not isinstance(y, Traced):
                raise UnsupportedCase(f"fuse: result {number} is a {type(y).__name__}, not computed from the arguments")
            expr = y.expr.convert(computed_in(y.dtype))
            results.append(graph.Output(expr.index, graph.layout_of(expr.node), y.dtype))
            shapes.append(Returned(y.ndim, expr.node.by_row, expr.node.by_column, y.dropped, y._size))
        given = self.inputs if self.views is None else self._given()
        count = len(given)
        for index, node in enumerate(self.graph.nodes):
            if node.op == "input" and node.value >= _OUTSIDE:
                self.graph.nodes[index] = node._replace(value=node.value - _OUTSIDE + count)
        inputs = [*given, *(Input(False, False, computed_in(each.dtype)) for each in self._captured)]
        return FusedProgram.of(self.graph, inputs, results), tuple(shapes)

    def used(self, outputs: Sequence[Any]) -> list[tuple[ArrayView, tuple[int, ...]]]:
        """Return the views that results are made of, and their shapes."""
        assert self.views is not None  # for the type checker
        nodes = self.graph.nodes
        needed = graph.leading_to(nodes, [y.expr.index for y in outputs if isinstance(y, Traced)])
        indices = sorted({nodes[i].value for i in needed if nodes[i].op == "input" and nodes[i].value < _OUTSIDE})
        return [(self.views[i], self.sizes[i]) for i in indices]

    def _given(self) -> list[Input]:
        """Return the inputs that are views, in their order."""
        assert self.views is not None  # for the type checker
        nodes = {node.value: node for node in self.graph.nodes if node.op == "input"}
        dtypes = [self.values[index].dtype for index, _ in self.views[: self._wanted]]
        return [Input(nodes[i].by_row, nodes[i].by_column, dtype) for i, dtype in enumerate(dtypes)]
