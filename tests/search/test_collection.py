"""Collections over Qdrant: answers beside Qdrant's exact mode, writes, faults, and bad input."""

import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest
import torch

from accelerant.errors import ConfigError, FormatError, RangeError, ShapeError
from accelerant.search import Collection
from accelerant.search.collection import Lists
from accelerant.search.qdrant import StoreError, edge_filter
from refusals import assert_raises

qdrant_edge = pytest.importorskip("qdrant_edge", reason="needs qdrant-edge-py, of the extra search")

DIM = 8


def vectors(n, seed=0, dim=DIM):
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


def payloads(n):
    return [{"group": i % 10, "tags": ["even" if i % 2 == 0 else "odd", f"t{i % 3}"]} for i in range(n)]


@pytest.fixture
def made(tmp_path):
    with Collection(tmp_path, "made", dim=DIM) as collection:
        collection.upsert(range(300), vectors(300), payloads(300))
        yield collection


def of_qdrant(collection, query, k, condition=None):
    """Return the answer of Qdrant's exact mode."""
    request = qdrant_edge.QueryRequest(
        query=qdrant_edge.Query.Nearest(query.tolist()), limit=k, params=qdrant_edge.SearchParams(exact=True),
        filter=None if condition is None else edge_filter(condition, qdrant_edge),
    )  # fmt: skip
    found = collection._store._shard.query(request)
    return [one.id for one in found], [one.score for one in found]


CONDITIONS = [
    None,
    {"must": [{"key": "group", "match": {"value": 3}}]},
    {"must_not": [{"key": "tags", "match": {"any": ["even"]}}], "should": [{"key": "group", "range": {"lt": 5}}]},
    {"must": [{"has_id": [1, 2, 299, 1000]}]},
    {"must": [{"key": "tags", "match": {"text": "odd"}}]},
    {"must": [{"key": "nothing", "match": {"value": 1}}]},
]


def clustered(n, seed=0):
    return vectors(30, 99)[np.random.default_rng(seed).integers(0, 30, n)] + 0.3 * vectors(n, seed)


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize(("kind", "metric"), [("ivf", "cosine"), ("ivf", "ip"), ("ivfpq", "l2")])
def test_lists_find_what_is_there_and_are_saved_with_it(tmp_path, kind, metric):
    ids = [*range(1500), *(uuid.UUID(int=i) for i in range(1500))]
    queries = clustered(40, 5)

    def checked(made, *, exactly):
        truth = made.search(queries, 10, filter={"must_not": [{"has_id": []}]})
        found = made.search(queries, 10)
        assert (truth.exact, found.exact) == (True, exactly)
        shares = [len(set(a) & set(b)) / 10 for a, b in zip(found.ids, truth.ids, strict=True)]
        assert np.mean(shares) > (0.999 if exactly else 0.8)
        every = made.search(queries, 10, nprobe=10**6)
        assert (every.ids, every.scores) == (truth.ids, truth.scores)
        return found

    with Collection(tmp_path, dim=DIM, metric=metric, kind=kind) as made:
        made.upsert(ids, clustered(3000), [{"n": i} for i in range(3000)])
        made.build()
        checked(made, exactly=False)
        far = 30 * vectors(3, 7)
        made.upsert([3, 5000, ids[2000]], far)
        made.delete([4, ids[2001]])
        assert [each[0] for each in made.search(far, 1).ids] == [3, 5000, str(ids[2000])]
        assert not {4, str(ids[2001])} & set(made.search(queries, 500).ids[0])
        before = checked(made, exactly=False)
    with Collection(tmp_path) as again:
        assert (again.kind, again._mirror.lists is None) == (kind, False)
        after = checked(again, exactly=False)
        assert after.scores == before.scores
    with Collection(tmp_path, kind="flat") as flat:
        checked(flat, exactly=True)
        flat.upsert([6], far[:1] * 2)
    with Collection(tmp_path) as late:  # the saved lists are not of these points
        assert late.kind == "flat"
        checked(late, exactly=True)
    assert_raises(ConfigError, "kind is flat, ivf, ivfpq", Collection, tmp_path, kind="hnsw")


def test_few_points_remember_their_kind(tmp_path):
    with Collection(tmp_path, dim=DIM, kind="ivfpq") as made:
        made.upsert(range(9), vectors(9, 0))
    with Collection(tmp_path) as again:
        assert (again.kind, again._mirror.lists) == ("ivfpq", None)
        again.upsert(range(9, 2000), clustered(1991))
    with Collection(tmp_path, kind="flat") as flat:
        assert flat.kind == "flat"
    with Collection(tmp_path) as last:
        assert (last.kind, last._mirror.lists is None) == ("ivfpq", False)


@pytest.mark.parametrize("damage", [b"", b"IwFl"])
def test_a_damaged_file_of_lists_is_replaced_and_a_closed_collection_closes_again(tmp_path, damage):
    with Collection(tmp_path, "made", dim=DIM, kind="ivf") as made:
        made.upsert(range(1500), vectors(1500))
        made.close()
    (file,) = tmp_path.glob("*.faiss")
    file.write_bytes(damage)
    with Collection(tmp_path, "made") as made:
        assert made.kind == "ivf"
    with Collection(tmp_path, "made") as made:
        assert made._builder is None
        assert not made.search(vectors(1)).exact


def test_lists_saved_at_the_same_versions_of_other_writes_are_not_read(tmp_path):
    with Collection(tmp_path, dim=DIM, kind="ivf") as made:
        made.upsert(range(1500), vectors(1500, 0))
    shutil.copytree(tmp_path / "vectors", tmp_path / "copy")
    with Collection(tmp_path, kind="ivf") as made:
        made.upsert(range(1500), vectors(1500, 1))
        made.build()
    shutil.rmtree(tmp_path / "vectors")
    shutil.copytree(tmp_path / "copy", tmp_path / "vectors")
    x = vectors(1500, 2)
    with Collection(tmp_path, kind="flat") as restored:
        restored.upsert(range(1500), x)
    with Collection(tmp_path) as again:
        assert again.search(x[:3], 1, nprobe=10**6).ids == [[0], [1], [2]]


def test_old_lists_answer_while_new_ones_are_built(tmp_path, monkeypatch):
    x = clustered(3000)
    with Collection(tmp_path, dim=DIM, kind="ivf") as made:
        made.upsert(range(2000), x[:2000])
        made._builder.join()
        made.build()
        entered, go, build, old = threading.Event(), threading.Event(), Lists.built, made._mirror.lists

        def slow(*arguments):
            entered.set()
            assert go.wait(30)
            return build(*arguments)

        monkeypatch.setattr(Lists, "built", slow)
        made.upsert(range(2000, 3000), x[2000:])
        assert entered.wait(30)
        assert made._mirror.lists is old
        answers = made.search(x[[17, 2017]], 1)
        assert (answers.ids, answers.exact) == ([[17], [2017]], False)
        go.set()
        made._builder.join()
        assert made._mirror.lists is not old
        assert made.search(x[[17, 2017]], 1).ids == [[17], [2017]]


@pytest.mark.parametrize("kind", ["ivf", "ivfpq"])
def test_lists_keep_their_centroids_while_these_fit(tmp_path, kind):
    x, queries = clustered(4000), clustered(40, 5)
    with Collection(tmp_path, dim=DIM, kind=kind) as made:
        seen = []
        for first in range(0, 4000, 500):
            made.upsert(range(first, first + 500), x[first : first + 500])
            for thread in filter(None, [made._builder]):
                thread.join()
            made.delete(range(first, first + 20))
            if (lists := made._mirror.lists) is not None:
                assert not lists.outdated(made._mirror.alive)
                assert sorted(lists.index.ids) == np.flatnonzero(lists.inside).tolist()
                seen.append(lists.index._state.lists)
            truth = made.search(queries, 10, filter={"must_not": [{"has_id": []}]})
            assert made.search(queries, 10, nprobe=10**6).ids == truth.ids
        assert [len({id(each) for each in seen[:n]}) for n in range(1, 7)] == [1, 1, 1, 2, 2, 2]
        made.build()
        again = made._mirror.lists.index._state.lists
        made.upsert(range(4000, 4700), vectors(700, 11))  # in no clusters
        made._builder.join()
        assert len({id(each) for each in (seen[-1], again, made._mirror.lists.index._state.lists)}) == 3


_LEFT_OPEN = """
import sys
import numpy as np
from accelerant.search import Collection
made = Collection(sys.argv[1], dim=16, kind="ivf")
made.upsert(range(60_000), np.random.default_rng(0).standard_normal((60_000, 16)))
assert made._builder.is_alive()
"""


def test_a_process_may_end_while_lists_are_built(tmp_path):
    subprocess.run([sys.executable, "-c", _LEFT_OPEN, str(tmp_path)], check=True)


@pytest.mark.parametrize("metric", ["cosine", "ip", "l2"])
def test_answers_equal_qdrants_exact_mode(tmp_path, metric):
    with Collection(tmp_path, dim=DIM, metric=metric) as collection:
        collection.upsert(range(300), vectors(300), payloads(300))
        collection.upsert([7, 11], vectors(2, seed=3), [{"group": 3}, {"group": 4}])
        collection.delete([13, 3])
        for query in vectors(5, seed=1):
            for condition in CONDITIONS:
                for k in (1, 10, 400):
                    found = collection.search(query, k, filter=condition)
                    ids, scores = of_qdrant(collection, query, k, condition)
                    assert found.ids[0] == ids
                    assert found.scores[0] == pytest.approx(scores, rel=1e-5, abs=1e-6)
                    assert len(ids) == min(k, found.selected)
                    assert found.age_s is None


def test_batches_payloads_and_ids_that_are_uuids(made):
    name = uuid.uuid4()
    made.upsert([name], vectors(1, seed=9), [{"group": 77}])
    found = made.search(torch.from_numpy(np.concatenate([vectors(1, seed=9), vectors(1)])), 2, payloads=True)
    assert found.ids[0][0] == str(name)
    assert found.ids[1][0] == 0
    assert found.payloads[0][0] == {"group": 77}
    assert made.select({"must": [{"has_id": [str(name).upper()]}]}).tolist() == [str(name)]


def test_a_column_follows_writes(made):
    condition = {"must": [{"key": "group", "match": {"value": 3}}]}
    assert made.count(condition) == 30
    made.upsert([1000, 0], vectors(2), [{"group": 3}, {"group": 3}])
    assert made.count(condition) == 32
    made.upsert([3], vectors(1), [{"group": 4}])
    assert made.delete(filter={"must": [{"has_id": [13]}]}) == 1
    assert made.count(condition) == 30
    assert made.delete([13, 5000]) == 0


def test_a_deleted_first_is_gone_and_many_writes_keep_the_mirror_small(made):
    first = made.search(vectors(1), 1).ids[0][0]
    made.delete([first])
    assert made.search(vectors(1), 1).ids[0][0] != first
    for turn in range(6):
        made.upsert(range(1000), vectors(1000, seed=turn))
    assert made._mirror.size < 4000
    assert made.search(vectors(1000, seed=5)[17], 1).ids == [[17]]


def test_writes_behind_its_back_are_found(made):
    shard, row = made._store._shard, vectors(1, seed=21)[0]
    shard.update(qdrant_edge.UpdateOperation.upsert_points([qdrant_edge.Point(5, row.tolist(), {"group": 42})]))
    assert made.search(row, 1).ids == [[5]]
    assert made.count({"must": [{"key": "group", "match": {"value": 42}}]}) == 1
    shard.update(qdrant_edge.UpdateOperation.set_payload([6], {"group": 43}))
    assert made.count({"must": [{"key": "group", "match": {"value": 43}}]}) == 1
    shard.update(qdrant_edge.UpdateOperation.delete_points([5]))
    assert made.search(row, 1).ids != [[5]]


def test_opens_again_with_the_same_answers(tmp_path):
    with Collection(tmp_path, dim=DIM) as collection:
        collection.upsert(range(50), vectors(50), payloads(50))
        before = collection.search(vectors(3, seed=1), 5)
        assert_raises(ConfigError, "open in another process", Collection, tmp_path)
    with Collection(tmp_path) as collection:
        after = collection.search(vectors(3, seed=1), 5)
    assert after == before


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"dim": DIM + 1}, ConfigError, "has the dimension 8, not 9"),
    ({"dim": DIM, "metric": "l2"}, ConfigError, "has the metric cosine, not l2"),
])  # fmt: skip
def test_another_collection_is_named(made, tmp_path, arguments, error, message):
    made.close()
    assert_raises(error, message, Collection, tmp_path, "made", **arguments)


def test_a_folder_that_is_no_collection_is_named(tmp_path):
    assert_raises(ConfigError, "give dim", Collection, tmp_path, "new")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("text")
    assert_raises(FormatError, "no collection", Collection, tmp_path, "other", dim=3)
    for text in ('{"vectors": {}}', "{", '{"vectors": {"": {"size": 2, "distance": "Manhattan"}}}', "[1]",
                 '{"vectors": {"image": {"size": 2, "distance": "Dot"}}}'):  # fmt: skip
        (tmp_path / "other" / "edge_config.json").write_text(text)
        assert_raises(FormatError, None, Collection, tmp_path, "other")
    (tmp_path / "other" / "edge_config.json").write_text('{"vectors": {"": {"size": 2, "distance": "Dot"}}}')
    (tmp_path / "other" / "segments").mkdir()
    (tmp_path / "other" / "segments" / "x").write_text("")
    assert_raises(ConfigError, "name", Collection, tmp_path, "../other")


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda c: c.upsert([1], np.ones((1, 3))), ShapeError, r"must be \(n, 8\), got \(1, 3\)"),
    (lambda c: c.upsert([1, 2], vectors(1)), ShapeError, "2 ids, 1 vectors"),
    (lambda c: c.upsert([1, 1], vectors(2)), ConfigError, "the id 1 is there twice"),
    (lambda c: c.upsert(["x"], vectors(1)), ConfigError, "UUID"),
    (lambda c: c.upsert([True], vectors(1)), ConfigError, "UUID"),
    (lambda c: c.upsert([1], np.full((1, DIM), np.nan)), RangeError, r"vectors\[0\] has NaN"),
    (lambda c: c.upsert([1], np.full((1, DIM), np.inf)), RangeError, "infinity"),
    (lambda c: c.upsert([1], np.zeros((1, DIM))), RangeError, "is zero"),
    (lambda c: c.upsert([1], vectors(1), [{"x": float("nan")}]), ConfigError, "JSON"),
    (lambda c: c.upsert([1], vectors(1), ["x"]), ConfigError, "JSON object"),
    (lambda c: c.upsert([1], [["a"] * DIM]), ShapeError, "must be numbers"),
    (lambda c: c.search(np.ones(3)), ShapeError, r"queries must be \(n, 8\)"),
    (lambda c: c.search(np.zeros(DIM)), RangeError, "is zero"),
    (lambda c: c.search(vectors(1), 0), ConfigError, "k must be at least 1"),
    (lambda c: c.search(vectors(1), filter=[]), ConfigError, "filter"),
    (lambda c: c.search(vectors(1), filter={"mist": []}), ConfigError, "cannot have 'mist'"),
    (lambda c: c.search(vectors(1), filter={"must": [{"key": "a"}]}), ConfigError, "says nothing"),
    (lambda c: c.search(vectors(1), filter={"min_should": {"conditions": [], "min_count": 1}}), ConfigError, "0 to 0"),
    (lambda c: c.search(vectors(1), filter={"must": [{"key": "a..b", "is_null": True}]}), ConfigError, "path"),
    (lambda c: c.search(vectors(1), filter={"must": [{"key": "a", "range": {"gt": "soon"}}]}), ConfigError, "2026-01"),
    (lambda c: c.search(vectors(1), filter={"must": [{"key": "a", "match": {}}]}), ConfigError, "one of"),
    (lambda c: c.search(vectors(1), filter={"must": [{"key": "a", "match": {"value": 1.5}}]}), ConfigError, "texts"),
    (lambda c: c.search(vectors(1), filter={"must": [{"has_vector": 3}]}), ConfigError, "does not take"),
])  # fmt: skip
def test_bad_input_is_refused_and_changes_nothing(made, call, error, message):
    assert_raises(error, message, call, made)
    assert len(made) == 300
    assert made.search(vectors(300)[17], 1).ids == [[17]]


def test_empty_collections_queries_and_writes(tmp_path):
    with Collection(tmp_path, dim=DIM) as collection:
        found = collection.search(vectors(2), 5, payloads=True)
        assert (found.ids, found.scores, found.selected, found.payloads) == ([[], []], [[], []], 0, [[], []])
        collection.upsert([], np.empty((0, DIM)))
        assert collection.search(np.empty((0, DIM)), 5).ids == []
        assert len(collection) == 0


_WRITER = """
import sys
import numpy as np
from accelerant.search import Collection
with Collection(sys.argv[1], dim=32) as collection:
    start = len(collection) // 500
    print(start, flush=True)
    for turn in range(start, int(sys.argv[2])):
        ids = range(500 * turn, 500 * turn + 500)
        collection.upsert(ids, np.random.default_rng(turn).standard_normal((500, 32)), [{"turn": turn}] * 500)
        print(turn + 1, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize("points", [0, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_what_was_written_survives_kill_9_at_any_moment(tmp_path, points):
    """Each batch that the writer has reported is there, and no part of another."""
    random, done = np.random.default_rng(5), points // 500
    if points:
        subprocess.run([sys.executable, "-c", _WRITER, str(tmp_path), str(done)], check=True, stdout=subprocess.DEVNULL)
    for written in range(5):
        command = [sys.executable, "-c", _WRITER, str(tmp_path), str(done + 100_000)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(1 + written):
            process.stdout.readline()
        time.sleep(random.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        reported = max([done, *map(int, process.communicate()[0].split())])
        with Collection(tmp_path) as collection:
            assert len(collection) % 500 == 0
            assert len(collection) >= 500 * reported
            done = len(collection) // 500
            for turn in random.choice(done, min(done, 40), replace=False).tolist():
                last = np.random.default_rng(turn).standard_normal((500, 32))[-1]
                assert collection.search(last, 1).ids == [[500 * turn + 499]]
                assert collection.count({"must": [{"key": "turn", "match": {"value": turn}}]}) == 500
    assert done > points // 500 + 5


@pytest.mark.slow
def test_64_readers_beside_a_writer_see_whole_batches(tmp_path):
    old, new = {"must": [{"key": "turn", "range": {"gte": 0}}]}, 5
    with Collection(tmp_path, dim=DIM) as collection:
        collection.upsert(range(64), vectors(64), [{"turn": 0}] * 64)
        wrong, stop = [], threading.Event()

        def read(number):
            query = vectors(64)[number]
            while not stop.is_set():
                found = collection.search(query, 64, filter=old)
                if len(set(found.ids[0])) != len(found.ids[0]) or found.selected < 64:
                    wrong.append(found)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for turn in range(new):
            collection.upsert(range(64), vectors(64, seed=turn), [{"turn": turn}] * 64)
            collection.upsert([1000 + turn], vectors(1, seed=turn), [{"turn": turn}])
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert collection.search(vectors(64, seed=new - 1)[3], 1).ids == [[3]]
        assert collection.search(vectors(1), 1000, filter=old).selected == 64 + new


_FULL = """
import sys
import numpy as np
from accelerant.search import Collection
from accelerant.search.qdrant import StoreError
rows = np.random.default_rng(0).standard_normal((1000, 256))
with Collection(sys.argv[1], dim=256) as collection:
    try:
        for turn in range(100):
            collection.upsert(range(1000 * turn, 1000 * turn + 1000), rows + turn)
    except StoreError as error:
        print(error)
    written = len(collection)
    assert collection.search(rows, 1).ids == [[i] for i in range(1000)] and written
with Collection(sys.argv[1]) as collection:
    print(written, len(collection))
"""
_SMALL_DISK = 'mount -t tmpfs -o size=128m none "$1" && exec "$2" -c "$3" "$1"'


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the small disk is a tmpfs in a namespace of its own")
def test_a_full_disk_is_an_error_before_qdrant_would_end_the_process(tmp_path):
    command = ["unshare", "-rm", "sh", "-c", _SMALL_DISK, "sh", str(tmp_path), sys.executable, _FULL]
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("namespaces of users are switched off here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "almost full" in done.stdout, done.stderr[-2000:]
    written, found = done.stdout.splitlines()[-1].split()
    assert written == found


def test_a_server_is_answered_for_with_its_age():
    # The client's own local mode answers: no package brings a server. Its filters of text are not a server's.
    library = pytest.importorskip("qdrant_client", reason="needs the extra search")
    client = library.QdrantClient(":memory:")
    with Collection(client, "papers", dim=DIM) as collection:
        collection.upsert(range(100), vectors(100), payloads(100))
        for condition in CONDITIONS[:4]:
            found = collection.search(vectors(3, seed=1), 7, filter=condition)
            for query, ids in zip(vectors(3, seed=1), found.ids, strict=True):
                options = {} if condition is None else {"query_filter": library.models.Filter(**condition)}
                expected = client.query_points("papers", query=query.tolist(), limit=7, **options).points
                assert ids == [one.id for one in expected]
        assert found.age_s >= 0
        row = vectors(1, seed=30)
        client.upsert("papers", points=[library.models.PointStruct(id=5, vector=row[0].tolist())])
        assert collection.search(row, 1).ids != [[5]]
        collection.refresh()
        assert collection.search(row, 1).ids == [[5]]
        collection.delete([5])
        assert client.count("papers").count == 99
        collection.upsert([1, 2, 3], vectors(3), [{"a b": 1}, {"a.b": 1}, {"a": {"b": 1}}])
        for row, key in enumerate(('"a b"', '"a.b"', "a.b"), 1):
            assert collection.select({"must": [{"key": key, "match": {"value": 1}}]}).tolist() == [row]


def test_a_write_whose_answer_is_lost_is_seen_by_the_next_search():
    library = pytest.importorskip("qdrant_client", reason="needs the extra search")

    class Lost(library.QdrantClient):
        def upsert(self, *args, **options):
            super().upsert(*args, **options)
            raise TimeoutError("no answer")

    row = vectors(1, seed=30)
    with Collection(Lost(":memory:"), "papers", dim=DIM) as collection:
        assert_raises(StoreError, "upsert: TimeoutError", collection.upsert, [5], row)
        assert collection.search(row, 1).ids == [[5]]


def test_a_server_that_is_not_there_is_an_error():
    pytest.importorskip("qdrant_client", reason="needs the extra search")
    assert_raises(StoreError, "did not answer", Collection, "http://127.0.0.1:9", "papers", dim=DIM)


def test_the_old_vectors_answer_while_new_ones_are_read(made, monkeypatch):
    entered, go = threading.Event(), threading.Event()
    read = made._store.read

    def slow():
        entered.set()
        assert go.wait(30)
        return read()

    monkeypatch.setattr(made._store, "read", slow)
    thread = threading.Thread(target=made.refresh)
    thread.start()
    assert entered.wait(30)
    assert made.search(vectors(300)[17], 1).ids == [[17]]
    go.set()
    thread.join()
    assert made.search(vectors(300)[17], 1).ids == [[17]]


@pytest.mark.gpu
def test_a_mirror_on_a_gpu_answers_as_one_on_the_cpu(tmp_path):
    with Collection(tmp_path, dim=384, device="cuda") as collection:
        collection.upsert(range(20_000), vectors(20_000, dim=384), payloads(20_000))
        collection.delete(range(0, 20_000, 7))
        found = [collection.search(vectors(20, seed=1, dim=384), 10, filter=condition) for condition in CONDITIONS]
    with Collection(tmp_path) as collection:
        for condition, expected in zip(CONDITIONS, found, strict=True):
            assert collection.search(vectors(20, seed=1, dim=384), 10, filter=condition).ids == expected.ids


def test_payloads_that_qdrant_could_not_read_again_are_refused(tmp_path):
    deep: dict = {}
    for _ in range(200):
        deep = {"a": deep}
    filter = {"must": [{"key": "a", "range": {"lte": 10**400}}]}
    with Collection(tmp_path, "deep", dim=2, metric="ip") as made:
        made.upsert([1], [[1.0, 0.0]], [{"a": 1}])
        for payload in (deep, {"a": chr(0xD800)}, {"a": 10**400}):
            assert_raises(ConfigError, "payload must be", made.upsert, [2], [[1.0, 0.0]], [payload])
        assert_raises(RangeError, "norm above 1e19", made.upsert, [2], [[1e25, 0.0]])
        assert made.search([1.0, 0.0], np.int64(3), filter=filter).ids == [[1]]
        for _ in range(2000):
            filter = {"must": [filter]}
        assert_raises(ConfigError, "at most 64 levels", made.count, filter)
    assert_raises(StoreError, "Qdrant Edge did not", made.search, [1.0, 0.0])
