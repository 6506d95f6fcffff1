"""The kernels of the aten table in OpenCL C: what `kernels.py` leaves to a language, and products of matrices."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.provider import ComputeProvider
from accelerant.tensors.kernels import FLOATS, LANES, GeneratedKernels, KernelBody, Text, file_text
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


_ROWS, _COLUMNS = 8, 16
"""Rows and columns of a product that a work-item computes on a CPU; the columns are one vector."""

_DEPTH = 16
"""Inner dimension of the tiles of the product on a GPU."""

_DEPTH_CPU, _DEPTH_GPU = 256, 2048
"""Terms of a product that are added plainly, one after the other; the sums of such blocks are compensated."""

_COMPENSATED = (
    "const {type} term = {v} - {rest}, next = {a} + term; "
    "{rest} = (next - {a}) - term; {rest} = {rest} == {rest} ? {rest} : ({type})0; {a} = next;"
)
"""Add v to a; `rest` is the rounding error of the last addition, 0 where a sum is not finite.

Source: Kahan's sum, in Higham 2002, Accuracy and Stability of Numerical Algorithms, 4.3.
"""

_JOIN = f"""\
__local T shared[{LANES}];
    shared[get_local_id(0)] = a;
    for (int half_width = {LANES // 2}; half_width; half_width /= 2) {{
        barrier(CLK_LOCAL_MEM_FENCE);
        if (get_local_id(0) < half_width) {{
            T v = shared[get_local_id(0) + half_width];
            a = shared[get_local_id(0)];
            ACCUMULATE
            shared[get_local_id(0)] = a;
        }}
    }}
    if (get_local_id(0)) return;
    a = shared[0];"""


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


class OpenclTensors(GeneratedKernels):
    """A device of OpenCL, of any type; products of matrices are tuned for CPUs and for GPUs."""

    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset(_STORAGE)
    numbers: ClassVar[Mapping[str, tuple[str, str, str, str]]] = {
        "float": ("0", "1", "-INFINITY", "INFINITY"), "double": ("0", "1", "-INFINITY", "INFINITY"),
        "int": ("0", "1", "INT_MIN", "INT_MAX"), "long": ("0", "1", "LONG_MIN", "LONG_MAX"),
    }  # fmt: skip
    thread, linear, group = "get_local_id(0)", "get_global_id(0)", "get_group_id(0)"
    counter, variable, nan = "I", "{} {} = {};", "NAN"
    out_of_range = (
        "if (!fault_whole[0]) {{ fault_whole[1] = convert_int_sat(j); fault_whole[0] = convert_int_sat({} + 1L); }}"
    )
    join = ("", _JOIN)

    def __init__(self, provider: ComputeProvider, index: int) -> None:
        super().__init__(provider, index)
        properties = provider.devices()[index].properties
        self.is_cpu, self._units = properties["kind"] == "cpu", properties["multiprocessors"]
        if "float64" not in properties["dtypes"]:
            self.dtypes = frozenset(set(_STORAGE) - {torch.float64})  # type: ignore[misc]  # this device's own

    # --- the language -------------------------------------------------------------------------------------------------
    def _kind(self, dtype: torch.dtype) -> str:
        return _COMPUTE.get(dtype, "long")

    def _expression(self, expression: str, kind: str) -> tuple[str, str]:
        return expression, kind

    def _cast(self, value: str, kind: str, to: str) -> str:
        return f"(T)({value})"

    def _load(self, dtype: torch.dtype, operand: str, index: str) -> str:
        return _load(dtype, f"{operand}_whole", index)

    def _operand(self, dtype: torch.dtype, operand: str, index: str, compute: torch.dtype) -> str:
        return f"const T {operand} = {self._load(dtype, operand, index)};"

    def _index(self, dtype: torch.dtype, operand: str, index: str) -> str:
        return f"const long j = {self._load(dtype, operand, index)};"

    def _store(self, dtype: torch.dtype, index: str, value: str, kind: str) -> str:
        return _store(dtype, "out_whole", index, value)

    def _added(self, dtype: torch.dtype, value: str, kind: str) -> str:
        return f"(T){self._load(dtype, 'out', 'at')} + {value}"

    def _lanes(self, length: int, outputs: int, innermost: int) -> int:
        return 1 if length <= 4 * LANES or (outputs >= 1024 and innermost != 1) else LANES

    def _long_sum(self, loop: str, first: str, length: str, lanes: int) -> tuple[list[str], str, list[str]]:
        """Add sums of 32 terms with compensation."""
        blocks = f"for (I block = {first}; block < {length}; block += {32 * lanes}) {{"
        end = f"min_index({length}, block + {32 * lanes})"
        opened = ["T rest = 0;", blocks, "T part = 0;", loop.format("block", end)]
        return opened, "part += v;", ["}", _COMPENSATED.format(type="T", a="a", v="part", rest="rest"), "}"]

    def _compile(self, text: Text, program: KernelBody) -> Kernel:
        kind, entry, operands = program.kind, program.entry, text.operands
        wide = self._is_wide([*operands.values()], program.count)
        parameters = [
            f"__global {'const ' * (name not in ('out', 'fault'))}{_STORAGE[x.dtype]}* {name}_whole"
            for name, x in operands.items()
        ] + [f"{type_} {name}" for name, type_ in text.numbers.items()]
        index = "i64" if wide else "i32"
        kinds = ["*u8"] * len(operands) + [_KINDS.get(type_, index) for type_ in text.numbers.values()]
        widths = (*program.block, 1, 1)[:3]  # else the compiler keeps registers for the largest work-group
        body = "\n    ".join(program.body)
        defined = {"FLOATING": kind in FLOATS, "RANDOM": "(i, n0, n1)" in body, "BFLOAT16": "bfloat16" in body}
        whole = "\n".join([
            *(["#pragma OPENCL EXTENSION cl_khr_fp64 : enable"] if torch.float64 in self.dtypes else []),
            f"typedef {kind} T;", f"typedef {'long' if wide else 'int'} I;",
            *(f"#define {name}" for name, used in defined.items() if used), file_text("expressions.cl"), program.head,
            f"__kernel __attribute__((reqd_work_group_size({', '.join(map(str, widths))})))",
            f"void {entry}({', '.join(parameters)}) {{", f"    {body}", "}",
        ])  # fmt: skip
        single = ["-cl-single-precision-constant"] * (kind == "float")
        options = ("-w", *single)  # PoCL prints warnings of its headers
        source = KernelSource(f"aten_{entry}", {"opencl": whole}, {entry: tuple(kinds)}, targets=(), options=options)
        return self.provider.compile(source, device=self.index)

    # --- products of matrices ----------------------------------------------------------------------------------------
    def matmul(self, out: DeviceTensor, a: DeviceTensor, b: DeviceTensor) -> None:
        if out.dtype in (torch.float16, torch.bfloat16):  # products of float32 are exact, and sums as torch's
            wide = self.empty(out.shape, torch.float32)
            self.matmul(wide, *(self.contiguous(x, torch.float32) for x in (a, b)))
            self.copy(out, wide)
        elif self.is_cpu:
            operands = (out, a, b if b.stride(2) == 1 else self.contiguous(b))
            self._run(self._write_product, operands, ())
        elif a.shape[2] > _DEPTH_GPU and out.dtype.is_floating_point:
            deep_product(self, out, a, b, _DEPTH_GPU)
        else:
            self._run(self._write_tiled_product, (out, a, b), ())

    @staticmethod
    def _product_numbers(text: Text) -> tuple[DeviceTensor, DeviceTensor, DeviceTensor]:
        """Add the sizes of a product and the strides of its batches; return the operands."""
        out, a, b = text.operands.values()
        for name, x in text.operands.items():
            text.number(f"{name}_batch", x.stride(0) if x.shape[0] > 1 else 0)
        for name, size in (("M", out.shape[1]), ("N", out.shape[2]), ("K", a.shape[2])):
            text.number(name, size)
        return out, a, b

    def _write_product(self, text: Text) -> KernelBody:
        """Write a product for CPUs: a work-item has a block of rows of a vector of columns."""
        out, a, b = self._product_numbers(text)
        batch, rows, columns = out.shape
        along = text.step("a_row", "m{0}", a.stride(1)), text.step("a_inner", "k", a.stride(2))
        text.number("b_row", b.stride(1))
        text.number("c_row", out.stride(1))
        height, kind = min(_ROWS, 1 << (rows - 1).bit_length()), _STORAGE[out.dtype]
        inner = along[1].removeprefix(" + ") or "0"
        compensated = a.shape[2] > _DEPTH_CPU and kind in FLOATS
        body = [
            f"const I n = get_global_id(0) * {_COLUMNS}, first = get_global_id(1) * {height}, z = get_global_id(2);",
            "if (n >= N || first >= M) return;",
            "__global const T* x0 = x0_whole + x0_at + z * x0_batch;",
            "__global const T* x1 = x1_whole + x1_at + z * x1_batch + n;",
            "__global T* out = out_whole + out_at + z * out_batch + n;",
        ]
        for at in range(height):
            body.append(f"const I m{at} = first + {at} < M ? first + {at} : M - 1;")
            body.append(f"__global const T* a{at} = x0{along[0].format(at)};")
        body += [
            f"if (n + {_COLUMNS} <= N) {{",
            *_sums("V", "vload16(0, x1 + k * b_row)", height, inner, compensated),
            *(f"if (first + {at} < M) vstore16(c{at}, 0, out + m{at} * c_row);" for at in range(height)),
            "return;",
            "}",
            "for (I e = 0; n + e < N; ++e) {",
            *_sums("T", "x1[k * b_row + e]", height, inner, compensated),
            *(f"if (first + {at} < M) out[m{at} * c_row + e] = c{at};" for at in range(height)),
            "}",
        ]
        high = 16 if rows > 8 * height else 1
        grid = (-(-columns // _COLUMNS), -(-rows // (height * high)), batch)
        return KernelBody("matmul", kind, out.numel(), body, grid, (1, high, 1), f"typedef {kind}16 V;\n")

    def _write_tiled_product(self, text: Text) -> KernelBody:
        """Write a product for GPUs, of operands of any strides: work-groups share tiles in local memory."""
        out, a, b = self._product_numbers(text)
        batch, rows, columns = out.shape
        large = batch * -(-rows // 128) * -(-columns // 128)
        groups = 2 if min(rows, columns) > 64 and large >= self._units else 1  # one for each unit, at least
        tile, kind = 64 * groups, _STORAGE[out.dtype]
        at_a = text.step("a_row", "m", a.stride(1)) + text.step("a_inner", "k", a.stride(2))
        at_b = text.step("b_inner", "k", b.stride(1)) + text.step("b_column", "n", b.stride(2))
        text.number("c_row", out.stride(1))
        along = {
            True: ("t % BK", f"t / BK + j * {256 // _DEPTH}"),
            False: (f"t / TILE + j * {256 // tile}", "t % TILE"),
        }
        (a_k, a_m), (b_k, b_n) = along[a.stride(2) == 1], along[b.stride(1) == 1 and b.stride(2) != 1]
        defined = {
            "BK": _DEPTH, "TILE": tile, "G": groups, "WIDTH": tile + 4, "A_K": a_k, "A_M": a_m, "B_K": b_k, "B_N": b_n,
            "A_STEPS": at_a, "B_STEPS": at_b,
        }  # fmt: skip
        body = file_text("matmul.cl").split("\n")
        head = f"typedef {kind}4 T4;\n" + "".join(f"#define {name} {value}\n" for name, value in defined.items())
        grid = (-(-columns // tile), -(-rows // tile), batch)
        return KernelBody("matmul", kind, out.numel(), body, grid, (256, 1, 1), head)


def _sums(kind: str, row: str, height: int, inner: str, compensated: bool) -> list[str]:
    """Return lines that set c0, c1, ... to sums over K; `compensated` ones are of blocks of _DEPTH_CPU terms."""
    each = range(height)
    depth = f"min_index(K, block + {_DEPTH_CPU})" if compensated else "K"
    return [
        *(f"{kind} c{at} = 0{f', e{at} = 0' * compensated};" for at in each),
        f"for (I block = 0; block < K; block += {_DEPTH_CPU if compensated else 'K'}) {{",
        *(f"{kind} p{at} = 0;" for at in each),
        f"for (I k = block; k < {depth}; ++k) {{",
        f"const {kind} row = {row};",
        *(f"p{at} += a{at}[{inner}] * row;" for at in each),
        "}",
        *(
            f"{{ {_COMPENSATED.format(type=kind, a=f'c{at}', v=f'p{at}', rest=f'e{at}')} }}"
            if compensated
            else f"c{at} = p{at};"
            for at in each
        ),
        "}",
    ]
