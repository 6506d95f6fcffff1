"""What the kernels for Hopper in CUDA C++ share, whatever op they are of: instructions, programs, tensor maps."""

from __future__ import annotations

from accelerant.ops._hopper.maps import tensor_map
from accelerant.ops._hopper.program import ELEMENTS, HopperProgram, Mma, hopper_program, load

__all__ = ["ELEMENTS", "HopperProgram", "Mma", "hopper_program", "load", "tensor_map"]
