"""Philox 4x32-10 and Box-Muller on the CPU as LLVM IR; philox.cuh says what is computed. Not for a privacy claim.

    x <- (x + width * z) * outward       z of N(0, 1), or of density exp(-|z|) / 2

Layout: an index of the launch is lanes() counters side by side, of four neighbouring elements each. Words of 32 bits
        lie in lanes of 64, so that a product of two is one instruction.
Maths:  ln u = e ln 2 + ln(1 + f), f in [sqrt(1/2) - 1, sqrt(2) - 1], by f - f^2 / 2 + f^3 P(f); sin(2 pi v) = v S(v^2)
        of |v| <= 1/4; P of degree 8 and S of degree 4, fitted for the least largest error: 2e-10 and 4e-9 before
        rounding.
Bound:  arithmetic: about 90 instructions for four vectors of elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerant.privacy.dp.noise.llvm_lines import Lines
from accelerant.privacy.random.llvm_kernels import LOOP_END, VectorKernel, lanes, splat

__all__ = ["PhiloxKernel"]

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_LOGARITHM = (
    0.33333298563957214, -0.25000008940696716, 0.20002824068069458, -0.16668526828289032, 0.14207574725151062,
    -0.12389998883008957, 0.11952442675828934, -0.11787271499633789, 0.06747034937143326,
)  # fmt: skip
_SINE = (6.283185005187988, -41.34165573120117, 81.60102081298828, -76.55010986328125, 39.53886795043945)
_LN2 = 0.6931471824645996
_SQRT_HALF_BITS = 0x3F3504F3
_STEP = 2.0**-32


def _philox(t: Lines) -> list[str]:
    """The four words of each counter, 32 bits, from %c0, %c1 and %c2 in lanes of 64 and the keys of %keys."""
    Q, low, upper = t.vector("i64"), splat("i64", _LOW, t.count), splat("i64", 32, t.count)
    c = ["%c0", "%c1", "%c2", "zeroinitializer"]
    for i in range(10):
        keys = []
        for side in (0, 1):
            place = t.new(f"getelementptr inbounds i32, ptr %keys, i64 {2 * i + side}")
            word = t.new(f"load i32, ptr {place}, align 4")
            keys.append(t.broadcast("i64", t.new(f"zext i32 {word} to i64")))
        products = [
            t.operation("mul", t.operation("and", c[2 * side], low, "i64"), splat("i64", factor, t.count), "i64")
            for side, factor in enumerate(_MULTIPLIERS)
        ]
        mixed = []
        for side in (0, 1):
            high = t.operation("lshr", products[1 - side], upper, "i64")
            mixed.append(t.operation("xor", t.operation("xor", high, c[2 * side + 1], "i64"), keys[side], "i64"))
        c = [mixed[0], products[1], mixed[1], products[0]]
    return [t.new(f"trunc {Q} {each} to {t.vector('i32')}") for each in c]


def _polynomial(t: Lines, coefficients: tuple[float, ...], x: str) -> str:
    """By Horner's rule."""
    y = t.number(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        y = t.fma(y, x, t.number(coefficient))
    return y


def _logarithm(t: Lines, word: str) -> str:
    """-ln((word + 1) / 2^32), nearly."""
    F, V = t.vector("float"), t.vector("i32")
    real = t.new(f"uitofp {V} {word} to {F}")
    u = t.fma(real, t.number(_STEP), t.number(_STEP))
    bits = t.new(f"bitcast {F} {u} to {V}")
    over = t.operation("sub", bits, t.word(_SQRT_HALF_BITS))
    exponent = t.operation("ashr", over, t.word(23))
    mantissa = t.operation("sub", bits, t.operation("shl", exponent, t.word(23)))
    f = t.operation("fsub", t.new(f"bitcast {V} {mantissa} to {F}"), t.number(1.0), "float")
    square = t.operation("fmul", f, f, "float")
    cubic = t.operation("fmul", t.operation("fmul", square, f, "float"), _polynomial(t, _LOGARITHM, f), "float")
    small = t.operation("fadd", f, t.fma(square, t.number(-0.5), cubic), "float")
    whole = t.new(f"sitofp {V} {exponent} to {F}")
    return t.new(f"fneg {F} {t.fma(whole, t.number(_LN2), small)}")


def _wave(t: Lines, v: str) -> str:
    """sin(2 pi v) of |v| <= 1/4."""
    return t.operation("fmul", v, _polynomial(t, _SINE, t.operation("fmul", v, v, "float")), "float")


def _normal_pair(t: Lines, first: str, second: str) -> list[str]:
    """Box-Muller: the radius from one word, the angle 2 pi (r - 1/2) from the upper 23 bits of the other."""
    F, V = t.vector("float"), t.vector("i32")
    squared = t.operation("fmul", _logarithm(t, first), t.number(2.0), "float")
    radius = t.new(f"call {F} @llvm.sqrt.v{t.count}f32({F} {squared})")
    upper = t.operation("lshr", second, t.word(9))
    one_to_two = t.new(f"bitcast {V} {t.operation('or', upper, t.word(0x3F800000))} to {F}")
    turn = t.operation("fsub", one_to_two, t.number(1.5), "float")
    size = t.new(f"call {F} @llvm.fabs.v{t.count}f32({F} {turn})")
    from_quarter = t.operation("fsub", t.number(0.25), size, "float")
    cosine = _wave(t, from_quarter)
    folded = t.operation(
        "fsub", t.number(0.25), t.new(f"call {F} @llvm.fabs.v{t.count}f32({F} {from_quarter})"), "float"
    )
    signed = t.new(f"call {F} @llvm.copysign.v{t.count}f32({F} {folded}, {F} {turn})")
    return [t.operation("fmul", radius, each, "float") for each in (cosine, _wave(t, signed))]


def _laplace(t: Lines, word: str) -> str:
    """The size from 31 bits, the sign from the uppermost."""
    F, V = t.vector("float"), t.vector("i32")
    size = _logarithm(t, t.operation("shl", word, t.word(1)))
    sign = t.operation("and", word, t.word(0x80000000))
    bits = t.operation("xor", t.new(f"bitcast {F} {size} to {V}"), sign)
    return t.new(f"bitcast {V} {bits} to {F}")


def _joined(t: Lines, kind: str, x: str, y: str, count: int) -> str:
    """One vector after the other."""
    order = ", ".join(f"i32 {i}" for i in range(2 * count))
    return t.new(f"shufflevector {kind} {x}, {kind} {y}, <{2 * count} x i32> <{order}>")


@dataclass(frozen=True, slots=True)
class PhiloxKernel(VectorKernel):
    """A Builder of philox_add(begin, end, x, keys, first, stream, n, width, outward).

    Attributes:
        laplace: the variates are Laplace's.
    """

    laplace: bool = False

    @property
    def least_share(self) -> int:
        """Indices from which on another thread is worth while: about 10 us."""
        return 8192 // (4 * lanes())

    def build(self, target: str) -> str:
        """LLVM IR."""
        count = lanes()
        t = Lines(count)
        words = _philox(t)
        if self.laplace:
            z = [_laplace(t, word) for word in words]
        else:
            z = [*_normal_pair(t, *words[:2]), *_normal_pair(t, *words[2:])]
        F, wide = t.vector("float"), f"<{4 * count} x float>"
        first, second = (_joined(t, F, z[i], z[i + 1], count) for i in (0, 2))
        noise = _joined(t, f"<{2 * count} x float>", first, second, 2 * count)
        order = ", ".join(f"i32 {(p % 4 // 2) * 2 * count + p // 4 + (p % 2) * count}" for p in range(4 * count))
        placed = t.new(f"shufflevector {wide} {noise}, {wide} poison, <{4 * count} x i32> <{order}>")
        return _PROGRAM.format(
            body=t.text(),
            noise=placed,
            count=count,
            elements=4 * count,
            F=F,
            W=wide,
            B=f"<{4 * count} x i1>",
            Q=t.vector("i64"),
            N=f"<{4 * count} x i64>",
            numbers=f"<{', '.join(f'i64 {i}' for i in range(count))}>",
            places=f"<{', '.join(f'i64 {i}' for i in range(4 * count))}>",
            low=splat("i64", _LOW, count),
            upper=splat("i64", 32, count),
            end=LOOP_END,
        )


_PROGRAM = """
define void @philox_add(i64 %begin, i64 %end, ptr noalias %x, ptr noalias readonly %keys, i64 %first, i64 %stream,
                        i64 %n, float %width, float %outward) {{
entry:
  %stream_0 = insertelement {Q} poison, i64 %stream, i64 0
  %c2 = shufflevector {Q} %stream_0, {Q} poison, <{count} x i32> zeroinitializer
  %width_0 = insertelement {W} poison, float %width, i64 0
  %widths = shufflevector {W} %width_0, {W} poison, <{elements} x i32> zeroinitializer
  %outward_0 = insertelement {W} poison, float %outward, i64 0
  %outwards = shufflevector {W} %outward_0, {W} poison, <{elements} x i32> zeroinitializer
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %loop, label %done
loop:
  %index = phi i64 [ %begin, %entry ], [ %next, %more ]
  %counters = mul i64 %index, {count}
  %from = add i64 %first, %counters
  %from_0 = insertelement {Q} poison, i64 %from, i64 0
  %froms = shufflevector {Q} %from_0, {Q} poison, <{count} x i32> zeroinitializer
  %c = add {Q} %froms, {numbers}
  %c0 = and {Q} %c, {low}
  %c1 = lshr {Q} %c, {upper}
{body}
  %at = mul i64 %index, {elements}
  %place = getelementptr inbounds float, ptr %x, i64 %at
  %after = add i64 %at, {elements}
  %inside = icmp sle i64 %after, %n
  br i1 %inside, label %whole, label %rest
whole:
  %wx = load {W}, ptr %place, align 4
  %ws = call {W} @llvm.fmuladd.v{elements}f32({W} {noise}, {W} %widths, {W} %wx)
  %wy = fmul {W} %ws, %outwards
  store {W} %wy, ptr %place, align 4
  br label %more
rest:
  %left = sub i64 %n, %at
  %left_0 = insertelement {N} poison, i64 %left, i64 0
  %lefts = shufflevector {N} %left_0, {N} poison, <{elements} x i32> zeroinitializer
  %in = icmp slt {N} {places}, %lefts
  %mx = call {W} @llvm.masked.load.v{elements}f32.p0(ptr %place, i32 4, {B} %in, {W} zeroinitializer)
  %ms = call {W} @llvm.fmuladd.v{elements}f32({W} {noise}, {W} %widths, {W} %mx)
  %my = fmul {W} %ms, %outwards
  call void @llvm.masked.store.v{elements}f32.p0({W} %my, ptr %place, i32 4, {B} %in)
  br label %more
more:
{end}
declare {F} @llvm.sqrt.v{count}f32({F})
declare {F} @llvm.fabs.v{count}f32({F})
declare {F} @llvm.copysign.v{count}f32({F}, {F})
declare {F} @llvm.fmuladd.v{count}f32({F}, {F}, {F})
declare {W} @llvm.fmuladd.v{elements}f32({W}, {W}, {W})
declare {W} @llvm.masked.load.v{elements}f32.p0(ptr, i32, {B}, {W})
declare void @llvm.masked.store.v{elements}f32.p0({W}, ptr, i32, {B})
"""
