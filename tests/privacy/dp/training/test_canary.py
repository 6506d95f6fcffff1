"""Membership inference: does a canary's loss tell whether it was in the training? No more than epsilon allows.

Any (epsilon, delta) private training bounds each test of membership: true positives <= e^epsilon false positives +
delta. Trainings with and without the canary are attacked by the best threshold on its loss. Without noise it finds all
of them, so the attack has teeth; with the noise of epsilon 1 it must stay below the bound, by more than chance.
"""

import math

import pytest
import torch
from loops import classify, points, private
from torch import nn

RUNS, STEPS, EPSILON, DELTA = 60, 5, 1.0, 1e-5


def canary_loss(data, canary, seed, **options):
    """Loss on the canary after a training, at rate 1."""
    torch.manual_seed(seed % RUNS)
    model = nn.Linear(6, 2)
    rows = data if canary is None else tuple(torch.cat([a, b]) for a, b in zip(data, canary, strict=True))
    with private(model, 1.0, lr=2.0, expected_batch_size=10.0, max_grad_norm=1.0, **options) as training:
        for batch in training.batches(rows, steps=STEPS):
            classify(model, *batch.tensors).backward()
            training.optimizer.step()
    return training, model


def advantage(**options):
    """The largest of true positives - e^epsilon * false positives, over thresholds; and epsilon of a training."""
    data = points(10, classes=2)
    canary = (torch.full((1, 6), 3.0), torch.tensor([1]))
    losses = {}
    for member in (True, False):
        losses[member] = []
        for seed in range(RUNS):
            training, model = canary_loss(data, canary if member else None, seed, **options)
            losses[member].append(classify(model, *canary).item())
    found = []
    for threshold in losses[True] + losses[False]:
        hits = sum(loss <= threshold for loss in losses[True]) / RUNS
        false = sum(loss <= threshold for loss in losses[False]) / RUNS
        found.append(hits - math.exp(EPSILON) * false)
    return max(found), training.epsilon(DELTA)


@pytest.mark.slow
def test_without_noise_the_canary_is_found():
    found, epsilon = advantage(noise_multiplier=0.0)
    assert found > 0.9
    assert epsilon == math.inf


@pytest.mark.slow
@pytest.mark.usefixtures("fixed_entropy")
def test_with_noise_it_stays_within_the_bound():
    # Releases of multiplier z at rate 1 compose to one of z / sqrt(5); the analytic Gaussian of 1e-5 wants 3.7304.
    found, epsilon = advantage(noise_multiplier=3.7305 * math.sqrt(STEPS))
    assert epsilon == pytest.approx(EPSILON, rel=2e-3)
    # A rate of 60 runs has a deviation of 0.065; with the choice of the best threshold, a right mechanism would pass
    # 0.25 once in 1,000 tests (simulated on its Gaussian): the entropy is fixed, so that it is no matter of luck.
    assert found <= DELTA + 0.25
