"""Arrays over K = F[u]/(u^2 - 7), F Goldilocks, on the CPU: (2, ...) of canonical words, x = x[0] + u x[1]."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field import launch
from accelerant.algebra.field.llvm_kernels import SOURCES, entry_functions, host_form, packed_field
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.ntt.launch import transform
from accelerant.runtime.compilation.kernel import KernelSource, LlvmProgram
from accelerant.runtime.compilation.llvm import FunctionBuilder, program
from accelerant.runtime.ledger import launch as launch_kernel
from accelerant.zk.inference import verifier
from accelerant.zk.inference.verifier import LOG_RATE, Element, P, root_of_unity

Words = npt.NDArray[np.uint64]
FIELD = field_of("goldilocks")
_PART = 1 << 20  # Products of a dot that are copied and summed at a time
_LOG_SMALL = 5  # Coordinates of tables of eq that Python computes sooner than kernels are launched


def base(op: str, x: Words, y: Words | np.uint64) -> Words:
    """Apply "add", "sub" or "mul" to elements of F; shapes broadcast."""
    x, y = np.broadcast_arrays(x, y)
    z: Words = launch.elementwise(HOST, FIELD, op, "canonical", np.ascontiguousarray(x), np.ascontiguousarray(y))
    return z


def add(x: Words, y: Words) -> Words:
    """Return x + y."""
    return base("add", x, y)


def sub(x: Words, y: Words) -> Words:
    """Return x - y."""
    return base("sub", x, y)


def mul(x: Words, y: Words) -> Words:
    """Return x y in K."""
    x, y = map(np.ascontiguousarray, np.broadcast_arrays(x, y))
    z, n = np.empty(x.shape, np.uint64), x[0].size
    launch_kernel(HOST, product_source(), "extension_mul", n, 1, (x, y, z), n)
    return z


@functools.cache
def product_source(form: str = "") -> KernelSource:
    """Return the kernel of products in K of arrays (2, n), in a form of field.llvm_kernels, by default the faster."""
    form = form or host_form(FIELD)
    write = functools.partial(_product_text, form)
    llvm = LlvmProgram(("extension_mul", form), (*SOURCES, "zk/inference/extension.py"), write, written_out=False)
    return KernelSource(f"extension_mul_{form}", {"llvm": llvm}, {"extension_mul": ("*u64", "*u64", "*u64", "i64")})


def _product_text(form: str) -> str:
    """Return LLVM IR: (x_0 y_0 + 7 x_1 y_1, (x_0 + x_1)(y_0 + y_1) - x_0 y_0 - x_1 y_1), in packs of elements."""
    packed = packed_field(FIELD, form)

    def write(code: FunctionBuilder) -> None:
        stop = code.smin("%end", "%n")
        with code.loop("%begin", stop, packed.lanes) as i:
            j, last = code.i64("add", i, "%n"), code.i64("add", stop, "%n")
            (x0, x1), (y0, y1) = (
                (packed.load(code, each, i, stop), packed.load(code, each, j, last)) for each in ("%x", "%y")
            )
            low, high = packed.call(code, "mul_call", x0, y0), packed.call(code, "mul_call", x1, y1)
            sums = packed.call(code, "add", x0, x1), packed.call(code, "add", y0, y1)
            whole = packed.call(code, "sub", packed.call(code, "mul_call", *sums), low)
            packed.store(code, "%z", i, stop, packed.call(code, "add", low, packed.times(code, high, 7)))
            packed.store(code, "%z", j, last, packed.call(code, "sub", whole, high))

    entries = entry_functions("extension", {"mul": (("x", "y", "z", "n"), write)}, "", ("x", "y", "z"))
    return program([*packed.functions(), *packed.called_functions(), *entries])


def inverse(x: Words) -> Words:
    """Return 1 / x = (x_0 - u x_1) / (x_0^2 - 7 x_1^2)."""
    squares = base("mul", x, x)
    norm = sub(squares[0], base("mul", squares[1], np.uint64(7)))
    return base(
        "mul", np.stack((x[0], sub(np.zeros_like(x[1]), x[1]))), launch.inverse(HOST, FIELD, norm, "canonical", "x")
    )


def total(x: Words) -> Words:
    """Return the sums along the last axis."""
    z: Words = launch.summed(HOST, FIELD, np.ascontiguousarray(x), -1, "canonical")
    return z


def dot(x: Words, y: Words) -> Words:
    """Return the sums of the products in F along the last of at least two axes; shapes broadcast, in parts of rows."""
    x, y = np.broadcast_arrays(x, y)
    sums = np.empty(x.shape[:-1], np.uint64)
    step = max(1, _PART // x.shape[-1])
    for at in range(0, x.shape[-2], step):
        left, right = (np.ascontiguousarray(each[..., at : at + step, :]) for each in (x, y))
        sums[..., at : at + step] = launch.dotted(HOST, FIELD, left, right, "canonical")
    return sums


def encode_coset(message: Words, coset: int) -> Words:
    """Return every fourth entry of `encode`, from that of this number: a transform without the padding."""
    generator = pow(root_of_unity((message.shape[-1] << LOG_RATE).bit_length() - 1), coset, P)
    z: Words = transform(HOST, FIELD, message, inverse=False, coset=generator, order="natural", out=None)
    return z


def encode(message: Words) -> Words:
    """Return the Reed-Solomon codewords of rate 1/4 of messages, along the last axis: sum_i m_i w^(ij) at j."""
    padded = np.zeros((*message.shape[:-1], message.shape[-1] << LOG_RATE), np.uint64)
    padded[..., : message.shape[-1]] = message
    z: Words = transform(HOST, FIELD, padded, inverse=False, coset=1, order="natural", out=None)
    return z


def constant(value: Element, axes: int) -> Words:
    """Return an element that broadcasts with arrays of that many axes after the first."""
    return np.array(value, np.uint64).reshape(2, *[1] * axes)


def lifted(x: Words) -> Words:
    """Return elements of F in K."""
    return np.stack((x, np.zeros_like(x)))


def words(x: npt.NDArray[Any]) -> Words:
    """Return signed integers modulo p."""
    z = x.astype(np.int64).view(np.uint64)
    z[x < 0] += np.uint64(P)
    return z


def eq_table(point: Sequence[Element]) -> Words:
    """Return eq(point, i) for each i, bit j of i with coordinate j: products of tables of a few coordinates."""
    first = np.array(verifier.eq_table(point[:_LOG_SMALL]), np.uint64).T
    if len(point) <= _LOG_SMALL:
        return first
    return mul(eq_table(point[_LOG_SMALL:])[:, :, None], first[:, None, :]).reshape(2, -1)


def byte_products(weights: Words, values: Any) -> Words:
    """Return the product of K (2, k, m) and bytes (m, n), exact in float64: limbs of 22 bits, m up to 2^23."""
    limbs = np.stack([weights >> np.uint64(22 * i) & np.uint64((1 << 22) - 1) for i in range(3)]).astype(np.float64)
    left = limbs.reshape(-1, weights.shape[-1])
    if isinstance(values, np.ndarray):
        sums = left @ values.astype(np.float64)
    else:
        sums = (values.new_tensor(left, dtype=sys.modules["torch"].float64) @ values.double()).cpu().numpy()
    scaled = base("mul", sums.astype(np.uint64).reshape(3, -1), np.array([[1], [1 << 22], [1 << 44]], np.uint64))
    return base("add", base("add", scaled[0], scaled[1]), scaled[2]).reshape(*weights.shape[:2], -1)


def elements(x: Words) -> list[Element]:
    """Return an array (2, n) as pairs of Python integers."""
    return list(zip(*x.tolist(), strict=True))
