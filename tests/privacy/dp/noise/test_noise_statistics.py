"""The draws against exact probabilities, and the time against what is drawn.

Keys are fixed: a test gives the same result each time. Limits lie at about five standard errors of a right sampler, so
that one that is off by a few parts in a thousand, or repeats itself, fails.
"""

import math
import re
import time
from fractions import Fraction

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from noise_fits import assert_fits, below

from accelerant.privacy.dp.noise import FastSource, SecureSource, gaussian_source, laplace_steps
from accelerant.privacy.dp.noise.discrete import GROUP, GaussianKernel, convolution_of, draws_of_unit
from accelerant.privacy.random import SecureStream, compiled, host_vectors, lanes

KEY = bytes(range(100, 132))
DRAWS = 2**21
LAGS = (1, 2, 15, 16, 31, 32, 33, 128, 1920)


def draws(sigma, n=DRAWS):
    return SecureSource(SecureStream(KEY)).integers((n,), sigma).numpy()


@pytest.mark.parametrize("sigma", [0.6, 3.0, 46.0, 200.0, 1000.0])
def test_narrow_draws_fit_the_exact_probabilities(sigma):
    z = draws(sigma)
    reach = int(8 * sigma) + 2
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    assert np.abs(z).max() <= reach
    assert_fits(np.bincount(z + reach, minlength=2 * reach + 1), weights / weights.sum())


@pytest.mark.parametrize("sigma", [2.0**14, 2.0**20, 2.0**23])
def test_wide_draws_fit_the_exact_probabilities_of_cells(sigma):
    z = draws(sigma)
    edges = [int(sigma * i / 16) for i in range(-88, 89)]
    observed = np.histogram(z, [-(2**62), *edges, 2**62])[0]
    at = [0.0, *(below(t, sigma) for t in edges), 1.0]
    assert_fits(observed, np.diff(at))


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("sigma", [46.0, 2.0**20, 2.0**23])
def test_moments(sigma):
    y = draws(sigma) / sigma
    errors = 1, math.sqrt(2), math.sqrt(15), math.sqrt(96)
    for power, (wanted, error) in enumerate(zip((0, 1, 0, 3), errors, strict=True), 1):
        assert abs((y**power).mean() - wanted) < 4.5 * error / math.sqrt(len(y)), power


@pytest.mark.parametrize("sigma", [46.0, 2.0**20])
def test_tails_are_as_heavy_as_they_should_be(sigma):
    z = draws(sigma)
    for t in (3.0, 3.5, 4.0, 4.5):
        edge = math.ceil(t * sigma)
        expected = len(z) * (1 - below(edge, sigma))
        for found in ((z >= edge).sum(), (z <= -edge).sum()):
            assert abs(found - expected) < 5 * math.sqrt(expected) + 1, (t, found, expected)


@pytest.mark.parametrize("modulus", [2, 3, 23, 28, 256, 795])
def test_low_digits_are_uniform(modulus):
    """28 and 795 are factors of the plan at 2^20: an incomplete convolution would show there."""
    z = draws(2.0**20)
    assert_fits(np.bincount(z % modulus, minlength=modulus), np.full(modulus, 1 / modulus))


@pytest.mark.parametrize("sigma", [20.0, 2.0**20])
def test_neighbours_lanes_and_groups_are_independent(sigma):
    z = draws(sigma)
    y = z / sigma
    lags = {*LAGS, GROUP * draws_of_unit(convolution_of(Fraction(sigma)).terms)}
    for lag in lags:
        for a in (y, np.abs(y) - math.sqrt(2 / math.pi), np.where(z & 1, 1.0, -1.0)):
            spread = (a**2).mean() * math.sqrt(len(a) - lag)
            assert abs((a[lag:] * a[:-lag]).sum() / spread) < 5 * math.sqrt(len(a) / (len(a) - lag)) * 1.0, lag


def test_two_streams_are_independent():
    a = draws(2.0**20) / 2.0**20
    b = SecureSource(SecureStream(bytes(31) + b"\x01")).integers((DRAWS,), 2.0**20).numpy() / 2.0**20
    assert abs((a * b).sum()) / math.sqrt(DRAWS) < 4.5
    joint = np.histogram2d(a, b, bins=[np.linspace(-2, 2, 9)] * 2)[0]
    p = np.diff([below(t * 2**18, 2.0**20) for t in range(-8, 9, 2)])
    inside = np.outer(p, p)
    assert_fits(joint.reshape(-1), (inside / inside.sum()).reshape(-1))


@pytest.mark.parametrize("t", [0.4, 3.0, 50.0])
def test_laplace_draws_fit_the_exact_probabilities(t):
    z = laplace_steps(SecureStream(KEY), (2**18,), Fraction(t), torch.device("cpu")).numpy()
    reach = int(40 * t) + 40
    weights = np.exp(-np.abs(np.arange(-reach, reach + 1)) / t)
    assert_fits(np.bincount(z + reach, minlength=2 * reach + 1), weights / weights.sum())


def test_wide_laplace_draws_fit_their_quantiles():
    z = laplace_steps(SecureStream(KEY), (2**18,), Fraction(1e6), torch.device("cpu")).numpy()
    edges = [int(1e6 * math.log(2 * p)) for p in np.arange(1, 16) / 32]
    edges = [*edges, 0, *(-e for e in reversed(edges))]
    q = math.exp(-1e-6)  # P(Z < e) = q^(1 - e) / (1 + q) of e <= 0
    at = [0.0]
    for e in edges:
        at.append(q ** (1 - e) / (1 + q) if e <= 0 else 1 - q**e / (1 + q))
    assert_fits(np.histogram(z, [-(2**62), *edges, 2**62])[0], np.diff([*at, 1.0]))


def test_fast_draws_fit_the_normal_distribution():
    x = torch.zeros(2**20)
    FastSource(12345).add_gaussian_([x], 1.0)
    edges = np.arange(-80, 81) / 20
    at = [0.0, *(0.5 * math.erfc(-e / math.sqrt(2)) for e in edges), 1.0]
    assert_fits(np.histogram(x.numpy(), [-np.inf, *edges, np.inf])[0], np.diff(at))


# --- time ------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(
    not host_vectors().wide_permutes, reason="without AVX-512 tables are read at secret addresses, as documented"
)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("terms", [1, 4])
def test_no_branch_and_no_address_depends_on_a_draw(terms, adds):
    """In the program itself, in SSA form: what is loaded, but for the counter, decides no branch and no address."""
    module = llvm.parse_assembly(GaussianKernel(terms, adds).build(""))
    target = llvm.Target.from_default_triple().create_target_machine()
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.run(module, llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options()))
    text = str(module.get_function(GaussianKernel(terms, adds).entry))
    assert "gather" not in text
    values = dict(re.findall(r"^  (%[\w.]+) = (.*)$", text, re.MULTILINE))
    operands = {name: set(re.findall(r"%[\w.]+", value)) for name, value in values.items()}
    secret = {name for name, value in values.items() if re.search(r"\bload\b", value) and "%first" not in value}
    assert len(secret) > 100
    while found := {name for name, used in operands.items() if name not in secret and used & secret}:
        secret |= found
    conditions = re.findall(r"br i1 (%[\w.]+)", text)
    assert len(conditions) > 2
    assert not secret.intersection(conditions)
    addresses = [name for name, value in values.items() if value.startswith("getelementptr")]
    assert len(addresses) > 16
    assert not secret.intersection(addresses)
    assert not any(set(re.findall(r"ptr (%[\w.]+)", line)) & secret for line in text.splitlines())


@pytest.mark.slow
def test_time_does_not_depend_on_what_is_drawn():
    """Tables that make every magnitude 0, or 511, and the real one, in turn: the quickest of many runs of each.

    A sampler that rejects, searches or branches by the magnitude would be tens of per cent apart.
    """
    plan = convolution_of(Fraction(2**20))
    provider, kernel = compiled(gaussian_source(4, False), torch.device("cpu"))
    del provider
    from accelerant.privacy.dp.noise.discrete import make_tables

    real = make_tables(plan.weights())
    tables = [real, np.zeros_like(real), np.full_like(real, 511 << 7)]
    held = [torch.from_numpy(np.ascontiguousarray(each).view(np.int32)) for each in tables]
    n = GROUP * draws_of_unit(4) * 8
    state, first, out = (
        torch.arange(12, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        torch.empty(n, dtype=torch.int64),
    )
    quickest = [math.inf] * 3
    for _ in range(2000):  # of 0.1 ms each: under load, too, many run without an interruption
        for i, table in enumerate(held):
            pointers = [each.data_ptr() for each in (state, first, table, out)]
            began = time.perf_counter()
            kernel.handle(0, 8 * GROUP // lanes(), *pointers, n, *plan.factors[1:], 0, 1)
            quickest[i] = min(quickest[i], time.perf_counter() - began)
        if i == 2:
            assert int(out.abs().max()) == 511 * sum(plan.factors)
    assert max(quickest) < 1.15 * min(quickest), quickest
