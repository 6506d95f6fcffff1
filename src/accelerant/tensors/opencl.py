"""The kernels of the aten table in OpenCL C: five templates, specialized by expression, dtypes and layout.

A kernel is compiled once for each expression, combination of dtypes and number of dimensions that remain after those
that lie together in memory are merged. Sizes, strides and scalars are arguments. The innermost stride of an operand is
part of the text where it is 0 or 1, so that CPU devices load vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch

from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.provider import ComputeProvider
from accelerant.tensors.device import TensorDevice, expanded, merged
from accelerant.tensors.table import deep_product
from accelerant.tensors.tensor import DeviceTensor

_STORAGE = {
    torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "ushort",
    torch.int64: "long", torch.int32: "int", torch.int16: "short", torch.int8: "char", torch.uint8: "uchar",
    torch.bool: "uchar",
}  # fmt: skip
"""Dtype -> its element type in OpenCL C."""

_COMPUTE = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "float",
    torch.bfloat16: "float",
    torch.bool: "int",
}
"""Dtype -> the type that expressions are evaluated in; long for integers."""

_KINDS = {"float": "f32", "double": "f64", "int": "i32", "long": "i64"}

_HEADER = """
#undef select
#define select(b, a, c) ((c) ? (a) : (b))
"""
_RANDOM = """
static inline uint4 philox(uint4 c, uint2 k) {
    for (int round = 0; round < 10; ++round) {
        uint h0 = mul_hi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
        uint h1 = mul_hi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
        c = (uint4)(h1 ^ c.y ^ k.x, l1, h0 ^ c.w ^ k.y, l0);
        k += (uint2)(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}
static inline uint4 drawn(long i, long n0, long n1) {
    return philox((uint4)((uint)i, (uint)(i >> 32), 0u, 0u), (uint2)((uint)n0, (uint)n1));
}
static inline float uniform(long i, long n0, long n1) { return (drawn(i, n0, n1).x >> 8) * 0x1p-24f; }
static inline float normal(long i, long n0, long n1) {
    uint4 r = drawn(i, n0, n1);
    float u = ((r.x >> 8) + 1) * 0x1p-24f;
    return sqrt(-2.0f * log(u)) * cospi((r.y >> 8) * 0x1p-23f);
}
"""
_BFLOAT16 = """
static inline float load_bfloat16(ushort x) { return as_float((uint)x << 16); }
static inline ushort store_bfloat16(float x) {
    uint bits = as_uint(x);
    return x != x ? (ushort)0x7FC0 : (ushort)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
"""
_FLOATING = """
#define is_nan(x) ((x) != (x))
#define is_inf(x) (fabs(x) == (T)INFINITY)
static inline T acl_max(T a, T b) { return a != a ? a : b != b ? b : a > b ? a : b; }
static inline T acl_min(T a, T b) { return a != a ? a : b != b ? b : a < b ? a : b; }
static inline T acl_rem(T a, T b) { T m = fmod(a, b); return m != 0 && ((b < 0) != (m < 0)) ? m + b : m; }
static inline T acl_div(T a, T b) {
    if (b == 0) return a / b;
    T m = fmod(a, b), q = (a - m) / b;
    if (m != 0 && ((b < 0) != (m < 0))) q -= 1;
    T f = floor(q);
    return q == 0 ? copysign((T)0, a / b) : q - f > (T)0.5 ? f + 1 : f;
}
#undef abs
#define abs(x) fabs(x)
"""
_INTEGRAL = """
#define is_nan(x) 0
#define is_inf(x) 0
static inline T acl_max(T a, T b) { return a > b ? a : b; }
static inline T acl_min(T a, T b) { return a < b ? a : b; }
static inline T acl_quotient(T a, T b) { return b == 0 ? 0 : b == -1 ? -a : a / b; }
static inline T acl_div(T a, T b) {
    T q = acl_quotient(a, b);
    return b && q * b != a && ((a < 0) != (b < 0)) ? q - 1 : q;
}
static inline T acl_rem(T a, T b) { return a - acl_div(a, b) * b; }
#define div_trunc(a, b) acl_quotient(a, b)
#undef abs
#define abs(x) ((x) < 0 ? -(x) : (x))
"""
_SHARED = """
#undef max
#undef min
#define max(a, b) acl_max(a, b)
#define min(a, b) acl_min(a, b)
#define rem_floor(a, b) acl_rem(a, b)
#define div_floor(a, b) acl_div(a, b)
"""

_BLOCK = 256
_LANES = 64
"""Work-items that share a long reduction."""

_ROWS, _COLUMNS = 8, 16
"""Result of a work-item of the product on a CPU: columns of one vector."""

_DEPTH = 16
"""Inner dimension of the tiles of the product on a GPU."""

_DEPTH_CPU, _DEPTH_GPU = 256, 2048
"""Terms of a product that are added one after the other; sums of so many are added with compensation."""

_COMPENSATED = (
    "const {type} term = {v} - {rest}, next = {a} + term; "
    "{rest} = (next - {a}) - term; {rest} = {rest} == {rest} ? {rest} : ({type})0; {a} = next;"
)
"""Add v to a; `rest` is the rounding error of the last addition, 0 where a sum is not finite.

Source: Kahan's sum, in Higham 2002, Accuracy and Stability of Numerical Algorithms, 4.3.
"""

_LANES_COMBINED = """\
    shared[get_local_id(0)] = a;
    for (int half_width = LANES / 2; half_width; half_width /= 2) {{
        barrier(CLK_LOCAL_MEM_FENCE);
        if (get_local_id(0) < half_width) {{
            T v = shared[get_local_id(0) + half_width];
            a = shared[get_local_id(0)];
            {accumulate}
            shared[get_local_id(0)] = a;
        }}
    }}
    if (get_local_id(0)) return;
    a = shared[0];"""
"""Combines the values `a` of a block's lanes, by halves."""

_TILED = """
    __local T4 a_tile[BK * WIDTH / 4], b_tile[BK * WIDTH / 4];
    __local T* const a_values = (__local T*)a_tile;
    __local T* const b_values = (__local T*)b_tile;
    const int t = get_local_id(0), tx = t % 16, ty = t / 16;
    const {index} first = get_group_id(1) * TILE, left = get_group_id(0) * TILE, z = get_group_id(2);
    __global const T* x0 = x0_whole + x0_at + z * x0_batch;
    __global const T* x1 = x1_whole + x1_at + z * x1_batch;
    __global T* out = out_whole + out_at + z * out_batch;
    T4 c[4 * G][G];
    for (int r = 0; r < 4 * G; ++r) for (int g = 0; g < G; ++g) c[r][g] = 0;
    T a_next[4 * G], b_next[4 * G];  // of the next tile, on the way while this one is multiplied
    for ({index} at = -BK; at < K; at += BK) {{
        if (at >= 0) {{
            barrier(CLK_LOCAL_MEM_FENCE);
            #pragma unroll
            for (int j = 0; j < 4 * G; ++j) {{
                a_values[({a_k}) * WIDTH + {a_m}] = a_next[j];
                b_values[({b_k}) * WIDTH + {b_n}] = b_next[j];
            }}
            barrier(CLK_LOCAL_MEM_FENCE);
        }}
        #pragma unroll
        for (int j = 0; j < 4 * G; ++j) {{
            {{
                const {index} k = at + BK + {a_k}, m = first + {a_m};
                a_next[j] = k < K && m < M ? x0[0{a}] : 0;
            }}
            {{
                const {index} k = at + BK + {b_k}, n = left + {b_n};
                b_next[j] = k < K && n < N ? x1[0{b}] : 0;
            }}
        }}
        if (at < 0) continue;
        #pragma unroll
        for (int k = 0; k < BK; ++k) {{
            T4 row[G], column[G];
            #pragma unroll
            for (int g = 0; g < G; ++g) {{
                column[g] = a_tile[k * (WIDTH / 4) + g * 16 + ty];
                row[g] = b_tile[k * (WIDTH / 4) + g * 16 + tx];
            }}
            #pragma unroll
            for (int g = 0; g < G; ++g) {{
                #pragma unroll
                for (int h = 0; h < G; ++h) {{
                    c[4 * g][h] += column[g].x * row[h];
                    c[4 * g + 1][h] += column[g].y * row[h];
                    c[4 * g + 2][h] += column[g].z * row[h];
                    c[4 * g + 3][h] += column[g].w * row[h];
                }}
            }}
        }}
    }}
    #pragma unroll
    for (int r = 0; r < 4 * G; ++r) {{
        const {index} m = first + r / 4 * 64 + ty * 4 + r % 4;
        #pragma unroll
        for (int g = 0; g < G; ++g) {{
            const {index} n = left + g * 64 + tx * 4;
            if (m < M && n < N) out[m * c_row + n] = c[r][g].x;
            if (m < M && n + 1 < N) out[m * c_row + n + 1] = c[r][g].y;
            if (m < M && n + 2 < N) out[m * c_row + n + 2] = c[r][g].z;
            if (m < M && n + 3 < N) out[m * c_row + n + 3] = c[r][g].w;
        }}
    }}
"""
"""Product on a GPU: a work-group of 256 writes a tile, a work-item 4 G rows of 4 G columns."""


_FAULT = "if (!fault_whole[0]) { fault_whole[1] = convert_int_sat(j); fault_whole[0] = convert_int_sat(length + 1L); }"


def _load(dtype: torch.dtype, pointer: str, index: str) -> str:
    if dtype == torch.float16:
        return f"vload_half({index}, {pointer})"
    if dtype == torch.bfloat16:
        return f"load_bfloat16({pointer}[{index}])"
    return f"({pointer}[{index}] != 0)" if dtype == torch.bool else f"{pointer}[{index}]"


def _store(dtype: torch.dtype, pointer: str, index: str, value: str) -> str:
    if dtype == torch.float16:
        return f"vstore_half_rte((float)({value}), {index}, {pointer});"
    if dtype == torch.bfloat16:
        return f"{pointer}[{index}] = store_bfloat16((float)({value}));"
    if dtype == torch.bool:
        return f"{pointer}[{index}] = ({value}) != 0;"
    return f"{pointer}[{index}] = ({_STORAGE[dtype]})({value});"


class _Text:
    """A kernel under construction: parameters, their types and values, and lines."""

    def __init__(self, wide: bool) -> None:
        self.index = "long" if wide else "int"
        self.parameters: list[str] = []
        self.kinds: list[str] = []
        self.values: list[Any] = []

    def array(self, name: str, x: DeviceTensor, *, const: bool = True) -> None:
        qualifier = "const " if const else ""
        self.parameters.append(f"__global {qualifier}{_STORAGE[x.dtype]}* {name}_whole")
        self.kinds.append("*u8")
        self.values.append(x.buffer)
        self.number(f"{name}_at", int(x.storage_offset()))

    def number(self, name: str, value: int) -> str:
        self.parameters.append(f"{self.index} {name}")
        self.kinds.append("i64" if self.index == "long" else "i32")
        self.values.append(value)
        return name

    def scalars(self, name: str, values: Sequence[float], kind: str) -> None:
        for at, value in enumerate(values):
            self.parameters.append(f"{kind} {name}{at}")
            self.kinds.append(_KINDS[kind])
            self.values.append(float(value) if kind in ("float", "double") else int(value))

    def step(self, name: str, coordinate: str, value: int) -> str:
        """Return a term of an offset: nothing for a stride of 0, the coordinate for 1."""
        if value == 0:
            return ""
        return f" + {coordinate}" if value == 1 else f" + {coordinate} * {self.number(name, value)}"


def _is_wide(tensors: Sequence[DeviceTensor], count: int) -> bool:
    if count >= 2**31:
        return True
    for x in tensors:
        span = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        if span >= 2**31:
            return True
    return False


class OpenclTensors(TensorDevice):
    """A device of OpenCL: any type of device, tuned for the CPU's and the GPU's."""

    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset(_STORAGE)

    def __init__(self, provider: ComputeProvider, index: int) -> None:
        super().__init__(provider, index)
        properties = provider.devices()[index].properties
        self.is_cpu, self._units = properties["kind"] == "cpu", properties["multiprocessors"]
        if "float64" not in properties["dtypes"]:
            self.dtypes = frozenset(set(_STORAGE) - {torch.float64})  # type: ignore[misc]  # this device's own
        self._kernels: dict[Any, Kernel] = {}
        self._plans: dict[Any, _Plan] = {}

    # --- the five kernels --------------------------------------------------------------------------------------------

    def map(
        self, out: DeviceTensor, expression: str, inputs: Sequence[DeviceTensor] = (), scalars: Sequence[float] = (),
        integers: Sequence[int] = (), *, compute: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        operands = (out, *inputs)
        plan = (expression, compute, len(scalars), len(integers), *map(_layout, operands))
        if (known := self._plans.get(plan)) is not None:
            self._repeat(known, operands, scalars, integers)
            return
        count = out.numel()
        shape = tuple(out.shape)
        sizes, steps = merged(shape, tuple(expanded(tuple(x.shape), tuple(x.stride()), shape) for x in operands))
        compute = out.dtype if compute is None else compute
        kind = _COMPUTE.get(compute, "long")
        text = _Text(_is_wide(operands, count))
        for at, x in enumerate(operands):
            text.array(_name(at), x, const=at > 0)
        text.number("count", count)
        coordinates = self._coordinates(text, sizes, "i")
        offsets = [f"{_name(at)}_at{self._offset(text, _name(at), steps[at])}" for at in range(len(operands))]
        text.scalars("s", scalars, kind)
        text.scalars("n", integers, text.index)
        lines = [
            f"    const T x{at} = {_load(x.dtype, f'x{at}_whole', offsets[at + 1])};" for at, x in enumerate(inputs)
        ]
        body = [
            f"    const {text.index} i = get_global_id(0);",
            "    if (i >= count) return;",
            *coordinates,
            *lines,
            f"    {_store(out.dtype, 'out_whole', offsets[0], expression)}",
        ]
        self._run(text, kind, "map", body, (-(-count // _BLOCK),), (_BLOCK,), plan=plan)

    def reduce(
        self, out: DeviceTensor, kind: str, inputs: Sequence[DeviceTensor], dims: Sequence[int], *, pre: str = "x0",
        post: str = "a", scalars: Sequence[float] = (), compute: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        operands = (out, *inputs)
        plan = (kind, pre, post, tuple(dims), compute, len(scalars), *map(_layout, operands))
        if (known := self._plans.get(plan)) is not None:
            self._repeat(known, operands, scalars)
            return
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
        compute = inputs[0].dtype if compute is None else compute
        value = _COMPUTE.get(compute, "long")
        indexed = kind.startswith("arg")
        lanes = 1 if indexed or length <= 4 * _LANES or (outputs >= 1024 and inner_steps[0][-1] != 1) else _LANES

        text = _Text(_is_wide((out, *inputs), outputs * max(length, 1) + 32 * _LANES))
        text.array("out", out, const=False)
        for at, x in enumerate(inputs):
            text.array(f"x{at}", x)
        text.number("count", outputs)
        text.number("length", length)
        outer_lines = self._coordinates(text, sizes, "i")
        bases = [f"{_name(at)}_at{self._offset(text, _name(at), steps[at])}" for at in range(len(inputs) + 1)]
        inner_lines = self._coordinates(text, inner, "r", "e")
        offsets = [f"b{at}{self._offset(text, f'r{at}', inner_steps[at], 'e')}" for at in range(len(inputs))]
        text.scalars("s", scalars, value)
        neutral, combine = _COMBINE[kind.removeprefix("arg")]
        loads = [
            f"        const T x{at} = {_load(x.dtype, f'x{at}_whole', offsets[at])};" for at, x in enumerate(inputs)
        ]
        accumulate = f"a = {combine};"
        if indexed:
            better = ">" if kind == "argmax" else "<"
            accumulate = f"if (r == 0 || (a == a && (v != v || v {better} a))) {{ a = v; where = r; }}"
        compensated = kind == "sum" and value in ("float", "double") and length > 32 * lanes
        first = "get_local_id(0)" if lanes > 1 else "0"
        loop = f"    for ({text.index} r = {first}; r < length; r += {lanes}) {{"
        if compensated:  # of sums of 32 terms
            loop = (
                f"    T rest = 0;\n    for ({text.index} block = {first}; block < length; block += {32 * lanes}) {{\n"
                f"    T part = 0;\n    for ({text.index} r = block; r < length && r < block + {32 * lanes}; "
                f"r += {lanes}) {{"
            )
            accumulate = "part += v;"
        low, high = ("-INFINITY", "INFINITY") if value in ("float", "double") else _LIMITS[value]
        body = [
            f"    const {text.index} i = {'get_group_id(0)' if lanes > 1 else 'get_global_id(0)'};",
            *(["    __local T shared[LANES];"] if lanes > 1 else []),
            "    if (i >= count) return;",
            *outer_lines,
            *(f"    const {text.index} b{at} = {bases[at + 1]};" for at in range(len(inputs))),
            f"    const T lowest = {low}, highest = {high};",
            f"    T a = {neutral};",
            *([f"    {text.index} where = 0;"] if indexed else []),
            loop,
            *(f"    {line}" for line in inner_lines),
            *loads,
            f"        const T v = {pre};",
            f"        {accumulate}",
            "    }",
            *([_COMPENSATED.format(type="T", a="a", v="part", rest="rest"), "    }"] if compensated else []),
        ]
        if lanes > 1:
            body.append(_LANES_COMBINED.format(accumulate="a += v;" if compensated else accumulate))
        body.append(f"    {_store(out.dtype, 'out_whole', bases[0], 'where' if indexed else post)}")
        block = lanes if lanes > 1 else 64
        grid = outputs if lanes > 1 else -(-outputs // block)
        self._run(text, value, "reduce", body, (grid,), (block,), f"#define LANES {lanes}\n", plan=plan)

    def gather(self, out: DeviceTensor, x: DeviceTensor, dim: int, index: DeviceTensor) -> None:
        shape = tuple(out.shape)
        at_index = expanded(tuple(index.shape), tuple(index.stride()), shape)
        x_strides = tuple(0 if at == dim else s for at, s in enumerate(x.stride()))
        sizes, steps = merged(shape, (tuple(out.stride()), x_strides, at_index))
        text = _Text(_is_wide((out, x), out.numel()))
        text.array("out", out, const=False)
        text.array("x0", x)
        text.array("x1", index)
        text.array("fault", self.fault(), const=False)
        text.number("count", out.numel())
        coordinates = self._coordinates(text, sizes, "i")
        offsets = [f"{_name(at)}_at{self._offset(text, _name(at), steps[at])}" for at in range(3)]
        text.number("length", x.shape[dim])
        text.number("step", x.stride(dim))
        kind, value = _COMPUTE.get(out.dtype, "long"), _load(x.dtype, "x0_whole", "at")
        if out.dtype.is_floating_point:
            value = f"outside ? (T)NAN : (T){value}"
        body = [
            f"    const {text.index} i = get_global_id(0);",
            "    if (i >= count) return;",
            *coordinates,
            f"    long j = {_load(index.dtype, 'x1_whole', offsets[2])};",
            "    const int outside = j < 0 || j >= length;",
            f"    if (outside) {_FAULT}",
            "    j = j < 0 ? 0 : j >= length ? length - 1 : j;",
            f"    const {text.index} at = {offsets[1]} + ({text.index})j * step;",
            f"    {_store(out.dtype, 'out_whole', offsets[0], value)}",
        ]
        self._run(text, kind, "gather", body, (-(-out.numel() // _BLOCK),), (_BLOCK,))

    def scatter(
        self, out: DeviceTensor, dim: int, index: DeviceTensor, source: DeviceTensor, *, add: bool,
        check: bool = True,
    ) -> None:  # fmt: skip
        shape = tuple(source.shape)
        others = [at for at in range(len(shape)) if at != dim]
        strides = (
            tuple(out.stride()),
            expanded(tuple(index.shape), tuple(index.stride()), shape),
            tuple(source.stride()),
        )
        sizes, steps = merged(tuple(shape[at] for at in others), tuple(tuple(s[at] for at in others) for s in strides))
        count = math.prod(shape[at] for at in others)
        text = _Text(_is_wide((out, source), source.numel()))
        text.array("out", out, const=False)
        text.array("x0", index)
        text.array("x1", source)
        if check:
            text.array("fault", self.fault(), const=False)
        text.number("count", count)
        coordinates = self._coordinates(text, sizes, "i")
        offsets = [f"{_name(at)}_at{self._offset(text, _name(at), steps[at])}" for at in range(3)]
        text.number("length", out.shape[dim])
        text.number("rows", shape[dim])
        along = [text.number(f"step{at}", s[dim]) for at, s in enumerate(strides)]
        kind = _COMPUTE.get(out.dtype, "long")
        value = _load(source.dtype, "x1_whole", f"b2 + r * {along[2]}")
        if add:
            value = f"(T){_load(out.dtype, 'out_whole', 'at')} + (T){value}"
        body = [
            f"    const {text.index} i = get_global_id(0);",
            "    if (i >= count) return;",
            *coordinates,
            *(f"    const {text.index} b{at} = {offset};" for at, offset in enumerate(offsets)),
            f"    for ({text.index} r = 0; r < rows; ++r) {{",
            f"        long j = {_load(index.dtype, 'x0_whole', f'b1 + r * {along[1]}')};",
            f"        if (j < 0 || j >= length) {{ {_FAULT if check else ''} continue; }}",
            f"        const {text.index} at = b0 + ({text.index})j * {along[0]};",
            f"        {_store(out.dtype, 'out_whole', 'at', value)}",
            "    }",
        ]
        self._run(text, kind, "scatter", body, (-(-count // 64),), (64,))

    def matmul(self, out: DeviceTensor, a: DeviceTensor, b: DeviceTensor) -> None:
        if out.dtype in (torch.float16, torch.bfloat16):  # products of float32 are exact, and sums as torch's
            wide = self.empty(out.shape, torch.float32)
            a, b = (self.converted(x, torch.float32) for x in (a, b))
            self.matmul(wide, a, b)
            self.copy(out, wide)
            return
        if not self.is_cpu:
            self._tiled_matmul(out, a, b)
            return
        if b.stride(2) != 1:
            b = self.contiguous(b)
        batch, rows, columns = out.shape
        inner = a.shape[2]
        text = _Text(_is_wide((out, a, b), out.numel()))
        for name, x in (("out", out), ("x0", a), ("x1", b)):
            text.array(name, x, const=name != "out")
            text.number(f"{name}_batch", x.stride(0) if x.shape[0] > 1 else 0)
        for name, n in (("M", rows), ("N", columns), ("K", inner)):
            text.number(name, n)
        steps = [text.step("a_row", "m", a.stride(1)), text.step("a_inner", "k", a.stride(2))]
        text.number("b_row", b.stride(1))
        text.number("c_row", out.stride(1))
        height = min(_ROWS, 1 << (rows - 1).bit_length())
        kind = _COMPUTE.get(out.dtype, "long")
        lines = []
        for at in range(height):
            lines.append(f"    const {text.index} m{at} = first + {at} < M ? first + {at} : M - 1;")
            lines.append(f"    __global const T* a{at} = x0{steps[0].replace(' + m', f' + m{at}', 1)};")
        along = steps[1].removeprefix(" + ") or "0"

        def sums(type_: str, row: str) -> list[str]:
            """Return lines that set c0, c1, ... to sums over K: blocks of _DEPTH_CPU terms, added with compensation."""
            compensated = inner > _DEPTH_CPU and kind in ("float", "double")
            each = range(height)
            depth = f"block + {_DEPTH_CPU} < K ? block + {_DEPTH_CPU} : K" if compensated else "K"
            return [
                *(f"        {type_} c{at} = 0{f', e{at} = 0' * compensated};" for at in each),
                f"        for ({text.index} block = 0; block < K; block += {_DEPTH_CPU if compensated else 'K'}) {{",
                *(f"            {type_} p{at} = 0;" for at in each),
                f"            for ({text.index} k = block; k < ({depth}); ++k) {{",
                f"                const {type_} row = {row};",
                *(f"                p{at} += a{at}[{along}] * row;" for at in each),
                "            }",
                *(
                    f"            {{ {_COMPENSATED.format(type=type_, a=f'c{at}', v=f'p{at}', rest=f'e{at}')} }}"
                    if compensated
                    else f"            c{at} = p{at};"
                    for at in each
                ),
                "        }",
            ]

        body = [
            f"    const {text.index} n = get_global_id(0) * {_COLUMNS}, first = get_global_id(1) * {height};",
            f"    const {text.index} z = get_global_id(2);",
            "    if (n >= N || first >= M) return;",
            "    __global const T* x0 = x0_whole + x0_at + z * x0_batch;",
            "    __global const T* x1 = x1_whole + x1_at + z * x1_batch + n;",
            "    __global T* out = out_whole + out_at + z * out_batch + n;",
            *lines,
            f"    if (n + {_COLUMNS} <= N) {{",
            *sums("V", "vload16(0, x1 + k * b_row)"),
            *(f"        if (first + {at} < M) vstore16(c{at}, 0, out + m{at} * c_row);" for at in range(height)),
            "        return;",
            "    }",
            f"    for ({text.index} e = 0; n + e < N; ++e) {{",
            *sums("T", "x1[k * b_row + e]"),
            *(f"        if (first + {at} < M) out[m{at} * c_row + e] = c{at};" for at in range(height)),
            "    }",
        ]
        if kind == "int":  # bool
            raise TypeError("there is no product of bool matrices")
        kind = _STORAGE[out.dtype]
        high = 16 if rows > 8 * height else 1
        grid = (-(-columns // _COLUMNS), -(-rows // (height * high)), batch)
        self._run(text, kind, "matmul", body, grid, (1, high, 1), f"typedef {kind}16 V;\n")

    def _tiled_matmul(self, out: DeviceTensor, a: DeviceTensor, b: DeviceTensor) -> None:
        """Write a product by work-groups that share tiles in local memory, for GPUs; operands may have any strides."""
        batch, rows, columns = out.shape
        if a.shape[2] > _DEPTH_GPU and out.dtype.is_floating_point:
            deep_product(self, out, a, b, _DEPTH_GPU)
            return
        large = batch * -(-rows // 128) * -(-columns // 128)
        groups = 2 if min(rows, columns) > 64 and large >= self._units else 1  # one for each unit, at least
        tile = 64 * groups
        text = _Text(_is_wide((out, a, b), out.numel()))
        for name, x in (("out", out), ("x0", a), ("x1", b)):
            text.array(name, x, const=name != "out")
            text.number(f"{name}_batch", x.stride(0) if x.shape[0] > 1 else 0)
        for name, n in (("M", rows), ("N", columns), ("K", a.shape[2])):
            text.number(name, n)
        at_a = text.step("a_row", "m", a.stride(1)) + text.step("a_inner", "k", a.stride(2))
        at_b = text.step("b_inner", "k", b.stride(1)) + text.step("b_column", "n", b.stride(2))
        text.number("c_row", out.stride(1))
        kind = _STORAGE[out.dtype]
        along = {
            True: ("t % BK", f"t / BK + j * {256 // _DEPTH}"),
            False: (f"t / TILE + j * {256 // tile}", "t % TILE"),
        }
        (a_k, a_m), (b_k, b_n) = along[a.stride(2) == 1], along[b.stride(1) == 1 and b.stride(2) != 1]
        body = _TILED.format(index=text.index, a=at_a, b=at_b, a_k=a_k, a_m=a_m, b_k=b_k, b_n=b_n).split("\n")
        sizes = {"BK": _DEPTH, "TILE": tile, "G": groups, "WIDTH": tile + 4}
        head = f"typedef {kind}4 T4;\n" + "".join(f"#define {name} {size}\n" for name, size in sizes.items())
        self._run(text, kind, "matmul", body, (-(-columns // tile), -(-rows // tile), batch), (256, 1, 1), head)

    # --- text --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _coordinates(text: _Text, sizes: Sequence[int], source: str, name: str = "c") -> list[str]:
        """Return lines that split a linear index into coordinates, the first dimension outermost."""
        if len(sizes) < 2:
            return [f"    const {text.index} {name}0 = {source};"] if sizes else []
        lines, rest = [], source
        for at in range(len(sizes) - 1, 0, -1):
            size = text.number(f"{name}size{at}", sizes[at])
            lines.append(f"    const {text.index} {name}{at} = {rest} % {size}, {name}rest{at} = {rest} / {size};")
            rest = f"{name}rest{at}"
        return [*lines, f"    const {text.index} {name}0 = {rest};"]

    @staticmethod
    def _offset(text: _Text, operand: str, steps: Sequence[int], name: str = "c") -> str:
        return "".join(text.step(f"{operand}_step{at}", f"{name}{at}", step) for at, step in enumerate(steps))

    def _run(
        self, text: _Text, kind: str, entry: str, body: Sequence[str], grid: Sequence[int], block: Sequence[int],
        head: str = "", plan: Any = None,
    ) -> None:  # fmt: skip
        """Launch a kernel, compiled on first use; with a key of `_plans`, keep the launch for `_repeat`."""
        key = (entry, kind, head, tuple(block), tuple(body), tuple(text.parameters))
        kernel = self._kernels.get(key)
        if kernel is None:
            widths = (*block, 1, 1)[:3]  # else the compiler keeps registers for the largest work-group
            floating, whole = kind in ("float", "double"), "\n".join(body)
            program = "\n".join([
                *(["#pragma OPENCL EXTENSION cl_khr_fp64 : enable"] if torch.float64 in self.dtypes else []),
                _HEADER, *[_RANDOM] * ("(i, n0, n1)" in whole), *[_BFLOAT16] * ("bfloat16" in whole),
                f"typedef {kind} T;", _FLOATING if floating else _INTEGRAL, _SHARED, head,
                f"__kernel __attribute__((reqd_work_group_size({', '.join(map(str, widths))})))",
                f"void {entry}({', '.join(text.parameters)}) {{", whole, "}",
            ])  # fmt: skip
            options = (
                "-w",
                *["-cl-single-precision-constant"] * (kind == "float"),
            )  # PoCL prints warnings of its headers
            source = KernelSource(
                f"aten_{entry}", {"opencl": program}, {entry: tuple(text.kinds)}, targets=(), options=options
            )
            kernel = self._kernels[key] = self.provider.compile(source, device=self.index)
        if plan is not None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            arrays = [None if kind == "*u8" else value for kind, value in zip(text.kinds, text.values, strict=True)]
            self._plans[plan] = (kernel, grid, block, arrays, float if kind in ("float", "double") else int)
        self.provider.launch(kernel, grid, block, text.values)

    def _repeat(
        self, plan: _Plan, operands: Sequence[DeviceTensor], scalars: Sequence[float], integers: Sequence[int] = ()
    ) -> None:
        """Launch as before, with other memory and other scalars: the text of a small kernel takes most of its time."""
        kernel, grid, block, known, number = plan
        values = known.copy()
        for at, x in enumerate(operands):
            values[2 * at] = x.buffer  # each is followed by its offset
        if scalars or integers:
            values[len(values) - len(scalars) - len(integers) :] = [*map(number, scalars), *map(int, integers)]
        self.provider.launch(kernel, grid, block, values)


_PLANS = 4096
"""Launches that a device keeps."""

_Plan: TypeAlias = tuple[Kernel, Sequence[int], Sequence[int], list[Any], Callable[[Any], Any]]


def _layout(x: DeviceTensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype


def _name(at: int) -> str:
    return f"x{at - 1}" if at else "out"


_LIMITS = {"int": ("INT_MIN", "INT_MAX"), "long": ("LONG_MIN", "LONG_MAX")}
_COMBINE = {
    "sum": ("0", "a + v"),
    "prod": ("1", "a * v"),
    "max": ("lowest", "max(a, v)"),
    "min": ("highest", "min(a, v)"),
}
"""Kind of reduction -> neutral element, and combination of `a` and `v`."""
