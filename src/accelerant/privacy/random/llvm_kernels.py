"""ChaCha20 on the CPU as LLVM IR: a vector of blocks side by side, a lane a block.

    words[16 i + j] = word j of the block of counter first + i

Layout: state word j of LANES blocks is one vector, so that a quarter round needs no shuffles: 12 instructions for each
        lane's quarter round with rotations (AVX-512), 16 without. 16 lanes where vectors have 512 bits and there are 32
        of them; 8 with AVX2, 4 elsewhere.
Bound:  arithmetic: 61 vector instructions a word of every lane.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from accelerant.privacy.random.chacha20 import CONSTANTS

__all__ = [
    "BLOCK_FUNCTION",
    "LOOP_END",
    "KeystreamKernel",
    "VectorKernel",
    "block_function",
    "has_wide_permutes",
    "lanes",
    "next_block",
    "prologue",
    "splat",
    "spread",
]

BLOCK_FUNCTION = "chacha20_block"

_COLUMNS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
_DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))


@functools.cache
def _features() -> dict[str, bool]:
    import llvmlite.binding as llvm

    return dict(llvm.get_host_cpu_features())


def has_wide_permutes() -> bool:
    """Whether the processor looks 32 words up in two registers: AVX-512."""
    return bool(_features().get("avx512f") and _features().get("avx512dq"))


def lanes() -> int:
    """Blocks side by side; divides 32."""
    if has_wide_permutes():
        return 16
    return 8 if _features().get("avx2") else 4


def splat(kind: str, value: int | float | str, count: int) -> str:
    """A constant vector."""
    return f"<{', '.join(f'{kind} {value}' for _ in range(count))}>"


def block_function(count: int) -> str:
    """The function void @chacha20_block(ptr words, ptr start): 16 vectors from 12, of `count` lanes, inlined."""
    V = f"<{count} x i32>"
    constants = [splat("i32", value, count) for value in CONSTANTS]
    start = [*constants, *(f"%s{j}" for j in range(4, 16))]
    loads = _each(
        line
        for j in range(4, 16)
        for line in (
            f"%ps{j} = getelementptr inbounds {V}, ptr %start, i64 {j - 4}",
            f"%s{j} = load {V}, ptr %ps{j}, align {4 * count}",
        )
    )
    phis = _each(f"%x{j} = phi {V} [ {start[j]}, %entry ], [ %y{j}, %loop ]" for j in range(16))
    stores = _each(
        line
        for j in range(16)
        for line in (
            f"%z{j} = add {V} %y{j}, {start[j]}",
            f"%pw{j} = getelementptr inbounds {V}, ptr %words, i64 {j}",
            f"store {V} %z{j}, ptr %pw{j}, align {4 * count}",
        )
    )
    return f"""
define internal void @{BLOCK_FUNCTION}(ptr noalias %words, ptr noalias %start) alwaysinline {{
entry:
{loads}
  br label %loop
loop:
  %round = phi i32 [ 0, %entry ], [ %after, %loop ]
{phis}
{_double_round(count)}
  %after = add i32 %round, 1
  %again = icmp ult i32 %after, 10
  br i1 %again, label %loop, label %done
done:
{stores}
  ret void
}}
declare {V} @llvm.fshl.v{count}i32({V}, {V}, {V})
"""


def _double_round(count: int) -> str:
    """%y0 to %y15 from %x0 to %x15."""
    V, names, lines, made = f"<{count} x i32>", [f"%x{j}" for j in range(16)], [], 0
    rotate = f"@llvm.fshl.v{count}i32"
    for quarters in (_COLUMNS, _DIAGONALS):
        for step, bits in enumerate((16, 12, 8, 7)):
            by = splat("i32", bits, count)
            for a, b, c, d in quarters:  # the four side by side, which have nothing to do with one another
                into, left, right = (d, a, b) if step % 2 == 0 else (b, c, d)
                lines += [
                    f"%t{made} = add {V} {names[left]}, {names[right]}",
                    f"%t{made + 1} = xor {V} {names[into]}, %t{made}",
                    f"%t{made + 2} = call {V} {rotate}({V} %t{made + 1}, {V} %t{made + 1}, {V} {by})",
                ]
                names[left], names[into] = f"%t{made}", f"%t{made + 2}"
                made += 3
    last = {name: f"%y{j}" for j, name in enumerate(names)}
    return re.sub(r"%t\d+", lambda found: last.get(found[0], found[0]), _each(lines))


def prologue(count: int) -> str:
    """What a program of blocks begins with: memory for a block in %word, and %start with key and nonce of %state.

    The counter, vectors 8 and 9 of %start, is left to `next_block`; %base is the first one's.
    """
    V = f"<{count} x i32>"
    lines = [f"%start = alloca [12 x {V}], align {4 * count}", f"%word = alloca [16 x {V}], align {4 * count}"]
    for j, word in [*((j, j) for j in range(8)), (10, 8), (11, 9)]:
        lines += [
            f"%key_at{j} = getelementptr inbounds i32, ptr %state, i64 {word}",
            f"%key{j} = load i32, ptr %key_at{j}, align 4",
            f"%key_one{j} = insertelement {V} poison, i32 %key{j}, i64 0",
            f"%keys{j} = shufflevector {V} %key_one{j}, {V} poison, <{count} x i32> zeroinitializer",
            f"%to{j} = getelementptr inbounds {V}, ptr %start, i64 {j}",
            f"store {V} %keys{j}, ptr %to{j}, align {4 * count}",
        ]
    lines += [f"%p{half} = getelementptr inbounds {V}, ptr %start, i64 {at}" for half, at in (("low", 8), ("high", 9))]
    return _each([*lines, "%base = load i64, ptr %first, align 8"])


def next_block(count: int, counters: str, name: str = "") -> str:
    """The blocks of a vector of counters into %word; `name` keeps values of several apart."""
    V, Q = f"<{count} x i32>", f"<{count} x i64>"
    return _each(
        [
            f"%low{name} = trunc {Q} {counters} to {V}",
            f"%highs{name} = lshr {Q} {counters}, {splat('i64', 32, count)}",
            f"%high{name} = trunc {Q} %highs{name} to {V}",
            f"store {V} %low{name}, ptr %plow, align {4 * count}",
            f"store {V} %high{name}, ptr %phigh, align {4 * count}",
            f"call void @{BLOCK_FUNCTION}(ptr %word, ptr %start)",
        ]
    )


def spread(count: int, name: str, kind: str = "i64") -> str:
    """%names, a vector, from the scalar %name."""
    V = f"<{count} x {kind}>"
    return _each(
        [
            f"%{name}_0 = insertelement {V} poison, {kind} %{name}, i64 0",
            f"%{name}s = shufflevector {V} %{name}_0, {V} poison, <{count} x i32> zeroinitializer",
        ]
    )


def _each(lines: Iterator[str] | list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


LOOP_END = """
  %next = add nuw nsw i64 %index, 1
  %again = icmp slt i64 %next, %end
  br i1 %again, label %loop, label %done
done:
  ret void
}"""
"""Of a function that goes from %begin to %end."""


@dataclass(frozen=True, slots=True)
class VectorKernel(ABC):
    """A Builder (see runtime/compilation/kernel.py) whose program is written out in vectors."""

    @property
    def key(self) -> str:
        """The program itself: it depends on the processor's vectors."""
        return self.build("")

    @property
    def written_out(self) -> bool:
        """All is vectors already, and but for inlining there is nothing to find."""
        return True

    @abstractmethod
    def build(self, target: str) -> str:
        """LLVM IR."""


@dataclass(frozen=True, slots=True)
class KeystreamKernel(VectorKernel):
    """A Builder (see runtime/compilation/kernel.py) of chacha20_keystream(begin, end, state, first, words, n, one).

    An index stands for lanes() blocks; words has room for whole blocks of all of them.
    """

    @property
    def least_share(self) -> int:
        """Indices from which on another thread is worth while: 16 KiB of keystream, about 10 us."""
        return 256 // lanes()

    def build(self, target: str) -> str:
        """LLVM IR."""
        count = lanes()
        each = "\n".join(
            f"""  %w{j}p = getelementptr inbounds <{count} x i32>, ptr %word, i64 {j}
  %w{j} = load <{count} x i32>, ptr %w{j}p, align {4 * count}
"""
            + "\n".join(
                f"""  %e{j}_{lane} = extractelement <{count} x i32> %w{j}, i64 {lane}
  %a{j}_{lane} = getelementptr inbounds i32, ptr %to, i64 {16 * lane + j}
  store i32 %e{j}_{lane}, ptr %a{j}_{lane}, align 4"""
                for lane in range(count)
            )
            for j in range(16)
        )
        return _PROGRAM.format(
            Q=f"<{count} x i64>",
            count=count,
            words=16 * count,
            numbers=f"<{', '.join(f'i64 {i}' for i in range(count))}>",
            prologue=prologue(count),
            froms=spread(count, "from"),
            block=next_block(count, "%counters"),
            each=each,
            end=LOOP_END,
            function=block_function(count),
        )


_PROGRAM = """
define void @chacha20_keystream(i64 %begin, i64 %end, ptr noalias readonly %state, ptr noalias readonly %first,
                                ptr noalias %words, i64 %n, i32 %one) {{
entry:
{prologue}
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %loop, label %done
loop:
  %index = phi i64 [ %begin, %entry ], [ %next, %loop ]
  %blocks = mul i64 %index, {count}
  %from = add i64 %base, %blocks
{froms}
  %counters = add {Q} %froms, {numbers}
{block}
  %at = mul i64 %index, {words}
  %to = getelementptr inbounds i32, ptr %words, i64 %at
{each}
{end}
{function}
"""
