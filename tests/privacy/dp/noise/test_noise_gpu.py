"""The battery on a GPU: 10^10 draws, tails to 6 deviations; and the time against what is drawn."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from noise_fits import assert_fits, below

from accelerant.privacy.dp import noise
from accelerant.privacy.dp.noise import SecureSource, fused_source
from accelerant.privacy.dp.noise.discrete import GROUP, UNIT_BLOCKS, convolution_of, draws_of_unit
from accelerant.privacy.random import SecureStream, take

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

KEY = bytes(range(50, 82))  # fixed: the same draws each time
DRAWS = 10**10
AT_A_TIME = 2**27
SIGMA = 2.0**20
HALF = 52
"""Cells of an eighth of a deviation to each side."""

TAILS = (4.0, 5.0, 5.5, 6.0)
LAGS = (1, 2, 31, 32, 33, 64, 128, GROUP * draws_of_unit(4))


@pytest.fixture(scope="module")
def drawn():
    """What 10^10 draws come to: counts of cells, of residues and of tails, sums of powers and of products at lags."""
    source = SecureSource(SecureStream(KEY))
    cells, residues = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (2 * HALF, 256))
    tails = torch.zeros(len(TAILS), 2, dtype=torch.int64, device="cuda")
    powers, products = (torch.zeros(n, dtype=torch.float64, device="cuda") for n in (4, len(LAGS)))
    total = 0
    while total < DRAWS:
        z = source.integers((AT_A_TIME,), SIGMA, "cuda")
        y = z.double() / SIGMA
        cell = torch.floor_divide(z, int(SIGMA) // 8).clamp_(-HALF, HALF - 1) + HALF
        cells += torch.bincount(cell, minlength=2 * HALF)
        residues += torch.bincount(z & 255, minlength=256)
        tails += torch.stack([torch.stack([(z >= t * SIGMA).sum(), (z <= -t * SIGMA).sum()]) for t in TAILS])
        powers += torch.stack([(y**power).sum() for power in (1, 2, 3, 4)])
        products += torch.stack([(y[lag:] * y[:-lag]).sum() for lag in LAGS])
        total += AT_A_TIME
    return total, *(each.cpu().numpy() for each in (cells, residues, tails, powers, products))


def test_cells_fit(drawn):
    edges = [below((i - HALF) * SIGMA / 8, SIGMA) for i in range(1, 2 * HALF)]
    expected = np.diff([0.0, *edges, 1.0])
    expected[HALF:] = expected[:HALF][::-1]  # where 1 - P has no digits left
    assert_fits(drawn[1], expected)


def test_residues_fit(drawn):
    assert_fits(drawn[2], np.full(256, 1 / 256))


def test_tails_to_six_deviations_fit(drawn):
    for t, found in zip(TAILS, drawn[3].tolist(), strict=True):
        expected = drawn[0] * 0.5 * math.erfc((t - 0.5 / SIGMA) / math.sqrt(2))
        assert all(abs(each - expected) < 5 * math.sqrt(expected) + 3 for each in found), (t, found, expected)


def test_moments_fit(drawn):
    total, sums = drawn[0], drawn[4]
    for wanted, error, found in zip((0, 1, 0, 3), (1, 2**0.5, 15**0.5, 96**0.5), sums / total, strict=True):
        assert abs(found - wanted) < 5 * error / math.sqrt(total)


def test_lags_are_independent(drawn):
    assert np.abs(drawn[5] / math.sqrt(drawn[0])).max() < 5


def test_time_does_not_depend_on_what_is_drawn():
    """Tables of which every magnitude is 0, or 511, and the real one: the quickest of 20 launches each, in turn."""
    plan, x = convolution_of(Fraction(SIGMA)), torch.zeros(2**26, device="cuda")
    _, kernel = noise.compiled(fused_source(4, "float32"), x.device)
    rows, groups = noise.packed_rows([x], GROUP * draws_of_unit(4))
    taken = take(SecureStream(KEY), groups * GROUP * UNIT_BLOCKS, x.device)
    blocks = torch.cuda.get_device_properties(x.device).multi_processor_count
    launches, held = [], []
    for magnitude in (None, 0, 511):
        words = noise.make_tables(plan.weights()).copy()
        if magnitude is not None:
            words[:] = magnitude << 7
        held.append(torch.from_numpy(words.view(np.int32)).cuda())
        args = (rows, *taken, held[-1], *plan.factors[1:], 0, 1, 1.0, 1.0)
        launches.append(kernel.handle.pack((blocks, 1, 1), args, x.get_device()))
    quickest = [math.inf] * 3
    for _ in range(20):
        for i, each in enumerate(launches):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            each.start()
            end.record()
            end.synchronize()
            quickest[i] = min(quickest[i], start.elapsed_time(end))
    assert max(quickest) < 1.01 * min(quickest), quickest
