"""acl.kernel: a user's text or file, found by parsing, compiled with options, on the arrays of every library."""

import numpy as np
import pytest
import torch

import accelerant as acl
from accelerant.config import override
from accelerant.errors import BackendUnavailable, CompileError, ConfigError, LaunchError, UnsupportedDtype
from accelerant.runtime import registry
from accelerant.runtime.compilation import host_c
from accelerant.runtime.compilation.cuda import compile_cuda, cuda_key, explained, run_nvrtc
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, KernelSource, header_hashes
from accelerant.runtime.compilation.signatures import Parameter, dialect_of, entry_of, find_kernels, host_code
from refusals import assert_raises
from requirements import require_backend

SAXPY = """
ACL_KERNEL void saxpy(float a, ACL_GLOBAL const float *x, ACL_GLOBAL float *y, i64 n) {
    i64 i = acl_global_id();
    if (i < n) y[i] = a * x[i] + y[i];
}
"""
MIX = """
ACL_KERNEL void scramble(ACL_GLOBAL const u64 *x, ACL_GLOBAL u64 *y, u32 by, i64 n) {
    i64 i = acl_global_id();
    if (i < n) y[i] = acl_mul_high_u64(x[i], 0x9E3779B97F4A7C15ul) ^ ((x[i] << (by & 63)) + acl_mul_high_u32(x[i], by));
}
"""
SUM = """
ACL_DEVICE i64 mine(void) { return acl_global_id(); }
ACL_KERNEL void sum(ACL_GLOBAL const u32 *x, ACL_GLOBAL u32 *total, i64 n) {
    ACL_LOCAL u32 tile[128];
    i32 t = acl_local_id();
    tile[t] = mine() < n ? x[mine()] : 0;
    acl_barrier();
    for (i32 half = acl_local_size() / 2; half > 0; half /= 2) {
        if (t < half) tile[t] += tile[t + half];
        acl_barrier();
    }
    if (t == 0) acl_atomic_add_u32(total, tile[0]);
}
"""
CUDA = """
// __global__ void hidden(int a) {
#define REAL double
typedef unsigned long long word;
template <typename T, int N = 2>
__global__ void __launch_bounds__(128) scale(T *__restrict__ x, const T by, const word *w) {}
namespace a { namespace b { __global__ void inner(REAL *x, const float4 *v, unsigned char c, bool f) {} } }
extern "C" __global__ void plain(const int *const x, long long n, size_t, void *p);
extern "C" __global__ void plain(const int *const x, long long n, size_t = 3, void *p = nullptr) {}
template __global__ void scale<float>(float *, float, const word *);
struct Pair { int a; };
__global__ void takes_struct(Pair both) {}
__global__ void takes_rows(float **rows) {}
"""


@pytest.fixture
def data():
    rng = np.random.default_rng(3)
    return rng.integers(0, 2**64, 1000, np.uint64)


# --- launching -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["cpu", "opencl", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_arrays_of_the_host_go_there_and_back(backend, make):
    require_backend(backend)
    x, y = np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)
    kernel = acl.kernel(SAXPY, "saxpy", device=backend)
    given = make(y)
    kernel(8, 128, 2.0, make(x), given, 1000)
    assert np.asarray(given).tolist() == (2 * x + 1).tolist()
    assert repr(kernel) == "<kernel saxpy(a: f32, x: const *f32, y: *f32, n: i64) in portable C>"


@pytest.mark.gpu
def test_tensors_on_the_gpu_are_passed_as_they_are(tmp_path):
    (tmp_path / "k.cu").write_text("template <typename T> __global__ void add(T *x, T by) { x[threadIdx.x] += by; }")
    x = torch.zeros(32, dtype=torch.float64, device="cuda")
    acl.kernel(tmp_path / "k.cu", "add<double>")(1, 32, x, 1.5)
    assert x.tolist() == [1.5] * 32
    on_host = np.zeros(32)
    acl.kernel(tmp_path / "k.cu", "add<double>")(1, 32, on_host, 1.5)
    assert on_host.tolist() == [1.5] * 32
    shared = """extern "C" __global__ void k(int *x) {
        extern __shared__ int s[];
        s[threadIdx.x * 400] = 7;
        x[threadIdx.x] = s[threadIdx.x * 400];
    }"""
    y = torch.zeros(32, dtype=torch.int32, device="cuda")
    acl.kernel(shared, shared_bytes=60_000)(1, 32, y)
    assert y.tolist() == [7] * 32


@pytest.mark.gpu
@pytest.mark.parametrize("debug", [False, True])
def test_tensors_of_opencl_are_passed_as_they_are(debug):
    x, y = acl.to([torch.arange(5.0), torch.ones(5)], require_backend("opencl"))
    saxpy = acl.kernel(SAXPY)
    with override(debug=debug):
        saxpy(1, 128, 2.0, x, y.view(5, 1), 5)  # y = 2 x + y
        assert y.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
        with pytest.raises(LaunchError, match=r"argument 1 \(x\): a view that begins within another .*x\.clone\(\)"):
            saxpy(1, 128, 2.0, x[1:], y, 4)
        with pytest.raises(UnsupportedDtype, match="wanted an array of float32, got float64"):
            saxpy(1, 128, 2.0, x.double(), y, 5)
        assert_raises(LaunchError, "wanted a contiguous array", lambda: saxpy(1, 128, 2.0, x.expand(2, 5), y, 5))
        with pytest.raises(LaunchError, match="for cpu; its arrays are on opencl:0"):
            acl.kernel(SAXPY, device="cpu")(1, 128, 2.0, x, y, 5)
        saxpy(1, 128, 2.0, torch.ones(1, 5)[:, 1], y[:1], 1)  # of the host, with the stride 5
        assert y[0].item() == 3


ADD = """ACL_KERNEL void add(
    ACL_GLOBAL const float *x, ACL_GLOBAL float *y, i64 x_stride0, i64 x_stride1, i64 y_stride0, i64 y_stride1,
    i64 y_size0, i64 y_size1) {
    i64 row = acl_global_id_y(), column = acl_global_id();
    if (row < y_size0 && column < y_size1) {
        y[row * y_stride0 + column * y_stride1] += x[row * x_stride0 + column * x_stride1] + acl_group_id_y() * 0;
    }
}"""
PLACES = """ACL_DEVICE i64 row(void) { return acl_global_id_y(); }
ACL_KERNEL void places(ACL_GLOBAL i64 *y, i64 width) {
    ACL_LOCAL i32 shared[64];
    shared[acl_local_id_y() * acl_local_size() + acl_local_id()] = acl_local_size_y();
    acl_barrier();
    y[row() * width + acl_global_id()] = row() * 1000 + acl_group_id_y() * 100 + acl_local_id_y() * 10 + shared[0];
}"""
EVERYWHERE = ["cpu", "opencl", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_two_axes_and_arrays_of_any_strides(backend, make):
    """The sizes and strides are the arrays', and the grid is the shape of what is written."""
    require_backend(backend)
    add, wide = acl.kernel(ADD, device=backend), np.arange(8 * 10, dtype=np.float32).reshape(8, 10)
    for x in (
        wide[:4, :5],
        np.asfortranarray(wide[:4, :5]),
        wide[::2, ::2],
        wide.T[3:7, 2:7],
        np.broadcast_to(wide[0, :5], (4, 5)),
    ):
        for y in (np.ones((4, 5), np.float32), np.ones((5, 4), np.float32).T, np.ones((9, 12), np.float32)[1::2, 2:7]):
            whole, wanted = y.base, y + x
            before = None if whole is None else whole.sum() - y.sum()
            add(make(x), make(y))
            np.testing.assert_array_equal(y, wanted)
            assert whole is None or whole.sum() - y.sum() == before  # nothing beside it was written
    y = np.zeros((4, 5), np.float32)
    add((2, 2), (3, 2), wide[:4, :5], y)
    np.testing.assert_array_equal(y, wide[:4, :5])
    add(wide[:0, :5], np.zeros((0, 5), np.float32))


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_indices_of_two_axes(backend):
    require_backend(backend)
    y = np.zeros((6, 8), np.int64)
    acl.kernel(PLACES, device=backend)((2, 3), (4, 2), y, 8)
    rows = np.arange(6)[:, None]
    np.testing.assert_array_equal(y, rows * 1000 + rows // 2 * 100 + rows % 2 * 10 + 2 + 0 * y)


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_grid_from_the_shape(backend):
    require_backend(backend)
    saxpy = acl.kernel(SAXPY, device=backend)
    for shape in ((1000,), (3, 5, 7), (1,)):
        x, y = np.ones(shape, np.float32), np.zeros(shape, np.float32)
        saxpy(2.0, x, y, x.size)
        assert (y == 2).all()
    y = np.zeros(1000, np.float32)
    saxpy(2.0, np.ones(1000, np.float32), y, 1000, shape=10)
    assert y[:10].sum() == 20
    for arguments, options, match in (
        ((2.0, y, y), {}, "takes 4 arguments, got 1 after the grid and the block, or 3 without"),
        ((1, 1, 2.0, y, y, 1), {"shape": 3}, "not both"),
        ((2.0, y, y, 1), {"shape": -1}, "shape must be numbers of at least 0, got -1"),
        ((2.0, y, y, 1), {"shape": "x"}, "shape must be"),
    ):
        assert_raises(LaunchError, match, saxpy, *arguments, **options)
    with pytest.raises(LaunchError, match=r"x_stride1 wants 2 dimensions, got 1"):
        acl.kernel(ADD, device=backend)(y, np.zeros((2, 2), np.float32))
    with pytest.raises(LaunchError, match=r"pass a copy, or let the kernel take i64 x_stride0 to x_stride1"):
        saxpy(2.0, np.ones((4, 4), np.float32).T[:2], y, 1)
    with pytest.raises(LaunchError, match="has no array: give the grid"):
        acl.kernel("ACL_KERNEL void none(i32 n) { (void)n; }", device=backend)(3)


def test_threads_of_a_block_run_one_after_the_other_on_the_cpu():
    """Kernels that others wrote without atomic operations add up there: they are not made vectors."""
    count = acl.kernel("""ACL_KERNEL void count(ACL_GLOBAL const i32 *bins, ACL_GLOBAL float *y, i32 n) {
        i32 i = acl_global_id();
        if (i < n) y[bins[i]] += 1;
    }""")
    bins, y = np.arange(1000, dtype=np.int32) % 5, np.zeros(5, np.float32)
    count(1, 1000, bins, y, 1000)
    assert y.tolist() == [200] * 5


def test_negated_views_of_torch_are_refused():
    add, view = acl.kernel(ADD, device="cpu"), torch.zeros(2, 2, dtype=torch.complex64).conj().imag
    for x, y in ((view, torch.zeros(2, 2)), (torch.zeros(2, 2), view)):
        assert_raises(LaunchError, r"a negated view.*resolve_neg", add, x, y)


def test_arrays_backwards_on_the_cpu():
    x, y = np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros((3, 4), np.float32)
    acl.kernel(ADD, device="cpu")(x[::-1, ::-1], y)
    np.testing.assert_array_equal(y, x[::-1, ::-1])
    with override(debug=True), pytest.raises(LaunchError, match="no strides below 0"):
        acl.kernel(ADD, device="cpu")(x[::-1], y)
    with override(debug=True):
        acl.kernel(ADD, device="cpu")(x.T, np.zeros((4, 3), np.float32))


def test_cupy_arrays_are_passed_in_their_stream():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    with cupy.cuda.Stream(non_blocking=True):
        x, y = cupy.arange(1000, dtype=cupy.float32), cupy.ones(1000, cupy.float32)
        acl.kernel(SAXPY)(8, 128, 2.0, x, y, 1000)
        assert cupy.asnumpy(y).tolist() == (2 * np.arange(1000) + 1).tolist()


def test_jax_gets_new_arrays():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    x, y = jax.numpy.arange(10, dtype="float32"), jax.numpy.ones(10, "float32")
    made = acl.kernel(SAXPY)(1, 16, 2.0, x, y, 10)
    assert made.tolist() == (2 * np.arange(10) + 1).tolist()
    assert y.tolist() == [1.0] * 10


def test_other_arrays_pass_by_dlpack():
    class Wrapped:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    y = torch.ones(4)
    acl.kernel(SAXPY, device="cpu")(1, 4, 2.0, Wrapped(torch.ones(4)), Wrapped(y), 4)
    assert y.tolist() == [3.0] * 4


def test_autograd_learns_of_the_write_and_the_ledger_of_the_call():
    acl.ledger().reset()
    x, y = torch.ones(4, requires_grad=True), torch.ones(4)
    product = (x * y).sum()
    acl.kernel(SAXPY, device="cpu")(1, 4, 2.0, x, y, 4)
    assert_raises(RuntimeError, "modified by an inplace operation", product.backward)
    (row,) = acl.ledger().to_dict()["ops"]
    assert (row["op"], row["implementation"], row["case"], row["bytes"]) == ("saxpy", "portable", "grid 1 block 4", 32)


def test_one_array_twice_is_one_and_overlapping_copies_are_refused():
    require_backend("opencl")
    kernel = acl.kernel(SAXPY, device="opencl")
    y = np.ones(8, np.float32)
    kernel(1, 8, 2.0, y, y, 8)
    assert y.tolist() == [3.0] * 8
    assert_raises(LaunchError, r"argument 1 \(x\) shares memory with argument 2", kernel, 1, 8, 2.0, y[1:], y[:-1], 7)


X, Y = np.ones(8, np.float32), np.ones(8, np.float32)
FIXED = np.ones(8, np.float32)
FIXED.flags.writeable = False


@pytest.mark.parametrize(("error", "match", "grid", "args"), [
    (LaunchError, "takes 4 arguments, got 3", 1, (2.0, X, Y)),
    (UnsupportedDtype, r"argument 1 \(x\): wanted an array of float32, got float64", 1, (2.0, X.astype(float), Y, 8)),
    (UnsupportedDtype, "got unaligned or swapped >f4", 1, (2.0, X.astype(">f4"), Y, 8)),
    (UnsupportedDtype, "masked", 1, (2.0, np.ma.masked_array(X), Y, 8)),
    (LaunchError, r"argument 1 \(x\): wanted a contiguous array, in C order; one of shape \(4,\)", 1,
     (2.0, X[::2], Y, 4)),
    (LaunchError, r"argument 2 \(y\): the kernel may write it, and the array is read-only", 1, (2.0, X, FIXED, 8)),
    (LaunchError, r"argument 2 \(y\).*requires a gradient", 1, (2.0, X, torch.ones(8, requires_grad=True), 8)),
    (LaunchError, "no memory", 1, (2.0, X, torch.ones(8, device="meta"), 8)),
    (LaunchError, r"argument 1 \(x\): wanted an array \(\*f32\), got builtins.list", 1, (2.0, [1.0], Y, 8)),
    (LaunchError, r"argument 0 \(a\): wanted a number that f32 holds, got 1e\+300", 1, (1e300, X, Y, 8)),
    (LaunchError, "wanted a number that f32 holds", 1, (10**400, X, Y, 8)),
    (LaunchError, r"argument 3 \(n\): wanted a number that i64 holds, got 9223372036854775808", 1, (2.0, X, Y, 2**63)),
    (LaunchError, "wanted a number that i64 holds, got 8.0", 1, (2.0, X, Y, 8.0)),
    (LaunchError, "grid must be one to three numbers of at least 1, got 0", 0, (2.0, X, Y, 8)),
    (LaunchError, "grid must be one to three numbers of at least 1, got 1.5", 1.5, (2.0, X, Y, 8)),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name_and_nothing_runs(error, match, grid, args):
    assert_raises(error, match, lambda: acl.kernel(SAXPY, device="cpu")(grid, 8, *args))
    assert Y.tolist() == [1.0] * 8


def test_a_language_without_a_device_is_refused_with_the_reason(tmp_path):
    if not registry.reason_absent("cuda"):
        pytest.skip("CUDA is here")
    with pytest.raises(BackendUnavailable, match=r"'k' is CUDA C.*only portable C runs on the CPU"):
        acl.kernel("__global__ void k(float *x) {}")(1, 1, X)
    with pytest.raises(CompileError, match=r"is CUDA C.*cpu takes portable C"):
        acl.kernel("__global__ void k(float *x) {}", device="cpu")(1, 1, X)
    with pytest.raises(ConfigError, match=r"cannot read the kernel's file '.*absent.cu': No such file"):
        acl.kernel(tmp_path / "absent.cu")
    assert_raises(CompileError, "has no kernel: mark one with __global__", acl.kernel, "int main() { return 0; }")


# --- portable C on the CPU -------------------------------------------------------------------------------------------
def test_the_cpu_computes_the_integers_of_opencl(data):
    require_backend("opencl")
    found = []
    for backend in ("cpu", "opencl"):
        y = np.zeros_like(data)
        acl.kernel(MIX, device=backend)((4, 2), (128, 1, 2), data, y, 0xFFFFFFFF, 500)  # twice each, in x alone
        found.append(y.tolist())
    assert found[0] == found[1]
    high = (int(data[7]) * 0x9E3779B97F4A7C15) >> 64
    assert found[0][7] == high ^ ((int(data[7]) << 63) + (int(data[7]) % 2**32 * 0xFFFFFFFF >> 32)) % 2**64
    assert not any(found[0][500:])


@pytest.mark.parametrize(("name", "barrier"), [("local", ""), ("threads", "acl_barrier();")])
def test_names_and_texts_of_a_kernel_are_its_own(name, barrier):
    body = f"{{ {barrier} y[acl_global_id()] = more ? 2 : 1; }}"
    helper = f"ACL_DEVICE void helper(ACL_GLOBAL i32 *y, bool more) {body}"
    y = np.zeros(4, np.int32)
    acl.kernel(f"{helper} ACL_KERNEL void {name}(ACL_GLOBAL i32 *y, bool more) {body}", device="cpu")(1, 4, y, True)
    assert y.tolist() == [2] * 4


@pytest.mark.parametrize("threads", [1, 128])
def test_threads_wait_at_barriers(threads):
    x, total = np.arange(3000, dtype=np.uint32), np.zeros(1, np.uint32)
    kernel = acl.kernel(SUM, device="cpu")
    kernel(-(-3000 // threads), threads, x, total, 3000)
    assert total[0] == x.sum()


def test_threads_that_end_before_a_barrier_no_longer_count():
    text = """ACL_KERNEL void k(ACL_GLOBAL i32 *x) {
        ACL_LOCAL i32 seen[8];
        i32 t = acl_local_id();
        if (t >= 4) return;
        seen[t] = t;
        acl_barrier();
        x[t] = seen[3 - t];
    }"""
    x = np.full(8, -1, np.int32)
    acl.kernel(text, device="cpu")(2, 8, x)
    assert x.tolist() == [3, 2, 1, 0, -1, -1, -1, -1]


def test_cores_share_the_blocks(data):
    cpu = registry.create("cpu")
    shares, pool = [], cpu._threads()
    original, y = pool.submit, np.zeros(200_000, np.uint64)
    pool.submit = lambda handle, begin, end, *rest: shares.append((begin, end)) or original(handle, begin, end, *rest)
    try:
        acl.kernel(MIX, device="cpu")(2000, 100, np.resize(data, 200_000), y, 3, 200_000)
    finally:
        del pool.submit
    assert len(shares) == min(cpu.cores, 200_000 // 4096) - 1
    assert y[:1000].tolist() == y[199_000:].tolist()


def test_without_a_c_compiler_the_cpu_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(host_c.shutil, "which", lambda name: None)
    host_c.c_compiler.cache_clear()
    try:
        with (
            override(cache_dir=tmp_path),
            pytest.raises(CompileError, match=r"needs a C compiler.*install gcc or clang"),
        ):
            acl.kernel(SAXPY, device="cpu")(1, 8, 2.0, X, np.ones(8, np.float32), 8)
    finally:
        host_c.c_compiler.cache_clear()


def test_a_frame_too_large_for_a_waiting_thread_does_not_compile(tmp_path):
    text = SUM.replace("u32 tile[128];", "u32 tile[128]; volatile u32 own[65536]; own[acl_local_id()] = 0;")
    with override(cache_dir=tmp_path), pytest.raises(CompileError, match="frame size"):
        acl.kernel(text, device="cpu").compile()
    assert not list(tmp_path.rglob("code"))


def test_files_of_windows_are_read(tmp_path):
    (tmp_path / "k.c").write_bytes(
        b"\xef\xbb\xbf#define T u32\r\nACL_KERNEL void k(ACL_GLOBAL T *x) {\r\n x[0] = 3;\r\n}\r\n"
    )
    x = np.zeros(1, np.uint32)
    acl.kernel(tmp_path / "k.c", device="cpu")(1, 1, x)
    assert x[0] == 3


def test_compile_errors_name_the_users_line(tmp_path):
    (tmp_path / 'my "own.c').write_text("\nACL_KERNEL void k(ACL_GLOBAL float *x) { x[0] = undeclared; }\n")
    with pytest.raises(CompileError, match="does not compile") as caught:
        acl.kernel(tmp_path / 'my "own.c', device="cpu").compile()
    assert "my _own.c:2" in caught.value.log
    assert "undeclared" in caught.value.log


# --- options ---------------------------------------------------------------------------------------------------------
ARITHMETIC = 'extern "C" __global__ void k(float *x, float y) { x[0] = x[1] / y + x[2] * x[3] + sqrtf(y); }'


def ptx(options):
    return run_nvrtc(ARITHMETIC, "sm_90", "k", options.for_nvrtc()).ptx


@pytest.mark.parametrize(("options", "there"), [
    ({}, "div.rn.f32 sqrt.rn.f32 fma.rn.f32"),
    ({"fast_math": True}, "div.approx.ftz.f32 sqrt.approx.ftz.f32 fma.rn.ftz.f32"),
    ({"ftz": True}, "div.rn.ftz.f32 sqrt.rn.ftz.f32"),
    ({"prec_div": False}, "div.full.f32 sqrt.rn.f32"),
    ({"prec_sqrt": False}, "div.rn.f32 sqrt.approx.f32"),
    ({"fmad": False}, "mul.rn.f32 add.rn.f32"),
    ({"fast_math": True, "prec_div": True}, "div.rn.ftz.f32 sqrt.approx.ftz.f32"),
])  # fmt: skip
def test_each_part_of_fast_math_reaches_nvrtc(options, there):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is for Linux and Windows")
    text = ptx(acl.CompileOptions(**options))
    assert all(instruction in text for instruction in there.split())


@pytest.mark.parametrize("backend", ["cpu", pytest.param("opencl", marks=pytest.mark.slow)])
def test_defines_and_headers_reach_the_compiler_and_the_key(backend, tmp_path):
    require_backend(backend)
    folder = tmp_path / "headers"
    folder.mkdir()
    text = '#include "value.h"\nACL_KERNEL void k(ACL_GLOBAL TYPE *x) { x[acl_global_id()] = VALUE + MORE; }'

    def result(more):
        options = acl.CompileOptions(defines={"MORE": more, "TYPE": "u32"}, include=[folder])
        x = np.zeros(2, np.uint32)
        acl.kernel(text, options=options, device=backend)(1, 2, x)
        return x.tolist()

    with override(cache_dir=tmp_path / "cache"):
        (folder / "value.h").write_text('#include "deeper.h"\n')
        (folder / "deeper.h").write_text("#define VALUE 7\n")
        assert result(1) == [8, 8]
        assert result(2) == [9, 9]
        (folder / "deeper.h").write_text("#define VALUE 70\n")
        assert result(2) == [72, 72]
        assert len(list((tmp_path / "cache").rglob("code"))) == 3


@pytest.mark.parametrize("where", ["header", "define"])
def test_indices_and_barriers_are_seen_in_headers_and_defines(where, tmp_path):
    (tmp_path / "own.h").write_text(
        "ACL_DEVICE i64 mine(void) { return acl_global_id(); }\n#define WAIT acl_barrier()\n"
    )
    text = """
    ACL_KERNEL void k(ACL_GLOBAL i64 *x) {
        ACL_LOCAL i64 seen[4];
        seen[acl_local_id()] = mine();
        WAIT;
        x[mine()] = seen[3 - acl_local_id()];
    }"""
    options = acl.CompileOptions(include=[tmp_path])
    if where == "header":
        text = f'#include "own.h"\n{text}'
    else:
        options = acl.CompileOptions(defines={"WAIT": "acl_barrier()", "mine": "acl_global_id"})
    x = np.zeros(8, np.int64)
    acl.kernel(text, device="cpu", options=options)(2, 4, x)
    assert x.tolist() == [3, 2, 1, 0, 7, 6, 5, 4]


def test_the_key_of_cuda_has_options_headers_and_shared_memory(tmp_path):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is for Linux and Windows")
    (tmp_path / "some.h").write_text("1")

    def key(shared=0, text="#include <some.h>", **options):
        source = KernelSource("k", {"cuda": text}, {"k": ()}, (), acl.CompileOptions(**options), shared)
        return cuda_key(source, "sm_90")

    keys = [
        key(), key(shared=4), key(optimize=0), key(optimize=3), key(fmad=True), key(fmad=False), key(defines={"A": 1}),
    ]  # fmt: skip
    keys += [key(nvrtc=["-x"]), key(ptxas=["-x"]), key(include=[tmp_path])]
    (tmp_path / "some.h").write_text("2")
    keys.append(key(include=[tmp_path]))
    assert len(set(keys)) == len(keys)
    with pytest.raises(CompileError, match="#include NAME: name the file"):
        header_hashes("#define NAME <some.h>\n#include NAME\n", [tmp_path])
    assert header_hashes('// #include "some.h"\n#if __has_include("none.h")\n', [tmp_path]) == [("none.h", "")]


@pytest.mark.parametrize(("options", "match"), [
    ({"optimize": 4}, "optimize must be 0, 1, 2 or 3, got 4"),
    ({"fast_math": None}, "fast_math must be True or False, got None"),
    ({"ftz": "yes"}, "ftz must be True or False, got 'yes'"),
    ({"defines": {"3D": 1}}, "wanted the name of a macro, got '3D'"),
    ({"defines": {"A": "1\n#include </etc/passwd>"}}, "the value of A must be one line"),
    ({"include": ["nowhere"]}, "include nowhere: no such folder"),
    ({"include": "src"}, "include must be a list of folders"),
    ({"ptxas": "-v"}, "ptxas must be a list of options, got '-v'"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(options, match):
    assert_raises(ConfigError, match, acl.CompileOptions, **options)


def test_an_option_that_a_compiler_cannot_keep_is_refused():
    with pytest.raises(CompileError, match="ftz=True: on the CPU"):
        acl.kernel(SAXPY, device="cpu", options=acl.CompileOptions(ftz=True)).compile()
    with pytest.raises(CompileError, match="prec_div=True: OpenCL's fast math has no parts"):
        acl.CompileOptions(fast_math=True, prec_div=True).for_opencl()
    source = KernelSource("k", {"llvm": "define void @k(i64 %b, i64 %e) { ret void }"}, {"k": ()}, (), ("-O1",))
    assert_raises(CompileError, "LLVM IR takes no compile options", lambda: registry.create("cpu").compile(source))


@pytest.mark.parametrize(
    "options", [{"fast_math": True}, {"fmad": False}, {"optimize": 0}, {"prec_div": True}], ids=str
)
@pytest.mark.parametrize("backend", ["cpu", pytest.param("opencl", marks=pytest.mark.slow)])
def test_kernels_with_options_compute_the_same_within_rounding(backend, options):
    require_backend(backend)
    text = "ACL_KERNEL void k(ACL_GLOBAL float *x) { i64 i = acl_global_id(); x[i] = x[i] / 3.0f + x[i] * x[i]; }"
    x = np.linspace(-3, 3, 64, dtype=np.float32)
    y = x.copy()
    acl.kernel(text, device=backend, options=acl.CompileOptions(**options))(1, 64, y)
    np.testing.assert_allclose(y, x / 3 + x * x, rtol=2e-6, atol=1e-6)
    assert np.float32(1e-40) + np.float32(0) == np.float32(1e-40)  # the process keeps subnormals


# --- parsing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "entry", "kinds"), [
    ("scale<float, 4>", "scale<float, 4>", "*f32 f32 const *u64"),
    ("scale<double>", "scale<double>", "*f64 f64 const *u64"),
    ("inner", "a::b::inner", "*f64 const *f32x4 u8 bool"),
    ("b::inner", "a::b::inner", "*f64 const *f32x4 u8 bool"),
    ("plain", "plain", "const *i32 i64 u64 *void"),
])  # fmt: skip
def test_entries_and_types_of_cuda_are_found(name, entry, kinds):
    found, parameters = entry_of(CUDA, "cuda", name)
    assert found == entry
    assert " ".join("const " * each.constant + each.kind for each in parameters) == kinds


def test_types_by_many_names():
    declared = {
        "std::uint32_t n": Parameter("n", "u32"),
        "unsigned": Parameter("argument 0", "u32"),
        "unsigned long long int x": Parameter("x", "u64"),
        "const T x[]": Parameter("x", "*f16", constant=True),
        "float const *__restrict__ const in": Parameter("in", "*f32", constant=True),
        "__nv_bfloat16* x": Parameter("x", "*bf16"),
        "signed char *": Parameter("argument 0", "*i8"),
        "volatile uint2 *p": Parameter("p", "*u32x2"),
    }
    for text, expected in declared.items():
        (found,) = entry_of(f"using T = __half; __global__ void k({text}) {{}}", "cuda", "k")[1]
        assert found == expected, text
    opencl = (
        "__kernel __attribute__((reqd_work_group_size(4, 1, 1))) void k(__global const long *restrict x, uint n) {}"
    )
    assert entry_of(opencl, "opencl", None)[1] == (Parameter("x", "*i64", constant=True), Parameter("n", "u32"))
    assert dialect_of("kernel void k() {}", "x.cl") == "opencl"
    assert entry_of("__global__ void k(T *x) {}", "cuda", "k", {"T": "short"})[1][0].kind == "*i16"


@pytest.mark.parametrize(("name", "match"), [
    ("absent", "no kernel 'absent' in the text.*it has scale<T, N>, a::b::inner, plain, takes_struct, takes_rows"),
    (None, "name a kernel of the text"),
    ("scale", "is a template: name it with its arguments, like 'scale<float, 4>'"),
    ("scale<float, 3, 4>", "takes 2 template arguments, got 'scale<float, 3, 4>'"),
    ("takes_struct", r"takes_struct, argument 0 \(both\): wanted a pointer to numbers, or a number, got 'Pair both'"),
    ("takes_rows", r"argument 0 \(rows\): wanted an array or a number, got 'float \*\*rows'"),
])  # fmt: skip
def test_what_cannot_be_called_is_refused_by_name(name, match):
    assert_raises(CompileError, match, entry_of, CUDA, "cuda", name)


def test_pointers_to_anything_and_to_vectors():
    text = "ACL_KERNEL void k(ACL_GLOBAL void *p, ACL_GLOBAL const float4 *v) {}"
    kernel = acl.kernel(text, device="cpu")
    assert [each.kind for each in kernel.parameters] == ["*void", "*f32x4"]
    with pytest.raises(UnsupportedDtype, match=r"argument 0 \(p\): wanted an array of numbers, got object"):
        kernel(1, 1, np.array([object()]), X)
    with pytest.raises(UnsupportedDtype, match=r"argument 1 \(v\): wanted an array of float32, got int32"):
        kernel(1, 1, X, np.zeros(4, np.int32))
    crooked = np.frombuffer(bytearray(64), np.float32)[1:5]
    kernel._kernels["cpu:0", False] = (
        registry.find_device("cpu"),
        registry.create("cpu"),
        None,
    )  # float4 is CUDA's type
    with pytest.raises(LaunchError, match=r"argument 1 \(v\): its address must be a multiple of 16 bytes"):
        kernel(1, 1, X, crooked)


def test_stated_types_serve_where_the_text_does_not_say():
    text = "#define MAKE(name) ACL_KERNEL void name(ACL_GLOBAL u32 *x) { x[acl_global_id()] = 5; }\nMAKE(five)"
    x = np.zeros(4, np.uint32)
    acl.kernel(text, "five", arguments=["*u32"], device="cpu")(2, 2, x)
    assert x.tolist() == [5] * 4
    assert find_kernels(text, "portable") == []
    with pytest.raises(ConfigError, match=r"arguments, 0: wanted a type like 'f32'.*got 'float'"):
        acl.kernel(text, "five", arguments=["float"])


HOST = """#include <iostream>
__global__ void k(float *x) { x[0] = 1; }
int main() {
    float *d; cudaMalloc(&d, 4);
    k<<<1, 1>>>(d);  // printf
}
"""


def test_host_code_is_named_with_its_lines():
    assert host_code(HOST) == [(1, "#include <iostream>"), (3, "int main()"), (4, "cudaMalloc"), (5, "<<<")]
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is for Linux and Windows")
    with pytest.raises(CompileError, match=r"k.cu\(3\): error: int main\(\) is code for the host: take it out"):
        compile_cuda(KernelSource("k.cu", {"cuda": HOST}, {"k": ("*f32",)}), "sm_90")


@pytest.mark.slow
def test_templates_namespaces_and_headers_of_cplusplus_compile():
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is for Linux and Windows")
    text = "#include <cstdint>\n#include <type_traits>\n#include <stdio.h>\n" + CUDA.replace(
        "const word *w) {}",
        "const word *w) { static_assert(std::is_same_v<T, float>); x[0] = N * (std::int32_t)w[0]; }",
    )
    names = ("scale<float, 4>", "a::b::inner", "plain")
    binary = compile_cuda(KernelSource("k", {"cuda": text}, dict.fromkeys(names, ())), CUDA_TARGETS[0])
    assert binary.symbols["plain"] == "plain"
    assert binary.symbols["scale<float, 4>"].startswith("_Z5scaleIfLi4E")
    assert all(binary.resources[name].registers for name in names)


def test_missing_headers_of_cuda_are_named():
    log = 'k.cu(1): catastrophic error: cannot open source file "cstdint"\n'
    assert explained(log, "", "k.cu").startswith(
        "k.cu(1): error: <cstdint> needs CUDA's headers, which are not installed"
    )
