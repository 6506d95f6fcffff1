"""What of the CUDA provider works without a GPU: compiling. Each portable kernel for each target: tests/conformance."""

from __future__ import annotations

import pytest

from accelerant.errors import CompileError
from accelerant.runtime.kernel import KernelSource
from accelerant.runtime.providers.cuda import CudaProvider, compile_cuda

pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")


def test_resources_of_each_entry_are_its_own():
    text = """
    extern "C" __global__ void small(float *x) { x[threadIdx.x] = 1.0f; }
    extern "C" __global__ void large(float *x, int n) {
        __shared__ float tile[1024];
        float sum = 0.0f;
        for (int i = 0; i < 16; ++i) sum += x[i * n] / x[i + n];
        tile[threadIdx.x] = sum;
        __syncthreads();
        x[threadIdx.x] = tile[1023 - threadIdx.x];
    }"""
    binary = compile_cuda(KernelSource("two", {"cuda": text}, {"small": ("*f32",), "large": ("*f32", "i32")}), "sm_90")
    small, large = binary.resources["small"], binary.resources["large"]
    assert (small.shared_bytes, large.shared_bytes) == (0, 4096)
    assert 0 < small.registers < large.registers


def test_the_log_of_a_broken_kernel_names_its_line():
    broken = KernelSource("broken", {"portable": "\nACL_KERNEL void broken() { undeclared = 1; }"}, {"broken": ()})
    with pytest.raises(CompileError, match="does not compile for sm_90") as caught:
        compile_cuda(broken, "sm_90")
    assert '"undeclared" is undefined' in caught.value.log
    assert "(2)" in caught.value.log


def test_the_preferred_dialect_is_cuda():
    both = KernelSource("k", {"portable": "not even C", "cuda": 'extern "C" __global__ void k() {}'}, {"k": ()})
    assert both.pick(CudaProvider.dialects)[0] == "cuda"
    assert compile_cuda(both, "sm_80").code
