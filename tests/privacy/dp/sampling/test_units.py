"""Who is drawn, and by which process."""

from itertools import chain

import pytest
import torch

from accelerant.errors import ConfigError
from accelerant.privacy.dp.sampling import Units


def everyone(units, rows, size):
    """The rows of one draw at rate 1, by process."""
    return [next(iter(units.sampler(rows, 1.0, 1, rank=rank, size=size))).tolist() for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_processes_share_the_units_among_them(size):
    assert sorted(chain(*everyone(Units(), 7, size))) == list(range(7))
    users = torch.tensor([9, 9, 4, -3, 4, 9, 8, 1, 0, 7, 8])
    drawn = users[list(chain(*everyone(Units.of(users), 11, size)))]
    assert sorted(drawn.tolist()) == sorted(set(users.tolist()))


@pytest.mark.parametrize("rank", [0, 2])
def test_more_processes_than_units_are_refused_in_each(rank):
    users = Units.of([5, 5, 6, 6])
    with pytest.raises(ConfigError, match="3 processes have 2 units among them"):
        users.sampler(4, 0.5, 1, rank=rank, size=3)
    with pytest.raises(ConfigError, match="3 processes have 2 units"):
        Units().sampler(2, 0.5, 1, rank=rank, size=3)


def test_groups_are_the_same_whatever_they_are_called():
    known = Units.of(torch.tensor([3, 3, -1, 8]))
    assert (known.groups.tolist(), known.number(4), known.name) == ([0, 0, 1, 2], 3, "user")
    for names in (["c", "c", "a", "b"], [1, 1, 2, 3], torch.tensor([1, 1, 0, 200], dtype=torch.uint8)):
        assert Units.of(names).digest == known.digest
    assert Units.of([3, -1, -1, 8]).digest != known.digest
    assert Units.of(None) == Units()
