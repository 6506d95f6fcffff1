"""Poisson draws: the exact probability, independence, batches that hold every drawn row once."""

import copy
import multiprocessing
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.privacy.dp.sampling import GroupedSampler, PoissonBatches, PoissonSampler, require_poisson, sampling_of
from accelerant.privacy.random import SecureStream


def draws(sampler):
    return [draw.tolist() for draw in sampler]


class FixedBytes(PoissonSampler):
    """A sampler whose random bytes and integers are given."""

    def __init__(self, size, rate, first, integers=()):
        super().__init__(size, rate, steps=1)
        self.first, self.integers = np.array(first, np.uint8), list(integers)

    def _bytes(self, count):
        assert count == len(self.first)
        return self.first

    def _integers(self, count):
        assert count == len(self.integers)
        return np.array(self.integers, np.int64)


class Rows(Dataset):
    """Items, as a Dataset has them; getting one that was not drawn is counted."""

    def __init__(self, size):
        self.size = size
        self.got = []

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        self.got.append(row)
        return {"x": torch.full((3,), float(row)), "y": row}


class Windows:
    """Token windows, as a memory-mapped file gives them."""

    def __getitem__(self, index):
        return torch.arange(4) + 10 * index[:, None]


# --- which units are drawn -------------------------------------------------------------------------------------------
@given(rate=st.floats(1 / 64, 1), first=st.integers(0, 255), low=st.integers(0, 2**45 - 1))
@settings(max_examples=300, deadline=None, derandomize=True)  # a loaded machine is no error
def test_a_unit_is_drawn_where_its_53_bits_are_below_the_rate(rate, first, low):
    sampler = FixedBytes(1, rate, [first])
    if first == int(sampler.sample_rate * 2**53) >> 45:
        sampler.integers = [low << 8]
    number = (first << 45) + low
    drawn = bool(draws(sampler)[0])
    if sampler.integers or first != int(sampler.sample_rate * 2**53) >> 45:
        assert drawn == (number < int(sampler.sample_rate * 2**53))


@pytest.mark.parametrize("low", [-1, 0, 1])
def test_the_threshold_itself_is_out(low):
    rate = 0.30517
    threshold = int(rate * 2**53)
    number = threshold + low
    sampler = FixedBytes(1, rate, [number >> 45], [(number & (2**45 - 1)) << 8])
    assert bool(draws(sampler)[0]) == (low < 0)


@pytest.mark.parametrize("rate", [255 / 256, 255.5 / 256, 1 - 2.0**-53])
@pytest.mark.parametrize("low", [-1, 0, 1])
def test_a_rate_just_below_one_draws_not_all(rate, low):
    """Of the first byte 255 the other bits decide; only a rate of 1 needs none."""
    number = int(rate * 2**53) + low
    if number < 1 << 53:
        sampler = FixedBytes(1, rate, [number >> 45], [(number & (2**45 - 1)) << 8] if number >> 45 == 255 else [])
        assert bool(draws(sampler)[0]) == (low < 0)
    assert draws(FixedBytes(1, rate, [255], [(2**45 - 1) << 8])) == [[]]


def test_the_rate_is_what_is_used():
    sampler = PoissonSampler(10, 1 / 3)
    assert sampler.sample_rate * 2**53 == int(sampler.sample_rate * 2**53)
    assert 0 <= 1 / 3 - sampler.sample_rate < 2**-53
    assert PoissonSampler(10, 0.5).sample_rate == 0.5


def test_rate_one_draws_all():
    assert draws(PoissonSampler(5, 1.0, steps=3)) == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("rate", [1 / 256, 0.3, 257 / 65536, 0.9])
@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.sample(2)
def test_frequencies_and_independence(rate):
    """Sizes, single units and pairs, each within 6 standard deviations: a wrong rate of 2 % fails."""
    size, steps = 40, 10_000
    hits = np.zeros((steps, size))
    for step, draw in enumerate(PoissonSampler(size, rate, steps=steps)):
        hits[step, draw] = 1
    deviation = (rate * (1 - rate) / steps) ** 0.5
    assert abs(hits.mean() - rate) < 6 * deviation / size**0.5
    assert np.abs(hits.mean(0) - rate).max() < 6 * deviation
    sums = hits.sum(1)
    variance = size * rate * (1 - rate)
    assert abs(sums.var() - variance) < 6 * variance * (2 / steps + 1 / (variance * steps)) ** 0.5
    covariance = np.cov(hits.T) - np.diag(hits.var(0))
    assert (
        np.abs(covariance - np.diag(np.diag(covariance))).max() < 6 * rate * (1 - rate) / steps**0.5 + 8 / steps
    )  # few hits are Poisson


def test_draws_are_ascending_int64_of_any_length():
    sampler = PoissonSampler(50, 0.02, steps=200)
    lengths = set()
    for draw in sampler:
        assert draw.dtype == torch.int64
        assert draw.tolist() == sorted(set(draw.tolist()))
        lengths.add(len(draw))
    assert 0 in lengths
    assert len(lengths) > 2
    assert sampler.draws == 200


def test_without_steps_it_does_not_end():
    sampler = PoissonSampler(10, 0.5)
    found = [draw.tolist() for draw, _ in zip(sampler, range(50), strict=False)]
    assert (len(found), sampler.draws) == (50, 51)  # zip takes one more
    assert len({tuple(draw) for draw in found}) > 10


# --- no seed ---------------------------------------------------------------------------------------------------------
def first_draw(sampler):
    return next(iter(sampler)).tolist()


def send_draw(sampler, queue):
    torch.manual_seed(0)
    queue.put(first_draw(sampler))


def test_no_two_draws_are_equal_after_copies_seeds_and_forks():
    sampler = PoissonSampler(512, 0.5)
    found = []
    for make in (lambda: sampler, lambda: copy.deepcopy(sampler), lambda: pickle.loads(pickle.dumps(sampler))):
        torch.manual_seed(0)
        np.random.seed(0)
        found += [first_draw(make()), first_draw(make())]
    if hasattr(os, "fork"):
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        for _ in range(2):
            child = context.Process(target=send_draw, args=(sampler, queue))
            child.start()
            found.append(queue.get())
            child.join()
    assert len({tuple(draw) for draw in found}) == len(found)


def test_a_stream_of_ours():
    key = bytes(range(32))
    one, two = (draws(PoissonSampler(1000, 0.3, steps=5, stream=SecureStream(key))) for _ in range(2))
    assert one == two
    assert 200 < sum(map(len, one)) / 5 < 400
    assert one[0] != one[1]


# --- batches ---------------------------------------------------------------------------------------------------------
def collected(batches):
    """Draws, each a list of the rows that count."""
    found, rows = [], []
    for batch in batches:
        x = batch.tensors["x"] if isinstance(batch.tensors, dict) else batch.tensors[0]
        assert len(x) == batch.rows
        kept = x if batch.mask is None else x[batch.mask]
        assert len(kept) == batch.examples
        rows += [int(row[0]) if row.ndim else int(row) for row in kept]
        if batch.last:
            found.append(rows)
            rows = []
    assert not rows
    return found


X, Y = torch.arange(20), torch.arange(20) * 2
KINDS = {
    "tensor": X, "tuple": (X, Y), "list": [X, Y], "mapping": {"x": X, "y": Y}, "tensor dataset": TensorDataset(X, Y),
    "dataset": Rows(20), "array": np.arange(20),
}  # fmt: skip


@pytest.mark.sample(3, 2)
@pytest.mark.parametrize("microbatch", [None, 1, 3, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_drawn_row_is_in_one_batch_of_its_draw(kind, microbatch):
    seen = []

    class Remembered(PoissonSampler):
        def _draw_units(self):
            seen.append(super()._draw_units().tolist())
            return np.array(seen[-1], np.int64)

    batches = PoissonBatches(KINDS[kind], Remembered(20, 0.1, steps=150), microbatch=microbatch)
    sizes = set()

    def noted():
        for batch in batches:
            sizes.add(batch.rows)
            yield batch

    assert collected(noted()) == seen
    assert [] in seen
    if microbatch:
        assert sizes == {microbatch}


def test_an_empty_draw_is_one_batch_of_padding():
    for microbatch, rows in ((None, 1), (4, 4)):
        (batch,) = PoissonBatches(X, FixedBytes(20, 0.1, [255] * 20), microbatch=microbatch)
        assert (batch.examples, batch.last, batch.rows) == (0, True, rows)
        assert batch.mask.tolist() == [False] * rows
        assert batch.tensors[0].tolist() == [0] * rows


def test_parts_of_a_draw():
    parts = list(PoissonBatches((X, Y), FixedBytes(20, 0.1, [0] * 5 + [255] * 15), microbatch=2))
    assert [part.last for part in parts] == [False, False, True]
    assert [part.examples for part in parts] == [2, 2, 1]
    assert [part.mask.tolist() for part in parts] == [[True, True], [True, True], [True, False]]
    assert parts[2].tensors[1].tolist() == [8, 0]


def test_windows_are_asked_by_an_index_tensor():
    batches = PoissonBatches(Windows(), FixedBytes(3, 0.1, [0, 255, 0]))
    assert [batch.tensors[0].tolist() for batch in batches] == [[[0, 1, 2, 3], [20, 21, 22, 23]]]


def test_only_drawn_items_of_a_dataset_are_read():
    data = Rows(1000)
    for _ in PoissonBatches(data, FixedBytes(1000, 0.1, [255] * 7 + [0] + [255] * 992)):
        pass
    assert data.got == [7]


# --- units with several records --------------------------------------------------------------------------------------
@pytest.mark.parametrize("records", [1, 2, 5])
def test_a_unit_puts_in_a_bounded_number_of_its_records(records):
    groups = torch.tensor([7, 7, 7, -2, 5, 5, 7, 5, 9])
    sampler = GroupedSampler(groups, 0.6, records=records, steps=400)
    assert (sampler.size, sampler.rows, sampler.rows_per_unit) == (4, 9, records)
    seen = set()
    for draw in sampler:
        units = groups[draw]
        assert len(set(draw.tolist())) == len(draw)
        for unit in units.unique():
            assert int((units == unit).sum()) == min(records, int((groups == unit).sum()))
        seen |= set(draw.tolist())
    assert seen == set(range(9))


@pytest.mark.usefixtures("fixed_entropy")
def test_units_are_drawn_at_the_rate_whatever_they_hold():
    groups = torch.tensor([0] * 50 + [1])
    counts = np.zeros(2)
    chosen = np.zeros(51)
    for draw in GroupedSampler(groups, 0.25, steps=4000):
        counts[groups[draw]] += 1
        chosen[draw] += 1
    assert np.abs(counts / 4000 - 0.25).max() < 6 * (0.25 * 0.75 / 4000) ** 0.5
    assert np.abs(chosen[:50] - 20).max() < 6 * 20**0.5


def test_grouped_batches():
    data = torch.arange(6)
    groups = data // 2
    for batch in PoissonBatches(data, GroupedSampler(groups, 1.0, steps=20)):
        assert (batch.tensors[0] // 2).tolist() == [0, 1, 2]


# --- what is refused -------------------------------------------------------------------------------------------------
def test_how_loaders_draw():
    data = TensorDataset(X)
    assert sampling_of(DataLoader(data, shuffle=True)) == "shuffled"
    assert sampling_of(RandomSampler(data)) == "shuffled"
    assert sampling_of(DataLoader(data)) == sampling_of(SequentialSampler(data)) == sampling_of([]) == "unknown"
    assert sampling_of(DataLoader(data, batch_sampler=PoissonSampler(20, 0.5, steps=2))) == "poisson"
    assert sampling_of(PoissonBatches(X, PoissonSampler(20, 0.5))) == "poisson"


def test_a_shuffled_loader_is_refused_under_poisson_accounting():
    data = TensorDataset(X)
    with pytest.raises(UnsupportedCase, match=r'DataLoader shuffles.*no Poisson draws.*sampling="shuffled"'):
        require_poisson(DataLoader(data, shuffle=True))
    with pytest.raises(UnsupportedCase, match="SequentialSampler does not say how it draws"):
        PoissonBatches(data, SequentialSampler(data))
    require_poisson(PoissonSampler(20, 0.5))


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, 0.5), "size must be a whole number"), ((2.0, 0.5), "got 2.0"), ((10, 0.0), "sample_rate must be in"),
    ((10, 1.1), "got 1.1"), ((10, 1e-20), "nothing would ever be drawn"),
])  # fmt: skip
def test_samplers_without_meaning(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PoissonSampler(*arguments)


def test_other_wrong_usage():
    with pytest.raises(ConfigError, match="steps must be a whole number"):
        PoissonSampler(10, 0.5, steps=-1)
    with pytest.raises(ConfigError, match="records must be a whole number"):
        GroupedSampler(X, 0.5, records=0)
    with pytest.raises(ShapeError, match=r"groups must be \(N,\) integers"):
        GroupedSampler(X.float(), 0.5)
    with pytest.raises(ConfigError, match="microbatch must be a whole number"):
        PoissonBatches(X, PoissonSampler(20, 0.5), microbatch=0)
    with pytest.raises(ConfigError, match="draws from 21 rows, the data have 20"):
        PoissonBatches(X, PoissonSampler(21, 0.5))
    with pytest.raises(ShapeError, match="lengths 20, 19"):
        PoissonBatches((X, X[1:]), PoissonSampler(20, 0.5))
    with pytest.raises(UnsupportedCase, match="got str"):
        PoissonBatches((X, "text"), PoissonSampler(20, 0.5))
    with pytest.raises(UnsupportedCase, match="a stream of records cannot be sampled"):
        PoissonBatches(iter([]), PoissonSampler(20, 0.5))


@pytest.mark.parametrize(("make", "most"), [
    (lambda data: Subset(data, [3] * 8 + [1, 2]), 8),
    (lambda data: Subset(data, [3, -7, 1]), 2),
    (lambda data: Subset(Subset(data, [4, 4, 5]), [0, 1, 2]), 2),
    (lambda data: ConcatDataset([data, data, data]), 3),
    (lambda data: ConcatDataset([Subset(data, [1, 2]), Subset(data, [2, 3])]), 2),
    (lambda data: Subset(ConcatDataset([data, data]), [0, 10]), 2),
    (lambda data: Subset(data, [3, 1, 2]), 1),
    (lambda data: ConcatDataset([Subset(data, [1, 2]), Subset(data, [3, 4])]), 1),
    (lambda data: ConcatDataset([data, TensorDataset(torch.zeros(2))]), 1),
])  # fmt: skip
def test_rows_that_a_subset_repeats_are_named_as_units_of_their_own(make, most):
    """A row that is there eight times moved the sum by eight times the bound."""
    data = make(TensorDataset(torch.arange(10.0)))
    sampler = PoissonSampler(len(data), 0.5, steps=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        PoissonBatches(data, sampler)
    assert len(said) == (most > 1)
    assert all(f"up to {most}: the unit of privacy is an entry of it" in str(each.message) for each in said)
