"""What of the CUDA provider works without a GPU: compiling. Each portable kernel for each target: tests/conformance."""

import ctypes
import importlib
import math
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from accelerant.errors import CompileError, DeviceLost, LaunchError, OutOfMemory
from accelerant.ops import norm
from accelerant.ops.norm import cases as norm_cases
from accelerant.ops.softmax import cases as softmax_cases
from accelerant.runtime.compilation import cuda as cuda_compile
from accelerant.runtime.compilation import triton
from accelerant.runtime.compilation.cuda import compile_cuda, cuda_key
from accelerant.runtime.compilation.kernel import Binary, KernelSource
from accelerant.runtime.providers import cuda_launch
from accelerant.runtime.providers.cuda import CudaProvider
from refusals import assert_raises

softmax_op = importlib.import_module("accelerant.ops.softmax")

pytest.importorskip("cuda.bindings", reason="cuda-bindings is for Linux and Windows")


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
    caught = assert_raises(CompileError, "does not compile for sm_90", compile_cuda, broken, "sm_90")
    assert '"undeclared" is undefined' in caught.log
    assert "(2)" in caught.log


def test_options_reach_nvrtc():
    text = 'extern "C" __global__ void k(int *x) { x[0] = WIDTH; }'
    plain = KernelSource("k", {"cuda": text}, {"k": ("*i32",)})
    assert_raises(CompileError, 'identifier "WIDTH" is undefined', compile_cuda, plain, "sm_90")
    codes = {compile_cuda(replace(plain, options=(f"-DWIDTH={width}",)), "sm_90").code for width in (1, 2)}
    assert len(codes) == 2
    for_ptxas = compile_cuda(replace(plain, options=("-DWIDTH=1", "--ptxas-options=-O0")), "sm_90")
    assert for_ptxas.code not in codes


def test_the_preferred_dialect_is_cuda():
    both = KernelSource("k", {"portable": "not even C", "cuda": 'extern "C" __global__ void k() {}'}, {"k": ()})
    assert both.pick(CudaProvider.dialects)[0] == "cuda"
    assert compile_cuda(both, "sm_80").code


# --- keys ------------------------------------------------------------------------------------------------------------
PLAIN = KernelSource("k", {"cuda": "text"}, {"k": ("*f32",)})
SPECIAL = triton.Specialization("some.module", "k", ("*fp32", "i32", "constexpr"), (("BLOCK", 64),), ((0, 16),), 4, 3)


@pytest.mark.parametrize("other", [
    replace(PLAIN, dialects={"cuda": "text "}), replace(PLAIN, dialects={"portable": "text"}),
    replace(PLAIN, options=("-DN=1",)), replace(PLAIN, entries={"l": ("*f32",)}),
    replace(PLAIN, entries={"k": ("*f32",), "l": ()}),
], ids=["program", "header", "options", "entries", "more entries"])  # fmt: skip
def test_the_key_changes_with_the_source(other):
    assert cuda_key(other, "sm_90") != cuda_key(PLAIN, "sm_90")


@pytest.mark.parametrize("dialects", [{"cuda": "text"}, {"portable": "text"}, {"triton": SPECIAL}], ids=list)
def test_the_key_changes_with_target_compiler_and_fixed_options(dialects, monkeypatch):
    source = replace(PLAIN, dialects=dialects)
    of_triton = "triton" in dialects
    if of_triton:
        monkeypatch.setattr(cuda_compile, "_triton_version", lambda: "triton 3")
    keys = [cuda_key(source, "sm_90"), cuda_key(source, "sm_90a"), cuda_key(source, "sm_80")]
    with monkeypatch.context() as patch:
        patch.setattr(cuda_compile, "_triton_version" if of_triton else "_nvrtc_version", lambda: "another")
        keys.append(cuda_key(source, "sm_90"))
    with monkeypatch.context() as patch:
        if of_triton:
            patch.setattr(triton, "_FIXED", {"enable_fp_fusion": False})
        else:
            patch.setattr(cuda_compile, "_FIXED", {"std": "c++20"})
        keys.append(cuda_key(source, "sm_90"))
    assert len(set(keys)) == len(keys)
    assert cuda_key(source, "sm_90") == keys[0]


@pytest.mark.parametrize("change", [
    {"module": "another.module"}, {"name": "l"}, {"kinds": ("*bf16", "i32", "constexpr")},
    {"constants": (("BLOCK", 128),)}, {"multiples": ()}, {"multiples": ((0, 8),)}, {"num_warps": 8},
    {"num_stages": 2},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_the_key_of_a_specialisation_changes_with_each_part(change):
    assert replace(SPECIAL, **change).key != SPECIAL.key


def test_the_key_of_a_specialisation_changes_with_triton_and_its_sources(monkeypatch):
    before = SPECIAL.key
    for name in ("_version", "sources_hash"):
        with monkeypatch.context() as patch:
            patch.setattr(triton, name, lambda *args, **options: "another")
            assert SPECIAL.key != before
    assert SPECIAL.key == before


# --- widths ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "multiple", "of_a_width"),
    [(1024, 16, 16), (0, 16, 16), (1000, 1, 8), (-1000, 1, 8), (12, 1, 4), (6, 1, 2), (7, 1, 1), (1, 1, 1)],
)
def test_what_an_integer_is_taken_to_be_a_multiple_of(value, multiple, of_a_width):
    assert triton._describe(value) == ("i32", multiple)
    assert triton._describe(value, True) == ("i32", of_a_width)
    assert value % of_a_width == 0


def test_an_integer_of_64_bits_is_no_width():
    assert triton._describe(2**40, True) == ("i64", 1)


def test_a_pointer_is_aligned_or_not():
    x = torch.zeros(64, dtype=torch.float16)
    assert [triton._describe(x[at:], True) for at in (0, 8, 4)] == [("*fp16", 16), ("*fp16", 16), ("*fp16", 1)]


WIDE = ("cross_entropy", "elementwise", "embedding", "norm", "quantize_int8", "rope", "softmax", "swiglu")
LENGTHS = {"N", "D", "HALF", "inner"}
DISTANCES = re.compile(r"stride|\w+_stride|[xy]_[bhs]|table_b")


def kernels_with_widths():
    for folder in WIDE:
        compilations = importlib.import_module(f"accelerant.ops.{folder}.cases").KERNELS
        for kernel in dict.fromkeys(each.kernel for each in compilations):
            if kernel.widths:
                yield pytest.param(kernel, id=kernel.name)


@pytest.mark.parametrize("kernel", list(kernels_with_widths()))
def test_widths_are_row_lengths_and_distances(kernel):
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    names = getattr(importlib.import_module(kernel.module), kernel.name).arg_names
    widths = {names[at] for at in kernel.widths}
    assert all(name in LENGTHS or DISTANCES.fullmatch(name) for name in widths)
    others = set(names) - widths - {"dy_stride"}  # of the gradient of a loss: from number to number
    if widths & LENGTHS != {"inner"}:  # a sum along another dimension, whose N is no row's length
        assert not [name for name in others if name in LENGTHS or DISTANCES.fullmatch(name)]


@pytest.fixture
def sources(monkeypatch):
    """What would be compiled for the launches of a test, which run nothing."""
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    found = []

    def launch(self, grid, args, constants, *, num_warps=4, num_stages=3):
        found.append(self.source_of(args, constants, num_warps, num_stages))

    monkeypatch.setattr(triton.TritonKernel, "launch", launch)
    return found


def run_rows(M, N):
    """Softmax and layer_norm of M float16 rows, and their gradients."""
    x, vector = torch.zeros(M, N, dtype=torch.float16), torch.zeros(N)
    softmax_op.launch("fwd", False, (x,), 1)
    softmax_op.launch("bwd", False, (x, x), 1)
    _, statistics = norm.launch_forward(True, x, vector, vector, 1e-5)
    norm.launch_backward(True, x, x, vector, vector, statistics, 1e-5, (True, True, True))


@pytest.mark.parametrize("N", [1024, 1000, 1004, 1002, 1001])
def test_what_was_compiled_ahead_is_found_when_it_runs(N, sources):
    run_rows(16, N)
    ahead = [*softmax_cases._compilations("*fp16", N), norm_cases._forward("*fp16", N, centre=True)]
    keys = {each.source().dialects["triton"].key for each in ahead}
    assert len(keys) == 3
    assert keys <= {source.dialects["triton"].key for source in sources}
    assert (4, math.gcd(N, 16)) in ahead[0].source().dialects["triton"].multiples or N % 2


def test_the_number_of_rows_is_not_compiled_for(sources):
    def kinds(rows):
        sources.clear()
        for M in rows:
            run_rows(M, 1000)
        return {source.dialects["triton"].key for source in sources if source.name != "norm_bwd_reduce"}

    assert len(kinds([17, 18, 20, 24, 1001])) == 4  # each of the two, forward and backward
    assert len(kinds([16, 48, 1024])) == 4


# --- what fails ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "kind"), [
    ("CUDA_ERROR_OUT_OF_MEMORY: The API call failed", OutOfMemory),
    ("CUDA out of memory. Tried to allocate 2.00 MiB", OutOfMemory),
    ("CUDA_ERROR_ILLEGAL_ADDRESS: While executing a kernel", DeviceLost),
    ("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image", CompileError),
])  # fmt: skip
def test_code_that_does_not_load_is_only_the_codes_fault_where_it_is(monkeypatch, text, kind):
    monkeypatch.setattr("accelerant.runtime.providers.cuda.Library", Mock(side_effect=RuntimeError(text)))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    provider = CudaProvider.__new__(CudaProvider)
    assert_raises(kind, text[:20], provider._load, PLAIN, "k", Binary(b"", {"k": "k"}, {}), "sm_90", 0, False, 0.0)


def test_each_start_of_a_kernel_has_its_own_arguments(monkeypatch):
    from cuda.bindings import driver

    given = []

    def note(_function, *rest):
        *shape, stream, address, _extra = rest
        cells = (ctypes.c_void_p * 4).from_address(address)
        kinds = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float, ctypes.c_uint64)
        read = [kind.from_address(cell).value for kind, cell in zip(kinds, cells, strict=True)]
        given.append((shape, stream, read))
        return (driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(driver, "cuLaunchKernel", note)
    monkeypatch.setattr(cuda_launch, "make_ready", lambda: None)
    kernel = cuda_launch.LoadedKernel("k", 7, ("*f32", "u32", "f32"), extra=1, shared_bytes=99)
    x, y = torch.zeros(3), torch.ones(3)
    kernel.start((2,), (64,), (x, 5, 0.5), 11)
    kernel.start((2,), (64,), (y, 6, 1.5), 12)
    shape = [2, 1, 1, 64, 1, 1, 99]
    assert given == [(shape, 11, [x.data_ptr(), 5, 0.5, 0]), (shape, 12, [y.data_ptr(), 6, 1.5, 0])]
    for args, message in (
        ((x, 5), "takes 3 arguments, got 2"),
        ((x, 5, 0.5, 1), "takes 3 arguments, got 4"),
        ((3, 5, 0.5), "argument 0: wanted a buffer, got int"),
        ((x, 5.5, 0.5), r"argument 1: wanted u32, got 5\.5"),
    ):
        assert_raises(LaunchError, message, kernel.start, (2,), (64,), args, 11)
    with pytest.raises(LaunchError, match=r"a grid has 1 to .* blocks along its axes, got \(0,\)"):
        kernel.start((0,), (64,), (x, 5, 0.5), 11)
    with pytest.raises(LaunchError, match=r"structs are launched by LoadedKernel\.pack"):
        cuda_launch.LoadedKernel("k", 7, ("struct",)).start((2,), (64,), (b"a\0b",), 11)
    assert len(given) == 2


def test_a_triton_kernel_that_does_not_compile_is_not_compiled_again_for_other_shapes(monkeypatch):
    kernel = triton.TritonKernel("some.module", "k")
    compiled = []

    def breaks(source, device):
        compiled.append(source)
        raise CompileError("no such instruction", "the log")

    monkeypatch.setattr(triton, "_cuda", lambda: SimpleNamespace(compile=breaks))
    raised = []
    for rows in (32, 64, 96):
        with pytest.raises(CompileError, match="no such instruction") as caught:
            kernel._prepare((rows,), (rows,), (torch.ones(16), rows), {"BLOCK": 64}, 4, 3)
        raised.append(caught.value)
    assert len(compiled) == 1
    assert len(set(map(id, raised))) == 3  # or the traceback of one would grow
    assert {error.log for error in raised} == {"the log"}
    assert_raises(CompileError, None, kernel._prepare, (32,), (32,), (torch.ones(16), 32), {"BLOCK": 128}, 4, 3)
    assert len(compiled) == 2


def test_triton_gets_a_temporary_cache_where_its_own_cannot_be_written(monkeypatch, tmp_path, caplog):
    pytest.importorskip("triton")
    (tmp_path / "file").touch()
    triton._require_cache.cache_clear()
    try:
        for folder, replaced in ((tmp_path / "file" / "cache", True), (tmp_path / "cache", False)):
            monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
            triton._require_cache.cache_clear()
            triton._require_cache()
            assert (os.environ["TRITON_CACHE_DIR"] != str(folder)) == replaced
            assert os.path.isdir(os.environ["TRITON_CACHE_DIR"])
    finally:
        triton._require_cache.cache_clear()
    (record,) = [record for record in caplog.records if record.name == "accelerant.cache"]
    assert "cannot be written (Not a directory)" in record.getMessage()


def test_a_lack_of_memory_while_loading_is_tried_again(monkeypatch):
    kernel = triton.TritonKernel("some.module", "k")
    prepared = SimpleNamespace(handle=SimpleNamespace(prepare=lambda *_: "ready"))
    outcomes = iter([OutOfMemory("8 bytes"), prepared])

    def compiles(source, device):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(triton, "_cuda", lambda: SimpleNamespace(compile=compiles))
    assert_raises(OutOfMemory, None, kernel._prepare, (1,), (1,), (torch.ones(16),), {}, 4, 3)
    assert kernel._prepare((1,), (1,), (torch.ones(16),), {}, 4, 3) == "ready"


@pytest.mark.gpu
def test_the_loaded_code_lives_as_long_as_its_kernel():
    import gc

    from accelerant.runtime import registry

    provider = registry.create("cuda")
    text = 'extern "C" __global__ void one(float *x) { x[threadIdx.x] = 1.0f; }'
    kernel = provider.compile(KernelSource("one", {"cuda": text}, {"one": ("*f32",)}))
    assert kernel.handle.code is not None
    gc.collect()
    x = torch.zeros(4, device="cuda")
    provider.launch(kernel, (1,), (4,), (x,))
    del kernel  # while it may still run
    gc.collect()
    assert x.tolist() == [1.0] * 4
