"""The kernels of the aten table in WGSL: five templates, specialized by expression, dtypes and number of dimensions.

A kernel is compiled once for each expression and layout; sizes, strides and scalars are arguments. Expressions are
evaluated in f32, in i32, or for int64, which WGSL lacks, in pairs of u32 (int64.wgsl), with functions for operators.
Elements of one and two bytes share a word, which is written by atomic operations.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from accelerant.errors import UnsupportedCase
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.compilation.wgsl import bindings
from accelerant.runtime.provider import Buffer, ComputeProvider
from accelerant.runtime.providers.webgpu import WebgpuProvider
from accelerant.tensors.device import TensorDevice, expanded, merged
from accelerant.tensors.table import deep_product, strided
from accelerant.tensors.tensor import DeviceTensor

_STORAGE = {
    torch.float32: "f32", torch.int32: "i32", torch.int64: "vec2<u32>", torch.float16: "u32", torch.bfloat16: "u32",
    torch.bool: "u32", torch.uint8: "u32",
}  # fmt: skip
"""Dtype -> the words in WGSL in which its elements lie."""

_FLOATING = (torch.float32, torch.float16, torch.bfloat16)
_BLOCK = 256
_LANES = 64
"""Threads that share a long reduction."""

_ROUNDS = 65_000
"""Mesa's lavapipe ends the loops of a thread, without an error, after 65,535 rounds (LP_MAX_TGSI_LOOP_ITERATIONS)."""

_TYPED = {
    "f32": {
        "max": "select(select(select(b, a, a > b), b, nan_f32(b)), a, nan_f32(a))",
        "min": "select(select(select(b, a, a < b), b, nan_f32(b)), a, nan_f32(a))",
        "div_floor": "div_f32(a, b)", "rem_floor": "rem_f32(a, b)", "div_trunc": "trunc(a / b)", "pow": "pow_f32(a, b)",
        "abs": "abs(a)", "rint": "round(a)", "erf": "erf_f32(a)", "tanh": "tanh_f32(a)",
        "is_nan": "nan_f32(a)", "is_inf": "inf_f32(a)",
    },
    "i32": {
        "max": "max(a, b)", "min": "min(a, b)", "div_floor": "div_i32(a, b)", "rem_floor": "a - div_i32(a, b) * b",
        "div_trunc": "quotient_i32(a, b)", "abs": "abs(a)", "is_nan": "false", "is_inf": "false",
    },
    "i64": {
        "max": "max_i64(a, b)", "min": "min_i64(a, b)", "div_floor": "div_i64(a, b)", "rem_floor": "rem_i64(a, b)",
        "div_trunc": "quotient_i64(a, b)", "abs": "abs_i64(a)", "is_nan": "false", "is_inf": "false",
    },
}  # fmt: skip
"""Type of expressions -> function -> its value for the arguments a and b."""

_TWO = ("max", "min", "div_floor", "rem_floor", "div_trunc", "pow")
_RENAMED = re.compile(
    rf"\b({'|'.join((*_TWO, 'abs', 'rint', 'erf', 'tanh', 'is_nan', 'is_inf', 'uniform', 'normal'))})\("
)
_NUMBERS = {
    "f32": ("0.0", "1.0", "-bitcast<f32>(infinity_bits)", "bitcast<f32>(infinity_bits)"),
    "i32": ("0", "1", "-2147483647 - 1", "2147483647"),
    "i64": ("vec2<u32>()", "vec2<u32>(1u, 0u)", "vec2<u32>(0u, 0x80000000u)", "vec2<u32>(0xffffffffu, 0x7fffffffu)"),
}
"""Type of expressions -> 0, 1, and the least and the largest number."""

_BLOCKS = (
    "added++;"
    " if ((added & 31) == 0) { middle += a; a = 0.0; if ((added & 1023) == 0) { total += middle; middle = 0.0; } }"
)
"""After each term of a long sum: sums of 32 terms are added up, and sums of 1,024; drivers drop a compensation."""

_DEPTH = 65536
"""Terms of a product of matrices; sums of so many are added up."""

_COMBINE = {"sum": (0, "a + v"), "prod": (1, "a * v"), "max": (2, "max(a, v)"), "min": (3, "min(a, v)")}
"""Kind of reduction -> index of its neutral number, and combination of `a` and `v`."""


@functools.cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@functools.cache
def _functions(kind: str) -> str:
    """Return the functions of expressions of a type."""
    lines = [f"alias T = {'vec2<u32>' if kind == 'i64' else kind};"]
    for name, value in _TYPED[kind].items():
        arguments = "a: T, b: T" if name in _TWO else "a: T"
        result = "bool" if name.startswith("is_") else "T"
        lines.append(f"fn acl_{name}({arguments}) -> {result} {{ return {value}; }}")
    return "\n".join([*lines, _file("expressions.wgsl")])


def _kind(dtype: torch.dtype) -> str:
    return "f32" if dtype in _FLOATING else "i64" if dtype == torch.int64 else "i32"


def _load(dtype: torch.dtype, array: str, index: str) -> str:
    """Return an element as f32, i32 or, of int64, vec2<u32>."""
    size = dtype.itemsize
    if size >= 4:
        return f"{array}[{index}]"
    word = f"({array}[({index}) >> {2 if size == 1 else 1}u] >> u32((({index}) & {4 // size - 1}) * {8 * size}))"
    if dtype == torch.float16:
        return f"unpack2x16float({word} & 0xffffu).x"
    if dtype == torch.bfloat16:
        return f"bitcast<f32>({word} << 16u)"
    return f"select(0, 1, ({word} & 0xffu) != 0u)" if dtype == torch.bool else f"i32({word} & 0xffu)"


def _converted(value: str, kind: str, to: str) -> str:
    """Return a value of kind f32, i32, i64 or bool in another kind."""
    if kind == to == "i64":
        return f"({value})"
    if kind == "i64":
        return {"f32": f"to_f32({value})", "i32": f"i32(({value}).x)", "bool": f"any({value} != vec2<u32>())"}[to]
    if to == "i64":
        return f"from_f32(f32({value}))" if kind == "f32" else f"from_i32(i32({value}))"
    return f"{to}({value})"


def _store(dtype: torch.dtype, index: str, value: str, kind: str) -> str:
    """Return statements that write a value of a kind to an element of `out`."""
    size = dtype.itemsize
    if size >= 4:
        return f"out[{index}] = {_converted(value, kind, _kind(dtype))};"
    if dtype == torch.float16:
        bits = f"pack2x16float(vec2<f32>({_converted(value, kind, 'f32')}, 0.0))"
    elif dtype == torch.bfloat16:
        bits = f"bfloat16_bits({_converted(value, kind, 'f32')})"
    elif dtype == torch.bool:
        bits = f"select(0u, 1u, {_converted(value, kind, 'bool')})"
    else:
        bits = f"(u32({_converted(value, kind, 'i32')}) & 0xffu)"
    mask = f"{(1 << 8 * size) - 1:#x}u"
    return (
        f"let at_word = ({index}) >> {2 if size == 1 else 1}u; let shift = u32((({index}) & {4 // size - 1}) * "
        f"{8 * size}); let bits = {bits}; atomicAnd(&out[at_word], ~({mask} << shift)); "
        "atomicOr(&out[at_word], bits << shift);"
    )


_BFLOAT16 = """
fn bfloat16_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    return select((bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u, 0x7fc0u, nan_f32(x));
}
"""


class _Text:
    """A kernel under construction: arrays and numbers, their types and values, in the order of the bindings."""

    def __init__(self, place: WebgpuTensors) -> None:
        self.place = place
        self.arrays: dict[str, str] = {}
        self.buffers: list[Any] = []
        self.numbers: dict[str, str] = {}
        self.values: list[Any] = []

    def array(self, name: str, x: DeviceTensor) -> None:
        narrow = name == "out" and x.dtype.itemsize < 4
        self.arrays[name] = "atomic<u32>" if narrow else _STORAGE[x.dtype]
        buffer, at = self.place._bound(x)
        self.buffers.append(buffer)
        self.number(f"{name}_at", at)

    def number(self, name: str, value: float, kind: str = "i32") -> str:
        if kind == "i32" and not -(2**31) <= value < 2**31:
            raise UnsupportedCase(f"WebGPU's kernels count in 32 bits; {name} is {value}")
        self.numbers[name] = kind
        self.values.append(value)
        return f"scalars.{name}"

    def scalars(self, name: str, values: Sequence[float], kind: str) -> list[str]:
        """Add scalars, and return lines that name them."""
        lines = []
        for at, value in enumerate(values):
            if kind == "i64":
                halves = (int(value) & 0xFFFFFFFF, int(value) >> 32 & 0xFFFFFFFF)
                numbers = (self.number(f"{name}{at}_{part}", half, "u32") for part, half in enumerate(halves))
                lines.append(f"let {name}{at} = vec2<u32>({', '.join(numbers)});")
            else:
                number = float(value) if kind == "f32" else int(value)
                lines.append(f"let {name}{at} = {self.number(f'{name}{at}', number, kind)};")
        return lines

    def step(self, name: str, coordinate: str, value: int) -> str:
        """Return a term of an offset: nothing for a stride of 0, the coordinate for 1."""
        if value == 0:
            return ""
        return f" + {coordinate}" if value == 1 else f" + {coordinate} * {self.number(name, value)}"

    def coordinates(self, sizes: Sequence[int], source: str, name: str = "c") -> list[str]:
        """Return lines that split a linear index into coordinates, the first dimension outermost."""
        if len(sizes) < 2:
            return [f"let {name}0 = {source};"] if sizes else []
        lines, rest = [], source
        for at in range(len(sizes) - 1, 0, -1):
            size = self.number(f"{name}size{at}", sizes[at])
            lines.append(f"let {name}{at} = {rest} % {size}; let {name}rest{at} = {rest} / {size};")
            rest = f"{name}rest{at}"
        return [*lines, f"let {name}0 = {rest};"]

    def offset(self, operand: str, steps: Sequence[int], name: str = "c") -> str:
        """Return the sum of an operand's strides times the coordinates."""
        return "".join(self.step(f"{operand}_step{at}", f"{name}{at}", step) for at, step in enumerate(steps))


_HEAD = """
@compute @workgroup_size({block})
fn {entry}(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32
) {{
    {body}
}}
"""
_FAULT = "if (fault[0] == 0) { fault[1] = j; fault[0] = scalars.length + 1; }"
_GLOBAL = "i32(linear_group(group, groups) * BLOCK_X + thread)"
_GROUP = "i32(linear_group(group, groups))"


class WebgpuTensors(TensorDevice):
    """A device of WebGPU."""

    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset(_STORAGE)

    def __init__(self, provider: ComputeProvider, index: int) -> None:
        super().__init__(provider, index)
        properties = provider.devices()[index].properties
        self.is_cpu, self.binding_bytes = properties["software"], properties["binding_bytes"]
        self._kernels: dict[Any, Kernel] = {}

    # --- the five kernels --------------------------------------------------------------------------------------------

    def map(
        self, out: DeviceTensor, expression: str, inputs: Sequence[DeviceTensor] = (), scalars: Sequence[float] = (),
        integers: Sequence[int] = (), *, compute: torch.dtype | None = None, first: int = 0,
    ) -> None:  # fmt: skip
        """As TensorDevice.map; `first` is the linear index of the first element, of a part of a larger result."""
        operands, shape, count = (out, *inputs), tuple(out.shape), out.numel()
        if self._too_large(operands):
            whole = [out, *(_broadcast(x, shape) for x in inputs)]
            counts = re.search(r"\bi\b", expression)  # the linear index: parts of the outermost dimension alone keep it
            dim = next(at for at, n in enumerate(shape) if n > 1) if counts else _widest(whole, range(len(shape)))
            for begin, halves in _halves(whole, dim):
                moved = first + begin * math.prod(shape[dim + 1 :])
                self.map(halves[0], expression, halves[1:], scalars, integers, compute=compute, first=moved)
            return
        sizes, steps = merged(shape, tuple(expanded(tuple(x.shape), tuple(x.stride()), shape) for x in operands))
        compute = out.dtype if compute is None else compute
        kind = _kind(compute)
        if not count:
            return
        text = _Text(self)
        for at, x in enumerate(operands):
            text.array(_name(at), x)
        lines = text.coordinates(sizes, "e")
        offsets = [f"scalars.{_name(at)}_at{text.offset(_name(at), steps[at])}" for at in range(len(operands))]
        lines += [*text.scalars("s", scalars, kind), *text.scalars("n", integers, "i32")]
        lines += [_operand(x, at, offsets[at + 1], compute) for at, x in enumerate(inputs)]
        text.number("count", count)
        body = [
            f"let e = {_GLOBAL};",
            "if (e >= scalars.count) { return; }",
            f"let i = e + {text.number('first', first)};" if first else "let i = e;",
            *lines,
            _store(out.dtype, offsets[0], *_expression(expression, kind)),
        ]
        self._run(text, kind, "map", body, (-(-count // _BLOCK),), _BLOCK)

    def reduce(
        self, out: DeviceTensor, kind: str, inputs: Sequence[DeviceTensor], dims: Sequence[int], *, pre: str = "x0",
        post: str = "a", scalars: Sequence[float] = (), compute: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        shape = tuple(torch.broadcast_shapes(*(x.shape for x in inputs)))
        if self._too_large((out, *inputs)):
            whole, computed = [_broadcast(x, shape) for x in inputs], compute or inputs[0].dtype
            self._reduce_parts(out, kind, whole, dims, pre, post, scalars, computed)
            return
        kept = [at for at in range(len(shape)) if at not in dims]
        strides = [expanded(tuple(x.shape), tuple(x.stride()), shape) for x in inputs]
        sizes, steps = merged(
            tuple(shape[at] for at in kept), tuple(tuple(s[at] for at in kept) for s in (tuple(out.stride()), *strides))
        )
        inner, inner_steps = merged(
            tuple(shape[at] for at in dims), tuple(tuple(s[at] for at in dims) for s in strides)
        )
        outputs, length = out.numel(), math.prod(shape[at] for at in dims)
        compute = inputs[0].dtype if compute is None else compute
        value = _kind(compute)
        indexed = kind.startswith("arg")
        lanes = 1 if indexed or length <= (_ROUNDS if self.is_cpu else 4 * _LANES) else _LANES
        self._check_rounds(-(-length // lanes))
        text = _Text(self)
        for at, x in enumerate((out, *inputs)):
            text.array(_name(at), x)
        text.number("length", length)
        outer = text.coordinates(sizes, "i")
        bases = [f"scalars.{_name(at)}_at{text.offset(_name(at), steps[at])}" for at in range(len(inputs) + 1)]
        along = text.coordinates(inner, "r", "e")
        offsets = [f"b{at}{text.offset(f'r{at}', inner_steps[at], 'e')}" for at in range(len(inputs))]
        named = text.scalars("s", scalars, value)
        text.number("count", outputs)
        neutral, combine = _COMBINE[kind.removeprefix("arg")]
        accumulate = f"a = {_expression(combine, value)[0]};"
        blocks = kind == "sum" and value == "f32" and length > 32 * lanes
        if indexed:
            better = _expression("v > a" if kind == "argmax" else "v < a", value)[0]
            accumulate = f"if (r == 0 || (!acl_is_nan(a) && (acl_is_nan(v) || {better}))) {{ a = v; best = r; }}"
        body = [
            f"let i = {_GROUP if lanes > 1 else _GLOBAL};",
            "if (i >= scalars.count) { return; }",
            *outer,
            *(f"let b{at} = {bases[at + 1]};" for at in range(len(inputs))),
            *named,
            f"var a: T = {_NUMBERS[value][neutral]}; var best = 0;",
            *(["var added = 0; var middle = 0.0; var total = 0.0;"] if blocks else []),
            f"for (var r = {'i32(thread)' if lanes > 1 else '0'}; r < scalars.length; r += {lanes}) {{",
            *along,
            *(_operand(x, at, offsets[at], compute) for at, x in enumerate(inputs)),
            f"let v = {_converted(*_expression(pre, value), value)};",
            accumulate,
            *([_BLOCKS] if blocks else []),
            "}",
            *(["a += middle; a += total;"] if blocks else []),
        ]
        head = ""
        if lanes > 1:
            head = f"var<workgroup> partial: array<T, {lanes}>;\n"
            body += [
                "partial[thread] = a;",
                f"for (var width = {lanes // 2}u; width > 0u; width /= 2u) {{",
                "workgroupBarrier();",
                "if (thread < width) {",
                f"let v = partial[thread + width]; a = partial[thread]; {accumulate} partial[thread] = a;",
                "}",
                "}",
                "if (thread > 0u) { return; }",
                "a = partial[0];",
            ]
        body.append(_store(out.dtype, bases[0], *(("best", "i32") if indexed else _expression(post, value))))
        block = lanes if lanes > 1 else 64
        self._run(text, value, "reduce", body, (outputs if lanes > 1 else -(-outputs // block),), block, head)

    def _reduce_parts(
        self, out: DeviceTensor, kind: str, inputs: list[DeviceTensor], dims: Sequence[int], pre: str, post: str,
        scalars: Sequence[float], compute: torch.dtype,
    ) -> None:  # fmt: skip
        """Reduce in two parts: of the results, or of what is reduced, whose two results are reduced again."""
        shape = inputs[0].shape
        dim = _widest([out, *inputs], range(len(shape)))
        if dim not in dims:
            for _, (part, *of_inputs) in _halves([out, *inputs], dim):
                self.reduce(part, kind, of_inputs, dims, pre=pre, post=post, scalars=scalars, compute=compute)
            return
        if kind.startswith("arg"):
            raise UnsupportedCase(f"{kind} along {shape[dim]:,} elements, of more bytes than a binding may have")
        wide = {torch.bool: torch.int32}.get(compute, torch.float32 if compute in _FLOATING else compute)
        both = self.empty((2, *out.shape), wide)
        for at, (_, of_inputs) in enumerate(_halves(inputs, dim)):
            self.reduce(cast(DeviceTensor, both[at]), kind, of_inputs, dims, pre=pre, scalars=scalars, compute=compute)
        self.reduce(strided(out, (1, *out.shape), (0, *out.stride())), kind, (both,), [0], post=post, scalars=scalars)

    def gather(
        self, out: DeviceTensor, x: DeviceTensor, dim: int, index: DeviceTensor, rows: tuple[int, int] | None = None
    ) -> None:
        """As TensorDevice.gather; `rows` are the first of x within a larger tensor, and the larger one's number."""
        shape = tuple(out.shape)
        if self._too_large((out, x, index)):
            whole = [out, _broadcast(index, shape), _without(x, dim, shape)]
            if _span(x) > max(map(_span, whole)) and (x.shape[dim] - 1) * x.stride(dim) >= _span(whole[2]):
                for begin, (part,) in _halves([x], dim):
                    self.gather(out, part, dim, index, (begin + (rows or (0, 0))[0], (rows or (0, x.shape[dim]))[1]))
                return
            for _, (part, of_index, of_x) in _halves(whole, _widest(whole, range(len(shape)))):
                self.gather(part, _with(of_x, dim, x), dim, of_index, rows)
            return
        at_index = expanded(tuple(index.shape), tuple(index.stride()), shape)
        x_strides = tuple(0 if at == dim else s for at, s in enumerate(x.stride()))
        sizes, steps = merged(shape, (tuple(out.stride()), x_strides, at_index))
        text = _Text(self)
        for at, operand in enumerate((out, x, index)):
            text.array(_name(at), operand)
        text.array("fault", self.fault())
        coordinates = text.coordinates(sizes, "i")
        offsets = [f"scalars.{_name(at)}_at{text.offset(_name(at), steps[at])}" for at in range(3)]
        text.number("length", x.shape[dim] if rows is None else rows[1])
        row, within = _row(text, x.shape[dim], rows, "return;")
        text.number("along", x.stride(dim))
        value = _load(x.dtype, "x0", "at")
        if x.dtype in _FLOATING:
            value = f"select({value}, bitcast<f32>(nan_bits), outside)"
        text.number("count", out.numel())
        body = [
            f"let i = {_GLOBAL};",
            "if (i >= scalars.count) { return; }",
            *coordinates,
            f"let j = {_index(index, 'x1', offsets[2])};",
            "let outside = j < 0 || j >= scalars.length;",
            f"if (outside) {{ {_FAULT} }}",
            f"let row = clamp(j, 0, scalars.length - 1){row};",
            *within,
            f"let at = {offsets[1]} + row * scalars.along;",
            _store(out.dtype, offsets[0], value, _kind(x.dtype)),
        ]
        self._run(text, _kind(out.dtype), "gather", body, (-(-out.numel() // _BLOCK),), _BLOCK)

    def scatter(
        self, out: DeviceTensor, dim: int, index: DeviceTensor, source: DeviceTensor, *, add: bool,
        check: bool = True, rows: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """As TensorDevice.scatter; `rows`: first row of `out` within a larger tensor, and the larger one's number."""
        shape = tuple(source.shape)
        if self._too_large((out, index, source)):
            whole = [source, _broadcast(index, shape), _without(out, dim, shape)]
            if _span(out) > max(map(_span, whole)) and (out.shape[dim] - 1) * out.stride(dim) >= _span(whole[2]):
                for begin, (part,) in _halves([out], dim):
                    of = (begin + (rows or (0, 0))[0], (rows or (0, out.shape[dim]))[1])
                    self.scatter(part, dim, index, source, add=add, check=check, rows=of)
                return
            for _, (part, of_index, of_out) in _halves(whole, _widest(whole, range(len(shape)))):
                self.scatter(_with(of_out, dim, out), dim, of_index, part, add=add, check=check, rows=rows)
            return
        others = [at for at in range(len(shape)) if at != dim]
        at_index = expanded(tuple(index.shape), tuple(index.stride()), shape)
        strides = (tuple(out.stride()), at_index, tuple(source.stride()))
        sizes, steps = merged(tuple(shape[at] for at in others), tuple(tuple(s[at] for at in others) for s in strides))
        count = math.prod(shape[at] for at in others)
        text = _Text(self)
        for at, operand in enumerate((out, index, source)):
            text.array(_name(at), operand)
        if check:
            text.array("fault", self.fault())
        coordinates = text.coordinates(sizes, "i")
        offsets = [f"scalars.{_name(at)}_at{text.offset(_name(at), steps[at])}" for at in range(3)]
        text.number("length", out.shape[dim] if rows is None else rows[1])
        row, within = _row(text, out.shape[dim], rows, "continue;")
        text.number("rows", shape[dim])
        along = [text.number(f"along{at}", s[dim]) for at, s in enumerate(strides)]
        text.number("count", count)
        self._check_rounds(shape[dim])
        kind = _kind(out.dtype)
        value = _converted(_load(source.dtype, "x1", f"b2 + r * {along[2]}"), _kind(source.dtype), kind)
        if add:
            old = _load(out.dtype, "out", "at")
            if out.dtype.itemsize < 4:
                old = re.sub(r"out\[(.*?)\] >>", r"atomicLoad(&out[\1]) >>", old)
            value = f"add_i64({old}, {value})" if kind == "i64" else f"T({old}) + {value}"
        body = [
            f"let i = {_GLOBAL};",
            "if (i >= scalars.count) { return; }",
            *coordinates,
            *(f"let b{at} = {offset};" for at, offset in enumerate(offsets)),
            "for (var r = 0; r < scalars.rows; r++) {",
            f"let j = {_index(index, 'x0', f'b1 + r * {along[1]}')};",
            f"if (j < 0 || j >= scalars.length) {{ {_FAULT if check else ''} continue; }}",
            f"let row = j{row};",
            *within,
            f"let at = b0 + row * {along[0]};",
            _store(out.dtype, "at", value, kind),
            "}",
        ]
        self._run(text, kind, "scatter", body, (-(-count // 64),), 64)

    def matmul(self, out: DeviceTensor, a: DeviceTensor, b: DeviceTensor) -> None:
        if out.dtype != torch.float32:
            if out.dtype not in _FLOATING:
                self._integer_product(out, a, b)
                return
            wide = self.empty(out.shape, torch.float32)
            self.matmul(wide, *(self.converted(x, torch.float32) for x in (a, b)))
            self.copy(out, wide)
            return
        batch, rows, columns = out.shape
        if self._too_large((out, a, b)):
            self._matmul_parts(out, a, b)
            return
        self._check_rounds(a.shape[2])
        if a.shape[2] > _DEPTH:
            deep_product(self, out, a, b, _DEPTH)
            return
        entry = "matmul_blocked" if self.is_cpu else "matmul"
        if entry not in self._kernels:
            self._kernels[entry] = self.provider.compile(matmul_source(), entry=entry, device=self.index)
        bound = [self._bound(x) for x in (out, a, b)]
        layouts = [
            number
            for x, (_, at) in zip((out, a, b), bound, strict=True)
            for number in (at, x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2))
        ]
        size, block = (32, (8, 8)) if self.is_cpu else (64, (16, 16))
        grid = (-(-columns // size), -(-rows // size), batch)
        numbers = (*layouts, rows, columns, a.shape[2])
        self.provider.launch(self._kernels[entry], grid, block, (*(buffer for buffer, _ in bound), *numbers))

    def _matmul_parts(self, out: DeviceTensor, a: DeviceTensor, b: DeviceTensor) -> None:
        """Write a product in two parts, of the results or of the sums."""
        (batch, rows, inner), columns = a.shape, b.shape[2]
        shape = (batch, rows, columns, inner)
        whole = [
            strided(out, shape, (*out.stride(), 0)),
            strided(a, shape, (a.stride(0), a.stride(1), 0, a.stride(2))),
            strided(b, shape, (b.stride(0), 0, b.stride(2), b.stride(1))),
        ]
        dim = _widest(whole, range(4))
        for begin, parts in _halves(whole, dim):
            y, x0, x1 = (
                strided(x, [x.shape[at] for at in axes], [x.stride(at) for at in axes])
                for x, axes in zip(parts, ((0, 1, 2), (0, 1, 3), (0, 3, 2)), strict=True)
            )
            if dim < 3 or not begin:
                self.matmul(y, x0, x1)
                continue
            rest = self.empty(out.shape, out.dtype)
            self.matmul(rest, x0, x1)
            self.map(out, "x0 + x1", (out, rest))

    # --- arrays larger than a binding may be -------------------------------------------------------------------------

    def _too_large(self, operands: Sequence[DeviceTensor]) -> bool:
        """Return whether an operand's elements lie further apart than a binding may be long."""
        limit = self.binding_bytes
        return any(x.buffer.size_bytes > limit and _span(x) + 512 > limit and x.numel() for x in operands)

    def _bound(self, x: DeviceTensor) -> tuple[Buffer, int]:
        """Return what to bind for a tensor, and the element of it at which the tensor begins."""
        at = int(x.storage_offset())
        if x.buffer.size_bytes <= self.binding_bytes:
            return x.buffer, at
        first = at * x.dtype.itemsize // 256 * 256
        end = min(at * x.dtype.itemsize + _span(x) + x.dtype.itemsize, x.buffer.size_bytes)
        return cast(WebgpuProvider, self.provider).part(x.buffer, first, end - first), at - first // x.dtype.itemsize

    def _check_rounds(self, rounds: int) -> None:
        if self.is_cpu and rounds > _ROUNDS:
            raise UnsupportedCase(
                f"a loop of {rounds:,} rounds; {self.label} is software, which may end one at {_ROUNDS:,}"
            )

    def _integer_product(self, out: DeviceTensor, a: DeviceTensor, b: DeviceTensor) -> None:
        (batch, rows, inner), columns = a.shape, b.shape[2]
        x = strided(a, (batch, rows, 1, inner), (a.stride(0), a.stride(1), 0, a.stride(2)))
        y = strided(b, (batch, 1, columns, inner), (b.stride(0), 0, b.stride(2), b.stride(1)))
        whole = strided(out, (*out.shape, 1), (*out.stride(), 0))
        self.reduce(whole, "sum", (x, y), [3], pre="x0 * x1")

    def _run(
        self, text: _Text, kind: str, entry: str, body: Sequence[str], grid: Sequence[int], block: int, head: str = ""
    ) -> None:
        """Launch a kernel, compiled on first use."""
        key = (entry, kind, head, tuple(body), tuple(text.arrays.items()), tuple(text.numbers))
        kernel = self._kernels.get(key)
        if kernel is None:
            whole = _HEAD.format(entry=entry, block="BLOCK_X", body="\n    ".join(body))
            declared = bindings(text.arrays, text.numbers).replace("= 256u", f"= {block}u")
            extra = _BFLOAT16 if "bfloat16_bits(" in whole else ""
            if kind == "i64" or re.search(r"\b(from_i32|from_f32|to_f32|narrowed)\(", whole):
                extra += _file("int64.wgsl")
            mark, shared = (head, "") if head.startswith("//!") else ("", head)
            program = mark + declared + _functions(kind) + extra + shared + whole
            kinds = ("*u32",) * len(text.arrays) + tuple(text.numbers.values())
            source = KernelSource(f"aten_{entry}", {"wgsl": program}, {entry: kinds}, targets=())
            kernel = self._kernels[key] = self.provider.compile(source, device=self.index)
        self.provider.launch(kernel, grid, (block,), (*text.buffers, *text.values))


@functools.cache
def matmul_source() -> KernelSource:
    """Return the products of batches of float32 matrices: `matmul`, and `matmul_blocked` for devices that are a CPU."""
    numbers = [f"{name}_{part}" for name in ("out", "x0", "x1") for part in ("at", "batch", "row", "column")]
    numbers += ["M", "N", "K"]
    declared = bindings(dict.fromkeys(("out", "x0", "x1"), "f32"), dict.fromkeys(numbers, "i32"))
    kinds = ("*f32",) * 3 + ("i32",) * len(numbers)
    entries = dict.fromkeys(("matmul", "matmul_blocked"), kinds)
    return KernelSource("aten_matmul", {"wgsl": declared + _file("matmul.wgsl")}, entries, targets=())


def _span(x: DeviceTensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    return sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) * x.dtype.itemsize


def _broadcast(x: DeviceTensor, shape: tuple[int, ...]) -> DeviceTensor:
    return strided(x, shape, expanded(tuple(x.shape), tuple(x.stride()), shape))


def _without(x: DeviceTensor, dim: int, shape: tuple[int, ...]) -> DeviceTensor:
    """Return the first row of a tensor along a dimension at each place of a shape."""
    return strided(x, shape, [0 if at == dim else step for at, step in enumerate(x.stride())])


def _with(row: DeviceTensor, dim: int, x: DeviceTensor) -> DeviceTensor:
    """Return the rows of x of which `_without` gave the first."""
    size, step = [*row.shape], [*row.stride()]
    size[dim], step[dim] = x.shape[dim], x.stride(dim)
    return strided(row, size, step)


def _widest(operands: Sequence[DeviceTensor], dims: Iterable[int]) -> int:
    """Return the dimension along which the operand of the most bytes extends furthest."""
    x = max(operands, key=_span)
    return max(dims, key=lambda dim: (x.shape[dim] - 1) * x.stride(dim))


def _halves(operands: Sequence[DeviceTensor], dim: int) -> Iterator[tuple[int, list[DeviceTensor]]]:
    """Yield the first index and the tensors of each half of a dimension, whose size is 1 where it is reduced."""
    count = max(x.shape[dim] for x in operands)
    for begin, end in ((0, count // 2), (count // 2, count)):
        yield begin, [x if x.shape[dim] == 1 else _narrow(x, dim, begin, end) for x in operands]


def _narrow(x: DeviceTensor, dim: int, begin: int, end: int) -> DeviceTensor:
    size = [end - begin if at == dim else n for at, n in enumerate(x.shape)]
    return strided(x, size, x.stride(), int(x.storage_offset()) + begin * x.stride(dim))


def _row(text: _Text, size: int, rows: tuple[int, int] | None, leave: str) -> tuple[str, list[str]]:
    """Return what to add to an index for a row of a part of a tensor, and lines that leave where it has no such row."""
    if rows is None:
        return "", []
    first, here = text.number("first", rows[0]), text.number("here", size)
    return f" - {first}", [f"if (row < 0 || row >= {here}) {{ {leave} }}"]


def _name(at: int) -> str:
    return f"x{at - 1}" if at else "out"


def _spelled(expression: str) -> str:
    """Return an expression with the functions of this module in place of WGSL's, or that WGSL lacks."""
    return _RENAMED.sub(r"acl_\1(", expression)


def _operand(x: DeviceTensor, at: int, index: str, compute: torch.dtype) -> str:
    """Return a line that names operand number `at` of an expression."""
    kind = _kind(compute)
    value = _converted(_load(x.dtype, f"x{at}", index), _kind(x.dtype), "bool" if compute == torch.bool else kind)
    return f"let x{at} = {_converted(value, 'i32', kind) if compute == torch.bool else value};"


def _index(index: DeviceTensor, array: str, at: str) -> str:
    element = _load(index.dtype, array, at)
    return f"narrowed({element})" if index.dtype == torch.int64 else f"i32({element})"


# --- expressions -----------------------------------------------------------------------------------------------------


def _expression(expression: str, kind: str) -> tuple[str, str]:
    """Return an expression in WGSL, and its kind: that of its operands, or bool for int64."""
    if kind == "f32" and "!=" in expression:
        expression = (
            ast.unparse(_Unordered().visit(_parsed(expression))).replace(" and ", " && ").replace(" or ", " || ")
        )
    if kind != "i64":
        return _spelled(expression), kind
    written: tuple[str, str] = _Int64().visit(_parsed(expression))
    return written


def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression.replace("&&", " and ").replace("||", " or "), mode="eval").body


class _Unordered(ast.NodeTransformer):
    """Makes a != b of floats true where one is a NaN, which WGSL's operator leaves open."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        of_floats = isinstance(node.ops[0], ast.NotEq) and not isinstance(node.left, ast.Compare)
        inner = cast(ast.Compare, self.generic_visit(node))
        return ast.Call(ast.Name("differ_f32"), [inner.left, *inner.comparators], []) if of_floats else inner


_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "add_i64({}, {})"), ast.Sub: ("-", "sub_i64({}, {})"), ast.Mult: ("*", "mul_i64({}, {})"),
    ast.Div: ("/", "quotient_i64({}, {})"), ast.Mod: ("%", "rest_i64({}, {})"), ast.BitAnd: ("&", "({} & {})"),
    ast.BitOr: ("|", "({} | {})"), ast.BitXor: ("^", "({} ^ {})"),
    ast.Eq: ("==", "eq_i64({}, {})"), ast.NotEq: ("!=", "!eq_i64({}, {})"), ast.Lt: ("<", "lt_i64({}, {})"),
    ast.GtE: (">=", "!lt_i64({}, {})"), ast.Gt: (">", "lt_i64({1}, {0})"), ast.LtE: ("<=", "!lt_i64({1}, {0})"),
}  # fmt: skip
"""Operator -> its sign for 32 bits and bool, and its function for 64."""


class _Int64(ast.NodeVisitor):
    """Writes an expression of int64: visit returns WGSL and its kind, i64, i32 (indices, literals) or bool.

    The language of expressions is a part of Python's, but for && and ||.
    """

    def visit_Name(self, node: ast.Name) -> tuple[str, str]:
        return node.id, "i32" if re.fullmatch(r"i|n\d+", node.id) else "i64"

    def visit_Constant(self, node: ast.Constant) -> tuple[str, str]:
        return str(node.value), "i32"

    def visit_UnaryOp(self, node: ast.UnaryOp) -> tuple[str, str]:
        value, kind = self.visit(node.operand)
        if isinstance(node.op, ast.Invert):
            return f"(~{value})", kind
        return (f"neg_i64({value})", kind) if kind == "i64" else (f"(-{value})", kind)

    def visit_BinOp(self, node: ast.BinOp) -> tuple[str, str]:
        return self._joined(node.op, node.left, node.right)

    def visit_Compare(self, node: ast.Compare) -> tuple[str, str]:
        return self._joined(node.ops[0], node.left, node.comparators[0])[0], "bool"

    def visit_BoolOp(self, node: ast.BoolOp) -> tuple[str, str]:
        sign = " && " if isinstance(node.op, ast.And) else " || "
        return f"({sign.join(self.visit(value)[0] for value in node.values)})", "bool"

    def visit_Call(self, node: ast.Call) -> tuple[str, str]:
        name = ast.unparse(node.func)
        operands = [self.visit(argument) for argument in node.args]
        if name == "select":
            values = [_converted(value, kind, "i64") for value, kind in operands[:2]]
            return f"select({values[0]}, {values[1]}, {operands[2][0]})", "i64"
        values = [_converted(value, kind, "i64") for value, kind in operands]
        return f"acl_{name}({', '.join(values)})", "bool" if name.startswith("is_") else "i64"

    def _joined(self, operator: ast.AST, left: ast.AST, right: ast.AST) -> tuple[str, str]:
        (a, kind_a), (b, kind_b) = self.visit(left), self.visit(right)
        sign, function = _OPERATORS[type(operator)]
        if "i64" not in (kind_a, kind_b):
            return f"({a} {sign} {b})", kind_a
        return function.format(_converted(a, kind_a, "i64"), _converted(b, kind_b, "i64")), "i64"
