"""Every backend's sampler against the reference in NumPy's integers, bit for bit."""

import functools
from fractions import Fraction

import noise_reference
import numpy as np
import pytest
import torch
from noise_reference import gaussian_reference, laplace_reference

from accelerant.privacy.dp.noise import (
    BLOCK,
    THREADS,
    add_steps,
    fused_source,
    gaussian_source,
    laplace_source,
    philox_source,
)
from accelerant.privacy.dp.noise.discrete import (
    GROUP,
    GaussianKernel,
    convolution_of,
    digits_of,
    draws_of_unit,
    groups_of,
    laplace_blocks,
    make_tables,
    thresholds,
)
from accelerant.privacy.random import Vectors, chacha20_words, key_words, lanes
from accelerant.runtime import registry
from accelerant.runtime.compilation.cuda import compile_cuda
from accelerant.runtime.compilation.kernel import KernelSource

KEY = bytes(range(32))
NONCE = 0x0123456789ABCDEF
FIRST = 2**32 - 5
BY_TERMS = {1: 20.0, 2: 100.0, 3: 2e3, 4: 2.0**20, 5: 5e6}
OFTEN = 0x003F0000
"""A trigger of probability 1/64, so that a unit has about 4, and often more than its pool serves."""

STATE = np.concatenate(
    [key_words(KEY), np.array([NONCE & 0xFFFFFFFF, NONCE >> 32, 0, 0], np.uint32)]
).view(np.int32)  # fmt: skip


def expected(plan, n):
    return gaussian_reference(key_words(KEY), NONCE, FIRST, plan, n)


def arguments(plan, n):
    """Tables, and the scalars."""
    factors = (*plan.factors[1:], 0, 0, 0, 0)[:4]
    return make_tables(plan.weights()).view(np.int32), (n, *factors, 1)


def on_cpu(source, plan, array, *numbers):
    table, scalars = arguments(plan, array.size)
    out = np.concatenate([array, np.full(64, 7, array.dtype)])
    provider = registry.create("cpu")
    indices = groups_of(array.size, plan.terms) * (GROUP // lanes())
    pointers = map(torch.from_numpy, (STATE, np.array([FIRST]), table, out[: array.size]))
    provider.launch(provider.compile(source), (indices,), (1,), (*pointers, *scalars, *numbers))
    assert (out[array.size :] == 7).all()
    return out[: array.size]


def on_opencl(opencl, source, plan, array, *numbers):
    table, scalars = arguments(plan, array.size)
    held = [opencl.copy_to_device(each) for each in (STATE, np.array([FIRST], np.int64), table, array)]
    threads = groups_of(array.size, plan.terms) * GROUP
    opencl.launch(opencl.compile(source), (-(-threads // BLOCK),), (BLOCK,), (*held, *scalars, *numbers))
    return opencl.copy_to_host(held[3], array.dtype, array.shape)


@pytest.fixture(params=["llvm", pytest.param("opencl", marks=pytest.mark.slow)])
def run(request):
    """(source, plan, array, *numbers) -> the array as the kernel left it, on the CPU or on OpenCL."""
    return on_cpu if request.param == "llvm" else functools.partial(on_opencl, request.getfixturevalue("opencl"))


def values(n):
    """Floats of all sizes, and those that are no numbers."""
    x = torch.from_numpy(np.random.default_rng(3).standard_normal(n).astype(np.float32)) * 100
    edges = [np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0, 2.0**-11, 3 * 2.0**-11, -(2.0**-11), 2.0**23 + 1, 1e-40]
    x[: len(edges)] = torch.tensor(edges)
    return x


@pytest.mark.sample(3)
@pytest.mark.parametrize("terms", BY_TERMS)
@pytest.mark.parametrize("whole", [True, False])
def test_draws_equal_the_reference(run, terms, whole):
    plan = convolution_of(Fraction(BY_TERMS[terms]))
    assert plan.terms == terms
    n = GROUP * draws_of_unit(terms) * 2 - (0 if whole else 37)
    assert np.array_equal(run(gaussian_source(terms, False), plan, np.zeros(n, np.int64)), expected(plan, n))


@pytest.mark.parametrize("n", [1, 15, 33, 2000])
def test_noise_is_added_as_torch_does(run, n):
    plan, grid, scale = convolution_of(Fraction(BY_TERMS[4])), 2.0**-10, 0.3
    x = values(max(n, 16))[:n]
    wanted = x.clone()
    add_steps(wanted, torch.from_numpy(expected(plan, n)), grid, scale)
    assert wanted.isfinite().all()
    assert np.array_equal(run(gaussian_source(4, True), plan, x.numpy(), 1 / grid, grid * scale), wanted.numpy())


# --- triggers --------------------------------------------------------------------------------------------------------
@pytest.fixture
def often(monkeypatch):
    """Triggers of probability 1/64 in the reference: of 2^-22, no test would see one."""
    usual = expected(convolution_of(Fraction(BY_TERMS[4])), 5000)
    monkeypatch.setattr(noise_reference, "TRIGGER", OFTEN)
    assert (expected(convolution_of(Fraction(BY_TERMS[4])), 5000) != usual).mean() > 0.03
    return usual


def test_triggers_are_taken_from_the_pool(often, run):
    plan, usual = convolution_of(Fraction(BY_TERMS[4])), gaussian_source(4, False)
    text = f"#define TRIGGER {OFTEN:#x}u\n{usual.dialects['portable']}"
    source = KernelSource("often", {"llvm": GaussianKernel(4, False, trigger=OFTEN), "portable": text}, usual.entries)
    assert np.array_equal(run(source, plan, np.zeros(5000, np.int64)), expected(plan, 5000))


@pytest.mark.parametrize("count", [4, 8, 16])
def test_by_addresses_the_same_comes_out(monkeypatch, count):
    """What processors without permutations of two registers run, with vectors of 128 and 256 bits."""
    monkeypatch.setitem(on_cpu.__globals__, "lanes", lambda: count)
    plan = convolution_of(Fraction(BY_TERMS[4]))
    program = GaussianKernel(4, False, vectors=Vectors(count))
    assert "masked.gather" in program.build("")
    source = KernelSource("gather", {"llvm": program}, gaussian_source(4, False).entries)
    assert np.array_equal(on_cpu(source, plan, np.zeros(3000, np.int64)), expected(plan, 3000))


# --- Laplace ---------------------------------------------------------------------------------------------------------
def laplace_on_cpu(table, n):
    digits, indices = table.shape[1], -(-n // lanes())
    held = [STATE, np.array([FIRST]), table.view(np.int32).copy(), np.zeros(indices * lanes(), np.int64)]
    scalars = (n, digits, laplace_blocks(digits), 1)
    provider = registry.create("cpu")
    provider.launch(provider.compile(laplace_source()), (indices,), (1,), (*map(torch.from_numpy, held), *scalars))
    return held[3][:n]


def laplace_on_opencl(opencl, table, n):
    digits = table.shape[1]
    held = [opencl.copy_to_device(each) for each in (STATE, np.array([FIRST], np.int64), table)]
    out = opencl.allocate(8 * n)
    kernel = opencl.compile(laplace_source())
    opencl.launch(kernel, (-(-n // BLOCK),), (BLOCK,), (*held, out, n, digits, laplace_blocks(digits), 1))
    return opencl.copy_to_host(out, np.int64, (n,))


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("steps", [0.25, 3.0, 1e6, 2.0**29])
@pytest.mark.parametrize("place", ["llvm", "opencl"])
def test_laplace_equals_the_reference(request, place, steps):
    steps = Fraction(steps)
    launch = laplace_on_cpu
    if place == "opencl":
        launch = functools.partial(laplace_on_opencl, request.getfixturevalue("opencl"))
    wanted = laplace_reference(key_words(KEY), NONCE, FIRST, steps, 300)
    assert np.array_equal(launch(thresholds(steps), 300), wanted)


def test_laplace_decides_equal_words_by_the_pool():
    """With thresholds that are words of the keystream every digit is decided by the pool: as often as not."""
    digits = digits_of(Fraction(1000))
    words = chacha20_words(key_words(KEY), FIRST, laplace_blocks(digits), NONCE).T.reshape(-1)
    table = np.zeros((3, digits), np.uint32)
    table[0] = words[6 : 6 + digits]
    table[1] = 0x80000000
    found = laplace_on_cpu(table, 1)
    pool = [*(int(words[2 * i]) << 32 | int(words[2 * i + 1]) for i in range(3))] + [0] * digits
    first = sum((pool[j] < 1 << 63) << j for j in range(digits))
    second = sum(int(words[6 + digits + j] < table[0, j]) << j for j in range(digits))
    assert found == first - second


# --- machine code ----------------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize(("terms", "kind"), [(4, "float32"), (5, "bfloat16"), (4, "int64")])
def test_the_cuda_kernel_compiles_without_spills(target, terms, kind):
    """A block has a multiprocessor to itself, whose registers its threads share."""
    resources = compile_cuda(fused_source(terms, kind), target).resources["gaussian"]
    assert resources.registers <= 65536 // THREADS
    assert resources.spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"laplace": True}, {"fills": True}])
def test_philox_compiles_without_spills(options):
    resources = compile_cuda(philox_source("float32", **options), "sm_90").resources["philox_add"]
    assert resources.registers <= 64  # four blocks of 256 threads a multiprocessor
    assert resources.spill_bytes == 0
