"""The rates of a GPU's 32-bit multiplier, and how many multiply-adds the cases of the suite zk take.

The suite times products of large numbers: 32-bit words multiplied and added into 64-bit sums. Two rates are measured,
each by independent chains of a kernel in PTX, enough of them to fill the device:

    wide multiply T/s          pairs mad.lo.cc.u32, madc.hi.u32 of the same factors: no carry comes in
    carry-chain multiply T/s   pairs madc.lo.cc.u32, madc.hi.cc.u32: a carry comes in and goes out

ptxas makes one instruction of a pair, IMAD.WIDE.U32 and IMAD.WIDE.U32.X; of mad.wide.u32 it makes a product and two
additions. On an H200 both run at 7.4 T/s, so that more digits of fewer bits, which need no carries, lose. The cases are
compared with the second, the plain way to add a row of a product; an algorithm with fewer multiply-adds than the
textbook's may exceed that limit.

The counts are of textbook algorithms, not of the kernels:

    Montgomery product of n limbs of 32 bits    2 n^2 + n                      136 of BN254, 300 of BLS12-381
    Montgomery square                           n (n + 1) / 2 + n^2 + n        108, 234
    transform of N points                       N / 2 log2 N products
    sum of N multiples of points                W N additions of an affine point to (X, Y, ZZ, ZZZ), 8 products and 2
                                                squares each; then 2 B additions of two such, 12 and 2 each
    the same with r affine rounds               W N - U additions in pairs, 5 products and 1 square each; U as above,
                                                U = W N / 2^r + B (1 - 2^-r) / 2; then 2 B

The sum's scalars of b bits are read in W = ceil((b + 1) / c) signed digits of c bits. B is W 2^(c - 1), the number of
buckets, or 2^(c - 1) with precomputed multiples of the points by 2^(c j); c is the one that takes the least. Rounds are
counted where a device has them (algebra/msm/device_plan.py): a bucket's points become as many as there are units of
2^r of them, the last of which is half full on average; a pair's 3 products for a share of one inverse are among the 5.

Source: Koc, Acar and Kaliski 1996, IEEE Micro 16(3), "CIOS"; the explicit-formulas database, short Weierstrass,
xyzz, madd-2008-s and add-2008-s.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.msm.device_plan import device_plan
from accelerant.bench.timer import time_ms
from accelerant.errors import AccelerantError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel, KernelSource, portable_header
from accelerant.runtime.provider import ComputeDevice

__all__ = [
    "CARRY",
    "WIDE",
    "chain_state",
    "measure_multiplier",
    "msm_multiplies",
    "msm_products",
    "multiplier_source",
    "ntt_multiplies",
    "product_multiplies",
    "square_multiplies",
    "wide_state",
]

WIDE, CARRY = "wide multiply T/s", "carry-chain multiply T/s"
"""Names of the ceilings."""

# --- counts ----------------------------------------------------------------------------------------------------------


def product_multiplies(field: Field) -> int:
    """Return the wide multiply-adds of a Montgomery product."""
    n = _limbs(field)
    return 2 * n * n + n


def square_multiplies(field: Field) -> int:
    """Return the wide multiply-adds of a Montgomery square."""
    n = _limbs(field)
    return n * (n + 1) // 2 + n * n + n


_ANY_BYTES = 1 << 62


def _limbs(field: Field) -> int:
    return field.limbs * field.word_bits // 32


def ntt_multiplies(field: Field, log_n: int) -> int:
    """Return the wide multiply-adds of a transform of 2^log_n points."""
    return (log_n << log_n) // 2 * product_multiplies(field)


def msm_products(curve: Curve[int], n: int, *, precomputed: bool = False) -> tuple[int, int]:
    """Return the products and squares in the coordinates' field of a multi-scalar multiplication of n points.

    Args:
        curve: a curve over a prime field.
        precomputed: with multiples of the points by 2^(c j), which share one set of buckets.
    """
    rounds = device_plan(curve, n, _ANY_BYTES, shared=precomputed).rounds

    def counted(c: int) -> tuple[int, int]:
        windows = -(-(curve.scalars.bits + 1) // c)
        added, folded = windows * n, (1 if precomputed else windows) * 2**c
        units = (4 * added + folded * ((1 << rounds) - 1)) >> rounds + 2
        return 5 * added + 3 * units + 12 * folded, added + units + 2 * folded

    return min(map(counted, range(2, 25)), key=sum)


def msm_multiplies(curve: Curve[int], n: int, *, precomputed: bool = False) -> int:
    """Return the wide multiply-adds of a multi-scalar multiplication; see msm_products."""
    products, squares = msm_products(curve, n, precomputed=precomputed)
    base = curve.coordinates.base
    return products * product_multiplies(base) + squares * square_multiplies(base)


# --- the kernels -----------------------------------------------------------------------------------------------------

_SUMS = 8
"""64-bit sums of a thread in multiply_wide, and of each of a thread's two chains in multiply_carry."""

_BLOCK, _BLOCKS_PER_CORE = 256, 16
_ROUNDS, _CHECKED_ROUNDS = 1 << 13, 5
_SEED = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1

_TEXT = """
#define FACTORS \\
    i64 thread = acl_global_id(); \\
    u32 x[%(sums)d], y = (u32)thread, step = (u32)thread | 1u; \\
    for (i32 k = 0; k < %(sums)d; k++) \\
        x[k] = (u32)((u64)(thread * %(sums)d + k + 1) * %(seed)dull >> 32);
#define WIDE(sum, x, y) asm("%(wide)s" : "+l"(sum) : "r"(x), "r"(y))
#define CHAIN(sums, x, y) asm("%(chain)s" : %(results)s : %(factors)s, "r"(y))

ACL_KERNEL ACL_BLOCK(%(block)d) void multiply_wide(u64 *out, i64 rounds)
{
    u64 sums[%(sums)d] = {0};
    FACTORS
#pragma unroll 4
    for (i64 i = 0; i < rounds; i++) {
        y += step;
#pragma unroll
        for (i32 k = 0; k < %(sums)d; k++)
            WIDE(sums[k], x[k], y);
    }
    for (i32 k = 1; k < %(sums)d; k++)
        sums[0] ^= sums[k];
    out[thread] = sums[0];
}

ACL_KERNEL ACL_BLOCK(%(block)d) void multiply_carry(u64 *out, i64 rounds)
{
    u64 one[%(sums)d] = {0}, other[%(sums)d] = {0};
    FACTORS
#pragma unroll 2
    for (i64 i = 0; i < rounds; i++) {
        y += step;
        CHAIN(one, x, y);
        y += step;
        CHAIN(other, x, y);
    }
    one[0] ^= other[0];
    for (i32 k = 1; k < %(sums)d; k++)
        one[0] ^= one[k] ^ other[k];
    out[thread] = one[0];
}
"""


def wide_text() -> str:
    """Return a multiply-add in PTX: %0 += %1 %2."""
    return (
        "{.reg .u32 low, high; mov.b64 {low, high}, %0; mad.lo.cc.u32 low, %1, %2, low; "
        "madc.hi.u32 high, %1, %2, high; mov.b64 %0, {low, high};}"
    )


def chain_text() -> str:
    """Return a chain in PTX: the sums, as one number, += (x[0] + x[1] 2^64 + ...) y + the carry of x[0] + y.

    Operands are the sums, then x, then y. Sums of 64 bits keep their halves in neighbouring registers, as the
    instruction wants them: with sums of 32 bits ptxas adds a move to most multiply-adds.
    """
    y = f"%{2 * _SUMS}"
    lines = [f"{{.reg .u32 spent, low<{_SUMS}>, high<{_SUMS}>;"]
    lines += [f"mov.b64 {{low{k}, high{k}}}, %{k};" for k in range(_SUMS)]
    lines.append(f"add.cc.u32 spent, %{_SUMS}, {y};")
    for k in range(_SUMS):
        carry_out = "" if k == _SUMS - 1 else ".cc"
        lines.append(f"madc.lo.cc.u32 low{k}, %{_SUMS + k}, {y}, low{k};")
        lines.append(f"madc.hi{carry_out}.u32 high{k}, %{_SUMS + k}, {y}, high{k};")
    lines += [f"mov.b64 %{k}, {{low{k}, high{k}}};" for k in range(_SUMS)]
    return " ".join([*lines, "}"])


@functools.cache
def multiplier_source() -> KernelSource:
    """Return both kernels, for CUDA only; arguments: out (*u64, a word for each thread) and the number of rounds."""
    values = {
        "block": _BLOCK,
        "sums": _SUMS,
        "seed": _SEED,
        "wide": wide_text(),
        "chain": chain_text(),
        "results": ", ".join(f'"+l"((sums)[{k}])' for k in range(_SUMS)),
        "factors": ", ".join(f'"r"((x)[{k}])' for k in range(_SUMS)),
    }
    entries = {"multiply_wide": ("*u64", "i64"), "multiply_carry": ("*u64", "i64")}
    return KernelSource("zk_multiplier", {"cuda": f"{portable_header()}\n{_TEXT % values}"}, entries)


# --- the kernels in Python's integers --------------------------------------------------------------------------------


def wide_state(thread: int, rounds: int) -> int:
    """Return the word that multiply_wide writes for a thread."""
    x, step = _factors(thread)
    sums = [sum(factor * ((thread + i * step) % 2**32) for i in range(1, rounds + 1)) & _MASK for factor in x]
    return functools.reduce(int.__xor__, sums)


def chain_state(thread: int, rounds: int) -> int:
    """Return the word that multiply_carry writes for a thread."""
    x, step = _factors(thread)
    number = sum(factor << 64 * k for k, factor in enumerate(x))
    chains, left = [0, 0], 0
    for i in range(1, 2 * rounds + 1):
        y = (thread + i * step) % 2**32
        chains[(i - 1) % 2] += number * y + (x[0] + y >> 32)
    for chain in chains:
        for k in range(_SUMS):
            left ^= chain >> 64 * k & _MASK
    return left


def _factors(thread: int) -> tuple[list[int], int]:
    """Return x, and the step of y."""
    return [((thread * _SUMS + k + 1) * _SEED & _MASK) >> 32 for k in range(_SUMS)], thread | 1


# --- the measurement -------------------------------------------------------------------------------------------------


def measure_multiplier(device: ComputeDevice, *, budget_s: float = 0.3) -> dict[str, float]:
    """Measure both rates of a CUDA device, WIDE and CARRY, in 10^12 multiply-adds a second.

    Raises:
        AccelerantError: a kernel computes something else than it says.
    """
    provider = registry.create(device.backend)
    where = torch.device(device.torch_device)
    blocks = _BLOCKS_PER_CORE * int(device.properties["multiprocessors"])
    out = torch.zeros(blocks * _BLOCK, dtype=torch.int64, device=where)
    rates = {}
    for name, entry, expected, each in (
        (WIDE, "multiply_wide", wide_state, _SUMS),
        (CARRY, "multiply_carry", chain_state, 2 * _SUMS),
    ):
        kernel = provider.compile(multiplier_source(), entry=entry, device=device.index)

        def run(rounds: int, kernel: Kernel = kernel) -> None:
            provider.launch(kernel, (blocks,), (_BLOCK,), (out, rounds))

        run(_CHECKED_ROUNDS)
        got = out.cpu().numpy().view(np.uint64)
        for thread in (0, 1, _BLOCK + 3, len(got) - 1):
            if int(got[thread]) != expected(thread, _CHECKED_ROUNDS):
                raise AccelerantError(
                    f"{entry}: thread {thread} gave {int(got[thread]):#x}, not {expected(thread, _CHECKED_ROUNDS):#x}"
                )
        timing = time_ms(functools.partial(run, _ROUNDS), where, budget_s=budget_s, reads=True)
        rates[name] = len(got) * each * _ROUNDS / timing.p50_ms / 1e9
    return rates
