"""Filters over payloads: which points they select, beside Qdrant Edge."""

import itertools

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from accelerant.search.payload_filter import Evaluator, Table
from accelerant.search.qdrant import edge_filter

qdrant_edge = pytest.importorskip("qdrant_edge", reason="needs qdrant-edge-py, of the extra search")

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 5), st.sampled_from([2**53 + 1, 2**62, -(2**63), 2**63 - 1]),
    st.sampled_from([0.5, 1.0, -2.5, 1e300]), st.sampled_from(["x", "y", "1", "", "red Fox", "2020-01-01"]),
    st.sampled_from(["2020-01-01T00:00:00Z", "2021-06-01 12:00:00", "2020-01-01T01:00:00+01:00", "2020-02-30"]),
)  # fmt: skip
NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2), max_leaves=5
)
PAYLOADS = st.lists(st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=12)
KEYS = st.sampled_from(
    ["a", "b", "c", "a.b", "a[]", "a[].b", "b[0]", "c[].a.b", '"a"."c"', "a[1].b", "a[][]", "missing"]
)
WHOLE = st.integers(-3, 5) | st.sampled_from([2**53 + 1, 2**62, 2**63 - 1, -(2**63)])
WORDS = st.sampled_from(["x", "y", "1", "", "red Fox", "2020-01-01", "zzz"])


def _some(bound):
    return st.dictionaries(st.sampled_from(["gt", "gte", "lt", "lte"]), bound, min_size=1, max_size=2)


FIELDS = st.builds(
    lambda key, rest: {"key": key, **rest},
    KEYS,
    st.one_of(
        st.builds(lambda x: {"match": {"value": x}}, WHOLE | WORDS | st.booleans()),
        st.builds(lambda name, xs: {"match": {name: xs}}, st.sampled_from(["any", "except"]),
                  st.lists(WHOLE, min_size=1, max_size=3) | st.lists(WORDS, min_size=1, max_size=3)),
        st.builds(lambda x: {"range": x}, _some(st.sampled_from([-2.5, 0.0, 0.5, 1.0, 2.0, 4.0, 2.0**53, 2.0**62]))),
        st.builds(lambda x: {"range": x}, _some(st.sampled_from(["2020-01-01T00:00:00Z", "2021-01-01T00:00:00Z"]))),
        st.builds(lambda x: {"values_count": x}, _some(st.integers(0, 3))),
        st.builds(lambda x: {"is_empty": x}, st.booleans()),
        st.builds(lambda x: {"is_null": x}, st.booleans()),
        st.builds(lambda x: {"match": {"value": x}, "is_empty": True}, WHOLE),
        st.builds(lambda x: {"match": {"text": x}}, st.sampled_from(["fox", "red", "x"])),
    ),
)  # fmt: skip
LEAVES = st.one_of(
    FIELDS, FIELDS, FIELDS,
    st.builds(lambda key: {"is_empty": {"key": key}}, KEYS),
    st.builds(lambda key: {"is_null": {"key": key}}, KEYS),
    st.builds(lambda ids: {"has_id": ids}, st.lists(st.integers(0, 14), max_size=4)),
)  # fmt: skip


def _clauses(inner):
    some = st.lists(inner, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "must": some, "should": some, "must_not": some,
            "min_should": st.builds(
                lambda c, n: {"conditions": c, "min_count": min(n, len(c))}, some, st.integers(0, 3)
            ),
        },
    )  # fmt: skip


NESTED = st.builds(
    lambda key, inner: {"nested": {"key": key, "filter": inner}},
    st.sampled_from(["a", "b", "c", "a[]", "a.b", "b[].c"]), _clauses(FIELDS),
)  # fmt: skip
FILTERS = _clauses(st.recursive(LEAVES | NESTED, _clauses, max_leaves=4))


def selected(payloads, condition, shard):
    """Return what we select, with Qdrant asked where we do."""
    table = Table()
    table.extend(payloads)

    def ask(one):
        mask = np.zeros(len(payloads), bool)
        mask[edge_ids(shard, {"must": [one]})] = True
        return mask

    mask = Evaluator(table, lambda ids: [i for i in ids if i < len(payloads)], ask).mask(condition)
    return np.flatnonzero(mask).tolist()


def edge_ids(shard, condition):
    found, _ = shard.scroll(qdrant_edge.ScrollRequest(limit=1000, filter=edge_filter(condition, qdrant_edge)))
    return [record.id for record in found]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Return a function that makes a shard of payloads; one folder serves, emptied for each."""
    config = qdrant_edge.EdgeConfig(vectors=qdrant_edge.EdgeVectorParams(size=1, distance=qdrant_edge.Distance.Dot))
    made = {}

    def shard(payloads, indexed=False):
        if indexed not in made:
            made[indexed] = qdrant_edge.EdgeShard.create(str(tmp_path_factory.mktemp("shard") / "c"), config)
            for name, kind in zip("abc", ("Keyword", "Integer", "Float"), strict=True) if indexed else ():
                made[indexed].update(
                    qdrant_edge.UpdateOperation.create_field_index(name, getattr(qdrant_edge.PayloadSchemaType, kind))
                )
        one = made[indexed]
        one.update(qdrant_edge.UpdateOperation.delete_points(list(range(20))))
        one.update(
            qdrant_edge.UpdateOperation.upsert_points([qdrant_edge.Point(i, [1.0], p) for i, p in enumerate(payloads)])
        )
        return one

    yield shard
    for each in made.values():
        each.close()


@pytest.mark.sample(2, 1)
@pytest.mark.search(0.05)
@pytest.mark.parametrize("indexed", [False, True])
def test_selects_what_qdrant_selects(shards, rng, record_property, indexed):
    # An index of integers takes ranges of times for seconds.
    conditions = FILTERS.filter(lambda one: not indexed or "T00:00:00Z" not in str(one))
    tried = 0

    @seed(rng.getrandbits(32))
    @settings(max_examples=100, deadline=None, database=None)
    @given(payloads=PAYLOADS, condition=conditions)
    def compare(payloads, condition):
        nonlocal tried
        tried += 1
        shard = shards(payloads, indexed)
        assert selected(payloads, condition, shard) == edge_ids(shard, condition)

    compare()
    record_property("filters beside Qdrant Edge", tried)


VALUES_AT_EDGES = [
    2**63 - 1, -(2**63), 2**63, 0, 1, True, [True, 1], [False], None, [], [[]], [[], [1]], [[None], [1]], [[None, 3]],
    [[], None], [3, None], {}, [{"b": True, "t": "fox"}], [{"b": 1, "t": "fox"}],
]  # fmt: skip


def test_ends_of_int64_booleans_and_values_in_lists(shards):
    payloads = [{"a": value} for value in VALUES_AT_EDGES] + [{}]
    shard = shards(payloads)
    of_nested = [{"key": "t", "match": {"text": "fox"}}, {"key": "b", "match": {"value": True}}]
    for condition, rows in (
        *(({"key": "a", "match": {"value": VALUES_AT_EDGES[i]}}, [i]) for i in (0, 1, 3)),
        ({"key": "a", "match": {"value": 1}}, [4, 6]), ({"key": "a", "match": {"value": True}}, [5, 6]),
        ({"key": "a", "match": {"value": False}}, [7]), ({"key": "a", "match": {"any": [2**63 - 1]}}, [0]),
        ({"nested": {"key": "a", "filter": {"must": of_nested}}}, [17]),
        ({"nested": {"key": "a", "filter": {"should": []}}}, []), ({"should": []}, list(range(len(payloads)))),
    ):  # fmt: skip
        assert selected(payloads, condition, shard) == edge_ids(shard, {"must": [condition]}) == rows, condition
    for key, name, value in itertools.product(("a", "a[]", "a[][]", "a[0]"), ("is_empty", "is_null"), (True, False)):
        for condition in ({"key": key, name: value}, {name: {"key": key}}):
            assert selected(payloads, condition, shard) == edge_ids(shard, {"must": [condition]}), condition
