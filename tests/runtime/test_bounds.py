"""Kernels of the user under the setting `debug`: accesses out of bounds, and numbers that are not finite."""

import logging

import numpy as np
import pytest
import torch

import accelerant as acl
from accelerant.config import override
from accelerant.errors import BoundsError, DivergenceError
from accelerant.runtime.compilation.cuda import compile_cuda
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.compilation.signatures import checked_source, entry_of
from requirements import require_backend

GATHER = """
/* x[100] is a comment */
ACL_KERNEL void gather(ACL_GLOBAL const float *x, ACL_GLOBAL float *y, ACL_GLOBAL const u32 *at, i64 n) {
    i64 i = acl_global_id();
    if (i < n) {
        y[i] = x[at[i] + 1]; /* and x[i] */
    }
}
"""
CUDA = """
struct Pair { float x[2]; };
template <typename T> __global__ void __launch_bounds__(128) pick(const T *x, Pair both, unsigned *y, void *raw) {
    extern __shared__ float tile[];
    y[threadIdx.x] = (unsigned)x[y[2 * threadIdx.x]] + (unsigned)both.x[1] + (unsigned)tile[0];
}
template <typename T> __global__ void other(T *x) { x[0] = 1; }
"""
OPENCL = """
__kernel void pick(__global const float *x, __global uint *y, const ulong n) __attribute__((reqd_work_group_size(8, 1, 1))) {
    if (get_global_id(0) < n) y[get_global_id(0)] = x[n - get_global_id(0)];
}
"""  # noqa: E501


@pytest.fixture(autouse=True)
def _debug():
    with override(debug=True):
        yield


BACKENDS = ["cpu", pytest.param("opencl", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_error_names_kernel_line_argument_and_index(backend):
    gather = acl.kernel(GATHER, device=require_backend(backend))
    x, y, at = np.arange(5, dtype=np.float32), np.zeros(5, np.float32), np.arange(5, dtype=np.uint32)
    gather(1, 8, x, y, at, 4)
    assert y.tolist() == [1, 2, 3, 4, 0]
    with pytest.raises(
        BoundsError, match=r"kernel 'gather', line 6, argument 0 \(x\): index 5 is out of bounds of 5 el"
    ):
        gather(1, 8, x, y, at, 5)
    with pytest.raises(BoundsError, match=r"argument 1 \(y\): index 3 is out of bounds of 3 elements; the results"):
        gather(1, 8, x, y[:3].copy(), at, 4)
    with pytest.raises(BoundsError, match=r"argument 2 \(at\): index 0 is out of bounds of 0 elements, and \d more"):
        gather(1, 8, x, y, at[:0], 4)
    with pytest.raises(IndexError, match="index 4294967291"):
        gather(1, 1, x, y, np.uint32([2**32 - 6]), 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_that_is_not_finite_is_found(backend):
    gather = acl.kernel(GATHER, device=require_backend(backend))
    x = torch.tensor([1.0, 2.0, float("nan")])
    at = torch.tensor([0, 1], dtype=torch.int32).view(torch.uint32)
    with pytest.raises(
        DivergenceError, match=r"kernel 'gather' .*: result 1 .* 1 NaN, the first at \(1,\); already input 0"
    ):
        gather(1, 8, x, torch.zeros(2), at, 2)


def test_without_the_setting_the_kernel_is_the_users():
    gather = acl.kernel(GATHER, device="cpu")
    with override(debug=False):
        assert "acl_checked" not in gather._on(gather._default())[2].name
        gather(1, 8, np.ones(5, np.float32), np.zeros(5, np.float32), np.arange(5, dtype=np.uint32), 4)
    assert list(gather._kernels) == [("cpu:0", False)]


def test_a_kernel_of_a_macro_is_not_checked_and_says_so(caplog):
    text = "#define KERNEL(name) ACL_KERNEL void name(ACL_GLOBAL float *x) { x[0] = 1; }\nKERNEL(set)\n"
    x = np.zeros(1, np.float32)
    with caplog.at_level(logging.WARNING, "accelerant"):
        acl.kernel(text, "set", device="cpu", arguments=["*f32"])(1, 1, x)
    assert x[0] == 1
    assert "bounds are not checked" in caplog.text


def checked(text, dialect, name):
    entry, parameters = entry_of(text, dialect, name) if name != "pick<float>" else (name, None)
    if parameters is None:
        _, parameters = entry_of(text.replace("Pair both", "float both"), dialect, name)
    kinds = tuple(each.kind for each in parameters)
    return checked_source(KernelSource("user's", {dialect: text}, {entry: kinds}), dialect, parameters)


def test_the_text_of_cuda_compiles():
    made = checked(CUDA, "cuda", "pick<float>")
    text = made.dialects["cuda"]
    assert text.count("acl_checked((acl_wide)(") == 3  # not of members, of shared memory, or of another kernel
    assert made.entries["pick<float>"][-4:] == ("i64", "i64", "i64", "*u32")
    assert compile_cuda(made, "sm_90").code


@pytest.mark.slow
def test_the_text_of_opencl_runs():
    require_backend("opencl")
    pick = acl.kernel(OPENCL, device="opencl")
    x, y = np.arange(9, dtype=np.float32), np.zeros(8, np.uint32)
    pick(1, 8, x, y, 8)
    assert y.tolist() == [8, 7, 6, 5, 4, 3, 2, 1]
    with pytest.raises(BoundsError, match=r"line 3, argument 0 \(x\): index 8 is out of bounds of 8"):
        pick(1, 8, x[:8].copy(), y, 8)
