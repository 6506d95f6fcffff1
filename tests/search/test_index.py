"""Index: what is added and removed is searched: under filters, by lists and codes, beside a writer, after faults."""

import os
import signal
import subprocess
import sys
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant.errors import (
    ConfigError,
    FormatError,
    MissingFile,
    RangeError,
    ShapeError,
    UnsupportedCase,
    UnsupportedDtype,
)
from accelerant.search import Index, exact, faiss_read, faiss_write, lists, llvm_kernels, recall
from refusals import assert_raises

KINDS = ("flat", "ivf", "ivfpq")


def clustered(rows, d, seed=0):
    generator = np.random.default_rng(seed)
    centers = 3 * generator.standard_normal((20, d))
    return (centers[generator.integers(0, 20, rows)] + generator.standard_normal((rows, d))).astype(np.float32)


def small(kind, metric="l2", rows=900, d=8, **options):
    x = clustered(rows, d)
    index = Index(d, metric, kind, lists=None if kind == "flat" else 9, **{"bits": 4, **options})
    index.add(x)
    return index, x


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_lists_are_exact_search(kind, metric):
    """Where the vectors are kept, an index that reads every list has the scores and ids of `exact`, bit for bit."""
    index, x = small(kind, metric)
    hits = index.search(x[:30], 7, nprobe=9)
    if metric == "cosine":
        x = (x / np.linalg.norm(x.astype(float), axis=1)[:, None]).astype(np.float32)
    truth = exact(x[:30], x, 7, "ip" if metric == "cosine" else metric)
    assert np.array_equal(hits.ids, truth.ids)
    assert np.array_equal(hits.scores, truth.scores)


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("ivf", {}), ("ivfpq", {"parts": 8}), ("ivfpq", {"bits": 8, "parts": 4}), ("ivfpq", {"parts": 8, "rerank": 0})],
)
def test_recall_rises_with_the_lists_that_are_read(kind, options, metric):
    index, x = small(kind, metric, rows=3000, **options)
    queries = clustered(50, 8)
    truth = exact(queries, x, 10, metric).ids
    found = [recall(index.search(queries, 10, nprobe=n).ids, truth) for n in (1, 8)]
    assert found[0] <= found[1] + 0.02
    assert found[1] > (0.4 if options.get("rerank") == 0 else 0.9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_sequence_of_changes_is_that_of_a_dictionary(data):
    kind, metric = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(("ip", "l2")))
    index, kept = Index(4, metric, kind, lists=3, bits=4), {}
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    for _ in range(data.draw(st.integers(1, 5))):
        if kept and data.draw(st.booleans()):
            gone = data.draw(st.lists(st.integers(0, 400), max_size=40))
            assert index.remove(gone) == len(kept.keys() & set(gone))
            kept = {name: x for name, x in kept.items() if name not in gone}
        else:
            rows = data.draw(st.sampled_from((1, 40, 150))) if kept else 60
            ids = np.setdiff1d(generator.permutation(400), list(kept))[:rows]
            x = generator.integers(-3, 4, (len(ids), 4)).astype(np.float32)
            index.add(x, ids)
            kept.update(zip(ids.tolist(), x, strict=True))
        assert len(index) == len(kept)
        assert set(index.ids.tolist()) == set(kept)
        queries = generator.integers(-3, 4, (3, 4)).astype(np.float32)
        mask = data.draw(st.sampled_from((None, range(100, 300), [5, 7, 200])))
        names = np.array(sorted(name for name in kept if mask is None or name in mask), np.int64)
        x = np.array([kept[name] for name in names], np.float32).reshape(-1, 4)
        hits = index.search(queries, 6, nprobe=3, mask=mask)
        truth = exact(queries, x, 6, metric, ids=names)
        assert np.array_equal(hits.ids, truth.ids)
        assert np.array_equal(hits.scores, truth.scores)


def drawn_index(data, **options):
    """An index of some hundred vectors, some of them equal, some of them in no list yet; and what it was made of."""
    metric, bits = data.draw(st.sampled_from(("ip", "cosine", "l2"))), data.draw(st.sampled_from((4, 8)))
    parts, width = data.draw(st.sampled_from((1, 2, 3, 5, 8, 33))), data.draw(st.sampled_from((1, 2, 5)))
    rows = data.draw(st.sampled_from((277, 300, 1000)))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = clustered(rows, parts * width, data.draw(st.integers(0, 99)))
    x[: rows // 3] = x[0] if data.draw(st.booleans()) else x[rows // 3 : 2 * (rows // 3)]
    options = {"kind": "ivfpq", "rerank": data.draw(st.sampled_from((1, 4))), **options}
    index = Index(parts * width, metric, lists=data.draw(st.sampled_from((1, 4, 9))), bits=bits, parts=parts, **options)
    index.add(x[:-20], generator.permutation(10_000)[: rows - 20])
    index.add(x[-20:], range(20_000, 20_020))
    return index, clustered(70, parts * width, 5) * data.draw(st.sampled_from((1e-8, 1, 1e8)))


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("shuffle", [(16, "avx512bw"), (8, "avx2"), (8, "ssse3"), (8, "neon"), (8, "")])
def test_codes_find_the_best_of_the_vectors_that_they_stand_for(shuffle, monkeypatch):
    """Tables are rounded to bytes: the margin holds for every width of registers, and without a byte shuffle."""
    import llvmlite.binding as llvm

    arm = llvm.get_process_triple().startswith(("aarch64", "arm64"))
    if shuffle[1] and not (arm if shuffle[1] == "neon" else llvm.get_host_cpu_features().get(shuffle[1])):
        pytest.skip(f"this processor has no {shuffle[1]}")
    monkeypatch.setattr(llvm_kernels, "features", lambda: shuffle)
    monkeypatch.setattr(lists, "features", lambda: shuffle)
    llvm_kernels.compiled.cache_clear()

    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(data=st.data())
    def drawn(data):
        index, queries = drawn_index(data, rerank=0)
        state, metric = index._state, "l2" if index.metric == "l2" else "ip"
        coded = np.concatenate([state.decoded(at).numpy() for at in range(len(state.starts) - 1)])
        k = data.draw(st.sampled_from((1, 10, 150)))
        hits, truth = (
            index.search(queries, k, nprobe=9),
            exact(index._taken(queries, "queries").numpy(), coded, k, metric, ids=index.ids),
        )
        assert np.array_equal(hits.scores, truth.scores)
        assert np.array_equal(hits.ids, truth.ids)

    drawn()
    llvm_kernels.compiled.cache_clear()


def test_one_answer_of_codes_alone_is_found():
    index, x = small("ivfpq", rerank=0, bits=8)
    assert [int(index.search(x[i], 1).ids[0]) for i in range(9)] == index.search(x[:9], 5).ids[:, 0].tolist()


def test_each_query_of_codes_alone_has_its_own_mask():
    index, x = small("ivfpq", rerank=0)
    mask = np.random.default_rng(0).random((3, 900)) < 0.1
    for allowed, k in ((mask, 5), (mask, 900), (mask & [[True], [False], [True]], 900)):
        hits = index.search(x[:3], k, nprobe=1, mask=allowed)
        assert hits.counts.tolist() == np.minimum(allowed.sum(1), k).tolist()
        assert all(allowed[i, hits.ids[i, :n]].all() for i, n in enumerate(hits.counts))


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("parts", [257, 261])
def test_parts_that_fill_up_a_shuffle_count_for_nothing(parts, monkeypatch):
    """As sums of 16 bits are full without them."""
    monkeypatch.setattr(lists.np, "empty", lambda shape, dtype: np.full(shape, 255, dtype))
    x = np.where(np.random.default_rng(0).random((128, parts)) < 0.5, 1, -1).astype(np.float32)
    x[:16] = np.linspace(1, -1, 16)[:, None]
    index = Index(parts, kind="ivfpq", parts=parts, bits=4, rerank=0, lists=1)
    index.train(x[np.arange(2048) % 16])
    index.add(x)
    assert index.search(x[:1], 1).ids.tolist() == [[0]]


def test_sparse_and_masked_vectors_are_refused():
    x = np.ones((3, 8), np.float32)
    index = Index(8)
    index.add(x)
    for ask in (lambda x: exact(x, x), Index(8).add, index.search):
        assert_raises(UnsupportedDtype, "dense", ask, torch.ones(3, 8).to_sparse())
        with pytest.raises(UnsupportedDtype, match="must be dense, got a tensor without values"):
            ask(torch.ones(3, 8, device="meta"))
        assert_raises(UnsupportedDtype, "is a masked array; pass", ask, np.ma.masked_array(x, x > 2))
    marks = np.ma.masked_array([True, True, True], [False, True, False])
    for ask in (lambda: exact(x, x, mask=marks), lambda: index.search(x, mask=marks), lambda: index.add(x, marks)):
        assert_raises(UnsupportedDtype, "is a masked array; pass", ask)


def test_views_that_negate_are_read_as_what_they_show():
    x = torch.from_numpy(clustered(300, 8))
    index = Index(8)
    index.add(torch._neg_view(x))
    for found in (index.search(torch._neg_view(x[:3]), 1), exact(torch._neg_view(x[:3]), torch._neg_view(x), 1)):
        assert torch.equal(found.ids, exact(x[:3], x, 1).ids)


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_default_device_and_autocast_change_nothing(kind):
    index, x = small(kind)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        other, _ = small(kind)
        for mask in (None, range(3, 800, 2), [5, 6]):
            for rows in (x[:1], x[:30]):
                one, two = (each.search(rows, 7, nprobe=4, mask=mask) for each in (index, other))
                assert np.array_equal(one.ids, two.ids)
                assert np.array_equal(one.scores, two.scores)
                mine, truth = exact(rows, x, 7, "l2", mask), index.search(rows, 7, nprobe=9, mask=mask)
                assert np.array_equal(mine.ids, truth.ids)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_an_answer_depends_on_its_query_alone(data):
    """Of any kind and number of lists, by scans or products, under any filter, however many rows are equally good."""
    index, queries = drawn_index(data, kind=data.draw(st.sampled_from(("ivf", "ivfpq"))))
    each = np.random.default_rng(0).random((70, 21_000)) < np.linspace(0, 1, 70)[:, None]
    mask = data.draw(st.sampled_from((None, range(3, 9_000), range(0, 30_000, 7), "each")))
    k, nprobe = data.draw(st.sampled_from((1, 10, 150))), data.draw(st.sampled_from((1, 3, 8)))
    shared, least = data.draw(st.sampled_from((0, 10**9))), data.draw(st.sampled_from((0, 1 << 21)))
    with (
        mock.patch.dict(Index._listed.__globals__, _SHARED=shared, _READERS=0),
        mock.patch.object(lists, "_LEAST_WORK", least),
    ):
        whole = index.search(queries, k, nprobe=nprobe, mask=each if mask == "each" else mask)
    for some in (slice(0, 1), slice(3, 5), slice(10, 50)):
        hits = index.search(queries[some], k, nprobe=nprobe, mask=each[some] if mask == "each" else mask)
        width = hits.ids.shape[1]
        assert np.array_equal(hits.counts, whole.counts[some])
        assert np.array_equal(hits.scores, whole.scores[some, :width])
        assert np.array_equal(hits.ids, whole.ids[some, :width])


@pytest.mark.parametrize("kind", KINDS)
def test_a_filter_gets_all_that_it_leaves(kind):
    """One list is read first; what the filter leaves lies in others."""
    index, x = small(kind)
    far = index.search(x[:1], 900, nprobe=9).ids[0, ::-1]
    for count in (0, 1, 5, 300):
        chosen = np.sort(far[:count])
        hits = index.search(x[:1], 10, nprobe=1, mask=chosen)
        assert hits.counts.tolist() == [min(count, 10)]
        assert hits.ids.shape == (1, min(count, 10))
        assert set(hits.ids[0].tolist()) <= set(chosen.tolist())
    masks = np.zeros((2, 900), bool)
    masks[0, far[:3]] = masks[1, far[:700]] = True
    each = index.search(x[:2], 10, nprobe=1, mask=masks)
    assert each.counts.tolist() == [3, 10]
    assert (each.ids[0, 3:] == -1).all()
    bits = index.search(x[:2], 10, nprobe=1, mask=np.packbits(masks, axis=1, bitorder="little"))
    assert np.array_equal(bits.ids, each.ids)


@pytest.mark.parametrize("kind", KINDS)
def test_queries_and_masks_lie_in_memory_in_any_way(kind):
    index, x = small(kind)
    mask = np.arange(1800) % 3 == 0
    apart, wide = np.repeat(mask[:900], 2)[::2], np.stack([mask] * 12)
    truth = index.search(np.ascontiguousarray(x[::80]), 7, nprobe=4, mask=mask)
    for queries in (x[::80], torch.from_numpy(x)[::80], np.asfortranarray(x[::80]), x[::80].astype(np.float16)):
        for chosen in (mask, apart, torch.from_numpy(apart), wide[:, :900], range(0, 900, 3), np.flatnonzero(mask)):
            hits = index.search(queries, 7, nprobe=4, mask=chosen)
            if queries.dtype != np.float16:
                assert np.array_equal(hits.ids, truth.ids)
                assert np.array_equal(hits.scores, truth.scores)
            assert (np.asarray(hits.ids) % 3 == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_removed_best_answer_is_gone(kind):
    index, x = small(kind)
    best = index.search(x[0], 2, nprobe=9)
    assert best.ids[0] == 0
    assert index.remove([0, 10**9]) == 1
    after = index.search(x[0], 1, nprobe=9)
    assert after.ids[0] == best.ids[1]
    index.add(x[:1], [0])
    assert index.search(x[0], 1, nprobe=1).ids[0] == 0  # not in a list yet, and searched all the same


def test_bits_have_their_hamming_distance():
    x = np.random.default_rng(0).integers(0, 256, (200, 4), dtype=np.uint8)
    index = Index(32, "hamming")
    index.add(x, range(1000, 1200))
    truth = exact(x[:5], x, 3, "hamming", ids=range(1000, 1200))
    assert np.array_equal(index.search(x[:5], 3).ids, truth.ids)
    assert_raises(UnsupportedDtype, "hamming", lambda: index.add(x.astype(np.float32)))


def test_what_an_index_refuses():
    index, x = small("flat")
    for vector, error, text in (
        (x[:, :7], ShapeError, r"x must be \(rows, 8\)"),
        (x[:2] * np.float32("nan"), RangeError, "row 0 of x has NaN"),
        (x[:2].astype(np.uint8), UnsupportedDtype, "not for"),
    ):
        assert_raises(error, text, index.add, vector)
    for ids, text in (
        (["a"], "numbers"),
        ([1, 1], "id 1 is there"),
        ([901, 3], "id 3 is there"),
        ([-1, 950], "0 or larger"),
    ):
        assert_raises((ConfigError, UnsupportedDtype), text, index.add, x[: len(ids)], ids)
    assert_raises(ShapeError, "queries must be", lambda: index.search(x[:2, :3]))
    assert_raises(ConfigError, "k must be", index.search, x, 0)
    assert_raises(ConfigError, "nprobe", index.search, x, nprobe=0)
    assert len(index) == 900
    for options in ({"metric": "dot"}, {"kind": "hnsw"}, {"bits": 5}, {"parts": 3}, {"dim": 0}, {"lists": 0}):
        assert_raises(ConfigError, None, Index, **{"dim": 8, **options})
    assert_raises(UnsupportedCase, "hamming", Index, 8, "hamming", "ivf")
    assert_raises(ConfigError, "centroids need", lambda: Index(8, kind="ivf", lists=100).add(x[:50]))
    assert_raises(ConfigError, "codes of 8 bits", lambda: Index(8, kind="ivfpq").add(x[:50]))
    assert_raises(ConfigError, "train before", lambda: small("ivf")[0].train(x))


def test_an_empty_index_has_no_answers(tmp_path):
    for kind in KINDS:
        index = Index(8, kind=kind)
        assert index.search(np.ones((2, 8), np.float32)).ids.shape == (2, 0)
        assert index.remove([1]) == 0
    flat = Index(8)
    flat.save(tmp_path / "empty")
    assert len(Index.load(tmp_path / "empty")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_readers_beside_a_writer_see_whole_versions(kind):
    """Vectors come in pairs whose ids are n and n + 1000: a search sees both or neither."""
    index, x = small(kind, rows=60)
    index.add(x, range(1000, 1060))
    stop, wrong = threading.Event(), []

    def read():
        while not stop.is_set():
            ids = index.search(x[:1], 2000, nprobe=9).ids
            for row in ids:
                if set(row[row < 1000] + 1000) != set(row[row >= 1000]):
                    wrong.append(row)

    readers = [threading.Thread(target=read) for _ in range(64 if kind == "flat" else 8)]
    for reader in readers:
        reader.start()
    for round_ in range(5):
        first = 200 + 5 * round_
        index.add(np.concatenate([x[:5], x[:5]]), [*range(first, first + 5), *range(first + 1000, first + 1005)])
        index.remove([round_, round_ + 1000])
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
@pytest.mark.parametrize(("kind", "options"), [("flat", {}), ("ivf", {}), ("ivfpq", {}), ("ivfpq", {"rerank": 0})])
def test_a_saved_index_answers_as_before(kind, options, metric, tmp_path):
    index, x = small(kind, metric, **options)
    index.remove(range(100))
    index.add(clustered(20, 8, seed=3), range(5000, 5020))
    path = tmp_path / "index.faiss"
    index.save(path)
    again = Index.load(path)
    assert (again.metric, again.kind, len(again), again.dim) == (metric, kind, len(index), 8)
    for nprobe in (1, 9) if metric != "cosine" else (9,):
        for wanted, found in zip(index.search(x, 5, nprobe=nprobe), again.search(x, 5, nprobe=nprobe), strict=True):
            assert nprobe == 1 or np.array_equal(wanted, found)
    before = path.read_bytes()
    again.save(path)
    assert path.read_bytes() == before


FACTORIES = (
    "Flat", "IVF8,Flat", "IVF8,PQ4", "IVF8,PQ3x4", "IVF8,PQ6x4fs", "IVF8,PQ3x4fs", "PQ4x4", "IVF8,PQ4x4,RFlat",
    "IDMap,Flat", "IDMap2,PQ4x4", "IVF8,PQ6x4fs,RFlat",
)  # fmt: skip


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("metric", [0, 1])
@pytest.mark.parametrize("name", FACTORIES)
def test_indexes_of_faiss_are_read_and_written(name, metric, tmp_path):
    faiss = pytest.importorskip("faiss", reason="needs faiss-cpu")
    x = clustered(900, 12)
    theirs = faiss.index_factory(12, name, metric)
    if name == "IVF8,PQ4":
        theirs.do_polysemous_training = False  # takes seconds
    if "RFlat" in name:
        theirs.k_factor = 60  # so that no equal codes are left out
    theirs.train(x)
    if "IDMap" in name:
        theirs.add_with_ids(x, np.arange(900) * 3 + 1)
    else:
        theirs.add(x)
    path = str(tmp_path / "theirs")
    faiss.write_index(theirs, path)
    ours = faiss_read(path)
    faiss_write(ours, tmp_path / "ours")
    back = faiss.read_index(str(tmp_path / "ours"))
    queries = clustered(40, 12, seed=2)
    for index in (theirs, back):
        if "IVF" in name:
            faiss.ParameterSpace().set_index_parameter(index, "nprobe", 3)
    hits = ours.search(queries, 5, nprobe=3)
    scores, ids = back.search(queries, 5)
    np.testing.assert_allclose(hits.scores, scores, rtol=1e-4, atol=1e-4)
    if "PQ" not in name or "RFlat" in name:
        assert np.array_equal(hits.ids, ids)
    scores, ids = theirs.search(queries, 5)
    if "fs" in name:  # fast scan rounds its tables to 8 bits
        assert recall(ids, hits.ids) > 0.5
    else:
        np.testing.assert_allclose(hits.scores, scores, rtol=1e-4, atol=1e-4)


def test_bits_of_faiss_are_read_and_written(tmp_path):
    faiss = pytest.importorskip("faiss", reason="needs faiss-cpu")
    x = np.random.default_rng(0).integers(0, 256, (300, 8), dtype=np.uint8)
    theirs = faiss.IndexBinaryFlat(64)
    theirs.add(x)
    faiss.write_index_binary(theirs, str(tmp_path / "theirs"))
    ours = faiss_read(tmp_path / "theirs")
    scores, _ = theirs.search(x[:9], 4)
    assert np.array_equal(ours.search(x[:9], 4).scores, scores)
    ours.remove([0])
    faiss_write(ours, tmp_path / "ours")
    scores, ids = faiss.read_index_binary(str(tmp_path / "ours")).search(x[:1], 4)
    assert np.array_equal(ours.search(x[:1], 4).scores, scores)
    assert 0 not in ids


@pytest.mark.parametrize("kind", ["flat", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ivf", "ivfpq"))])
def test_truncated_and_lying_files_are_refused(kind, tmp_path):
    """Cut anywhere, or a byte changed: FormatError, UnsupportedCase, or an index that can be searched."""
    index, _ = small(kind, rows=60, rerank=4)
    index.remove([3])
    path = tmp_path / "index"
    index.save(path)
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    step = max(len(whole) // 20, 1)
    for size in [*range(0, min(len(whole), 240), 7), *range(240, len(whole), step)]:
        path.write_bytes(whole[:size])
        assert_raises(FormatError, "is not an index of FAISS", faiss_read, path)
    for place in [*range(160), *generator.integers(0, len(whole), 150)]:
        for value in (0, 255, whole[place] ^ 1):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                changed = faiss_read(path)
            except (FormatError, UnsupportedCase):
                continue
            changed.search(np.ones((2, changed.dim), np.float32), 3)
    assert_raises(MissingFile, None, faiss_read, tmp_path / "none")


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path):
    resource = pytest.importorskip("resource", reason="limits of files are POSIX's")
    index, x = small("flat")
    path = tmp_path / "index"
    index.save(path)
    before = path.read_bytes()
    index.add(x, range(1000, 1900))
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
    try:
        assert_raises(OSError, "File too large", index.save, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["index"]


SAVES = """
import sys, numpy as np
from accelerant.search import Index
index = Index(32)
index.add(np.ones((20000, 32), np.float32))
print("ready", flush=True)
while True:
    index.save(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX's")
def test_a_killed_save_leaves_a_whole_file(tmp_path):
    path = tmp_path / "index"
    Index(32).save(path)
    with subprocess.Popen([sys.executable, "-c", SAVES, str(path)], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        threading.Event().wait(0.12)
        child.kill()
    assert len(Index.load(path)) in (0, 20000)


def test_ids_to_remove_are_never_bits_and_never_all():
    index = Index(2)
    index.add(np.ones((10, 2), np.float32), ids=np.arange(10, dtype=np.uint8))
    assert index.remove(np.array([3], np.uint8)) == 1
    assert 3 not in index.ids
    assert_raises(ConfigError, "remove needs ids", index.remove, None)
    assert index.remove([]) == 0
    index.add(np.ones((1, 2), np.float32), ids=[2**63 - 1])
    assert_raises(ConfigError, "no ids are left", index.add, np.ones((1, 2), np.float32))
    index.add(np.ones((0, 2), np.float32))
    assert index.remove([2**63 - 1]) == 1
    index.add(np.ones((1, 2), np.float32), ids=[2**63 - 2])
    index.add(np.ones((1, 2), np.float32))
    assert index.ids.max() == 2**63 - 1
    assert_raises(RangeError, f"below 2\\^63, got {2**63}", index.add, np.ones((1, 2), np.float32), ids=[2**63])
    assert small("ivf")[0].search(np.ones(8, np.float32), nprobe=True).ids.shape == (10,)
    for arguments in ({"dim": 2.5}, {"dim": 2, "lists": 1.5}):
        assert_raises(ConfigError, "integers", Index, **arguments)
    assert_raises(ConfigError, "nprobe", index.search, np.ones((1, 2), np.float32), nprobe=1.5)


@pytest.mark.parametrize("options", [{"kind": "ivf"}, {"kind": "ivfpq"}, {"kind": "ivfpq", "rerank": 0}])
def test_an_emptied_index_is_saved_and_filled_again(options, tmp_path):
    x = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    index = Index(8, "l2", lists=2, **options)
    index.add(x)
    index.remove(range(300))
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert len(again) == 0
    again.add(x[:5])
    assert sorted(again.search(x[0], 5).ids.tolist()) == [0, 1, 2, 3, 4]


def test_files_that_lie_of_ids_factors_and_metrics_are_refused(tmp_path):
    import struct

    x = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    index = Index(8, "l2", "ivfpq", lists=2)
    index.add(x)
    index.save(tmp_path / "index")
    whole = (tmp_path / "index").read_bytes()
    flat = Index(8, "l2")
    flat.add(x)
    flat.save(tmp_path / "index")
    plain = (tmp_path / "index").read_bytes()
    lists = Index(8, "l2", "ivf", lists=2)
    lists.add(x, ids=np.arange(300) + 7)
    lists.save(tmp_path / "index")
    named = b"IxMp" + plain[4:37] + (tmp_path / "index").read_bytes() + struct.pack("<Q", 300)
    named += np.arange(300).tobytes()
    nan = whole[:-4] + struct.pack("<f", float("nan"))
    for lying, match in ((nan, "candidates"), (plain + b"accelerant cosine", "not normalized"), (named, "an id for")):
        (tmp_path / "index").write_bytes(lying)
        assert_raises(FormatError, match, Index.load, tmp_path / "index")


def test_ids_at_the_end_of_int64_and_beyond():
    x, last = np.eye(3, dtype=np.float32), 2**63 - 1
    index = Index(3)
    index.add(x, [last, 5, 7])
    assert index.search(x[0], mask=slice(6, None)).ids.tolist() == [last, 7]
    assert index.search(x[1], mask=[np.uint8(5), np.uint8(7)]).ids.tolist() == [5, 7]  # a list has ids, not bits
    assert_raises(ShapeError, "a slice of ids", index.search, x[0], mask=slice(0.5, None))
    assert index.remove([5, 2**64, -1]) == index.remove({7, 2**70}) == 1
    assert index.ids.tolist() == [last]


@pytest.mark.parametrize("count", [1000, 1003])
def test_bits_and_ranges_select_what_bools_do(count):
    random = np.random.default_rng(count)
    x = random.standard_normal((count, 8)).astype(np.float32)
    index = Index(8, kind="ivf", lists=16)
    index.add(x)
    assert index._state.slots.of_rows is not None  # rows lie in another order than their ids
    for queries in (1, 5, 20):
        for _ in range(10):
            bools = random.random((queries, count)) < random.choice([0.05, 0.5])
            more = np.pad(bools, ((0, 0), (0, 13)), constant_values=True)  # of ids that no row has
            start, stop = sorted(random.integers(0, count + 9, 2).tolist())
            inside = np.isin(np.arange(count), range(start, stop))
            for form, same in (
                (np.packbits(bools, 1, "little"), bools), (np.packbits(bools[0], 0, "little"), bools[0]),
                (np.packbits(more, 1, "little"), bools), (range(start, stop), inside), (slice(start, stop), inside),
            ):  # fmt: skip
                found, wanted = (index.search(x[:queries], 10, nprobe=2, mask=mask) for mask in (form, same))
                for a, b in (*zip(found, wanted, strict=True), (found.counts, wanted.counts)):
                    np.testing.assert_array_equal(a, b)
