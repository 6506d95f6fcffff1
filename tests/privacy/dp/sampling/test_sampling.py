"""Poisson draws: the exact probability, independence, batches that hold every drawn row once."""

import copy
import itertools
import math
import multiprocessing
import os
import pickle
import warnings
from fractions import Fraction
from itertools import chain

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

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.privacy.dp.sampling import (
    GroupedSampler,
    PoissonBatches,
    PoissonSampler,
    RareDraws,
    Units,
    require_poisson,
    sampling_of,
)
from accelerant.privacy.random import SecureStream
from refusals import assert_raises


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
    "dataset": Rows(20), "array": np.arange(20), "big-endian array": np.arange(20, dtype=">i8"),
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
    assert_raises(ConfigError, message, PoissonSampler, *arguments)


@pytest.mark.parametrize(("data", "message"), [
    (np.ma.masked_array(np.arange(20), X.numpy() > 3), "data is a masked array"),
    (np.arange(20).astype(object), "data must be numbers, got an array of object"),
    (torch.eye(20).to_sparse(), "data is a sparse_coo tensor"),
    (torch.ones(20, device="meta"), "data is a meta tensor"),
])  # fmt: skip
def test_arrays_without_plain_numbers_are_refused(data, message):
    assert_raises((UnsupportedCase, UnsupportedDtype), message, lambda: PoissonBatches(data, PoissonSampler(20, 0.5)))


def test_other_wrong_usage():
    assert_raises(ConfigError, "steps must be a whole number", PoissonSampler, 10, 0.5, steps=-1)
    assert_raises(ConfigError, "records must be a whole number", GroupedSampler, X, 0.5, records=0)
    assert_raises(ShapeError, r"groups must be \(N,\) integers", lambda: GroupedSampler(X.float(), 0.5))
    with pytest.raises(ConfigError, match="microbatch must be a whole number"):
        PoissonBatches(X, PoissonSampler(20, 0.5), microbatch=0)
    assert_raises(ConfigError, "draws from 21 rows, the data have 20", PoissonBatches, X, PoissonSampler(21, 0.5))
    assert_raises(ShapeError, "lengths 20, 19", lambda: PoissonBatches((X, X[1:]), PoissonSampler(20, 0.5)))
    assert_raises(UnsupportedCase, "got str", lambda: PoissonBatches((X, "text"), PoissonSampler(20, 0.5)))
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


# --- who is drawn, and by which process -------------------------------------------------------------------------------
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
    assert_raises(ConfigError, "3 processes have 2 units among them", users.sampler, 4, 0.5, 1, rank=rank, size=3)
    assert_raises(ConfigError, "3 processes have 2 units", lambda: Units().sampler(2, 0.5, 1, rank=rank, size=3))


def test_groups_are_the_same_whatever_they_are_called():
    known = Units.of(torch.tensor([3, 3, -1, 8]))
    assert (known.groups.tolist(), known.number(4), known.name) == ([0, 0, 1, 2], 3, "user")
    for names in (["c", "c", "a", "b"], [1, 1, 2, 3], torch.tensor([1, 1, 0, 200], dtype=torch.uint8)):
        assert Units.of(names).digest == known.digest
    assert Units.of([3, -1, -1, 8]).digest != known.digest
    assert Units.of(None) == Units()


# --- rare draws: the exact binomial law of a block, ties settled by all bits, uniform places --------------------------
WORDS = 1 << 53


def answering(*batches):
    """A source whose answers are fixed."""
    left = list(batches)

    def integers(count):
        batch = left.pop(0)
        assert len(batch) == count
        return np.array(batch, np.int64)

    return integers


def law(threshold, length, count):
    rate = Fraction(threshold, WORDS)
    return math.comb(length, count) * rate**count * (1 - rate) ** (length - count)


@pytest.mark.parametrize(("threshold", "bits"), [(WORDS // 3, 1), (WORDS // 5, 2), (12345, 3), (WORDS // 4097, 5)])
def test_the_distribution_function_is_exact(threshold, bits):
    rare, length = RareDraws(threshold, bits), 1 << bits
    total = Fraction(0)
    for count in range(length + 1):
        total += law(threshold, length, count)
        assert Fraction(rare._up_to(count), 1 << (53 * length)) == total
    assert total == 1


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_words_beside_a_bound_and_ties_at_it(count, off):
    """One below the first 53 bits of P(<= count): as many; one above: one more; equal: all the bits decide."""
    threshold, bits = WORDS // 5 + 1, 2
    bound = RareDraws(threshold, bits)._up_to(count)
    word = (bound >> 53 * 3) + off
    if off:
        assert RareDraws(threshold, bits).counts(np.array([word]), answering()).tolist() == [count + (off > 0)]
        return
    for below in (1, 0):
        number = bound - below
        parts = [(number >> 53 * place) & (WORDS - 1) for place in (2, 1, 0)]
        assert (number >> 53 * 3) == word
        found = RareDraws(threshold, bits).counts(np.array([word]), answering(parts))
        assert found.tolist() == [count + (not below)]


def test_the_far_tail_is_settled_by_all_bits():
    rare = RareDraws(WORDS // 4096, 6)
    most = [WORDS - 1] * 63
    assert rare.counts(np.array([WORDS - 1]), answering(most)).tolist() == [64]


def test_equal_places_are_drawn_again():
    rare = RareDraws(WORDS // 5, 2)
    two = (rare._up_to(1) >> 53 * 3) + 1
    source = answering([two, 0, two], [1, 1, 2, 3], [0, 3])
    assert rare.draw(3, source).tolist() == [0, 3, 10, 11]


def test_all_sets_of_places_are_as_likely():
    """Two of four places: each of the six pairs from as many of the outcomes that are kept."""
    rare, found = RareDraws(WORDS // 5, 2), {}
    two = (rare._up_to(1) >> 53 * 3) + 1
    for places in itertools.permutations(range(4), 2):
        pair = tuple(rare.draw(1, answering([two], list(places))).tolist())
        found[pair] = found.get(pair, 0) + 1
    assert len(found) == 6
    assert set(found.values()) == {2}


def test_nothing_of_no_blocks():
    assert RareDraws(WORDS // 100, 6).draw(0, answering([], [])).tolist() == []


@pytest.mark.parametrize(("size", "rate"), [(64 * 5 + 7, 1 / 65), (3 * 4096 + 100, 1 / 4096), (10_000, 1e-3)])
@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.sample(3)
def test_a_sampler_with_blocks_and_a_rest(size, rate):
    """Mean, variance, and where: within 6 standard deviations; the units after the last block as the others."""
    steps = 4000
    sampler = PoissonSampler(size, rate, steps=steps)
    lengths, hits = [], np.zeros(size)
    for draw in sampler:
        assert draw.tolist() == sorted(set(draw.tolist()))
        lengths.append(len(draw))
        hits[draw] += 1
    assert sampler._rare is not None
    mean, variance = size * rate, size * rate * (1 - rate)
    assert abs(np.mean(lengths) - mean) < 6 * (variance / steps) ** 0.5
    assert abs(np.var(lengths) - variance) < 6 * variance * (2 / steps + 1 / (variance * steps)) ** 0.5
    rest = size % sampler._rare._length
    for part in (hits[size - rest :], hits[: size // 2], hits[::2]):
        wanted = steps * rate * len(part)
        assert abs(part.sum() - wanted) < 6 * wanted**0.5
