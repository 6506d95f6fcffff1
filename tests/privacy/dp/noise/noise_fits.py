"""Counts against probabilities."""

import math

import numpy as np


def below(t, sigma):
    """P(Z < t) of a wide discrete Gaussian, t an integer: the continuous one half a step lower (within 1 / sigma^2)."""
    return 0.5 * math.erfc(-(t - 0.5) / sigma / math.sqrt(2))


def chi_square(observed, probabilities):
    """The statistic and its degrees, of cells of which 20 are expected at least."""
    observed, expected = np.asarray(observed, float), np.asarray(probabilities) * np.sum(observed)
    enough = expected >= 20
    return float((((observed - expected) ** 2) / expected)[enough].sum()), int(enough.sum()) - 1


def assert_fits(observed, probabilities):
    found, degrees = chi_square(observed, probabilities)
    assert abs(found - degrees) < 5 * math.sqrt(2 * degrees), (found, degrees)
