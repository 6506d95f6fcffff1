"""A start before the preceding kernel of the stream has ended (programmatic dependent launch), in Triton.

A kernel whose code waits so is launched with that attribute; its result is the same as without. Source: PTX ISA 8.7,
section 9.7.13.13, griddepcontrol.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def ask(rows_at, size, EARLY: tl.constexpr):
    """Load the first EARLY bytes of rows to the L2; of fewer, the first again."""
    if EARLY > 0:
        lines = tl.arange(0, EARLY // 128)[None, :] * 128
        at = rows_at.to(tl.int64)[:, None] + tl.where(lines < size, lines, 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def start_early(rows_at, size, EARLY: tl.constexpr):
    """Wait for the preceding kernel, which this one begins before the end of; until then, load memory to the L2.

    Args:
        rows_at: pointers to what no kernel writes, the first of which are read.
        size: bytes from each of them on that may be read.
        EARLY: bytes of each row that are loaded, a power of two times 128, or 0; None: the kernel begins as any other.
    """
    if EARLY is not None:
        if rows_at is not None:
            ask(rows_at, size, EARLY)
        gdc_launch_dependents()
        gdc_wait()
