"""Search by encrypted queries, and counts with noise, of collections."""

import numpy as np
import pytest

from accelerant.errors import BudgetExceeded, ConfigError, RangeError, ShapeError, UnsupportedDtype
from accelerant.privacy import dp
from accelerant.privacy.he import bfv, search
from refusals import assert_raises

N = 8192


def searched(vectors, query, bits=8, device="cpu"):
    public, private = search.keygen(vectors.shape[1], bits)
    server = search.PrivateSearch(vectors, bfv.PublicKey.from_bytes(public.to_bytes(), device=device), query_bits=bits)
    sent = search.encrypt_query(private, query, bits=bits).to_bytes()
    answer = server.scores(bfv.Ciphertext.from_bytes(sent, server._public)).to_bytes()
    scores = bfv.Ciphertext.from_bytes(answer, public)
    assert scores.budget_bits < private.noise_budget(scores) < scores.budget_bits + 20
    return search.decrypt_scores(private, scores, len(vectors))


@pytest.mark.parametrize(("count", "d", "bits"), [
    (1, 1, 8), (3, 2, 8), (100, 5, 8), (N + 3, 8, 4), (40, 17, 12),
    pytest.param(2 * N, 384, 8, marks=pytest.mark.slow), pytest.param(50, 4096, 8, marks=pytest.mark.soak),
])  # fmt: skip
def test_scores_are_the_inner_products(count, d, bits):
    random = np.random.default_rng(d)
    limit = 1 << (bits - 1)
    vectors, query = random.integers(-limit, limit, (count, d)), random.integers(-limit, limit, d)
    vectors[0], query[:] = -limit, -limit  # the largest score
    np.testing.assert_array_equal(searched(vectors, query, bits), vectors @ query)


@pytest.mark.gpu
def test_scores_on_a_gpu_are_the_inner_products():
    random = np.random.default_rng(0)
    vectors, query = random.integers(-128, 128, (N + 3, 100)), random.integers(-128, 128, 100)
    np.testing.assert_array_equal(searched(vectors, query, device="cuda"), vectors @ query)


def test_the_plain_modulus_holds_every_score_and_is_refused_where_none_does():
    for d, bits in ((1, 2), (384, 8), (1024, 8), (4096, 9), (16, 12)):
        t = search.plain_modulus(d, bits)
        assert t % (2 * N) == 1
        assert t > 2 * d * 4 ** (bits - 1)
        bfv.EncryptionParameters(N, t)  # raises unless it is a prime
    for d, bits in ((4096, 10), (384, 12), (0, 8), (4097, 8), (384, 1)):
        assert_raises(ConfigError, None, search.plain_modulus, d, bits)


def test_keys_and_arrays_that_would_give_wrong_scores_are_refused():
    public, private = search.keygen(4, 8)
    vectors = np.full((2, 4), 127)
    assert_raises(RangeError, "scores reach", search.PrivateSearch, np.full((2, 200), 127), public)
    assert_raises(RangeError, "more than 8 bits", search.encrypt_query, private, np.array([1, 200, 0, 0]))
    assert_raises(UnsupportedDtype, "integers", search.PrivateSearch, vectors / 2, public)
    with pytest.raises(UnsupportedDtype, match="is a masked array"):
        search.PrivateSearch(np.ma.masked_array(vectors, vectors > 1), public)
    for wrong in (np.zeros((0, 4), int), np.zeros(4, int)):
        assert_raises(ShapeError, None, search.PrivateSearch, wrong, public)
    plain, other = bfv.keygen(N, search.plain_modulus(4))
    assert_raises(ConfigError, "no key for this rotation", search.PrivateSearch, vectors, plain)
    server = search.PrivateSearch(vectors, public)
    assert_raises(ConfigError, "another key", lambda: server.scores(search.encrypt_query(other, np.ones(4, int))))
    assert_raises(ShapeError, "one ciphertext", lambda: server.scores(private.encrypt(np.ones(4, int))))
    for d in (1, 3, 5):  # in the same period, or another
        with pytest.raises(ShapeError, match=f"the query has dimension {d}, the vectors 4"):
            server.scores(search.encrypt_query(private, np.ones(d, int)))


@pytest.fixture
def people(tmp_path):
    pytest.importorskip("qdrant_edge", reason="needs qdrant-edge-py, of the extra search")
    from accelerant.search import Collection

    with Collection(tmp_path, dim=2) as made:
        towns = ["a"] * 600 + ["b"] * 300 + [["a", "b"]] * 100
        made.upsert(range(1000), np.ones((1000, 2)), [{"town": town, "age": i % 50} for i, town in enumerate(towns)])
        yield made


def test_counts_have_the_noise_of_epsilon_and_are_charged(people):
    ledger = dp.PrivacyLedger(unit="person", budget=dp.Budget(epsilon=40.0, delta=1e-6))
    young = {"must": [{"key": "age", "range": {"lt": 25}}]}
    assert abs(dp.private_count(people, young, epsilon=10.0, ledger=ledger) - 500) < 10
    counts = dp.private_histogram(people, "town", ["a", "b", "c"], epsilon=10.0, ledger=ledger, filter=young)
    assert np.abs(counts - [350, 150, 0]).max() < 10  # who has both towns counts for the first
    assert ledger.epsilon(1e-6) == pytest.approx(20.0, rel=0.01)
    assert_raises(BudgetExceeded, None, dp.private_count, people, epsilon=30.0, ledger=ledger)
    drawn = [dp.private_count(people, epsilon=0.5, ledger=dp.PrivacyLedger()) - 1000 for _ in range(400)]
    assert np.std(drawn) == pytest.approx(2 * np.sqrt(2), rel=0.35)  # of 400 draws: 5 standard errors
    for values in ([], ["a", "a"]):
        with pytest.raises(ConfigError, match="each once"):
            dp.private_histogram(people, "town", values, epsilon=1.0, ledger=ledger)


def test_neighbours_that_replace_a_point_move_two_numbers(people):
    ledger = dp.PrivacyLedger(neighbouring="replace-one")
    dp.private_histogram(people, "town", ["a", "b"], epsilon=1.0, ledger=ledger)
    assert ledger.epsilon(1e-6) == pytest.approx(1.0, rel=0.01)


def test_integers_whose_sums_would_wrap_and_wrong_counts_are_refused():
    public, private = search.keygen(4, 8)
    for wrong in (np.full((1, 4), 2**62), np.full((1, 1), -(2**63)), np.full((1, 1), 2**64 - 1, np.uint64)):
        assert_raises(RangeError, "beyond 32 bits", search.PrivateSearch, wrong, public)
    scores = search.PrivateSearch(np.ones((2, 4), int), public).scores(search.encrypt_query(private, np.ones(4, int)))
    for count in (-1, 10**6):
        assert_raises(ShapeError, "scores, got a count", search.decrypt_scores, private, scores, count)
