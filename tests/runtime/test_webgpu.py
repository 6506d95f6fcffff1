"""What is WebGPU's own: one submit for many dispatches, limits of bindings and grids, and what WGSL does not have."""

import subprocess
import sys

import numpy as np
import pytest

from accelerant import zk
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.program import kernel_source
from accelerant.config import override
from accelerant.errors import CompileError, DeviceLost, FormatError, LaunchError, OutOfMemory
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import KernelSource, bindings
from refusals import assert_raises
from requirements import require_backend

P = FIELDS["goldilocks"].modulus
_ADD = (
    bindings({"x": "u32"}, {"n": "i64", "step": "u32"})
    + """
@compute @workgroup_size(BLOCK_X)
fn more(@builtin(global_invocation_id) id: vec3<u32>) {
    if (i32(id.x) < scalars.n) { x[id.x] += scalars.step; }
}
@compute @workgroup_size(8, 4)
fn tiled(@builtin(global_invocation_id) id: vec3<u32>) {
    if (i32(id.x) < scalars.n) { x[id.x] += scalars.step + id.y; }
}
"""
)
ADD = KernelSource("add", {"wgsl": _ADD}, dict.fromkeys(("more", "tiled"), ("*u32", "i64", "u32")))


@pytest.fixture
def provider():
    return registry.create(require_backend("webgpu"))


@pytest.fixture
def opened(provider):
    return provider._devices[0]


@pytest.fixture
def submits(monkeypatch):
    """The command buffers that the queue takes."""
    from wgpu.backends.wgpu_native import GPUQueue

    taken, submit = [], GPUQueue.submit
    monkeypatch.setattr(GPUQueue, "submit", lambda queue, buffers: (taken.append(buffers), submit(queue, buffers))[1])
    return taken


def test_a_software_device_says_so_and_is_never_chosen(provider):
    for device in provider.devices():
        assert device.properties["software"] == (device.properties["kind"] == "cpu")
    assert not registry.find_device().software
    assert registry.find_device("vulkan").backend == "webgpu"


def test_dispatches_are_one_submit(provider, submits):
    kernel, x = provider.compile(ADD, entry="more"), provider.zeros(4, np.uint32)
    provider.synchronize()
    submits.clear()
    for step in range(1, 101):
        provider.launch(kernel, (1,), (64,), (x, 4, step))
    assert not submits
    assert provider.copy_to_host(x, np.uint32, (4,)).tolist() == [5050] * 4
    assert len(submits) == 2  # the dispatches, and the copy to the host
    for _ in range(300):
        provider.launch(kernel, (1,), (64,), (x, 4, 1))
    assert len(submits) == 3  # a full command buffer
    assert provider.copy_to_host(x, np.uint32, (4,)).tolist() == [5350] * 4


def test_a_write_waits_for_what_was_launched_before(provider):
    kernel, x = provider.compile(ADD, entry="more"), provider.zeros(4, np.uint32)
    provider.launch(kernel, (1,), (64,), (x, 4, 7))
    provider.copy_to_device(np.full(4, 100, np.uint32), out=x)
    provider.launch(kernel, (1,), (64,), (x, 2, 1))
    assert provider.copy_to_host(x, np.uint32, (4,)).tolist() == [101, 101, 100, 100]


def test_arrays_above_the_binding_limit_are_split(provider, opened, monkeypatch):
    n = 2000
    x, y = (np.random.default_rng(seed).integers(0, P, n, dtype=np.uint64) for seed in (1, 2))
    expected = [(a + b) % P for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    kernel = provider.compile(kernel_source(FIELDS["goldilocks"], "field_add"))
    a, b, out = provider.copy_to_device(x), provider.copy_to_device(y), provider.zeros(n + 8, np.uint64)
    monkeypatch.setattr(opened, "binding_bytes", 4096)  # 512 elements
    counts, dispatch = [], opened.dispatch
    monkeypatch.setattr(opened, "dispatch", lambda *args: (counts.append(args[-1][-1]), dispatch(*args)))
    provider.launch(kernel, (8,), (256,), (a, b, out, n))
    assert provider.copy_to_host(out, np.uint64, (n + 8,)).tolist() == [*expected, *[0] * 8]
    assert counts == [512, 512, 512, 464]


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "babybear",
    pytest.param("goldilocks", marks=pytest.mark.soak),
    pytest.param("bn254_fr", marks=pytest.mark.soak),  # takes seconds to compile
])  # fmt: skip
def test_arrays_of_other_kernels_are_bound_in_windows(provider, opened, monkeypatch, name):
    """Sums, products, powers, inverses, the check of the input, and transforms, of four windows."""
    field, n = zk.field(name), 1024
    x, y = field.random(n), field.random(n)
    x[x == 0] = 1
    monkeypatch.setattr(opened, "binding_bytes", n * field.parameters.size_bytes // 4)
    bound, dispatch = set(), opened.dispatch
    monkeypatch.setattr(opened, "dispatch", lambda *args: (bound.add(len(args[3])), dispatch(*args)))
    with override(fallback="forbid"):
        for op, arguments in {"sum": (x,), "dot": (x, y), "inv": (x,), "pow": (x, 5)}.items():
            call = getattr(field, op)
            assert np.array_equal(call(*arguments, device="webgpu"), call(*arguments, device="cpu")), op
        for options in ({}, {"inverse": True, "coset": 7}):
            assert np.array_equal(zk.ntt(x, name, device="webgpu", **options), zk.ntt(x, name, **options))
        x.reshape(n, -1)[900] = ~x.dtype.type(0)
        assert_raises(FormatError, r"x\[900\]", field.sum, x, device="webgpu")
    assert max(bound) == 4 + 3 * 4  # input, result and twiddles are larger than a binding


def test_a_kernel_that_cannot_be_split_refuses_such_an_array(provider, opened, monkeypatch):
    kernel = provider.compile(kernel_source(FIELDS["goldilocks"], "field_sum"))
    x, out = provider.zeros(2000, np.uint64), provider.zeros(8, np.uint64)
    monkeypatch.setattr(opened, "binding_bytes", 4096)
    monkeypatch.setitem(opened.limits, "max-storage-buffers-per-shader-stage", 4)
    message = (
        "16,128 bytes; a binding of this device has at most 4,096, and its arrays would be 5 bindings of at most 4"
    )
    assert_raises(LaunchError, message, provider.launch, kernel, (1,), (256,), (x, out, 2000, 2000))
    kernel, x = provider.compile(ADD, entry="more"), provider.zeros(2000, np.uint32)
    with pytest.raises(LaunchError, match="its module is neither elementwise nor"):
        provider.launch(kernel, (8,), (64,), (x, 2000, 1))


TRITON_LATER = """
from accelerant.runtime import registry
provider = registry.create("webgpu")
provider.zeros(4)
import triton, llvmlite.binding
print(provider.field_mul([3], [5]), registry.create("cpu").field_mul([3], [5]))
"""


@pytest.mark.slow
def test_triton_can_be_imported_after_the_driver(provider):
    """Mesa's LLVM and Triton's share symbols, so that the later of the two took the process down."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    done = subprocess.run([sys.executable, "-c", TRITON_LATER], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["[15]", "[15]"]), done.stderr


@pytest.mark.slow
def test_an_array_of_more_than_the_real_limit(provider, opened):
    n = opened.binding_bytes // 4 + 1000
    field = FIELDS["babybear"]
    if 4 * n > 300 << 20:
        pytest.skip(f"a binding of this device has {opened.binding_bytes:,} bytes")
    x = np.arange(n, dtype=np.uint32)
    a, out = provider.copy_to_device(x), provider.allocate(x.nbytes)
    provider.launch(provider.compile(kernel_source(field, "field_add")), (-(-n // 256),), (256,), (a, a, out, n))
    np.testing.assert_array_equal(provider.copy_to_host(out, np.uint32, (n,)), 2 * x % np.uint32(field.modulus))


def test_a_long_grid_is_folded_or_refused(provider, opened, monkeypatch):
    monkeypatch.setitem(opened.limits, "max-compute-workgroups-per-dimension", 4)
    x = np.arange(300, dtype=np.uint64)
    a, out = provider.copy_to_device(x), provider.zeros(300, np.uint64)
    provider.launch(provider.compile(kernel_source(FIELDS["goldilocks"], "field_add")), (10,), (32,), (a, a, out, 300))
    assert provider.copy_to_host(out, np.uint64, (300,)).tolist() == (2 * x).tolist()
    own = KernelSource("own", {"wgsl": _ADD[: _ADD.index("fn linear")] + _ADD[_ADD.index("@compute") :]}, ADD.entries)
    with pytest.raises(LaunchError, match=r"at most 4 blocks along an axis, got \(5, 1, 1\)"):
        provider.launch(provider.compile(own, entry="more"), (5,), (64,), (a, 4, 1))


def test_blocks_that_a_module_does_not_take_are_refused(provider):
    x = provider.zeros(64, np.uint32)
    more, tiled = (provider.compile(ADD, entry=name) for name in ADD.entries)
    with pytest.raises(LaunchError, match=r"written for blocks of \(8, 4, 1\) threads, got \(8, 1, 1\)"):
        provider.launch(tiled, (1,), (8,), (x, 4, 1))
    with pytest.raises(LaunchError, match=r"at most \d+ threads on this device, got \(65536, 1, 1\)"):
        provider.launch(more, (1,), (65536,), (x, 4, 1))
    assert provider.copy_to_host(x, np.uint32, (64,)).tolist() == [0] * 64


def test_what_wgsl_does_not_have_is_refused(provider):
    x = provider.zeros(4, np.uint32)
    with pytest.raises(
        LaunchError, match="argument 1: WGSL has no 64-bit integers; wanted an i64 of 32 bits, got 2147"
    ):
        provider.launch(provider.compile(ADD, entry="more"), (1,), (64,), (x, 2**31, 1))
    with pytest.raises(CompileError, match="argument 1: WGSL has no scalar of type f64"):
        provider.compile(KernelSource("d", {"wgsl": _ADD}, {"more": ("*u32", "f64", "u32")}))
    with pytest.raises(CompileError, match="options of the form -DNAME=VALUE, got '-O3'"):
        provider.compile(KernelSource("o", {"wgsl": _ADD}, {"more": ("*u32", "i64", "u32")}, options=("-O3",)))
    with pytest.raises(CompileError, match="no entry point 'less'"):
        provider.compile(KernelSource("e", {"wgsl": _ADD}, {"less": ("*u32", "i64", "u32")}))


def test_options_are_constants_of_the_module(provider):
    text = _ADD.replace("scalars.step;", "scalars.step * FACTOR;")
    source = KernelSource("f", {"wgsl": text}, {"more": ADD.entries["more"]}, options=("-DFACTOR=10u",))
    x = provider.zeros(4, np.uint32)
    provider.launch(provider.compile(source), (1,), (64,), (x, 3, 2))
    assert provider.copy_to_host(x, np.uint32, (4,)).tolist() == [20, 20, 20, 0]


def test_the_pool_is_emptied_before_it_takes_a_quarter_of_the_memory_and_where_memory_ends(
    provider, opened, monkeypatch
):
    provider.trim()
    monkeypatch.setattr(opened, "memory_bytes", 4 << 20)
    for size in range(400_000, 2_000_000, 400_000):
        provider.allocate(size).free()
    assert opened.kept_bytes() <= (1 << 20) + 1_600_256
    create, failures = opened.device.create_buffer, [RuntimeError("out of memory")] * 3

    def failing(**options):
        if failures:
            raise failures.pop()
        return create(**options)

    monkeypatch.setattr(opened.device, "create_buffer", failing)
    assert_raises(OutOfMemory, r"12,345,678 bytes asked on webgpu:0", provider.allocate, 12_345_678)
    provider.allocate(12_345_678).free()  # the third fails, the pool is emptied, the fourth succeeds
    assert not failures


def test_a_lost_device_is_refused_afterwards(provider, opened, monkeypatch):
    monkeypatch.setattr(opened, "lost", "as after a reset of the driver")
    assert_raises(DeviceLost, "webgpu:0: as after a reset", provider.allocate, 8)
