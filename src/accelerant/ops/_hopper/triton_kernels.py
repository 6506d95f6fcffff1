"""A start before the preceding kernel of the stream has ended (programmatic dependent launch), in Triton.

A kernel whose code waits so is launched with that attribute; its result is the same as without. Source: PTX ISA 8.7,
section 9.7.13.13, griddepcontrol.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_early(EARLY: tl.constexpr):
    """Wait for the preceding kernel, which this one may begin before the end of where EARLY."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
