"""Philox 4x32-10 and Box-Muller on the CPU as LLVM IR; philox.cuh defines the result. Not for a privacy claim.

    x <- (x + width * z) * outward       z from N(0, 1), or of density exp(-|z|) / 2

Layout: an index of the launch is one counter in each of lanes() lanes, for four adjacent elements each.
Maths:  ln u = e ln 2 + ln(1 + f), f in [sqrt(1/2) - 1, sqrt(2) - 1], by f - f^2 / 2 + f^3 P(f); sin(2 pi v) = v S(v^2)
        of |v| <= 1/4; P of degree 8 and S of degree 4, fitted for the least largest error: 2e-10 and 4e-9 before
        rounding.
Bound:  arithmetic: about 90 instructions for four vectors of elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerant.privacy.random.llvm_kernels import Load, VectorKernel, host_vectors, lanes, update_elements
from accelerant.runtime.compilation.llvm import (
    FunctionBuilder,
    Operand,
    Value,
    constant,
    lane_constants,
    program,
    suffix,
)
from accelerant.runtime.compilation.philox import philox

_LOGARITHM = (
    0.33333298563957214, -0.25000008940696716, 0.20002824068069458, -0.16668526828289032, 0.14207574725151062,
    -0.12389998883008957, 0.11952442675828934, -0.11787271499633789, 0.06747034937143326,
)  # fmt: skip
_SINE = (6.283185005187988, -41.34165573120117, 81.60102081298828, -76.55010986328125, 39.53886795043945)
_LN2 = 0.6931471824645996
_SQRT_HALF_BITS = 0x3F3504F3
_STEP = 2.0**-32


def _float(code: FunctionBuilder, name: str, x: Value, *others: Operand) -> Value:
    operands = [other if isinstance(other, Value) else constant(x.type, float(other)) for other in others]
    return code.intrinsic(x.type, f"llvm.{name}.{suffix(x.type)}", x, *operands)


def _polynomial(code: FunctionBuilder, coefficients: tuple[float, ...], x: Value) -> Value:
    """Append Horner's rule."""
    y = constant(x.type, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        y = _float(code, "fmuladd", y, x, coefficient)
    return y


def _logarithm(code: FunctionBuilder, word: Value) -> Value:
    """Return approximately -ln((word + 1) / 2^32)."""
    u = _float(code, "fmuladd", code.convert("uitofp", word, "float"), _STEP, _STEP)
    bits = code.bitcast(u, word.type)
    exponent = code.op("ashr", code.op("sub", bits, _SQRT_HALF_BITS), 23)
    mantissa = code.op("sub", bits, code.op("shl", exponent, 23))
    f = code.op("fsub", code.bitcast(mantissa, u.type), 1.0)
    square = code.op("fmul", f, f)
    cubic = code.op("fmul", code.op("fmul", square, f), _polynomial(code, _LOGARITHM, f))
    small = code.op("fadd", f, _float(code, "fmuladd", square, -0.5, cubic))
    whole = code.convert("sitofp", exponent, "float")
    return code.fneg(_float(code, "fmuladd", whole, _LN2, small))


def _sine(code: FunctionBuilder, v: Value) -> Value:
    """Return sin(2 pi v) of |v| <= 1/4."""
    return code.op("fmul", v, _polynomial(code, _SINE, code.op("fmul", v, v)))


def _normal_pair(code: FunctionBuilder, first: Value, second: Value) -> list[Value]:
    """Append Box-Muller: the radius from one word, the angle 2 pi (r - 1/2) from the upper 23 bits of the other."""
    radius = _float(code, "sqrt", code.op("fmul", _logarithm(code, first), 2.0))
    upper = code.op("or", code.op("lshr", second, 9), 0x3F800000)
    turn = code.op("fsub", code.bitcast(upper, radius.type), 1.5)
    from_quarter = code.op("fsub", 0.25, _float(code, "fabs", turn))
    cosine = _sine(code, from_quarter)
    folded = code.op("fsub", 0.25, _float(code, "fabs", from_quarter))
    sine = _sine(code, _float(code, "copysign", folded, turn))
    return [code.op("fmul", radius, wave) for wave in (cosine, sine)]


def _laplace(code: FunctionBuilder, word: Value) -> Value:
    """Return a variate whose size has 31 bits of the word, and whose sign is the uppermost."""
    size = _logarithm(code, code.op("shl", word, 1))
    sign = code.op("and", word, 0x80000000)
    return code.bitcast(code.op("xor", code.bitcast(size, word.type), sign), size.type)


def _interleaved(code: FunctionBuilder, z: list[Value], count: int) -> Value:
    """Return four vectors as one, whose elements 4 i to 4 i + 3 are those of lane i."""
    first, second = (code.shuffle(z[i], z[i + 1], range(2 * count)) for i in (0, 2))
    joined = code.shuffle(first, second, range(4 * count))
    order = [(p % 4 // 2) * 2 * count + p // 4 + (p % 2) * count for p in range(4 * count)]
    return code.shuffle(joined, None, order)


@dataclass(frozen=True, slots=True)
class PhiloxKernel(VectorKernel):
    """A Builder of philox_add(begin, end, x, keys, first, stream, n, width, outward); normal or Laplace variates."""

    laplace: bool = False

    @property
    def least_share(self) -> int:
        """The fewest indices that are worth another thread: about 10 us."""
        return 8192 // (4 * lanes())

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        count = (self.vectors or host_vectors()).lanes
        elements = 4 * count
        scalars = ("i64 %first", "i64 %stream", "i64 %n", "float %width", "float %outward")
        code = self.function("philox_add", "ptr noalias %x", "ptr noalias readonly %keys", *scalars)
        stream = code.broadcast("%stream", count)
        width, outward = (code.broadcast(scalar, elements) for scalar in ("%width", "%outward"))

        def key(i: int, word: int) -> Value:
            loaded = code.load("i32", "%keys", 2 * i + word, align=4)
            return code.broadcast(code.convert("zext", loaded, "i64"), count)

        with code.loop("%begin", "%end") as index:
            first = code.op("add", "%first", code.op("mul", index, count))
            counters = code.op("add", code.broadcast(first, count), lane_constants("i64", range(count)))
            counter = [counters, code.op("lshr", counters, 32), stream, constant(counters.type, 0)]
            words = [code.convert("trunc", word, "i32") for word in philox(code, counter, key)]
            if self.laplace:
                z = [_laplace(code, word) for word in words]
            else:
                z = [*_normal_pair(code, *words[:2]), *_normal_pair(code, *words[2:])]
            noise = _interleaved(code, z, count)

            def add(load: Load, noise: Value = noise) -> Value:
                return code.op("fmul", _float(code, "fmuladd", noise, width, load()), outward)

            update_elements(code, "float", elements, "%x", code.op("mul", index, elements), add)
        code.ret()
        return program([code])
