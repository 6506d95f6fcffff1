"""What every backend must do; see runtime/provider.py for the contract."""

from __future__ import annotations

import gc
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from accelerant.accelerator import Accelerator
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.field.program import field_add_source
from accelerant.config import override, settings
from accelerant.errors import BackendUnavailable, CompileError, ConfigError, LaunchError, OutOfMemory, ShapeError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.zk.elliptic_curve import curve
from processes import in_threads
from refusals import assert_raises

P = field_of("goldilocks").modulus
EDGES = [0, 1, 2**32 - 1, 2**32, 2**63, P - 2, P - 1]


def run_field_add(provider, x, y, *, n=None, block=128):
    n = len(x) if n is None else n
    kernel = provider.compile(field_add_source())
    a, b = provider.copy_to_device(x), provider.copy_to_device(y)
    out = provider.copy_to_device(np.full(len(x), 0xDEAD, np.uint64))
    provider.launch(kernel, (max(1, -(-len(x) // block)),), (block,), (a, b, out, n))
    provider.synchronize()
    return provider.copy_to_host(out, np.uint64, (len(x),))


def test_devices_are_described(provider):
    devices = provider.devices()
    assert [device.index for device in devices] == list(range(len(devices)))
    for device in devices:
        assert device.backend == provider.name
        assert device.available
        assert device.name
        assert device.architecture
        assert device.memory_bytes > 0
        json.dumps(device.to_dict())


@pytest.mark.parametrize(
    "array", [np.arange(7, dtype=np.uint8), np.linspace(0, 1, 12).reshape(3, 4), np.zeros((0, 5), np.float32)]
)
def test_copies_keep_every_bit(provider, array):
    buffer = provider.copy_to_device(array)
    assert buffer.size_bytes >= array.nbytes
    np.testing.assert_array_equal(provider.copy_to_host(buffer, array.dtype, array.shape), array)


def test_copies_of_views_and_into_a_given_buffer(provider):
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, ::3]
    buffer = provider.allocate(64)
    assert provider.copy_to_device(array, out=buffer) is buffer
    np.testing.assert_array_equal(provider.copy_to_host(buffer, np.int32, (2, 2)), array)


def test_host_copies_are_the_callers_own(provider):
    source = np.arange(4, dtype=np.int64)
    buffer = provider.copy_to_device(source)
    source[:] = -1
    first = provider.copy_to_host(buffer, np.int64, (4,))
    first[:] = -2
    np.testing.assert_array_equal(provider.copy_to_host(buffer, np.int64, (4,)), np.arange(4))


def test_buffers_do_not_overlap(provider):
    arrays = [np.full(size, size % 251, np.uint8) for size in (1, 300, 4096, 300)]
    buffers = [provider.copy_to_device(array) for array in arrays]
    for array, buffer in zip(arrays, buffers, strict=True):
        np.testing.assert_array_equal(provider.copy_to_host(buffer, np.uint8, array.shape), array)
    if provider.name in ("cuda", "cpu"):  # whose memory has addresses
        assert all(buffer.data_ptr() % 256 == 0 for buffer in buffers)


@pytest.mark.parametrize("dtype", [np.float32, np.uint64, np.complex128, np.bool_])
def test_zeros_and_ones(provider, dtype):
    for shape, sizes in (((2, 3), (2, 3)), (5, (5,)), ((), ()), ((4, 0), (4, 0))):
        for made, expected in ((provider.zeros, np.zeros), (provider.ones, np.ones)):
            buffer = made(shape, dtype)
            np.testing.assert_array_equal(provider.copy_to_host(buffer, dtype, sizes), expected(sizes, dtype))
    assert_raises(ShapeError, "-1", provider.zeros, (2, -1))


def test_a_kernel_by_its_source_and_an_operation_by_its_name(provider):
    assert provider.has_custom_kernels()
    x = np.array(EDGES[:4], np.uint64)
    a, out = provider.copy_to_device(x), provider.zeros(4, np.uint64)
    provider.execute_kernel(field_add_source(), a, a, out, 4, grid=(1,), block=(32,))
    provider.synchronize()
    sums = [2 * value % P for value in EDGES[:4]]
    assert provider.copy_to_host(out, np.uint64, (4,)).tolist() == sums
    assert provider.execute_kernel("field_add", x, x).tolist() == provider.field_add(x, x).tolist() == sums
    assert provider.field_mul([3], [5], field="babybear").tolist() == [15]
    assert_raises(ConfigError, r"no operation 'abacus'; there are .*field_add", provider.execute_kernel, "abacus", x)
    with pytest.raises(ConfigError, match="takes no option fast"):
        provider.execute_kernel(field_add_source(), a, a, out, 4, grid=(1,), block=(32,), fast=True)
    assert_raises(ConfigError, "chooses its grid", provider.execute_kernel, "field_add", x, x, grid=(1,))
    with pytest.raises(AttributeError, match="no operation 'abacus'"):
        _ = provider.abacus


@pytest.mark.slow
def test_transforms_and_sums_of_points_are_methods(provider):
    assert provider.ntt(provider.ntt([1, 2, 3, 4]), inverse=True).tolist() == [1, 2, 3, 4]
    if provider.dialects == ("wgsl",):
        with pytest.raises(CompileError, match="'curve_bn254_g1' has no dialect of wgsl; it has portable"):
            provider.msm([1], curve("bn254_g1").mul(curve("bn254_g1").generator, [1]))
        return
    group = curve("bn254_g1")
    points = group.mul(group.generator, [1, 2, 3])
    np.testing.assert_array_equal(provider.msm([1, 2, 3], points), group.mul(group.generator, [14])[0])


def test_shutdown_refuses_every_use_and_start_ends_it(provider):
    kernel = provider.compile(field_add_source())
    x = provider.ones(4, np.uint64)
    words = np.ones(4, np.uint64)
    if provider.name == "cuda":
        words = torch.from_numpy(words).cuda()  # the second call is a prepared launch
    accelerator = Accelerator(provider.name)
    for add in (provider.field_add, accelerator.field_add):
        assert add(words, words).tolist() == [2] * 4
    provider.shutdown()
    try:
        provider.shutdown()
        assert not provider.running
        for use in (
            provider.devices,
            lambda: provider.allocate(8),
            lambda: provider.zeros(3),
            lambda: provider.compile(field_add_source()),
            lambda: provider.launch(kernel, (1,), (32,), (x, x, x, 4)),
            lambda: provider.copy_to_host(x, np.uint64, (4,)),
            lambda: provider.field_add(words, words),
            lambda: provider.gelu([1.0]),
            lambda: accelerator.field_add(words, words),
            lambda: accelerator.gelu([1.0]),
            lambda: accelerator.submit(accelerator.field_add, words, words),
            lambda: accelerator.batch(),
            lambda: registry.find_device(provider.name),
            provider.synchronize,
            provider.memory,
        ):
            assert_raises(BackendUnavailable, r"was shut down; provider.start\(\) starts it again", use)
        (row,) = [device for device in registry.devices() if device.backend == provider.name]
        assert not row.available
        assert "was shut down" in row.reason
    finally:
        assert provider.start() is provider
    provider.start()
    provider.launch(kernel, (1,), (32,), (x, x, x, 4))
    assert provider.copy_to_host(x, np.uint64, (4,)).tolist() == [2] * 4
    with provider as same:
        assert same.running
    assert not provider.running
    provider.start()
    assert provider.field_add([1], [2]).tolist() == [3]


def test_empty_buffer(provider):
    assert provider.copy_to_host(provider.allocate(0), np.uint8, (0,)).size == 0


def test_memory_is_counted_and_given_back(provider):
    gc.collect()
    before = provider.memory().allocated_bytes
    buffer = provider.allocate(8 << 20)
    held = provider.memory()
    assert held.allocated_bytes >= before + (8 << 20)
    assert held.peak_bytes >= held.allocated_bytes
    assert 0 < held.free_bytes <= held.total_bytes
    del buffer
    gc.collect()
    assert provider.memory().allocated_bytes == before


def test_too_much_memory_is_refused_with_the_figures(provider):
    assert_raises(OutOfMemory, r"bytes asked on .* free", provider.allocate, 1 << 60)


def test_sizes_that_do_not_fit_are_refused(provider):
    assert_raises(ShapeError, "-1", provider.allocate, -1)
    buffer = provider.allocate(8)
    assert_raises(ShapeError, "buffer", provider.copy_to_host, buffer, np.uint64, (2,))
    assert_raises(ShapeError, "buffer of 8 bytes", provider.copy_to_device, np.zeros(2), out=buffer)


@pytest.mark.parametrize("n", [1, 7, 128, 1000, 100_003])
def test_field_add_is_exact(provider, n):
    rng = np.random.default_rng(n)
    x = rng.integers(0, P, n, dtype=np.uint64)
    y = rng.integers(0, P, n, dtype=np.uint64)
    pairs = [(a, b) for a in EDGES for b in EDGES][:n]
    x[: len(pairs)], y[: len(pairs)] = [a for a, _ in pairs], [b for _, b in pairs]
    expected = [(a + b) % P for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert run_field_add(provider, x, y).tolist() == expected


def test_a_kernel_keeps_to_its_length(provider):
    ones = np.ones(1000, np.uint64)
    out = run_field_add(provider, ones, ones, n=10)
    assert out[:10].tolist() == [2] * 10
    assert (out[10:] == 0xDEAD).all()


def test_launches_from_threads(provider):
    x = np.arange(50_000, dtype=np.uint64)
    results: dict[int, np.ndarray] = {}

    def work(i: int) -> None:
        results[i] = run_field_add(provider, x, x + np.uint64(i))

    in_threads(partial(work, i) for i in range(4))
    for i in range(4):
        np.testing.assert_array_equal(results[i], 2 * x + np.uint64(i))


def test_bad_launches_are_refused_and_nothing_runs(provider):
    kernel = provider.compile(field_add_source())
    x = provider.copy_to_device(np.zeros(4, np.uint64))
    good = (x, x, x, 4)
    assert_raises(LaunchError, "takes 4 arguments, got 3", lambda: provider.launch(kernel, (1,), (32,), good[:3]))
    assert_raises(LaunchError, "grid", provider.launch, kernel, (0,), (32,), good)
    assert_raises(LaunchError, "block", provider.launch, kernel, (1,), (1, 1, 1, 1), good)
    with pytest.raises(LaunchError, match="argument 1: wanted a buffer, got int"):
        provider.launch(kernel, (1,), (32,), (x, 5, x, 4))
    with pytest.raises(LaunchError, match=r"argument 3: .*9223372036854775808"):
        provider.launch(kernel, (1,), (32,), (x, x, x, 2**63))
    assert_raises(LaunchError, "argument 3: wanted i64", provider.launch, kernel, (1,), (32,), (x, x, x, "4"))
    assert provider.copy_to_host(x, np.uint64, (4,)).tolist() == [0, 0, 0, 0]


def test_kernels_of_another_backend_are_refused(provider):
    kernel = provider.compile(field_add_source())
    kernel.backend = "elsewhere"
    assert_raises(LaunchError, "compiled for elsewhere", provider.launch, kernel, (1,), (32,), ())


def test_compile_errors_carry_the_log_and_leave_no_entry(provider, tmp_path):
    broken = KernelSource("broken", dict.fromkeys(provider.dialects, "this is no program"), {"broken": ()})
    with override(cache_dir=tmp_path):
        caught = assert_raises(CompileError, "broken", provider.compile, broken)
        assert caught.log
        assert not list(tmp_path.rglob("report.json"))


def test_unknown_dialects_and_entries_are_refused(provider):
    with pytest.raises(CompileError, match="has no dialect of"):
        provider.compile(KernelSource("alien", {"wgsl-of-mars": ""}, {"alien": ()}))
    with pytest.raises(LaunchError, match="has the entries field_add; got 'field_sub'"):
        provider.compile(field_add_source(), entry="field_sub")


def test_second_compile_comes_from_the_disk_cache(provider, tmp_path):
    with override(cache_dir=tmp_path):
        first = provider.compile(field_add_source())
        second = provider.compile(field_add_source())
        assert (first.from_cache, second.from_cache) == (False, True)
        (report,) = Path(settings().cache_dir).rglob("report.json")
        noted = json.loads(report.read_text())
        assert noted["name"] == "field_add"
        assert noted["target"] == first.target
        assert noted["compiler"]
        assert "registers" in noted["resources"]["field_add"]


def test_events_time_what_lies_between(provider):
    start = provider.record_event()
    x = np.zeros(1 << 20, np.uint64)
    run_field_add(provider, x, x)
    stop = provider.record_event()
    provider.synchronize()
    assert start.done()
    assert stop.done()
    assert 0 < start.elapsed_ms(stop) < 60_000


def test_launches_are_logged_at_the_level_debug(provider, caplog, monkeypatch):
    kernel = provider.compile(field_add_source())
    x = provider.copy_to_device(np.ones(1000, np.uint64))
    with override(log="debug"), caplog.at_level("DEBUG", "accelerant.launch"):
        provider.launch(kernel, (4,), (256,), (x, x, x, 1000))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "accelerant.launch"]
    assert re.fullmatch(
        rf"field_add on {provider.name}:0: grid \(4,.*\), block \(256,.*\), [\d.]+ us on the host", line
    )
    caplog.clear()
    with override(log="warning"):
        provider.launch(kernel, (4,), (256,), (x, x, x, 1000))
    assert not caplog.records
