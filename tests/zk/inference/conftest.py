import numpy as np
import pytest


@pytest.fixture
def generator(rng):
    return np.random.default_rng(rng.getrandbits(63))
