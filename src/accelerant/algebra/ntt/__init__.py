"""Number-theoretic transforms over the prime fields.

reference.py      the sums on Python integers
plan.py           what a transform does, pass by pass: numbers only
tables.py         roots, twiddles and scales as words, on the CPU
llvm_kernels.py   a pass on the CPU; llvm_core.py its butterflies, llvm_packs.py its packs
kernel.c          a pass in portable C; program.py puts it together, with levels.h, limbs.h or goldilocks.h
device_tables.py  its roots, and its twiddles by powers.c on the device
host.py           the passes on the CPU
device.py         the passes on CUDA, HIP and OpenCL
launch.py         plans, kept, and the ledger
"""

from accelerant.algebra.ntt.launch import LOG_MOST, transform
from accelerant.algebra.ntt.plan import ORDERS

__all__ = ["LOG_MOST", "ORDERS", "transform"]
