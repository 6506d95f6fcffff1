"""Number-theoretic transforms over the prime fields.

reference.py      the sums on Python integers
plan.py           the passes of a transform: numbers only
tables.py         roots, twiddles and scales as words, for the CPU and for devices
llvm_kernels.py   a pass on the CPU
program.py        a pass in C: kernel.c with levels.h, limbs.h or goldilocks.h; twiddles by powers.c
launch.py         plans for the CPU and for devices, kept with their tables, and recorded launches
"""

from accelerant.algebra.ntt.launch import LOG_MOST, transform
from accelerant.algebra.ntt.plan import ORDERS

__all__ = ["LOG_MOST", "ORDERS", "transform"]
