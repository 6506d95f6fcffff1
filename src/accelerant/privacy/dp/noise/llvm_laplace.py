"""Discrete Laplace noise on the CPU as LLVM IR; laplace.py defines it bit for bit.

Layout: an index of the launch is lanes() draws side by side.
Time:   does not depend on what is drawn: each digit is compared, and the pool is read, whatever comes out.
Bound:  arithmetic: four blocks of keystream a draw of up to 29 digits, and about 20 instructions a digit.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerant.privacy.random.llvm_kernels import (
    LOOP_END,
    VectorKernel,
    block_function,
    lanes,
    next_block,
    prologue,
    splat,
    spread,
)

__all__ = ["LaplaceKernel"]


@dataclass(frozen=True, slots=True)
class LaplaceKernel(VectorKernel):
    """A Builder of laplace_steps; arguments as kernel.c has them.

    The memory of `out` has room for whole vectors.
    """

    @property
    def least_share(self) -> int:
        """Indices from which on another thread is worth while: about 10 us."""
        return 16

    def build(self, target: str) -> str:
        """LLVM IR."""
        count = lanes()
        return _PROGRAM.format(
            V=f"<{count} x i32>",
            Q=f"<{count} x i64>",
            B=f"<{count} x i1>",
            count=count,
            align=4 * count,
            lanes=f"<{', '.join(f'i64 {i}' for i in range(count))}>",
            prologue=prologue(count),
            eachs=spread(count, "each"),
            froms=spread(count, "from"),
            numbers=spread(count, "number"),
            block=next_block(count, "%counter"),
            us=spread(count, "u", "i32"),
            rests=spread(count, "rest"),
            signeds=spread(count, "signed"),
            pool="\n".join(
                f"""  %wide{i} = zext <{count} x i32> %first_word{i} to <{count} x i64>"""
                + (
                    f"\n  %up{i} = shl <{count} x i64> %wide{i}, {splat('i64', 32, count)}"
                    if i % 2 == 0
                    else f"\n  %pool{i // 2} = or <{count} x i64> %up{i - 1}, %wide{i}"
                )
                for i in range(6)
            ),
            words="\n".join(
                f"  %first_at{i} = getelementptr inbounds <{count} x i32>, ptr %word, i64 {i}\n"
                f"  %first_word{i} = load <{count} x i32>, ptr %first_at{i}, align {4 * count}"
                for i in range(6)
            ),
            end=LOOP_END,
            function=block_function(count),
        )


_PROGRAM = """
define void @laplace_steps(i64 %begin, i64 %end, ptr noalias readonly %state, ptr noalias readonly %first,
                           ptr noalias readonly %thresholds, ptr noalias %out, i64 %n, i32 %digits, i32 %blocks,
                           i32 %one) {{
entry:
{prologue}
  %each = zext i32 %blocks to i64
  %J = zext i32 %digits to i64
  %both = shl i64 %J, 1
  %last = add i64 %both, 6
{eachs}
  %strides = mul {Q} %eachs, {lanes}
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %loop, label %done
loop:
  %index = phi i64 [ %begin, %entry ], [ %next, %made ]
  %draws = mul i64 %index, {count}
  %used = mul i64 %draws, %each
  %from = add i64 %base, %used
{froms}
  %counters = add {Q} %froms, %strides
  br label %block
block:
  %number = phi i64 [ 0, %loop ], [ %number_next, %after_words ]
  %at = phi i64 [ 0, %loop ], [ %at_end, %after_words ]
  %a0 = phi {Q} [ zeroinitializer, %loop ], [ %n0, %after_words ]
  %a1 = phi {Q} [ zeroinitializer, %loop ], [ %n1, %after_words ]
  %a2 = phi {Q} [ zeroinitializer, %loop ], [ %n2, %after_words ]
  %sum = phi {Q} [ zeroinitializer, %loop ], [ %sum_next, %after_words ]
{numbers}
  %counter = add {Q} %counters, %numbers
{block}
{words}
{pool}
  %begins = icmp eq i64 %number, 0
  %b0 = select i1 %begins, {Q} %pool0, {Q} %a0
  %b1 = select i1 %begins, {Q} %pool1, {Q} %a1
  %b2 = select i1 %begins, {Q} %pool2, {Q} %a2
  %at_0 = select i1 %begins, i64 6, i64 %at
  %block_end = shl i64 %number, 4
  %block_last = add i64 %block_end, 16
  %least = icmp slt i64 %block_last, %last
  %at_end = select i1 %least, i64 %block_last, i64 %last
  br label %words
words:
  %i = phi i64 [ %at_0, %block ], [ %i_next, %words ]
  %p0 = phi {Q} [ %b0, %block ], [ %n0, %words ]
  %p1 = phi {Q} [ %b1, %block ], [ %n1, %words ]
  %p2 = phi {Q} [ %b2, %block ], [ %n2, %words ]
  %total = phi {Q} [ %sum, %block ], [ %sum_next, %words ]
  %in_block = and i64 %i, 15
  %pw = getelementptr inbounds {V}, ptr %word, i64 %in_block
  %w = load {V}, ptr %pw, align {align}
  %d = sub i64 %i, 6
  %second = icmp uge i64 %d, %J
  %d_second = sub i64 %d, %J
  %digit = select i1 %second, i64 %d_second, i64 %d
  %middle_at = add i64 %J, %digit
  %lower_at = add i64 %J, %middle_at
  %pu = getelementptr inbounds i32, ptr %thresholds, i64 %digit
  %pm = getelementptr inbounds i32, ptr %thresholds, i64 %middle_at
  %pl = getelementptr inbounds i32, ptr %thresholds, i64 %lower_at
  %u = load i32, ptr %pu, align 4
  %m = load i32, ptr %pm, align 4
  %l = load i32, ptr %pl, align 4
  %mw = zext i32 %m to i64
  %lw = zext i32 %l to i64
  %ms = shl i64 %mw, 32
  %rest = or i64 %ms, %lw
{us}
{rests}
  %below = icmp ult {V} %w, %us
  %equal = icmp eq {V} %w, %us
  %lower = icmp ult {Q} %p0, %rests
  %tie = and {B} %equal, %lower
  %is = or {B} %below, %tie
  %n0 = select {B} %equal, {Q} %p1, {Q} %p0
  %n1 = select {B} %equal, {Q} %p2, {Q} %p1
  %n2 = select {B} %equal, {Q} zeroinitializer, {Q} %p2
  %weight = shl i64 1, %digit
  %against = sub i64 0, %weight
  %signed = select i1 %second, i64 %against, i64 %weight
{signeds}
  %gain = select {B} %is, {Q} %signeds, {Q} zeroinitializer
  %sum_next = add {Q} %total, %gain
  %i_next = add i64 %i, 1
  %more = icmp slt i64 %i_next, %at_end
  br i1 %more, label %words, label %after_words
after_words:
  %number_next = add i64 %number, 1
  %blocks_left = icmp ult i64 %number_next, %each
  br i1 %blocks_left, label %block, label %made
made:
  %place = getelementptr inbounds i64, ptr %out, i64 %draws
  store {Q} %sum_next, ptr %place, align 8
{end}
{function}
"""
