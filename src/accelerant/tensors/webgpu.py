"""The kernels of the aten table in WGSL: the words of `kernels.py`, products of matrices, and parts of large arrays.

Expressions are evaluated in f32, in i32, or for int64, which WGSL lacks, in pairs of u32 (int64.wgsl), with functions
for operators. Elements of one and two bytes share a word, which is written by atomic operations.
"""

import ast
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch

from accelerant.errors import UnsupportedCase
from accelerant.runtime.compilation.kernel import Kernel, KernelSource, bindings
from accelerant.runtime.provider import Buffer, ComputeProvider
from accelerant.runtime.providers.webgpu import WebgpuProvider
from accelerant.tensors.kernels import LANES, GeneratedKernels, KernelBody, Text, file_text
from accelerant.tensors.table import deep_product, strided
from accelerant.tensors.tensor import DeviceTensor, expanded, span

_STORAGE = {
    torch.float32: "f32", torch.int32: "i32", torch.int64: "vec2<u32>", torch.float16: "u32", torch.bfloat16: "u32",
    torch.bool: "u32", torch.uint8: "u32",
}  # fmt: skip
"""Dtype -> the words in WGSL in which its elements lie."""

_FLOATING = (torch.float32, torch.float16, torch.bfloat16)
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
_BLOCKS = (
    "added++;"
    " if ((added & 31) == 0) { middle += a; a = 0.0; if ((added & 1023) == 0) { total += middle; middle = 0.0; } }"
)
"""After each term of a long sum: sums of 32 terms are added up, and sums of 1,024; drivers drop a compensation."""

_DEPTH = 65536
"""Terms of a product of matrices; sums of so many are added up."""


@functools.cache
def _functions(kind: str) -> str:
    """Return the functions of expressions of a type."""
    lines = [f"alias T = {'vec2<u32>' if kind == 'i64' else kind}; alias I = i32;"]
    for name, value in _TYPED[kind].items():
        arguments = "a: T, b: T" if name in _TWO else "a: T"
        result = "bool" if name.startswith("is_") else "T"
        lines.append(f"fn acl_{name}({arguments}) -> {result} {{ return {value}; }}")
    return "\n".join([*lines, file_text("expressions.wgsl")])


_BFLOAT16 = """
fn bfloat16_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    return select((bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u, 0x7fc0u, nan_f32(x));
}
"""


_HEAD = """
@compute @workgroup_size({block})
fn {entry}(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32
) {{
    {body}
}}
"""
_JOIN = f"""\
partial[thread] = a;
    for (var width = {LANES // 2}u; width > 0u; width /= 2u) {{
        workgroupBarrier();
        if (thread < width) {{
            let v = partial[thread + width]; a = partial[thread]; ACCUMULATE partial[thread] = a;
        }}
    }}
    if (thread > 0u) {{ return; }}
    a = partial[0];"""


def _converted(value: str, kind: str, to: str) -> str:
    """Return a value of kind f32, i32, i64 or bool in another kind."""
    if kind == to == "i64":
        return f"({value})"
    if kind == "i64":
        return {"f32": f"to_f32({value})", "i32": f"i32(({value}).x)", "bool": f"any({value} != vec2<u32>())"}[to]
    if to == "i64":
        return f"from_f32(f32({value}))" if kind == "f32" else f"from_i32(i32({value}))"
    return f"{to}({value})"


class _Text(Text):
    """A kernel under construction, whose numbers are members of `scalars`; those of int64 are two."""

    let = "let {} = {};"

    def number(self, name: str, value: int) -> str:
        if not -(2**31) <= value < 2**31:
            raise UnsupportedCase(f"WebGPU's kernels count in 32 bits; {name} is {value}")
        super().number(name, value)
        return f"scalars.{name}"

    def scalars(self, kind: str) -> list[str]:
        if kind != "i64":
            super().scalars(kind)
            return [self.let.format(name, f"scalars.{name}") for name in self.numbers if re.fullmatch(r"[sn]\d+", name)]
        count, integers = self._counts
        self.numbers |= {f"s{at}_{half}": "u32" for at in range(count) for half in range(2)}
        self.numbers |= {f"n{at}": "I" for at in range(integers)}
        named = {f"s{at}": f"vec2<u32>(scalars.s{at}_0, scalars.s{at}_1)" for at in range(count)}
        named |= {f"n{at}": f"scalars.n{at}" for at in range(integers)}
        return [self.let.format(*each) for each in named.items()]


class WebgpuTensors(GeneratedKernels):
    """A device of WebGPU."""

    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset(_STORAGE)
    numbers: ClassVar[Mapping[str, tuple[str, str, str, str]]] = {
        "f32": ("0.0", "1.0", "-bitcast<f32>(infinity_bits)", "bitcast<f32>(infinity_bits)"),
        "i32": ("0", "1", "-2147483647 - 1", "2147483647"),
        "i64": ("vec2<u32>()", "vec2<u32>(1u, 0u)", "vec2<u32>(0u, 0x80000000u)", "vec2<u32>(~0u, 0x7fffffffu)"),
    }
    thread, group = "i32(thread)", "i32(linear_group(group, groups))"
    linear = "i32(linear_group(group, groups) * BLOCK_X + thread)"
    counter, variable, nan = "var", "var {1}: {0} = {2};", "bitcast<f32>(nan_bits)"
    out_of_range = "if (fault[0] == 0) {{ fault[1] = j; fault[0] = {} + 1; }}"
    join = (f"var<workgroup> partial: array<T, {LANES}>;\n", _JOIN)
    text = _Text

    def __init__(self, provider: ComputeProvider, index: int) -> None:
        super().__init__(provider, index)
        properties = provider.devices()[index].properties
        self.is_cpu, self.binding_bytes = properties["software"], properties["binding_bytes"]

    # --- words -------------------------------------------------------------------------------------------------------
    def _kind(self, dtype: torch.dtype) -> str:
        return "f32" if dtype in _FLOATING else "i64" if dtype == torch.int64 else "i32"

    def _expression(self, expression: str, kind: str) -> tuple[str, str]:
        return _expression(expression, kind)

    def _cast(self, value: str, kind: str, to: str) -> str:
        return _converted(value, kind, to)

    def _load(self, dtype: torch.dtype, operand: str, index: str) -> str:
        """Return an element as f32, i32 or, of int64, vec2<u32>."""
        if (size := dtype.itemsize) >= 4:
            return f"{operand}[{index}]"
        word = f"({operand}[({index}) >> {2 if size == 1 else 1}u] >> u32((({index}) & {4 // size - 1}) * {8 * size}))"
        if dtype == torch.float16:
            return f"unpack2x16float({word} & 0xffffu).x"
        if dtype == torch.bfloat16:
            return f"bitcast<f32>({word} << 16u)"
        return f"select(0, 1, ({word} & 0xffu) != 0u)" if dtype == torch.bool else f"i32({word} & 0xffu)"

    def _store(self, dtype: torch.dtype, index: str, value: str, kind: str) -> str:
        """Return statements that write a value of a kind to an element of `out`."""
        if (size := dtype.itemsize) >= 4:
            return f"out[{index}] = {_converted(value, kind, self._kind(dtype))};"
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

    def _operand(self, dtype: torch.dtype, operand: str, index: str, compute: torch.dtype) -> str:
        kind, value = self._kind(compute), self._load(dtype, operand, index)
        if compute == torch.bool:
            return f"let {operand} = i32({_converted(value, self._kind(dtype), 'bool')});"
        return f"let {operand} = {_converted(value, self._kind(dtype), kind)};"

    def _index(self, dtype: torch.dtype, operand: str, index: str) -> str:
        return f"let j = {'narrowed' if dtype == torch.int64 else 'i32'}({self._load(dtype, operand, index)});"

    def _added(self, dtype: torch.dtype, value: str, kind: str) -> str:
        old = self._load(dtype, "out", "at")
        if dtype.itemsize < 4:
            old = re.sub(r"out\[(.*?)\] >>", r"atomicLoad(&out[\1]) >>", old)
        return f"add_i64({old}, {value})" if kind == "i64" else f"T({old}) + {value}"

    def _lanes(self, length: int, outputs: int, innermost: int) -> int:
        return 1 if length <= (_ROUNDS if self.is_cpu else 4 * LANES) else LANES

    def _long_sum(self, loop: str, first: str, length: str, lanes: int) -> tuple[list[str], str, list[str]]:
        opened = ["var added = 0; var middle = 0.0; var total = 0.0;", loop.format(first, length)]
        return opened, f"a = a + v; {_BLOCKS}", ["}", "a += middle; a += total;"]

    def _values(self, scalars: Sequence[float], kind: str) -> list[Any]:
        if kind != "i64":
            return super()._values(scalars, kind)
        return [int(value) >> shift & 0xFFFFFFFF for value in scalars for shift in (0, 32)]

    def _check_rounds(self, rounds: int) -> None:
        if self.is_cpu and rounds > _ROUNDS:
            raise UnsupportedCase(
                f"a loop of {rounds:,} rounds; {self.label} is software, which may end one at {_ROUNDS:,}"
            )

    def _compile(self, text: Text, program: KernelBody) -> Kernel:
        kind, entry, block = program.kind, program.entry, program.block[0]
        arrays = {
            name: "atomic<u32>" if name == "out" and x.dtype.itemsize < 4 else _STORAGE[x.dtype]
            for name, x in text.operands.items()
        }
        numbers = {name: "i32" if type_ == "I" else type_ for name, type_ in text.numbers.items()}
        whole = _HEAD.format(entry=entry, block="BLOCK_X", body="\n    ".join(program.body))
        declared = bindings(arrays, numbers).replace("= 256u", f"= {block}u")
        extra = _BFLOAT16 if "bfloat16_bits(" in whole else ""
        if kind == "i64" or re.search(r"\b(from_i32|from_f32|to_f32|narrowed)\(", whole):
            extra += file_text("int64.wgsl")
        shader = declared + _functions(kind) + extra + program.head + whole
        kinds = ("*u32",) * len(arrays) + tuple(numbers.values())
        source = KernelSource(f"aten_{entry}", {"wgsl": shader}, {entry: kinds}, targets=())
        return self.provider.compile(source, device=self.index)

    # --- products of matrices ----------------------------------------------------------------------------------------
    def matmul(self, out: DeviceTensor, a: DeviceTensor, b: DeviceTensor) -> None:
        if out.dtype != torch.float32:
            if out.dtype not in _FLOATING:
                self._integer_product(out, a, b)
                return
            wide = self.empty(out.shape, torch.float32)
            self.matmul(wide, *(self.contiguous(x, torch.float32) for x in (a, b)))
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

    def _integer_product(self, out: DeviceTensor, a: DeviceTensor, b: DeviceTensor) -> None:
        (batch, rows, inner), columns = a.shape, b.shape[2]
        x = strided(a, (batch, rows, 1, inner), (a.stride(0), a.stride(1), 0, a.stride(2)))
        y = strided(b, (batch, 1, columns, inner), (b.stride(0), 0, b.stride(2), b.stride(1)))
        whole = strided(out, (*out.shape, 1), (*out.stride(), 0))
        self.reduce(whole, "sum", (x, y), [3], pre="x0 * x1")

    # --- arrays larger than a binding may be -------------------------------------------------------------------------
    def _too_large(self, operands: Sequence[DeviceTensor]) -> bool:
        """Return whether an operand's elements lie further apart than a binding may be long."""
        limit = self.binding_bytes
        return any(x.buffer.size_bytes > limit and _bytes(x) + 512 > limit and x.numel() for x in operands)

    def _bound(self, x: DeviceTensor) -> tuple[Buffer, int]:
        """Return what to bind for a tensor, and the element of it at which the tensor begins."""
        at = int(x.storage_offset())
        if x.buffer.size_bytes <= self.binding_bytes:
            return x.buffer, at
        first = at * x.dtype.itemsize // 256 * 256
        end = min(at * x.dtype.itemsize + _bytes(x) + x.dtype.itemsize, x.buffer.size_bytes)
        return cast(WebgpuProvider, self.provider).part(x.buffer, first, end - first), at - first // x.dtype.itemsize

    def map(
        self, out: DeviceTensor, expression: str, inputs: Sequence[DeviceTensor] = (), scalars: Sequence[float] = (),
        integers: Sequence[int] = (), *, compute: torch.dtype | None = None, first: int = 0,
    ) -> None:  # fmt: skip
        if not self._too_large((out, *inputs)):
            super().map(out, expression, inputs, scalars, integers, compute=compute, first=first)
            return
        shape = tuple(out.shape)
        whole = [out, *(_broadcast(x, shape) for x in inputs)]
        counts = re.search(r"\bi\b", expression)  # the linear index: parts of the outermost dimension alone keep it
        dim = next(at for at, n in enumerate(shape) if n > 1) if counts else _widest(whole, range(len(shape)))
        for begin, halves in _halves(whole, dim):
            moved = first + begin * math.prod(shape[dim + 1 :])
            self.map(halves[0], expression, halves[1:], scalars, integers, compute=compute, first=moved)

    def reduce(
        self, out: DeviceTensor, kind: str, inputs: Sequence[DeviceTensor], dims: Sequence[int], *, pre: str = "x0",
        post: str = "a", scalars: Sequence[float] = (), compute: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        compute = inputs[0].dtype if compute is None else compute
        if not self._too_large((out, *inputs)):
            super().reduce(out, kind, inputs, dims, pre=pre, post=post, scalars=scalars, compute=compute)
            return
        shape = tuple(torch.broadcast_shapes(*(x.shape for x in inputs)))
        inputs = [_broadcast(x, shape) for x in inputs]
        if (dim := _widest([out, *inputs], range(len(shape)))) not in dims:
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
        if not self._too_large((out, x, index)):
            super().gather(out, x, dim, index, rows)
            return
        shape = tuple(out.shape)
        whole = [out, _broadcast(index, shape), _without(x, dim, shape)]
        if _longer(x, dim, whole):
            for begin, (part,) in _halves([x], dim):
                self.gather(out, part, dim, index, _rows_from(begin, x.shape[dim], rows))
            return
        for _, (part, of_index, of_x) in _halves(whole, _widest(whole, range(len(shape)))):
            self.gather(part, _with(of_x, dim, x), dim, of_index, rows)

    def scatter(
        self, out: DeviceTensor, dim: int, index: DeviceTensor, source: DeviceTensor, *, add: bool,
        check: bool = True, rows: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        if not self._too_large((out, index, source)):
            super().scatter(out, dim, index, source, add=add, check=check, rows=rows)
            return
        shape = tuple(source.shape)
        whole = [source, _broadcast(index, shape), _without(out, dim, shape)]
        if _longer(out, dim, whole):
            for begin, (part,) in _halves([out], dim):
                self.scatter(
                    part, dim, index, source, add=add, check=check, rows=_rows_from(begin, out.shape[dim], rows)
                )
            return
        for _, (part, of_index, of_out) in _halves(whole, _widest(whole, range(len(shape)))):
            self.scatter(_with(of_out, dim, out), dim, of_index, part, add=add, check=check, rows=rows)


def _longer(x: DeviceTensor, dim: int, others: Sequence[DeviceTensor]) -> bool:
    """Return whether x is the largest operand because of its rows along a dimension."""
    return _bytes(x) > max(map(_bytes, others)) and (x.shape[dim] - 1) * x.stride(dim) >= _bytes(others[2])


def _rows_from(begin: int, size: int, rows: tuple[int, int] | None) -> tuple[int, int]:
    """Return the first row of a part within the largest tensor, and that tensor's number of rows."""
    first, whole = rows or (0, size)
    return first + begin, whole


@functools.cache
def matmul_source() -> KernelSource:
    """Return the products of batches of float32 matrices: `matmul`, and `matmul_blocked` for devices that are a CPU."""
    numbers = [f"{name}_{part}" for name in ("out", "x0", "x1") for part in ("at", "batch", "row", "column")]
    numbers += ["M", "N", "K"]
    declared = bindings(dict.fromkeys(("out", "x0", "x1"), "f32"), dict.fromkeys(numbers, "i32"))
    kinds = ("*f32",) * 3 + ("i32",) * len(numbers)
    entries = dict.fromkeys(("matmul", "matmul_blocked"), kinds)
    return KernelSource("aten_matmul", {"wgsl": declared + file_text("matmul.wgsl")}, entries, targets=())


def _bytes(x: DeviceTensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    return span(x) * x.dtype.itemsize


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
    x = max(operands, key=_bytes)
    return max(dims, key=lambda dim: (x.shape[dim] - 1) * x.stride(dim))


def _halves(operands: Sequence[DeviceTensor], dim: int) -> Iterator[tuple[int, list[DeviceTensor]]]:
    """Yield the first index and the tensors of each half of a dimension, whose size is 1 where it is reduced."""
    count = max(x.shape[dim] for x in operands)
    for begin, end in ((0, count // 2), (count // 2, count)):
        yield begin, [x if x.shape[dim] == 1 else _narrow(x, dim, begin, end) for x in operands]


def _narrow(x: DeviceTensor, dim: int, begin: int, end: int) -> DeviceTensor:
    size = [end - begin if at == dim else n for at, n in enumerate(x.shape)]
    return strided(x, size, x.stride(), int(x.storage_offset()) + begin * x.stride(dim))


# --- expressions -----------------------------------------------------------------------------------------------------
def _expression(expression: str, kind: str) -> tuple[str, str]:
    """Return an expression in WGSL, and its kind: that of its operands, or bool for int64."""
    if kind == "f32" and "!=" in expression:
        expression = (
            ast.unparse(_Unordered().visit(_parsed(expression))).replace(" and ", " && ").replace(" or ", " || ")
        )
    if kind != "i64":
        return _RENAMED.sub(r"acl_\1(", expression), kind  # functions that WGSL lacks or has others for
    written: tuple[str, str] = _Int64().visit(_parsed(expression))
    return written


def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression.replace("&&", " and ").replace("||", " or "), mode="eval").body


class _Unordered(ast.NodeTransformer):
    """Makes a != b of floats true where one is NaN, which WGSL does not define."""

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
    """Writes an int64 expression (Python's syntax, && and ||): visit returns WGSL and its kind, i64, i32 or bool."""

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
