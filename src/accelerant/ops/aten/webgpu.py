"""The kernels of the aten table in WGSL: five templates, specialised by expression, dtypes and number of dimensions.

A kernel is compiled once for each expression and layout; sizes, strides and scalars are arguments. Expressions are
evaluated in f32 or i32. An int64 tensor has its 8 bytes an element, of which kernels use the lower half: its values fit
in 32 bits, which is checked when it comes from the host, and operations that could leave that range run on the host.
Elements of one and two bytes share a word, which is written by atomic operations.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from accelerant.errors import UnsupportedCase, UnsupportedDtype
from accelerant.ops.aten.device import TensorDevice, expanded, merged
from accelerant.ops.aten.table import TABLE, aten
from accelerant.ops.aten.tensor import DeviceTensor
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.compilation.wgsl import bindings, elementwise
from accelerant.runtime.provider import ComputeProvider

__all__ = ["WebgpuTensors", "matmul_source"]

_STORAGE = {
    torch.float32: "f32", torch.int32: "i32", torch.int64: "vec2<i32>", torch.float16: "u32", torch.bfloat16: "u32",
    torch.bool: "u32", torch.uint8: "u32",
}  # fmt: skip
"""Dtype -> the words in WGSL in which its elements lie."""

_FLOATING = (torch.float32, torch.float16, torch.bfloat16)
_BLOCK = 256
_LANES = 64
"""Threads that share a long reduction."""

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
}  # fmt: skip
"""Type of expressions -> function -> its value for the arguments a and b."""

_TWO = ("max", "min", "div_floor", "rem_floor", "div_trunc", "pow")
_RENAMED = re.compile(
    rf"\b({'|'.join((*_TWO, 'abs', 'rint', 'erf', 'tanh', 'is_nan', 'is_inf', 'uniform', 'normal'))})\("
)
_LIMITS = {
    "f32": ("-bitcast<f32>(infinity_bits)", "bitcast<f32>(infinity_bits)"),
    "i32": ("-2147483647 - 1", "2147483647"),
}
_COMBINE = {
    "sum": ("T(0)", "a + v"),
    "prod": ("T(1)", "a * v"),
    "max": ("lowest", "acl_max(a, v)"),
    "min": ("highest", "acl_min(a, v)"),
}
"""Kind of reduction -> neutral element, and combination of `a` and `v`."""


@functools.cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@functools.cache
def _functions(kind: str) -> str:
    """Return the functions of expressions of a type."""
    lines = [f"alias T = {kind};"]
    for name, value in _TYPED[kind].items():
        arguments = "a: T, b: T" if name in _TWO else "a: T"
        result = "bool" if name.startswith("is_") else "T"
        lines.append(f"fn acl_{name}({arguments}) -> {result} {{ return {value}; }}")
    return "\n".join([*lines, _file("expressions.wgsl")])


def _kind(dtype: torch.dtype) -> str:
    return "f32" if dtype in _FLOATING else "i32"


def _load(dtype: torch.dtype, array: str, index: str) -> str:
    """Return an element as f32 or i32."""
    size = dtype.itemsize
    if dtype == torch.int64:
        return f"{array}[{index}].x"
    if size == 4:
        return f"{array}[{index}]"
    word = f"({array}[({index}) >> {2 if size == 1 else 1}u] >> u32((({index}) & {4 // size - 1}) * {8 * size}))"
    if dtype == torch.float16:
        return f"unpack2x16float({word} & 0xffffu).x"
    if dtype == torch.bfloat16:
        return f"bitcast<f32>({word} << 16u)"
    return f"select(0, 1, ({word} & 0xffu) != 0u)" if dtype == torch.bool else f"i32({word} & 0xffu)"


def _store(dtype: torch.dtype, index: str, value: str) -> str:
    """Return statements that write an expression of any scalar type to an element of `out`."""
    size = dtype.itemsize
    if dtype == torch.int64:
        return f"let stored = i32({value}); out[{index}] = vec2<i32>(stored, stored >> 31u);"
    if size == 4:
        return f"out[{index}] = {_STORAGE[dtype]}({value});"
    if dtype == torch.float16:
        bits = f"pack2x16float(vec2<f32>(f32({value}), 0.0))"
    elif dtype == torch.bfloat16:
        bits = f"bfloat16_bits(f32({value}))"
    else:
        bits = f"select(0u, 1u, bool({value}))" if dtype == torch.bool else f"(u32(i32({value})) & 0xffu)"
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

    def __init__(self) -> None:
        self.arrays: dict[str, str] = {}
        self.buffers: list[Any] = []
        self.numbers: dict[str, str] = {}
        self.values: list[Any] = []

    def array(self, name: str, x: DeviceTensor) -> None:
        narrow = name == "out" and x.dtype.itemsize < 4
        self.arrays[name] = "atomic<u32>" if narrow else _STORAGE[x.dtype]
        self.buffers.append(x.buffer)
        self.number(f"{name}_at", int(x.storage_offset()))

    def number(self, name: str, value: float, kind: str = "i32") -> str:
        if kind == "i32" and not -(2**31) <= value < 2**31:
            raise UnsupportedCase(f"WebGPU's kernels count in 32 bits; {name} is {value}")
        self.numbers[name] = kind
        self.values.append(value)
        return f"scalars.{name}"

    def scalars(self, name: str, values: Sequence[float], kind: str) -> list[str]:
        """Add scalars, and return lines that name them."""
        convert = float if kind == "f32" else int
        return [
            f"let {name}{at} = {self.number(f'{name}{at}', convert(value), kind)};" for at, value in enumerate(values)
        ]

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
_GLOBAL = "i32(linear_group(group, groups) * BLOCK_X + thread)"
_GROUP = "i32(linear_group(group, groups))"


class WebgpuTensors(TensorDevice):
    """A device of WebGPU."""

    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset(_STORAGE)
    overrides: ClassVar[dict[Any, Callable[..., Any]]] = {}

    def __init__(self, provider: ComputeProvider, index: int) -> None:
        super().__init__(provider, index)
        self.is_cpu = provider.devices()[index].properties["software"]
        self._kernels: dict[Any, Kernel] = {}

    def upload(self, x: torch.Tensor) -> DeviceTensor:
        if x.dtype == torch.int64 and x.numel():
            low, high = (int(bound) for bound in torch.aminmax(x.detach()))
            if low < -(2**31) or high >= 2**31:
                value = low if low < -(2**31) else high
                raise UnsupportedCase(f"{self.label} has int64 tensors of values that fit in 32 bits, got {value}")
        return super().upload(x)

    # --- the five kernels --------------------------------------------------------------------------------------------

    def map(
        self, out: DeviceTensor, expression: str, inputs: Sequence[DeviceTensor] = (), scalars: Sequence[float] = (),
        integers: Sequence[int] = (), *, compute: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        operands, shape, count = (out, *inputs), tuple(out.shape), out.numel()
        sizes, steps = merged(shape, tuple(expanded(tuple(x.shape), tuple(x.stride()), shape) for x in operands))
        kind = _kind(out.dtype if compute is None else compute)
        text = _Text()
        for at, x in enumerate(operands):
            text.array(_name(at), x)
        lines = text.coordinates(sizes, "i")
        offsets = [f"scalars.{_name(at)}_at{text.offset(_name(at), steps[at])}" for at in range(len(operands))]
        lines += [*text.scalars("s", scalars, kind), *text.scalars("n", integers, "i32")]
        lines += [f"let x{at} = T({_load(x.dtype, f'x{at}', offsets[at + 1])});" for at, x in enumerate(inputs)]
        text.number("count", count)
        body = [
            f"let i = {_GLOBAL};",
            "if (i >= scalars.count) { return; }",
            *lines,
            _store(out.dtype, offsets[0], _spelled(expression)),
        ]
        whole = len(sizes) <= 1 and all(step in ([], [1]) for step in steps) and not re.search(r"\bi\b", expression)
        apart = whole and all(not x.storage_offset() for x in operands)
        head = elementwise(*(x.dtype.itemsize for x in operands)) if apart else ""
        self._run(text, kind, "map", body, (-(-count // _BLOCK),), _BLOCK, head)

    def reduce(
        self, out: DeviceTensor, kind: str, inputs: Sequence[DeviceTensor], dims: Sequence[int], *, pre: str = "x0",
        post: str = "a", scalars: Sequence[float] = (), compute: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        shape = tuple(torch.broadcast_shapes(*(x.shape for x in inputs)))
        kept = [at for at in range(len(shape)) if at not in dims]
        strides = [expanded(tuple(x.shape), tuple(x.stride()), shape) for x in inputs]
        sizes, steps = merged(
            tuple(shape[at] for at in kept), tuple(tuple(s[at] for at in kept) for s in (tuple(out.stride()), *strides))
        )
        inner, inner_steps = merged(
            tuple(shape[at] for at in dims), tuple(tuple(s[at] for at in dims) for s in strides)
        )
        outputs, length = out.numel(), math.prod(shape[at] for at in dims)
        value = _kind(inputs[0].dtype if compute is None else compute)
        indexed = kind.startswith("arg")
        lanes = 1 if indexed or length <= 4 * _LANES or self.is_cpu else _LANES
        text = _Text()
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
        accumulate = f"a = {combine};"
        if indexed:
            better = ">" if kind == "argmax" else "<"
            accumulate = f"if (r == 0 || (!acl_is_nan(a) && (acl_is_nan(v) || v {better} a))) {{ a = v; best = r; }}"
        low, high = _LIMITS[value]
        body = [
            f"let i = {_GROUP if lanes > 1 else _GLOBAL};",
            "if (i >= scalars.count) { return; }",
            *outer,
            *(f"let b{at} = {bases[at + 1]};" for at in range(len(inputs))),
            *named,
            f"let lowest: T = {low}; let highest: T = {high};",
            f"var a: T = {neutral}; var best = 0;",
            f"for (var r = {'i32(thread)' if lanes > 1 else '0'}; r < scalars.length; r += {lanes}) {{",
            *along,
            *(f"let x{at} = T({_load(x.dtype, f'x{at}', offsets[at])});" for at, x in enumerate(inputs)),
            f"let v = T({_spelled(pre)});",
            accumulate,
            "}",
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
        body.append(_store(out.dtype, bases[0], "best" if indexed else _spelled(post)))
        block = lanes if lanes > 1 else 64
        self._run(text, value, "reduce", body, (outputs if lanes > 1 else -(-outputs // block),), block, head)

    def gather(self, out: DeviceTensor, x: DeviceTensor, dim: int, index: DeviceTensor) -> None:
        shape = tuple(out.shape)
        at_index = expanded(tuple(index.shape), tuple(index.stride()), shape)
        x_strides = tuple(0 if at == dim else s for at, s in enumerate(x.stride()))
        sizes, steps = merged(shape, (tuple(out.stride()), x_strides, at_index))
        text = _Text()
        for at, operand in enumerate((out, x, index)):
            text.array(_name(at), operand)
        coordinates = text.coordinates(sizes, "i")
        offsets = [f"scalars.{_name(at)}_at{text.offset(_name(at), steps[at])}" for at in range(3)]
        text.number("length", x.shape[dim])
        text.number("along", x.stride(dim))
        text.number("count", out.numel())
        body = [
            f"let i = {_GLOBAL};",
            "if (i >= scalars.count) { return; }",
            *coordinates,
            f"var j = i32({_load(index.dtype, 'x1', offsets[2])});",
            "if (j < 0) { j += scalars.length; }",
            f"let at = {offsets[1]} + clamp(j, 0, scalars.length - 1) * scalars.along;",
            _store(out.dtype, offsets[0], _load(x.dtype, "x0", "at")),
        ]
        self._run(text, _kind(out.dtype), "gather", body, (-(-out.numel() // _BLOCK),), _BLOCK)

    def scatter(self, out: DeviceTensor, dim: int, index: DeviceTensor, source: DeviceTensor, *, add: bool) -> None:
        shape = tuple(source.shape)
        others = [at for at in range(len(shape)) if at != dim]
        at_index = expanded(tuple(index.shape), tuple(index.stride()), shape)
        strides = (tuple(out.stride()), at_index, tuple(source.stride()))
        sizes, steps = merged(tuple(shape[at] for at in others), tuple(tuple(s[at] for at in others) for s in strides))
        count = math.prod(shape[at] for at in others)
        text = _Text()
        for at, operand in enumerate((out, index, source)):
            text.array(_name(at), operand)
        coordinates = text.coordinates(sizes, "i")
        offsets = [f"scalars.{_name(at)}_at{text.offset(_name(at), steps[at])}" for at in range(3)]
        text.number("length", out.shape[dim])
        text.number("rows", shape[dim])
        along = [text.number(f"along{at}", s[dim]) for at, s in enumerate(strides)]
        text.number("count", count)
        value = f"T({_load(source.dtype, 'x1', f'b2 + r * {along[2]}')})"
        if add:
            old = _load(out.dtype, "out", "at")
            if out.dtype.itemsize < 4:
                old = re.sub(r"out\[(.*?)\] >>", r"atomicLoad(&out[\1]) >>", old)
            value = f"T({old}) + {value}"
        body = [
            f"let i = {_GLOBAL};",
            "if (i >= scalars.count) { return; }",
            *coordinates,
            *(f"let b{at} = {offset};" for at, offset in enumerate(offsets)),
            "for (var r = 0; r < scalars.rows; r++) {",
            f"var j = i32({_load(index.dtype, 'x0', f'b1 + r * {along[1]}')});",
            "if (j < 0) { j += scalars.length; }",
            "if (j < 0 || j >= scalars.length) { continue; }",
            f"let at = b0 + j * {along[0]};",
            _store(out.dtype, "at", value),
            "}",
        ]
        self._run(text, _kind(out.dtype), "scatter", body, (-(-count // 64),), 64)

    def matmul(self, out: DeviceTensor, a: DeviceTensor, b: DeviceTensor) -> None:
        if out.dtype != torch.float32:
            if out.dtype not in _FLOATING:
                raise UnsupportedDtype(f"{self.label} multiplies matrices of floating dtypes, got {out.dtype}")
            wide = self.empty(out.shape, torch.float32)
            self.matmul(wide, *(self._converted(x, torch.float32) for x in (a, b)))
            self.copy(out, wide)
            return
        batch, rows, columns = out.shape
        entry = "matmul_blocked" if self.is_cpu else "matmul"
        if entry not in self._kernels:
            self._kernels[entry] = self.provider.compile(matmul_source(), entry=entry, device=self.index)
        layouts = [
            number
            for x in (out, a, b)
            for number in (int(x.storage_offset()), x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2))
        ]
        size, block = (32, (8, 8)) if self.is_cpu else (64, (16, 16))
        grid = (-(-columns // size), -(-rows // size), batch)
        numbers = (*layouts, rows, columns, a.shape[2])
        self.provider.launch(self._kernels[entry], grid, block, (out.buffer, a.buffer, b.buffer, *numbers))

    def _converted(self, x: DeviceTensor, dtype: torch.dtype) -> DeviceTensor:
        out = self.empty(x.shape, dtype)
        self.copy(out, x)
        return out

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


def _name(at: int) -> str:
    return f"x{at - 1}" if at else "out"


def _spelled(expression: str) -> str:
    """Return an expression with the functions of this module in place of WGSL's, or that WGSL lacks."""
    return _RENAMED.sub(r"acl_\1(", expression)


# --- int64 -----------------------------------------------------------------------------------------------------------

_GROWING = {
    ("add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "pow", "pow_", "floor_divide", "floor_divide_", "div", "div_",
     "neg", "neg_", "abs", "square", "addcmul", "addcmul_"): lambda x, *rest: _meets_int64(x, *rest[:1]),
    ("sum", "prod"): lambda x, *rest: x.dtype in (torch.int64, torch.int32),
    ("scatter_add", "scatter_add_", "index_add", "index_add_"): lambda x, *rest: x.dtype == torch.int64,
    ("mm", "bmm", "mv", "dot", "addmm", "baddbmm"): lambda x, *rest: x.dtype not in _FLOATING,
}  # fmt: skip
"""Operations, and whether a call's result may need more than 32 bits."""


def _meets_int64(*operands: Any) -> bool:
    dtypes = [x.dtype for x in operands if isinstance(x, torch.Tensor)]
    return torch.int64 in dtypes and not any(dtype.is_floating_point for dtype in dtypes)


def _guarded(known: Callable[..., Any], grows: Callable[..., bool]) -> Callable[..., Any]:
    def run(place: TensorDevice, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if grows(*args) else known(place, *args, **kwargs)

    return run


for _names, _grows in _GROWING.items():
    for _packet in (getattr(aten, name) for name in _names):
        for _function in (getattr(_packet, overload) for overload in _packet.overloads()):
            if _function in TABLE:
                WebgpuTensors.overrides[_function] = _guarded(TABLE[_function], _grows)
