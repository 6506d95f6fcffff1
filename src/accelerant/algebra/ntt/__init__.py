"""Number-theoretic transforms over the prime fields.

plan.py           the passes of a transform: numbers only
llvm_kernels.py   a pass on the CPU
program.py        a pass in C: kernel.c with levels.h, limbs.h or goldilocks.h; twiddles by powers.c
launch.py         plans for the CPU and for devices, kept with their roots, twiddles and scales; recorded launches
rns.py            polynomials mod X^n + 1 in a residue number system
"""

from accelerant.algebra.ntt.launch import LOG_MOST, transform
from accelerant.algebra.ntt.plan import ORDERS

__all__ = ["LOG_MOST", "ORDERS", "transform"]
