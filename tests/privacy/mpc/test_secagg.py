"""Secure aggregation: exact sums under dropouts, and everything that parties refuse."""

import copy
import hmac
import itertools
import math
import os
import pickle
from dataclasses import fields, replace
from fractions import Fraction
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import nn
from torch.utils._pytree import tree_flatten

from accelerant.errors import (
    BudgetExceeded,
    ConfigError,
    DivergenceError,
    FormatError,
    ProtocolError,
    ShapeError,
    UnsupportedCase,
    UnsupportedDtype,
)
from accelerant.privacy import mpc
from accelerant.privacy.dp import Budget, PrivacyLedger
from accelerant.privacy.dp.noise.discrete import charge
from accelerant.privacy.mpc.secagg import encoding, messages, run_round
from accelerant.privacy.mpc.secagg.encoding import scaled_down
from accelerant.privacy.mpc.secagg.messages import STAGES, AggregationReader
from accelerant.privacy.mpc.secagg.protocol import (
    SECURITY,
    failure_log2,
    least_neighbours,
    local_threshold,
    make_identities,
)
from refusals import assert_raises

CLIENTS, SIZE = 5, 33


class Party:
    """A setup with its clients and their updates, on a grid so that sums are exact."""

    def __init__(self, clients=CLIENTS, threshold=4, size=SIZE, **settings):
        self.setup = mpc.SecureAggregation(clients, threshold, size, **{"max_abs": 8.0, "step": 0.125, **settings})
        self.signing, self.keys = make_identities(clients)
        self.clients = [self.setup.client(i, key, self.keys) for i, key in enumerate(self.signing)]
        draw = np.random.default_rng(1)
        self.updates = [torch.from_numpy(draw.integers(-64, 65, size) * 0.125) for _ in range(clients)]

    def server(self, number=0, **options):
        return self.setup.server(number, self.keys, **options)

    def run(self, number=0, leaving=None, **options):
        server = self.server(number, **options)
        return run_round(server, self.clients, lambda i: (self.updates[i], 1), number, leaving or {})

    def sum(self, survivors):
        return sum(self.updates[i] for i in survivors)

    def upto(self, stage, number=0):
        """The server, and its answers to which clients reply with their message of a stage."""
        server, answers = self.server(number), dict.fromkeys(range(len(self.clients)), b"")
        for name in STAGES[: STAGES.index(stage)]:
            for i, answer in answers.items():
                server.receive(self.step(name, i, answer, number))
            answers = server.advance()
        return server, answers

    def step(self, stage, i, answer, number=0):
        client = self.clients[i]
        if stage == "advertise":
            return client.advertise(number)
        if stage == "mask":
            return client.masked_input(answer, self.updates[i])
        return {"share": client.share_keys, "consistency": client.consistency, "unmask": client.unmask}[stage](answer)


@pytest.fixture
def party():
    return Party()


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_sums_are_exact_whoever_leaves(party, stage):
    result = party.run(leaving={stage: [2]} if stage else None)
    survivors = tuple(i for i in range(CLIENTS) if i != 2 or stage in (None, "consistency", "unmask"))
    assert result.survivors == survivors
    assert result.weight == len(survivors)
    assert torch.equal(result.sum, party.sum(survivors))
    assert torch.equal(result.mean, party.sum(survivors) / len(survivors))


def test_rounds_follow_each_other_with_other_masks(party):
    first, second = party.run(0), party.run(7)
    assert torch.equal(first.sum, second.sum)
    assert party.clients[0].last_round == 7


@pytest.mark.parametrize("stage", STAGES)
def test_too_few_clients_lose_the_round(party, stage):
    with pytest.raises(ProtocolError, match=f"3 clients sent their message of stage {stage}, the threshold is 4"):
        party.run(leaving={stage: [0, 3]})


def test_a_sparse_graph_sums_exactly():
    party = Party(24, 16, neighbours="auto", size=3)
    result = party.run(leaving={"share": [1], "mask": [4]})
    assert party.setup.neighbours < 20
    assert torch.equal(result.sum, party.sum(set(range(24)) - {1, 4}))
    assert result.stages["mask"].clients == 22


@pytest.mark.parametrize("dropped", [20, 1])
def test_a_sparse_graph_reveals_no_seed_of_a_client_without_masks(dropped):
    """A server that tells a client that those it drew have left gets its input without masks, but not its seed."""
    party = Party(24, 16, neighbours="auto", size=3)
    server, answers = party.upto("mask")
    body, context = AggregationReader(answers[0][42:], 24), party.setup.context(0, party.keys)
    drawn, sealed = body.ids(), body.pieces()
    left = set(drawn[:dropped])
    told = messages.pack_ids(set(drawn) - left) + messages.pack_pieces({i: sealed[i] for i in set(sealed) - left})
    sent = {i: party.step("mask", i, answers[i]) for i in range(1, 24)}
    lie = party.step("mask", 0, messages.pack_message(messages.MASK, context, 0, told))
    assert_raises(ProtocolError, "client 0 has not masked its input with those that it was told", server.receive, lie)
    statements = {i: message[42:110] for i, message in sent.items()}
    true = lie[42 : 42 + 4 * (len(left) + 1) + 64]
    forged = itertools.cycle([true, statements[1], messages.pack_ids([]) + true[-64:], None])
    signed = []
    for i in range(1, 24):
        passed = {j: statements[j] for j in statements if i in server._sealed[j]}
        if i in server._sealed[0]:
            passed |= {0: each} if (each := next(forged)) else {}
        told = messages.pack_ids(range(24)) + messages.pack_pieces(passed)
        answer = messages.pack_message(messages.CONSISTENCY, context, i, told)
        if i not in server._sealed[0]:
            signed.append(party.clients[i].consistency(answer))
            continue
        with pytest.raises(ProtocolError, match=r"masks are missing|is not client 0's|not passed on"):
            party.clients[i].consistency(answer)
    assert len(signed) == 23 - party.setup.neighbours < party.setup.threshold


def test_members_of_a_sparse_graph_have_one_list_of_members():
    """A server that leaves a member out of what it tells one client gets no signature of those that hold its shares."""
    party = Party(24, 16, neighbours="auto", size=3)
    server, answers = party.upto("share")
    pieces = AggregationReader(answers[0][42:], 24).pieces()
    del pieces[23]
    context = party.setup.context(0, party.keys)
    answers[0] = messages.pack_message(messages.SHARE, context, 0, messages.pack_pieces(pieces))
    for i, answer in answers.items():
        server.receive(party.step("share", i, answer))
    answers = server.advance()
    body = AggregationReader(answers.pop(0)[42:], 24)
    told = messages.pack_ids(body.ids()) + messages.pack_pieces({i: x for i, x in body.pieces().items() if i != 23})
    lie = party.step("mask", 0, messages.pack_message(messages.MASK, context, 0, told))
    assert_raises(ProtocolError, "signature is not client 0's", server.receive, lie)
    for i, answer in answers.items():
        server.receive(party.step("mask", i, answer))
    held, statement = set(server._sealed[0]), lie[42:110]
    for i, answer in server.advance().items():
        body = AggregationReader(answer[42:], 24)
        passed = (body.ids(), body.pieces())[1]
        told = messages.pack_ids(range(24)) + messages.pack_pieces(passed | ({0: statement} if i in held else {}))
        if i in held:
            with pytest.raises(ProtocolError, match="signature is not client 0's"):
                party.clients[i].consistency(messages.pack_message(messages.CONSISTENCY, context, i, told))


def test_weights():
    updates = [torch.full((2, 3), i + 1) for i in range(4)]
    total, report = mpc.secure_aggregate(updates, threshold=3, weights=np.array([5, 1, 2, 9]), leaving={"mask": [3]})
    assert torch.equal(total, torch.full((2, 3), 5 + 2 + 6))
    assert report.weight == 8
    assert total.dtype == torch.int64
    assert {name: stage.clients for name, stage in report.stages.items()} == dict(
        zip(STAGES, (4, 4, 3, 3, 3), strict=True)
    )
    assert all(stage.bytes_up > 0 for stage in report.stages.values())


def test_floats_and_arrays_are_rounded_to_a_fine_step():
    updates = [np.linspace(-1, 1, 7) * scale for scale in (1, 2, 3)]
    total, report = mpc.secure_aggregate(updates, threshold=2)
    assert np.allclose(total.numpy(), np.linspace(-1, 1, 7) * 6, atol=1e-7)
    assert report.survivors == (0, 1, 2)
    with pytest.raises(DivergenceError, match="update 1 has elements that are NaN or infinite"):
        mpc.secure_aggregate([updates[0], updates[1] * math.inf], threshold=2)


def test_a_models_parameters_are_aggregated_as_they_are():
    module = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    module[1].num_batches_tracked += 3
    forms = [
        {"w": torch.ones(3)},
        [torch.ones(2), np.full((1, 2), 0.5)],
        {"layers": [{"w": torch.ones(2, 2)}, (torch.tensor(2), True)], "n": torch.arange(2)},
        module.state_dict(),
    ]
    for form in forms:
        total = mpc.secure_aggregate([form] * 3, threshold=2, max_abs=4.0).total
        leaves, wanted = map(tree_flatten, (total, form))
        assert (total.keys() if isinstance(form, dict) else type(total)) == (
            form.keys() if isinstance(form, dict) else type(form)
        )
        for found, each in zip(leaves[0], wanted[0], strict=True):
            each = torch.as_tensor(each)
            assert found.dtype == (torch.float64 if each.is_floating_point() else torch.int64)
            assert torch.allclose(found.double(), 3 * each.detach().double(), atol=1e-6)
    own = dict(module.named_parameters())
    for each in (module, iter(module.parameters())):
        total = mpc.secure_aggregate([each, own if each is module else list(own.values())], threshold=2).total
        found = total if isinstance(total, dict) else dict(zip(own, total, strict=True))
        assert all(torch.allclose(found[name], 2 * own[name].double(), atol=1e-6) for name in own)
    ordered = [{"a": torch.ones(1), "b": torch.zeros(1)}, {"b": torch.zeros(1), "a": torch.ones(1)}]
    assert mpc.secure_aggregate(ordered, threshold=2).total["a"] == 2
    noisy = mpc.secure_aggregate([{"n": torch.ones(4).int()}] * 3, 2, max_norm=2.0, noise_multiplier=1.0).total["n"]
    assert noisy.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(("update", "error", "message"), [
    (torch.tensor([1.7 + 5j]), UnsupportedDtype, "complex64: take torch.view_as_real"),
    (np.array([1 + 1j]), UnsupportedDtype, "complex128"),
    ([1j], UnsupportedDtype, "complex64"),
    (lambda: torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.quint8), UnsupportedDtype, "its dequantize"),
    (np.array(["1"]), UnsupportedDtype, "array of <U1"),
    (["1"], UnsupportedDtype, "got a list"),
    (np.array([1, None], object), UnsupportedDtype, "array of object"),
    (None, UnsupportedDtype, "NoneType"),
    ([[1], [1, 2]], UnsupportedDtype, "got a list"),
    ([2**70], UnsupportedDtype, "got a list"),
    (np.ma.array([1, 2], mask=[0, 1]), UnsupportedDtype, "masked"),
    (torch.eye(2).to_sparse(), UnsupportedCase, "sparse"),
    (torch.ones(2, device="meta"), UnsupportedCase, "meta"),
    (torch.tensor([math.nan]), DivergenceError, "NaN or infinite"),
    (np.array([-math.inf], np.float16), DivergenceError, "NaN or infinite"),
])  # fmt: skip
def test_what_is_no_real_number_is_refused(update, error, message):
    """Before a round begins, whatever max_abs; by a client before it sends anything; inside of a model by its name."""
    update = update() if callable(update) else update
    for updates, options in (
        ([update] * 3, {}),
        ([update] * 3, {"max_abs": 1.0}),
        ([{"w": update}] * 3, {"max_norm": 1.0}),
    ):
        assert_raises(error, message, mpc.secure_aggregate, updates, 2, **options)
    with pytest.raises(error, match=message):
        mpc.SecureAggregation(2, 2, 1, max_abs=1.0).encoding.encode(update, 1, torch.device("cpu"))


def test_updates_that_differ_are_refused():
    one = torch.ones(2)
    for updates, message in [
        ([one, torch.ones(1)], r"update 1 is torch.float32 \(1,\), update 0 torch.float32 \(2,\)"),
        ([one, one.int()], "one shape and kind"),
        ([one.bool(), one], "one shape and kind"),
        ([{"w": one}, {"w": one, "b": one}], r"update 1 has \['b'\], which update 0 does not have"),
        ([{"w": one, "b": one}, {"w": one}], r"update 0 has \['b'\], which update 1 does not have"),
        ([{"w": one}, one], "does not have"),
        ([[one], [one, one]], r"\[1\], which update 0 does not have"),
        ([{"w": [one]}, {"w": [one[:1]]}], r"update 1\['w'\]\[0\] is"),
    ]:
        assert_raises(ShapeError, message, mpc.secure_aggregate, updates, 2)
    with pytest.raises(ConfigError, match="in a call of their own"):
        mpc.secure_aggregate([{"w": one, "n": torch.tensor(2**40)}] * 2, 2)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))  # its layers are not clients
    for single in (layers, {"a": one, "b": one}, 3.0, torch.tensor(3.0)):
        with pytest.raises(
            ConfigError, match=r"a list of one update per client, got an? (Sequential|dict|float|array)"
        ):
            mpc.secure_aggregate(single, 2)


def test_clipping_bounds_what_a_client_contributes():
    """Sensitivity end to end: a client of any size changes the sum by at most max_norm and the rounding."""
    setup = {"max_abs": None, "max_norm": 1.0, "step": 2.0**-10}
    with_huge, without = Party(**setup), Party(**setup)
    bound = 1.0 + 2.0**-10 * math.sqrt(SIZE) / 2
    for huge in (torch.full((SIZE,), 1e30), torch.arange(SIZE) * 1e3, torch.eye(SIZE)[3] * -9, torch.randn(SIZE)):
        with_huge.updates[4] = huge
        number = with_huge.clients[0].last_round + 1
        a, b = with_huge.run(number), without.run(number, leaving={"mask": [4]})
        assert float((a.sum - b.sum).norm()) <= bound
    clipped = Party(max_abs=1.0)
    clipped.updates[0] = torch.full((SIZE,), 100.0)
    assert torch.equal(clipped.run().sum, torch.ones(SIZE) + sum(x.clamp(-1, 1) for x in clipped.updates[1:]))


def test_an_update_is_scaled_below_the_norm_exactly():
    """The computed norm of this one is too small by 2.5e-12 of it."""
    x = torch.full((10**6,), 1 / 3, dtype=torch.float64)
    assert Fraction(float(x.norm())) ** 2 < 10**6 * Fraction(1 / 3) ** 2
    found = scaled_down(x, 1.0)
    assert (found == found[0]).all()
    assert (1 - 1e-9) ** 2 < 10**6 * Fraction(float(found[0])) ** 2 <= 1
    assert torch.equal(scaled_down(x, 1e4), x)


@pytest.mark.parametrize("max_norm", [1.0, 1e-15, 1e-140])
@pytest.mark.parametrize("size", [1e150, 1e155, 1e300, 1.7e308, 1e-170])
def test_norms_whose_squares_leave_float64(size, max_norm):
    x, max_norm = size * torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64), min(size, max_norm)
    found = scaled_down(x, max_norm)
    assert torch.equal(found, found[0] * torch.tensor([1.0, -1.0, 0.5]).double())
    assert 0.9 < math.sqrt(sum(Fraction(float(each)) ** 2 for each in found) / Fraction(max_norm) ** 2) <= 1
    assert torch.equal(scaled_down(0 * x, size), 0 * x)


@pytest.mark.parametrize("bound", [1e154, 1e155, 1e300])
def test_norms_as_large_as_float64_holds(bound):
    updates = [bound / 2 * torch.tensor([1.0, -1.0], dtype=torch.float64)] * 3
    total = mpc.secure_aggregate(updates, 2, max_norm=bound).total
    torch.testing.assert_close(total / bound, torch.tensor([1.5, -1.5], dtype=torch.float64), rtol=1e-8, atol=0)
    with pytest.raises(ConfigError, match="grid must be a power of two from"):
        mpc.secure_aggregate(updates, 2, max_norm=bound, noise_multiplier=1.0)


def test_noise_and_its_charge():
    size = 1000
    party = Party(size=size, threshold=5, colluders=1, max_abs=None, step=None, max_norm=1.0, noise_multiplier=2.0)
    party.updates = [torch.zeros(size)] * CLIENTS
    ledger = PrivacyLedger(unit="client")
    encoding = party.setup.encoding
    noise = party.run(ledger=ledger).sum
    assert encoding.least == 4
    wanted = 2.0 * math.sqrt(CLIENTS / 4)  # five add noise, four of them are counted
    assert abs(float(noise.std()) / wanted - 1) < 5 / math.sqrt(2 * size) + 1e-3
    assert ledger.epsilon(1e-5) == pytest.approx(1.9931, abs=1e-3)  # of the Gaussian with noise multiplier 2
    assert [event.mechanism for event in ledger.events] == ["discrete_gaussian"]
    assert encoding.std > 1000 * encoding.step


@pytest.mark.parametrize(
    ("clients", "threshold", "colluders", "step", "neighbours"),
    [(5, 5, 1, 2.0**-4, None), (24, 16, 0, 2.0**-6, "auto")],
)
def test_noise_is_that_of_its_formula(clients, threshold, colluders, step, neighbours):
    """The deviation and delta of the module's docstring, where rounding, smoothing and every charge count."""
    size, norm, z = 10_000, 1.0, 4.0
    setup = mpc.SecureAggregation(
        clients, threshold, size, max_norm=norm, noise_multiplier=z, step=step, colluders=colluders,
        neighbours=neighbours,
    )  # fmt: skip
    found, least = setup.encoding, threshold - colluders
    least = least // 2 + 1 if neighbours else least
    sensitivity = norm + step * math.sqrt(size) / 2
    assert found.least == least
    assert found.std == pytest.approx(math.sqrt(((z * sensitivity) ** 2 + (1.58 * step) ** 2) / least), rel=1e-12)
    delta = clients * charge(found.std, grid=step, dimensions=size).delta + (2.0**-40 if neighbours else 0.0)
    assert found.delta == 2.0 ** math.ceil(math.log2(delta))
    assert (found.noise_multiplier, found.event().noise_multiplier, found.event().delta) == (z, z, found.delta)


def test_sums_that_just_fit():
    """The largest sum is n (max_abs / step + 1), below 2^31; noise adds 12 of its deviations, of at least 4 steps."""
    most = 2**31 // 3 - 1
    assert mpc.SecureAggregation(3, 2, 1, max_abs=float(most), step=1.0).encoding.max_abs == most
    total = mpc.secure_aggregate([torch.tensor([most], dtype=torch.int64)] * 3, 2, max_abs=float(most)).total
    assert total.tolist() == [3 * most]
    for beyond in (most + 1, most + 2):
        with pytest.raises(ConfigError, match="do not fit 32 bits"):
            mpc.SecureAggregation(3, 2, 1, max_abs=float(beyond), step=1.0)
    assert (encoding._TAIL, encoding._LEAST_STEPS, encoding.SMOOTH, encoding._HALF) == (12, 4, 1.58, 2**31)
    noisy = {"clients": 3, "threshold": 3, "size": 1, "max_norm": 2.0**10, "step": 1.0}
    least = 4 * math.sqrt(3) / (2.0**10 + 0.5)
    assert_raises(ConfigError, "too narrow", lambda: mpc.SecureAggregation(**noisy, noise_multiplier=least * 0.97))
    assert mpc.SecureAggregation(**noisy, noise_multiplier=least * 1.0001).encoding.std >= 4


def test_a_sparse_graph_charges_its_probability_to_fail():
    setup = mpc.SecureAggregation(24, 16, 10, max_norm=1.0, noise_multiplier=1.0, neighbours="auto")
    assert setup.encoding.least == 9
    assert 2.0**-40 <= setup.encoding.delta <= 2.0**-39
    assert mpc.SecureAggregation(24, 16, 10, max_norm=1.0, noise_multiplier=1.0).encoding.delta < 2.0**-40


def test_a_budget_ends_the_round_before_anything_is_unmasked():
    party = Party(max_abs=None, step=None, max_norm=1.0, noise_multiplier=1.0)
    ledger = PrivacyLedger(unit="client", budget=Budget(epsilon=1.0, delta=1e-5))
    assert_raises(BudgetExceeded, None, party.run, ledger=ledger)
    assert not ledger.events
    with pytest.raises(ConfigError, match="add-or-remove-one"):
        party.server(ledger=PrivacyLedger(unit="client", neighbouring="replace-one"))


def test_a_client_counts_for_itself():
    """A server that records nothing gets updates until the client's own budget is spent."""
    party = Party(max_abs=None, step=None, max_norm=1.0, noise_multiplier=4.0)
    ledger = PrivacyLedger(unit="client", budget=Budget(epsilon=1.3, delta=1e-5))
    party.clients[2] = party.setup.client(2, party.signing[2], party.keys, ledger=ledger)
    party.run(0)
    assert [event.count for event in ledger.events] == [1]
    _, answers = party.upto("mask", 1)
    assert_raises(BudgetExceeded, None, party.step, "mask", 2, answers[2])
    assert party.clients[2]._round is None
    assert ledger.epsilon(1e-5) < 1.3
    with pytest.raises(ConfigError, match="add-or-remove-one"):
        party.setup.client(
            2, party.signing[2], party.keys, ledger=PrivacyLedger(unit="client", neighbouring="replace-one")
        )


# --- settings --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("settings", "message"), [
    ({"clients": 1}, "clients must be .*2"),
    ({"threshold": 2}, r"above \(clients \+ colluders\) / 2 = 2.5, got 2"),
    ({"threshold": 4, "colluders": 3}, "/ 2 = 4, got 4"),
    ({"threshold": 6}, "threshold must be 1 to 5, got 6"),
    ({"size": 0}, "size"),
    ({"max_abs": 0.0}, "max_abs"),
    ({"max_abs": None}, "give max_abs"),
    ({"step": 0.3}, "power of two"),
    ({"max_abs": 2.0**40, "step": 1.0}, "do not fit 32 bits.*larger step"),
    ({"step": 2.0**-40}, "do not fit 32 bits"),
    ({"noise_multiplier": 1.0}, "max_norm"),
    ({"noise_multiplier": 1.0, "max_norm": 1.0, "max_weight": 2}, "without weights"),
    ({"noise_multiplier": 1e-3, "max_norm": 1.0, "step": 0.5}, "too narrow"),
    ({"max_weight": 2**29, "max_abs": 8.0}, "max_weight must be"),
    ({"neighbours": 3, "clients": 50, "threshold": 30}, "neighbours must be at least .* got 3"),
])  # fmt: skip
def test_unsafe_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        mpc.SecureAggregation(**{"clients": 5, "threshold": 4, "size": 8, "max_abs": 1.0, **settings})


@pytest.mark.parametrize("total", [7, 12])
def test_the_failure_bound_is_the_sum_of_its_docstring(total):
    clients, threshold, colluders, k = total, total - 1, 1, total // 2

    def tail(marked, least):
        ways = sum(
            math.comb(marked, i) * math.comb(clients - 1 - marked, k - i) for i in range(least, min(k, marked) + 1)
        )
        return Fraction(ways, math.comb(clients - 1, k))

    needed = -(-(k + 1) * threshold // clients) - 1
    assert local_threshold(clients, threshold, k) == needed + 1
    wanted = sum(
        math.comb(clients - colluders, s) * tail(s - 1 + colluders, needed) ** s
        for s in range(1, (clients - colluders) // 2 + 1)
    )
    found = failure_log2(clients, clients, threshold, colluders, k)
    assert found == pytest.approx(math.log2(wanted) if wanted else -math.inf)


def test_strengths(monkeypatch):
    """Lengths of secrets, and keys by HKDF-SHA256 (RFC 5869) of the standard library, each for one purpose."""
    private = [X25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2)]
    public, context = private[1].public_key().public_bytes_raw(), bytes(range(32))

    def hkdf(purpose, first, second):
        extracted = hmac.digest(context, private[0].exchange(private[1].public_key()), "sha256")
        info = b"accelerant secure aggregation " + purpose + first.to_bytes(4, "little") + second.to_bytes(4, "little")
        return hmac.digest(extracted, info + b"\1", "sha256")

    for purpose, first, second in ((b"mask", 0, 1), (b"shares", 1, 0), (b"shares", 70_000, 3)):
        assert messages.derived(private[0], public, context, purpose, first, second) == hkdf(purpose, first, second)
    assert messages.mask_seed(private[0], public, context, 7, 3) == (hkdf(b"mask", 3, 7), -1)
    assert messages.mask_seed(private[0], public, context, 3, 7) == (hkdf(b"mask", 3, 7), 1)
    assert_raises(ProtocolError, "no valid X25519 key", messages.derived, private[0], bytes(32), context, b"mask", 0, 1)
    drawn, real = set(), os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: (drawn.add(found := real(size)), found)[1])
    party = Party(size=2)
    seeds, aead = set(), set()
    for number in (0, 1):
        party.upto("mask", number)
        for own, each in enumerate(party.clients):
            state = each._round
            assert state.seed in drawn
            seeds |= {state.seed, state.share_key.private_bytes_raw(), state.mask_key.private_bytes_raw()}
            for other in state.drawn:
                for pair in ((own, other), (other, own)):  # tags under each key
                    aead.add(state.aead(other, *pair).encrypt(bytes(12), b"", None))
    assert {len(seed) for seed in seeds} == {32}
    assert len(seeds) == 2 * 3 * CLIENTS  # all fresh
    assert len(aead) == 2 * CLIENTS * (CLIENTS - 1)  # a key for each message, so that nonce 0 is used once
    assert (messages.SECRET_BYTES, messages.SHARE_BYTES, messages.SEALED_BYTES, SECURITY) == (35, 40, 96, -40.0)


def test_the_context_has_every_setting():
    setup = mpc.SecureAggregation(5, 4, 8, max_abs=1.0)
    keys = make_identities(5)[1]
    others = [
        {"threshold": 5}, {"size": 9}, {"max_abs": 2.0}, {"max_norm": 1.0}, {"step": 0.5}, {"max_weight": 2},
        {"colluders": 1}, {"neighbours": 4}, {"max_norm": 1.0, "noise_multiplier": 1.0},
    ]  # fmt: skip
    contexts = [replace(setup, **change).context(3, keys) for change in others]
    contexts += [setup.context(3, keys), setup.context(4, keys), setup.context(3, keys[::-1])]
    contexts += [setup.context(3, keys, b"model"), mpc.SecureAggregation(4, 4, 8, max_abs=1.0).context(3, keys[:4])]
    assert len(set(contexts)) == len(contexts)
    assert {len(each) for each in contexts} == {32}
    for number in (-1, 1.0, True):
        assert_raises(ConfigError, "round_number", setup.context, number, keys)
    assert {name for change in others for name in change} == {each.name for each in fields(setup)} - {"clients"}


def test_the_bound_of_failures_is_exact():
    """2^-40 of the docstring: graphs, and members of a round, on both sides of it; complete graphs at 2 t = n + c."""
    assert -40.1 < failure_log2(20, 20, 16, 0, 9) <= -40 < failure_log2(24, 24, 18, 0, 11) < -39.5
    assert mpc.SecureAggregation(20, 16, 1, max_abs=1.0, neighbours=9).neighbours == 9
    with pytest.raises(ConfigError, match=r"got 11: the server may isolate clients with probability 2\^-40"):
        mpc.SecureAggregation(24, 18, 1, max_abs=1.0, neighbours=11)
    setup = mpc.SecureAggregation(26, 19, 1, max_abs=1.0, neighbours="auto")
    assert setup.neighbours == 9
    assert -40 < failure_log2(26, 22, 19, 0, 9) < -39
    assert [members for members in range(19, 27) if not setup.is_safe(members)] == [22, 24]
    assert failure_log2(4, 4, 2, 0, 3) == failure_log2(5, 5, 4, 3, 4) == 0.0
    assert failure_log2(5, 5, 3, 0, 4) == failure_log2(5, 5, 5, 4, 4) == -math.inf


def test_sparse_graphs_of_many_clients_have_few_neighbours():
    k = least_neighbours(1000, 800, 100)
    assert 15 < k < 60
    assert failure_log2(1000, 1000, 800, 100, k) <= -40
    assert mpc.SecureAggregation(1000, 800, 10, max_abs=1.0, colluders=100, neighbours="auto").neighbours == k


# --- refusals --------------------------------------------------------------------------------------------------------
def test_a_round_whose_first_message_fails_is_over(party):
    class Interrupted(BaseException):
        pass

    client, party.clients[0]._sign = party.clients[0], Mock(side_effect=Interrupted)
    assert_raises(Interrupted, None, client.advertise, 1)
    assert "no round" in repr(client)


def test_a_round_is_never_used_twice(party, tmp_path):
    party.run(3)
    for number in (3, 2):
        assert_raises(ProtocolError, f"round {number} is not above the last one, 3", party.clients[0].advertise, number)
    path = tmp_path / "round"
    party.setup.client(0, party.signing[0], party.keys, state_path=path).advertise(9)
    again = party.setup.client(0, party.signing[0], party.keys, state_path=path)
    assert_raises(ProtocolError, "round 9 is not above", again.advertise, 9)
    path.write_text("nine")
    assert_raises(ConfigError, "does not hold", party.setup.client, 0, party.signing[0], party.keys, state_path=path)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_clients_abort_at_any_wrong_answer(stage):
    """Cut, extended, altered, another client's, another stage's: the round of this client ends, without its secrets."""
    party = Party(size=2)
    for number, change in enumerate(
        [
            lambda answer, other: answer[:-1],
            lambda answer, other: answer + b"\0",
            lambda answer, other: b"",
            lambda answer, other: answer[:4] + b"\2" + answer[5:],  # version
            lambda answer, other: answer[:5] + bytes([answer[5] ^ 1]) + answer[6:],  # stage
            lambda answer, other: answer[:6] + bytes(32) + answer[38:],  # round
            lambda answer, other: other,
            lambda answer, other: answer[:42] + b"\xff\xff\xff\x7f" + answer[46:],  # a claimed count
        ]
    ):
        _, answers = party.upto(stage, number)
        assert_raises((ProtocolError, FormatError), None, party.step, stage, 0, change(answers[0], answers[1]))
        assert "no round" in repr(party.clients[0])
        assert party.clients[0]._round is None
        assert_raises(ProtocolError, "in no round", party.step, stage, 0, answers[0])


def test_shares_that_the_server_changes_are_noticed(party):
    """One bit of what another client encrypted, which is the last part of the answer."""
    _, answers = party.upto("mask")
    with pytest.raises(ProtocolError, match="the shares of client 4 were changed, or are not for this client"):
        party.step("mask", 0, answers[0][:-1] + bytes([answers[0][-1] ^ 1]))
    assert "no round" in repr(party.clients[0])
    for identity in (-1, CLIENTS):
        with pytest.raises(ConfigError, match=f"identity must be 0 to 4, got {identity}"):
            party.setup.client(identity, party.signing[0], party.keys)


def test_the_server_refuses_messages_and_goes_on(party):
    server, answers = party.upto("share")
    messages = {i: party.step("share", i, answer) for i, answer in answers.items()}
    good, other = messages[0], messages[1]
    forged = good[:-1] + bytes([good[-1] ^ 1])
    changed = (good[:-70] + good[-64:], good[:42] + other[42:], b"x" + good[1:])
    for bad in (b"", good[:50], forged, *changed, "text" * 50, 5, None, [good]):
        assert_raises((ProtocolError, FormatError), None, server.receive, bad)
    for message in messages.values():
        server.receive(message)
    assert_raises(ProtocolError, "client 0 has sent its message", server.receive, good)
    answers = server.advance()
    assert_raises(ProtocolError, "of stage share, this is stage mask", server.receive, good)
    for stage in STAGES[2:]:
        for i, answer in answers.items():
            server.receive(party.step(stage, i, answer))
        answers = server.advance()
    assert torch.equal(server.finish().sum, party.sum(range(CLIENTS)))
    assert_raises(ProtocolError, "failed", server.finish)


def test_the_server_refuses_what_a_client_signs_wrongly(party):
    """A client that follows only the format: at each stage bodies that are too short, too long, or of other clients."""
    context, n = party.setup.context(0, party.keys), CLIENTS
    server, answers = party.server(), dict.fromkeys(range(n), b"")
    assert_raises(ProtocolError, "after all stages, this is advertise", server.finish)

    def changed(of, at, by):
        return {i: by if i == at else each for i, each in of.items()}

    def bodies(stage, body):
        if stage == "advertise":
            return [body[:-1], body + b"0", b""]
        if stage == "mask":
            return [body[:-1], body[:-4], body + bytes(4), b""]
        if stage == "consistency":
            members = server._members
            return [messages.survivors_digest(others, members) for others in (range(n), (0, 1, 2))] + [body[:-1]]
        reader = AggregationReader(body, n)
        sealed = reader.pieces()
        if stage == "share":
            some = next(iter(sealed))
            others = [
                {}, {i: each for i, each in sealed.items() if i != some}, {**sealed, 0: sealed[some]},
                {0: sealed[some], **{i: each for i, each in sealed.items() if i != some}},
                changed(sealed, some, sealed[some][:-1]), changed(sealed, some, sealed[some] + b"0"),
            ]  # fmt: skip
            return [*map(messages.pack_pieces, others), body + b"0"]
        keys, some = reader.pieces(), next(iter(sealed))
        pairs = [
            ({}, keys), ({i: each for i, each in sealed.items() if i != some}, keys), (sealed, {some: sealed[some]}),
            ({**sealed, 4: sealed[some]}, keys), (sealed, {}), (keys, sealed), (changed(sealed, some, bytes(39)), keys),
            (changed(sealed, some, bytes(41)), keys), (sealed, changed(keys, 4, bytes(39))),
        ]  # fmt: skip
        return [*(messages.pack_pieces(a) + messages.pack_pieces(b) for a, b in pairs), body + b"0"]

    for stage in STAGES:
        if stage == "mask":
            answers.pop(4)  # its key is revealed at the end
        true = {i: party.step(stage, i, answer) for i, answer in answers.items()}
        good = true[0]
        for body in bodies(stage, good[42:-64]):
            bad = messages.pack_signed(STAGES.index(stage), context, 0, body, party.signing[0].sign)
            assert_raises((ProtocolError, FormatError), None, server.receive, bad)
            assert 0 not in server._received
        for message in true.values():
            server.receive(message)
        if stage == "mask":
            late = messages.pack_signed(messages.CONSISTENCY, context, 4, b"", party.signing[4].sign)
        answers = server.advance()
        assert_raises(ProtocolError, "before its first message", server.bind, b"another request")
        if stage != "unmask":
            assert_raises(ProtocolError, "known after all stages", server.finish)
        if stage == "mask":
            assert_raises(ProtocolError, "client 4 has left the round", server.receive, late)
    for call in (lambda: server.receive(good), server.advance):
        assert_raises(ProtocolError, r"is done", call)
    assert torch.equal(server.finish().sum, party.sum(range(4)))


@pytest.mark.parametrize(
    ("sizes", "left", "message"), [((3, 2), (2,), "client 2's key were changed"), ((), (), "do not fit together")]
)
def test_a_changed_share_is_seen(sizes, left, message):
    """Surplus shares are on one polynomial; a key of no surplus must give the public key that its owner signed."""
    party = Party(*sizes, size=2)
    server, answers = party.server(), dict.fromkeys(range(len(party.clients)), b"")
    for stage in STAGES:
        answers = {i: answer for i, answer in answers.items() if stage != "mask" or i not in left}
        for i, answer in answers.items():
            server.receive(party.step(stage, i, answer))
        answers = server.advance()
    share = bytearray(server._received[1][2])
    share[3] ^= 1  # X25519 ignores the lowest bits of a key
    server._received[1][2] = bytes(share)
    assert_raises(ProtocolError, message, server.finish)
    assert server.stage == "failed"


def test_clients_of_other_settings_or_keys_are_refused(party):
    other = Party(max_abs=4.0)
    server = party.server()
    assert_raises(ProtocolError, "other settings or keys", lambda: server.receive(other.clients[0].advertise(0)))
    assert_raises(ShapeError, "wanted 5 verification keys", lambda: party.setup.server(0, party.keys[:4]))
    assert_raises(ConfigError, "not that of client 1", party.setup.client, 1, party.signing[0], party.keys)


def test_a_round_is_bound_to_one_request(party):
    """A server that asks one client for something else gets no sum with it, and no update for another request."""
    server = party.server()
    server.bind(b"model 1")
    sent = [client.advertise(0, b"model 1") for client in party.clients[:4]]
    assert_raises(ProtocolError, "another round or request", server.receive, party.clients[4].advertise(0, b"model 2"))
    for message in sent:
        server.receive(message)
    assert_raises(ProtocolError, "before its first message", server.bind, b"model 2")
    answers = server.advance()
    for i, answer in answers.items():
        server.receive(party.clients[i].share_keys(answer))
    answers = server.advance()
    for about in (b"model 2", b""):
        i, answer = answers.popitem()
        with pytest.raises(ProtocolError, match="not the one that this round was begun for"):
            party.clients[i].masked_input(answer, party.updates[i], about=about)
        assert party.clients[i]._round is None
    number = 1
    server = party.server(number)
    server.bind(b"model 3")
    for client in party.clients:
        server.receive(client.advertise(number, b"model 3"))
    answers = server.advance()
    for stage in STAGES[1:]:
        for i, answer in answers.items():
            if stage == "mask":
                server.receive(party.clients[i].masked_input(answer, party.updates[i], about=b"model 3"))
            else:
                server.receive(party.step(stage, i, answer))
        answers = server.advance()
    assert torch.equal(server.finish().sum, party.sum(range(CLIENTS)))


def test_updates_are_checked_before_anything_is_sent(party):
    for update, error in ((torch.zeros(SIZE + 1), ShapeError), (torch.full((SIZE,), math.nan), DivergenceError)):
        _, answers = party.upto("mask", party.clients[0].last_round + 1)
        assert_raises(error, None, party.clients[0].masked_input, answers[0], update)
        assert party.clients[0]._round is None


def test_secrets_are_not_shown_or_copied(party):
    server, answers = party.upto("unmask")
    client = party.clients[0]
    secrets = [
        client._round.seed,
        client._round.mask_key.private_bytes_raw(),
        *itertools.chain(*client._round.held.values()),
    ]
    texts = [repr(client), repr(server), str(client), repr(party.setup)]
    raised = assert_raises(ProtocolError, None, client.unmask, answers[1])
    texts.append(str(raised))
    assert not any(secret.hex()[:12] in text or str(secret[:4]) in text for secret in secrets for text in texts)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        assert_raises(ConfigError, "not copied", duplicate, client)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_a_client_leaves_its_round(party):
    """Parent and child would each answer once, for different survivors: with both secrets of a client."""
    _, answers = party.upto("consistency")
    child = os.fork()
    if not child:
        refused = 1
        try:
            party.clients[0].consistency(answers[0])
        except ProtocolError:
            refused = 0
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert party.clients[0].consistency(answers[0])
