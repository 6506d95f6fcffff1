"""Write a kernel once and run it on the CPU, an NVIDIA GPU or an OpenCL device; compile it for GPUs that are not here.

    python examples/own_kernel.py [cpu | cuda | opencl]

The kernel is the soft threshold y = sign(x) max(|x| - k, 0), in C with a few macros. `accelerant compile` shows the
resources of a kernel in a file of its own.
"""

from __future__ import annotations

import sys

import numpy as np

import accelerant as acl
from accelerant.runtime import find_device
from accelerant.runtime.compilation import inspect_cuda

TEXT = """
ACL_KERNEL void soft_threshold(ACL_GLOBAL const float *x, ACL_GLOBAL float *y, float k, i64 n) {
    i64 i = acl_global_id();
    if (i < n) {  /* the grid may be larger than the data */
        float size = x[i] < 0 ? -x[i] - k : x[i] - k;
        size = size > 0 ? size : 0;
        y[i] = x[i] < 0 ? -size : size;
    }
}
"""


def soft_threshold(backend: str, x: np.ndarray, k: float) -> np.ndarray:
    """Run the kernel on a device of a backend; it is compiled once and then comes from the disk cache."""
    y = np.empty_like(x)
    kernel = acl.kernel(TEXT, "soft_threshold", device=backend)
    kernel(-(-x.size // 256), 256, x, y, k, x.size)
    return y


def main(backend: str = "auto") -> None:
    """Compare with NumPy, and print the kernel's resources on three GPUs."""
    x = np.random.default_rng(0).normal(size=100_003).astype(np.float32)
    y = soft_threshold(backend, x, 0.5)
    expected = np.sign(x) * np.maximum(np.abs(x) - np.float32(0.5), 0)
    print(f"{find_device(backend).name}: equal to NumPy: {np.array_equal(y, expected)}")
    for target in ("sm_75", "sm_90", "sm_120"):  # Turing, Hopper, Blackwell; no GPU is needed
        resources = inspect_cuda(TEXT, target, name="soft_threshold").entries[0].resources
        print(f"{target}: {resources.registers} registers, {resources.spill_bytes} bytes spilled")


if __name__ == "__main__":
    main(*sys.argv[1:])
