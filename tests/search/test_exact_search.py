"""Exact search against a float64 reference: metrics, dtypes, filters, ties, and what it refuses."""

import itertools
import os
import pickle
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import accelerant as acl
from accelerant.errors import ConfigError, RangeError, ShapeError, UnsupportedDtype
from accelerant.runtime.compilation.cuda import compile_cuda
from accelerant.search import blocks, exact, recall
from accelerant.search.exact import METRICS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def reference(q, x, k, metric, allowed=None, ids=None):
    """Scores and ids of each query, lists of at most k, by float64 and a sort of everything."""
    ids = np.arange(len(x)) if ids is None else np.asarray(ids)
    if metric == "hamming":
        differing = np.unpackbits(q.numpy()[:, None] ^ x.numpy()[None], axis=2).sum(2)
        scores = -differing.astype(np.float32)
    else:
        a, b = q.double().numpy(), x.double().numpy()
        scores = a @ b.T
        if metric == "cosine":
            scores = scores / np.maximum(np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1), 1e-300)
        if metric == "l2":
            scores = -((a[:, None] - b[None]) ** 2).sum(2)
        scores = scores.astype(np.float32)
    best = []
    for row, each in enumerate(scores):
        left = np.arange(len(x)) if allowed is None else np.flatnonzero(np.broadcast_to(allowed, scores.shape)[row])
        order = left[np.lexsort((ids[left], -each[left]))][:k]
        best.append((each[order] * (-1 if metric in ("l2", "hamming") else 1), ids[order]))
    return best


def drawn(generator, rows, d, dtype, levels=None):
    """Vectors of a dtype; of so few levels that scores are often equal, where asked."""
    if dtype in FLOATS and levels is None:
        return torch.randn(rows, d, generator=generator).to(dtype)
    low, high = {torch.uint8: (0, 256), torch.int8: (-128, 128)}.get(dtype, (-2, 3))
    if levels is not None and dtype != torch.uint8:
        low, high = -levels, levels + 1
    return torch.randint(low, high, (rows, d), generator=generator).to(dtype)


def compare(hits, best, dtype=torch.float32, exactly=True):
    scores, ids = (np.asarray(x) for x in hits)
    assert list(np.asarray(hits.counts)) == [len(ids) for _, ids in best]
    for row, (wanted, names) in enumerate(best):
        np.testing.assert_allclose(scores[row, : len(names)], wanted, rtol=2e-7, atol=1e-30)
        if not np.array_equal(ids[row, : len(names)], names):  # sums in another order may round apart, by an ulp
            assert not exactly
            assert len(set(ids[row])) == len(ids[row])
        assert (ids[row, len(names) :] == -1).all()
        assert np.isinf(scores[row, len(names) :]).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_any_case_is_the_references(data):
    """Sizes across the blocks and tiles, every metric and dtype, few levels for ties, every kind of filter."""
    metric = data.draw(st.sampled_from(METRICS))
    dtypes = (torch.uint8,) if metric == "hamming" else (*FLOATS, torch.int8)
    dtype, other = data.draw(st.sampled_from(dtypes)), data.draw(st.sampled_from(dtypes))
    rows = data.draw(st.sampled_from((0, 1, 5, 31, 32, 33, 700, 2048, 5003)))
    d, queries = data.draw(st.integers(1, 40)), data.draw(st.sampled_from((1, 2, 9, 17, 40)))
    k = data.draw(st.sampled_from((1, 3, 10, 64, 6000)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    levels = data.draw(st.sampled_from((None, 1)))
    x, q = drawn(generator, rows, d, dtype, levels), drawn(generator, queries, d, other, levels)
    ids = None
    if data.draw(st.booleans()):
        ids = torch.randperm(3 * rows + 5, generator=generator)[:rows]
    mask, allowed = filter_of(data, generator, rows, queries, ids)
    best = reference(q, x, k, metric, allowed, ids)
    compare(exact(q, x, k, metric, mask, ids), best, exactly=levels is not None and metric != "cosine")


def filter_of(data, generator, rows, queries, ids):
    """A filter in one of its forms, and the same as a bool array."""
    share = data.draw(st.sampled_from((0.0, 0.02, 0.3, 1.0)))
    form = data.draw(st.sampled_from(("none", "bool", "bits", "each", "each bits", "ids", "range")))
    shape = (queries, rows) if "each" in form else (rows,)
    allowed = torch.rand(shape, generator=generator).numpy() < share
    names = np.arange(rows) if ids is None else ids.numpy()
    if form == "none":
        return None, None
    if form == "range":
        wanted = range(-3, int(share * 2 * rows), data.draw(st.sampled_from((1, 2, 5))))
        return wanted, np.isin(names, wanted)
    if form == "ids":
        return [*names[allowed].tolist(), -1, 10**12], allowed
    return np.packbits(allowed, axis=-1, bitorder="little") if "bits" in form else allowed, allowed


@pytest.mark.parametrize("metric", METRICS)
def test_scores_and_order_do_not_depend_on_the_batch_the_chunk_or_the_filter(metric, monkeypatch):
    dtype = torch.uint8 if metric == "hamming" else torch.float32
    generator = torch.Generator().manual_seed(3)
    x, q = drawn(generator, 3000, 24, dtype), drawn(generator, 40, 24, dtype)
    x[1500:1600] = x[:100]  # equal rows: ties by id
    whole = exact(q, x, 12, metric)
    for rows in (1, 7, 20):
        for first in range(0, 40, rows):
            some = exact(q[first : first + rows], x, 12, metric)
            assert torch.equal(some.scores, whole.scores[first : first + rows])
            assert torch.equal(some.ids, whole.ids[first : first + rows])
    shards = exact(q, [x[:17], x[17:1501], x[1501:]], 12, metric)
    shuffled = torch.randperm(3000, generator=generator)
    moved = exact(q, x[shuffled], 12, metric, ids=shuffled)
    masked = exact(q, x, 12, metric, mask=torch.ones(3000, dtype=torch.bool))
    monkeypatch.setitem(exact.__globals__["_SCORES"], "cpu", 1 << 9)
    monkeypatch.setitem(exact.__globals__["_QUERIES"], "cpu", 3)
    for other in (shards, moved, masked, exact(q, x, 12, metric)):
        assert torch.equal(other.scores, whole.scores)
        assert torch.equal(other.ids, whole.ids)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_of_lower_precision_choose_the_same_rows(precision):
    generator = torch.Generator().manual_seed(4)
    x, q = drawn(generator, 4000, 32, torch.float32), drawn(generator, 40, 32, torch.float32)
    whole = exact(q, x)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        again = exact(q, x)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(again.scores, whole.scores)
    assert torch.equal(again.ids, whole.ids)


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e9, 1e18])
@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
def test_vectors_of_any_size(metric, scale):
    """Squares and products below or near the limits of float32."""
    generator = torch.Generator().manual_seed(5)
    x, q = drawn(generator, 200, 8, torch.float32) * scale, drawn(generator, 3, 8, torch.float32)
    compare(exact(q, x, 5, metric), reference(q, x, 5, metric), exactly=False)
    if metric == "cosine":
        compare(exact(q * scale, x, 5, metric), reference(q * scale, x, 5, metric), exactly=False)


def test_far_from_the_origin_the_nearest_are_found():
    generator = torch.Generator().manual_seed(6)
    x, q = (drawn(generator, n, 16, torch.float32) + 1000 for n in (3000, 5))
    compare(exact(q, x, 5, "l2"), reference(q, x, 5, "l2"), exactly=False)


def test_answers_are_arrays_of_the_queries_library():
    x = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    hits = exact(x[:2], x, 3)
    assert isinstance(hits.scores, np.ndarray)
    assert hits.scores.dtype == np.float32
    assert hits.ids.dtype == np.int64
    assert isinstance(exact(torch.from_numpy(x[:2]), x, 3).ids, torch.Tensor)
    one = exact(x[0], x, 3)
    assert one.ids.shape == (3,)
    assert one.counts == 3
    assert np.array_equal(one.ids, hits.ids[0])
    assert np.array_equal(exact(x[0].tolist(), x, 3).ids, one.ids)
    for same in (np.asfortranarray(x), np.repeat(x, 2, 0)[::2], x[::-1][::-1]):
        assert np.array_equal(exact(x[:2], same, 3).ids, hits.ids)
    frozen = x.copy()
    frozen.flags.writeable = False
    assert np.array_equal(exact(x[:2], frozen, 3).ids, hits.ids)
    again = pickle.loads(pickle.dumps(hits))
    assert np.array_equal(again.ids, hits.ids)
    assert np.array_equal(again.counts, hits.counts)


def test_a_memory_mapped_file_is_searched(tmp_path):
    x = np.random.default_rng(0).standard_normal((5000, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    assert np.array_equal(exact(x[:3], np.load(tmp_path / "x.npy", mmap_mode="r"), 1, "l2").ids[:, 0], [0, 1, 2])


def test_fewer_than_k_are_said():
    x = np.eye(6, dtype=np.float32)
    assert exact(x, x, 10).ids.shape == (6, 6)
    hits = exact(x[:2], x, 3, mask=[4])
    assert hits.ids.tolist() == [[4], [4]]
    none = exact(x[:2], x, 3, mask=np.zeros(6, bool))
    assert none.ids.shape == (2, 0)
    assert none.counts.tolist() == [0, 0]
    mask = np.zeros((2, 6), bool)
    mask[1, 2:4] = True
    for metric, worst in (("ip", -np.inf), ("l2", np.inf)):
        each = exact(x[:2], x, 3, metric, mask=mask)
        assert each.counts.tolist() == [0, 2]
        assert each.ids.tolist() == [[-1, -1], [2, 3]]
        assert (each.scores[0] == worst).all()
    assert exact(x, x[:0], 3).ids.shape == (6, 0)
    assert exact(x[:0], x, 3).ids.shape[0] == 0


def test_zero_vectors_under_cosine_score_zero():
    x = np.array([[0, 0], [1, 0], [-1, 0]], np.float32)
    hits = exact(np.array([[1, 0], [0, 0]], np.float32), x, 3, "cosine")
    assert hits.ids.tolist() == [[1, 0, 2], [0, 1, 2]]
    assert hits.scores.tolist() == [[1, 0, -1], [0, 0, 0]]


@pytest.mark.parametrize("change", [0, 1e-30, 1e15])
def test_one_row_of_a_far_norm_under_cosine_changes_no_answer_of_many_queries(change):
    """Such rows are divided by their norms before the products, which the scan of blocks must not scale again."""
    x = np.random.default_rng(0).standard_normal((700, 9)).astype(np.float32)
    x[5] *= np.float32(change)
    together = exact(x[:17], x, 3, "cosine")
    alone = [exact(q, x, 3, "cosine") for q in x[:17]]
    np.testing.assert_array_equal(together.ids, [each.ids for each in alone])
    np.testing.assert_array_equal(together.scores, [each.scores for each in alone])


def test_rows_may_share_an_id():
    x = np.eye(3, dtype=np.float32)
    assert exact(x[0], x, 3, ids=[5, 5, 1]).ids.tolist() == [5, 1, 5]


@pytest.mark.parametrize("name", ["queries", "data"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
def test_numbers_that_are_not_finite_are_refused_with_their_row(name, bad, metric):
    arrays = {"queries": np.ones((40, 4), np.float32), "data": np.ones((5000, 4), np.float32)}
    arrays[name][33, 2] = bad
    with pytest.raises(RangeError, match=f"row 33 of {name} has NaN or infinity"):
        exact(**arrays, metric=metric)


def test_a_row_in_a_later_shard_is_named_by_its_number():
    x = np.ones((100, 4), np.float32)
    x[77] = np.nan
    with pytest.raises(RangeError, match="row 77 of data"):
        exact(x[0], [x[:50], x[50:]])
    with pytest.raises(RangeError, match="row 77 of data"):
        exact(x[:9], x, mask=range(3, 90, 2))
    assert exact(x[0], x, mask=range(70)).counts == 10  # rows that the filter leaves out are not read


def test_what_is_refused():
    x = np.ones((9, 4), np.float32)
    for k in (0, -1, 1.5, None):
        with pytest.raises(ConfigError, match="k must be"):
            exact(x, x, k)
    with pytest.raises(ConfigError, match="metric must be one of"):
        exact(x, x, metric="dot")
    with pytest.raises(ShapeError, match="queries have dimension 3, data 4"):
        exact(x[:, :3], x)
    with pytest.raises(ShapeError, match="data must be"):
        exact(x, x[0])
    with pytest.raises(UnsupportedDtype, match=r"float64; round it with .astype"):
        exact(x, x.astype(float))
    for bits in (x, x.astype(np.uint8)):
        with pytest.raises(UnsupportedDtype, match="uint8 is for hamming"):
            exact(bits, x.astype(np.uint8) if bits is x else bits, metric="hamming" if bits is x else "ip")
    for mask in (np.ones(8, bool), np.ones((2, 9), bool), np.ones(9, np.uint8)):
        with pytest.raises(ShapeError, match="mask"):
            exact(x, x, mask=mask)
    with pytest.raises(UnsupportedDtype, match="mask must be"):
        exact(x, x, mask=np.ones(9))
    with pytest.raises(ShapeError, match="ids must be"):
        exact(x, x, ids=range(3))
    with pytest.raises(UnsupportedDtype, match="ids must be integers"):
        exact(x, x, ids=np.arange(9.0))
    with pytest.raises(RangeError, match="norm above 1e19"):
        exact(x, x * np.float32(1e30))


@pytest.mark.parametrize("form", [torch.int8, torch.bfloat16])
def test_a_copy_of_lower_precision_is_ranked_by_the_vectors(form):
    generator = torch.Generator().manual_seed(7)
    x = drawn(generator, 3000, 64, torch.float32)
    q = x[:50] + 0.3 * drawn(generator, 50, 64, torch.float32)
    low = x.to(form) if form == torch.bfloat16 else (x * 30).round().clamp(-127, 127).to(form)
    truth = exact(q, x)
    ranked = exact(q, low, rerank=x)
    assert recall(ranked.ids, truth.ids) >= max(0.99, recall(exact(q, low).ids, truth.ids))
    same = (ranked.ids == truth.ids).all(1)
    assert same.sum() > 25
    assert torch.equal(ranked.scores[same], truth.scores[same])
    with pytest.raises(ShapeError, match="rerank must be"):
        exact(q, low, rerank=x[:-1])


def test_recall_counts_true_answers():
    assert recall([[1, 2], [3, 4]], [[2, 9], [4, 3]]) == 0.75
    assert recall([[1, 2]], [[1, -1]]) == 1.0
    assert recall(np.zeros((2, 0)), np.zeros((2, 0))) == 1.0
    with pytest.raises(ShapeError, match="recall compares"):
        recall([1], [[1]])


def test_a_search_is_in_the_ledger():
    x = np.ones((12, 5), np.float32)
    acl.ledger().reset()
    exact(x, x)
    (record,) = [each for each in acl.ledger().records() if each.op == "search_exact"]
    assert (record.case, record.calls) == ("12 x 12 x 5 float32 ip", 1)
    assert record.flops_per_call == 2 * 12 * 12 * 5


def test_threads_search_at_once():
    generator = torch.Generator().manual_seed(8)
    x, q = drawn(generator, 2000, 16, torch.float32), drawn(generator, 8, 16, torch.float32)
    wanted, found = exact(q, x), {}

    def search(at):
        found[at] = exact(q, x)

    threads = [threading.Thread(target=search, args=(at,)) for at in range(8)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    assert all(torch.equal(found[at].ids, wanted.ids) for at, _ in itertools.product(range(8), [0]))


@pytest.fixture
def interpreted(monkeypatch):
    """Run the Triton kernels on CPU tensors."""
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: tests marked gpu run the kernels compiled")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


KERNEL_CASES = [
    *((metric, dtype, dtype) for metric in ("ip", "cosine", "l2") for dtype in (*FLOATS, torch.int8)),
    ("ip", torch.float32, torch.bfloat16), ("l2", torch.float32, torch.int8), ("cosine", torch.float16, torch.float32),
]  # fmt: skip


def compare_kernels(metric, of_queries, of_data, device, rows, d):
    """Several queries and one, filters of each kind, equal rows: the bits of the CPU's answers."""
    generator = torch.Generator().manual_seed(9)
    x, q = drawn(generator, rows, d, of_data), drawn(generator, 3, d, of_queries)
    x[rows // 2 : rows // 2 + 40] = x[:40]
    q[2] = q[0]
    mask = torch.rand(rows, generator=generator) < 0.4
    each = torch.rand(3, rows, generator=generator) < 0.1
    for queries, filter_ in (
        (q, None),
        (q[:1], None),
        (q, mask),
        (q[:1], mask),
        (q, each),
        (q[:1], each[:1]),
        (q, range(7, 90)),
    ):
        yield (
            (queries, x, 7, metric, filter_),
            [y.to(device) if isinstance(y, torch.Tensor) else y for y in (queries, x, filter_)],
        )


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize(("metric", "of_queries", "of_data"), KERNEL_CASES)
def test_the_kernels_choose_the_same_rows(metric, of_queries, of_data, interpreted, monkeypatch):
    cases = list(compare_kernels(metric, of_queries, of_data, "cpu", 331, 70))
    for arguments, _ in cases[KERNEL_CASES.index((metric, of_queries, of_data)) % 3 :: 3]:
        with monkeypatch.context() as context:
            context.delenv("TRITON_INTERPRET")
            wanted = exact(*arguments)
        acl.ledger().reset()
        found = exact(*arguments)
        (record,) = [each for each in acl.ledger().records() if each.op == "search_exact"]
        assert record.implementation == "triton"
        assert torch.equal(found.ids, wanted.ids)
        assert torch.equal(found.scores, wanted.scores)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_the_kernels_have_the_bits_of_the_cpu_in_any_case(interpreted, data):
    """Drawn sizes around the kernels' tiles, ties, ids in any order, filters, k beyond the rows and the blocks."""
    dtypes = (torch.float32, torch.float16, torch.int8)
    metric, dtype, other = (data.draw(st.sampled_from(names)) for names in (("ip", "cosine", "l2"), dtypes, dtypes))
    rows, queries = data.draw(st.sampled_from((1, 31, 33, 257, 700))), data.draw(st.sampled_from((1, 2, 9)))
    d, k = data.draw(st.sampled_from((1, 8, 33, 128, 130, 300))), data.draw(st.sampled_from((1, 3, 10, 64, 600)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    levels = data.draw(st.sampled_from((None, 1)))
    x, q = drawn(generator, rows, d, dtype, levels), drawn(generator, queries, d, other, levels)
    ids = torch.randperm(3 * rows, generator=generator)[:rows] if data.draw(st.booleans()) else None
    mask, _ = filter_of(data, generator, rows, queries, ids)
    found = exact(q, x, k, metric, mask, ids)
    os.environ.pop("TRITON_INTERPRET")
    try:
        wanted = exact(q, x, k, metric, mask, ids)
    finally:
        os.environ["TRITON_INTERPRET"] = "1"
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.scores, wanted.scores)
    assert torch.equal(found.counts, wanted.counts)


def test_the_kernels_take_empty_and_small_collections(interpreted):
    x = torch.eye(3)
    assert exact(x, x[:0]).ids.shape == (3, 0)
    assert exact(x[:0], x).ids.shape == (0, 0)
    assert exact(x, x, 9).ids.tolist() == [[0, 1, 2], [1, 0, 2], [2, 0, 1]]
    assert exact(x, x, mask=[1]).ids.tolist() == [[1]] * 3
    assert exact(x, x, mask=torch.zeros(3, 3, dtype=torch.bool)).counts.tolist() == [0, 0, 0]
    blocks._rooms.clear()
    for mask in ([1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 1]):  # of more rows than the kernels have room for, and of few
        chosen = [row for row in range(3) if mask[row]]
        wanted = [sorted(chosen, key=lambda row: (row != query, row)) for query in range(3)]
        assert exact(x, x, 9, mask=torch.tensor(mask, dtype=torch.bool)).ids.tolist() == wanted
    for mask in (None, torch.eye(3, dtype=torch.bool), range(1, 3)):
        whole, shards = exact(x, x, 9, mask=mask), exact(x, [x[:1], x[:0], x[1:]], 9, mask=mask)
        for found, wanted in zip((*shards, shards.counts), (*whole, whole.counts), strict=True):
            assert torch.equal(found, wanted)
    with pytest.raises(RangeError, match="row 1 of data has NaN"):
        exact(x, torch.tensor([[0.0, 1, 2], [0, float("nan"), 0]]))


@pytest.mark.gpu
@pytest.mark.parametrize(("metric", "of_queries", "of_data"), KERNEL_CASES)
def test_a_gpu_has_the_bits_of_the_cpu(metric, of_queries, of_data):
    for rows, d in ((331, 70), (70_001, 128), (20_000, 384)):
        for arguments, moved in compare_kernels(metric, of_queries, of_data, "cuda", rows, d):
            wanted = exact(*arguments)
            queries, x, filter_ = moved
            for found in (exact(queries, x, 7, metric, filter_) for _ in range(3)):  # the last by known launches
                assert torch.equal(found.ids.cpu(), wanted.ids)
                assert torch.equal(found.scores.cpu(), wanted.scores)
                assert torch.equal(found.counts.cpu(), wanted.counts)
            streamed = exact(queries, arguments[1], 7, metric, arguments[4])  # rows in the host's memory
            assert torch.equal(streamed.ids.cpu(), wanted.ids)


@pytest.mark.gpu
def test_autocast_on_a_gpu_rounds_no_bits():
    x = torch.randint(256, (300, 96), dtype=torch.uint8)
    with torch.autocast("cuda", torch.bfloat16):
        found = exact(x[:3].cuda(), x.cuda(), 50, "hamming")
    assert torch.equal(found.scores.cpu(), exact(x[:3], x, 50, "hamming").scores)


@pytest.mark.gpu
@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_many_queries_on_a_gpu_have_the_bits_of_the_cpu(metric, dtype, monkeypatch):
    """Of the product for Hopper where that is served, its last tile partly filled, in one part and in several."""
    monkeypatch.setattr(blocks, "_COPIED", 1 << 20)
    generator = torch.Generator().manual_seed(10)
    for rows, d in ((20_001, 384), (191, 8), (50_000, 136)):
        x, q = drawn(generator, rows, d, dtype), drawn(generator, 130, d, dtype)
        x[rows // 2 : rows // 2 + 40] = x[:40]
        moved = x.cuda()
        for k, mask in ((1, None), (10, None), (100, None), (600, None), (10, range(5, rows - 7))):
            wanted, found = exact(q, x, k, metric, mask), exact(q.cuda(), moved, k, metric, mask)
            assert torch.equal(found.ids.cpu(), wanted.ids)
            assert torch.equal(found.scores.cpu(), wanted.scores)
            assert torch.equal(found.counts.cpu(), wanted.counts)
        if dtype.is_floating_point:
            for bad in (float("nan"), float("inf")):
                moved[rows - 1, d - 1] = bad
                for some in (1, 5, 130):
                    with pytest.raises(RangeError, match=f"row {rows - 1} of data has NaN"):
                        exact(q[:some].cuda(), moved, metric=metric)


@pytest.mark.gpu
def test_roundings_that_agree_leave_no_row_out():
    """Each element of a row is rounded to bfloat16 in the same direction: the largest error that there is."""
    x = torch.full((3000, 256), 1 + 2**-8 + 2**-12)
    x[::2], x[5] = 1.003, 1.0045
    wanted, found = exact(x[:70], x, 3), exact(x[:70].cuda(), x.cuda(), 3)
    assert torch.equal(found.ids.cpu(), wanted.ids)


COMPILE = """
import torch
from accelerant.search import blocks
types = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8"}
pointers = {"at": "i64", "norms": "fp32", "seen": "i1", "maxima": "fp32", "largest": "i32", "state": "i32",
            "count": "i32", "told": "i32",
            "cut": "fp32", "chosen": "i32", "keys": "i64", "scores": "fp32", "ids": "i64", "counts": "i64"}
pointers["copy"] = "bf16"
rest = {f"{name}_ptr": f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(
    ("share", "tiny", "least_norm"), "fp32"
)
integers = ("Q", "N", "D", "K", "ROOM", "CHOSEN", "KEYS", "q_row", "x_row", "seen_row", "blocks", "first")
fixed = {"ROWS": 24, "LANES": 32, "PARTS": 16, "CHUNK": 64, "BLOCK_D": 128, "SETS": 8}
fixed |= {"ROUNDED": True, "EVEN": True, "WORDS": False}
cases = [("maxima", dtype, "ip") for dtype in types if dtype != torch.float16] + [("maxima_one", torch.bfloat16, "ip")]
cases += [(name, torch.float32, "cosine") for name in ("norms", "choose", "score", "finish")]
cases += [(name, torch.float32, "l2") for name in ("best", "compact")]
count = 0
for target, shared in (("sm_75", 0), ("sm_80", 166912), ("sm_90", 232448), ("gfx942", 65536)):
    for name, dtype, metric in cases:
        constants, warps, stages = fixed | {"METRIC": metric, "WIDTH": 64 if name == "best" else 1024}, 4, 3
        if name in ("norms", "maxima_one", "finish"):
            constants["ROWS"] = 32
        if name == "maxima":
            tile, warps, stages = blocks.tile_of(128, dtype, dtype, shared)
            constants |= tile
        given = {"q_ptr": types[dtype], "x_ptr": types[dtype], **rest, **dict.fromkeys(integers, "i32")}
        kernel = blocks.KERNELS[name]
        constants = {each: value for each, value in constants.items() if each in kernel.argument_names()}
        both = dtype == torch.bfloat16 and name == "maxima"
        for absent in (("at_ptr", "count_ptr", "seen_ptr", "norms_ptr"), ("largest_ptr",))[: 1 + both]:
            none = {each: None for each in absent if each in kernel.argument_names()}
            none = {} if name in ("norms", "compact") else none
            names = [each for each in kernel.argument_names() if each not in constants and each not in none]
            kinds = {each: given[each] for each in names}
            source = kernel.source(kinds, constants | none, num_warps=warps, num_stages=stages)
            assert len(source.dialects["triton"].build(target).code)
            count += 1
print(count)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "measures"), [("ip", True), ("ip", False), ("l2", False), ("cosine", False)])
def test_the_code_for_hopper_stays_in_its_budget(metric, measures):
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    program = blocks.hopper_program(metric, measures=measures)
    binary = compile_cuda(program.source(blocks.HOPPER_KINDS), "sm_90a")
    resources = binary.resources["search_maxima"]
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert program.shared_bytes <= 227 * 1024
    assert not re.search(r"C75\d\d", binary.log)  # the compiler waits for each wgmma, or ignores setmaxnreg


@pytest.mark.slow
def test_the_kernels_compile_for_each_target():
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "44", done.stderr[-3000:]


def test_ranges_of_ids_reach_the_ends_of_int64():
    x = np.eye(4, dtype=np.float32)
    ids = np.array([-(2**63), -4, 2**63 - 4, 2**63 - 1])
    for wanted in (range(-(10**30), 10**30), range(-4, 2**63, 3), range(2**63 - 1, -5, -3), range(-4, 2**64, 2**63)):
        hits = exact(x[0], x, 4, mask=wanted, ids=ids)
        assert sorted(hits.ids.tolist()) == [i for i in ids.tolist() if i in wanted]
    for listed in (np.array([2**64 - 4], np.uint64), [2**63], {2**64 - 1, -(2**70)}):
        assert exact(x[0], x, 10**30, mask=listed, ids=ids).ids.tolist() == []
    assert exact(x[0], x, 4, mask=[2**64 - 1, -4, 2**63 - 1], ids=ids).ids.tolist() == [-4, 2**63 - 1]
    for kind in (np.uint32, np.uint64):
        assert exact(x[0], x, 1, ids=np.arange(4, dtype=kind) + 2**31).ids.tolist() == [2**31]
    with pytest.raises(RangeError, match=f"below 2\\^63, got {2**63} for row 2"):
        exact(x[0], x, 1, ids=np.array([0, 2**63 - 1, 2**63, 2**63 + 1], np.uint64))


def test_arrays_of_other_byte_order_or_within_records_are_read():
    records = np.zeros(4, [("x", "<f4", 3), ("tag", "u1")])
    records["x"] = np.arange(12).reshape(4, 3)
    x = np.ascontiguousarray(records["x"])
    for other in (records["x"], x.astype(">f4")):
        assert exact(other[:1], other, 4).ids.tolist() == exact(x[:1], x, 4).ids.tolist()
    with pytest.raises(ShapeError, match="one length"):
        exact([[1.0], [2.0, 3.0]], x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_default_dtype_changes_no_bit(dtype):
    generator = torch.Generator().manual_seed(8)
    x, q = drawn(generator, 3000, 32, torch.float32), drawn(generator, 9, 32, torch.float32)
    whole = exact(q, x)
    torch.set_default_dtype(dtype)
    try:
        again = exact(q, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again.scores, whole.scores)
    assert torch.equal(again.ids, whole.ids)


def test_vectors_to_rerank_by_are_checked():
    x = np.eye(4, dtype=np.float32)
    wrong = x.copy()
    wrong[2] = np.nan
    with pytest.raises(RangeError, match="row 2 of rerank has NaN"):
        exact(x, x, rerank=wrong)
    with pytest.raises(UnsupportedDtype, match="uint8"):
        exact(x, x, rerank=x.astype(np.uint8))
    with pytest.raises(ConfigError, match="rerank is for numbers"):
        exact(x.astype(np.uint8), x.astype(np.uint8), metric="hamming", rerank=x)
