"""Launches of fused kernels on the CPU: how a kernel walks through strided arrays, and calls without Python's part.

A kernel takes a table of 64-bit integers: the addresses of the inputs that it reads and of the results; rows M, columns
N, rows and columns of a part, parts across, parts; the first stage and the end; scratch memory; sizes of the dimensions
that the rows are made of, but for the first; and of each input the strides of these dimensions and of a column.

A quick call compares the arguments with those of an earlier call and computes in one call of C, which takes a
microsecond where Python takes some twenty. It reads NumPy's arrays and tuples in memory, where they are for CPython
with its lock; `_READABLE` says whether they are.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from accelerant.accelerator.fusion.code import portable_source, stages_of
from accelerant.accelerator.fusion.graph import REDUCTIONS, FusedProgram
from accelerant.accelerator.fusion.outside import Reads
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


def _words(x: object) -> list[int]:
    return list((ctypes.c_int64 * _FIELDS).from_address(id(x) + _HEAD))


def _readable() -> bool:
    """Return whether NumPy's arrays and tuples are in memory as fused_call reads them."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8 or _HEAD != 16:
        return False
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    x = np.zeros((3, 5, 7), np.float32)[:, ::2]
    data, count, sizes, strides, _, dtype = _words(x)
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
