"""Write a kernel once and run it on the CPU, an NVIDIA GPU or an OpenCL device; compile it for GPUs that are not here.

    python examples/own_kernel.py [cpu | cuda | opencl]

The kernel is the soft threshold y = sign(x) max(|x| - k, 0): in C with a few macros for GPUs (`portable`), and as LLVM
IR for the CPU. `accelerant compile` shows the resources of a kernel in a file of its own.
"""

from __future__ import annotations

import sys

import numpy as np

from accelerant.runtime import registry
from accelerant.runtime.compilation.cuda import compile_cuda
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.compilation.llvm import FunctionBuilder, program

C_TEXT = """
ACL_KERNEL void soft_threshold(ACL_GLOBAL const float *x, ACL_GLOBAL float *y, float k, i64 n) {
    i64 i = acl_global_id();
    if (i < n) {  /* the grid may be larger than the data */
        float size = x[i] < 0 ? -x[i] - k : x[i] - k;
        size = size > 0 ? size : 0;
        y[i] = x[i] < 0 ? -size : size;
    }
}
"""


def llvm_text() -> str:
    """Return the kernel for the CPU: a function of a range of indices, which the provider divides among the cores."""
    arguments = ["i64 %begin", "i64 %end", "ptr noalias %x", "ptr noalias %y", "float %k", "i64 %n"]
    code = FunctionBuilder("soft_threshold", arguments, "void", linkage="")
    with code.loop("%begin", code.smin("%end", "%n")) as i:
        x = code.load("float", "%x", i)
        below = code.compare("olt", x, 0.0)
        size = code.op("fsub", code.select(below, code.fneg(x), x), "%k")
        size = code.select(code.compare("ogt", size, 0.0), size, 0.0)
        code.store("float", code.select(below, code.fneg(size), size), "%y", i)
    code.ret()
    return program([code])


SOURCE = KernelSource(
    "soft_threshold",
    {"portable": C_TEXT, "llvm": llvm_text()},
    entries={"soft_threshold": ("*f32", "*f32", "f32", "i64")},
)


def soft_threshold(backend: str, x: np.ndarray, k: float) -> np.ndarray:
    """Run the kernel on a device of a backend; it is compiled once and then comes from the disk cache."""
    provider = registry.create(registry.choose(backend).backend)
    kernel = provider.compile(SOURCE)
    source, result = provider.copy_to_device(x), provider.allocate(x.nbytes)
    provider.launch(kernel, (-(-x.size // 256),), (256,), (source, result, k, x.size))
    provider.synchronize()
    return provider.copy_to_host(result, np.float32, x.shape)


def main(backend: str = "auto") -> None:
    """Compare with NumPy, and print the kernel's resources on three GPUs."""
    x = np.random.default_rng(0).normal(size=100_003).astype(np.float32)
    y = soft_threshold(backend, x, 0.5)
    expected = np.sign(x) * np.maximum(np.abs(x) - np.float32(0.5), 0)
    print(f"{registry.choose(backend).name}: equal to NumPy: {np.array_equal(y, expected)}")
    for target in ("sm_75", "sm_90", "sm_120"):  # Turing, Hopper, Blackwell; no GPU is needed
        resources = compile_cuda(SOURCE, target).resources["soft_threshold"]
        print(f"{target}: {resources.registers} registers, {resources.spill_bytes} bytes spilled")


if __name__ == "__main__":
    main(*sys.argv[1:])
