"""The cases of leaky_relu's tests and benchmark."""

import torch
import torch.nn.functional as F

from accelerant.ops.registry import Benchmark, Compilation, SampleInput, Subject, Tolerance
from leaky_relu import backward_kernel, forward_kernel


def _sample(*shape, **options):
    return SampleInput("x".join(map(str, shape)) or "scalar", (shape,), options)


SAMPLES = (_sample(1), _sample(7), _sample(3, 5, slope=0.2), _sample(), _sample(0), _sample(2, 3, 129))
LARGE = (_sample(4097, 4095),)
BENCHMARKS = (Benchmark(_sample(16384, 4096), torch.bfloat16),)
TOLERANCES = {
    torch.float64: Tolerance(1e-13, 1e-13), torch.float32: Tolerance(1e-6, 1e-6), torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}  # fmt: skip
SUBJECT = Subject(lambda x, slope=0.01: F.leaky_relu(x, slope))


def _compilation(kernel, *pointers):
    types = {**dict.fromkeys(pointers, "*bf16"), "n": "i32"}
    constants = {"SLOPE": 0.01, "BLOCK": kernel.usual.block, "EVICTION": ""}
    return Compilation(kernel, types, constants, kernel.usual.num_warps)


KERNELS = (
    _compilation(forward_kernel, "x_ptr", "y_ptr"),
    _compilation(backward_kernel, "dy_ptr", "x_ptr", "dx_ptr"),
)
