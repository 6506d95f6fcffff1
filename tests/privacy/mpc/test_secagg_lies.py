"""What a lying server of secure aggregation learns: every lie of a list at every stage, and random mixtures of lies."""

import itertools
import os
import struct

import pytest
from lying_server import STEPS, LyingServer

from accelerant.errors import FormatError, ProtocolError
from accelerant.privacy.mpc.secagg import messages
from accelerant.privacy.mpc.secagg.messages import STAGES, AggregationReader, pack_ids, pack_message, pack_pieces

SPARSE = 24, 16, 2, "auto"
SETTINGS = [(5, 3, 0), (5, 4, 2), (5, 5, 4), (4, 3, 0), pytest.param((7, 5, 2), marks=pytest.mark.slow)]
"""Clients, threshold, colluders: thresholds at 2 t = n + c + 1, the least, and above it; all but one collude."""


# --- lies: from a server and a client, the answer that the client gets -----------------------------------------------
# i is the client that is lied to, 0, and 1 another honest one where there is one.


def adverts(change):
    """A lie about the members: what `change` makes of their messages, by member."""

    def lie(w, i):
        told = dict(w.adverts)
        change(w, i, told)
        return w.answer("share", i, pack_pieces(told))

    return lie


def another(w, i):
    """A member that is not i: honest, or the only honest one's colluder."""
    return next(j for j in w.everyone if j != i)


def keep(count):
    def change(w, i, told):
        for j in sorted(set(told) - {i})[max(0, count(w) - 1) :]:
            del told[j]

    return change


def signed_keys(w, j, keys):
    """A colluder's first message with other keys."""
    body = pack_message(messages.ADVERTISE, w.context, j, keys)
    return body + w.signing[j].sign(body)


def colluder_has(keys):
    def change(w, i, told):
        j = w.colluders[-1]
        told[j] = signed_keys(w, j, keys(told[i][42:106], told[j][42:106]))

    return change


def pieces(change):
    """A lie about the shares: what `change` makes of the ciphertexts for the client, by sender."""

    def lie(w, i):
        told = {sender: to[i] for sender, to in w.sealed.items() if i in to}
        drawn = set(w.states[i].drawn)
        change(w, i, told)
        return w.answer("mask", i, pack_ids(drawn & set(told)) + pack_pieces(told))

    return lie


def last_of(told, j, value):
    told[j] = value


def bogus_shares(text):
    """A colluder's ciphertext that opens, of other bytes."""

    def change(w, i, told):
        j = w.colluders[-1]
        told[j] = w.states[j].aead(i, j, i).encrypt(bytes(12), text, None)

    return change


def survivors(change):
    def lie(w, i):
        return w.answer("consistency", i, w.told_survivors(i, change(w, i)))

    return lie


def signatures(change):
    def lie(w, i):
        told = dict(w.signatures)
        change(w, i, told)
        return w.answer("unmask", i, pack_pieces(told))

    return lie


def swap(of):
    def change(w, i, told):
        a, b = sorted(set(told) - {i})[:2]
        told[a], told[b] = (of(w, told)[b], of(w, told)[a])

    return change


def some(w, count):
    """i = 0 and the last clients, so many in all."""
    return (0, *sorted(w.everyone[-count + 1 :]) * (count > 1))


def threshold(w):
    return w.setup.threshold


def of_told(w, told):
    return told


LIES = {
    "share": {
        "one member too few": (adverts(keep(lambda w: threshold(w) - 1)), True),
        "as many members as the threshold": (adverts(keep(threshold)), False),
        "no members": (adverts(lambda w, i, told: told.clear()), True),
        "only the client itself": (adverts(keep(lambda w: 1)), True),
        "without the client": (adverts(lambda w, i, told: told.pop(i)), True),
        "keys of the round before": (
            adverts(lambda w, i, told: last_of(told, another(w, i), w.earlier["adverts"][another(w, i)])), True,
        ),
        "the client's keys of the round before": (
            adverts(lambda w, i, told: last_of(told, i, w.earlier["adverts"][i])), True,
        ),
        "keys exchanged": (adverts(swap(of_told)), True),
        "one client's message twice": (adverts(lambda w, i, told: last_of(told, another(w, i), told[i])), True),
        "other keys under a signature": (
            adverts(lambda w, i, t: last_of(
                t, another(w, i), t[another(w, i)][:42] + bytes(64) + t[another(w, i)][-64:]
            )),
            True,
        ),
        "signed by another": (
            adverts(lambda w, i, t: last_of(
                t, another(w, i), t[another(w, i)][:-64] + w.signing[w.everyone[-1]].sign(t[i][:-64])
            )),
            True,
        ),
        "a member that there is not": (lambda w, i: w.answer("share", i, pack_pieces(
            {**w.adverts, len(w.everyone): w.adverts[i]})), True),
        "a colluder with the client's keys": (adverts(colluder_has(lambda own, its: own)), True),
        "a colluder with the client's mask key": (adverts(colluder_has(lambda own, its: its[:32] + own[32:])), True),
        "a colluder with the client's share key": (adverts(colluder_has(lambda own, its: own[:32] + its[32:])), True),
        "a colluder with the client's keys exchanged": (
            adverts(colluder_has(lambda own, its: own[32:] + own[:32])), True,
        ),
        "a colluder with one key for both": (adverts(colluder_has(lambda own, its: its[:32] * 2)), True),
        "a colluder with a key of small order": (adverts(colluder_has(lambda own, its: bytes(32) + its[32:])), True),
        "a colluder with a short key": (adverts(colluder_has(lambda own, its: its[:63])), True),
        "a colluder with a long key": (adverts(colluder_has(lambda own, its: its + b"0")), True),
    },
    "mask": {
        "nobody shared": (pieces(lambda w, i, told: told.clear()), True),
        "one share too few": (
            pieces(lambda w, i, t: [t.pop(j) for j in sorted(t)[: len(t) - (threshold(w) - 2)]]), True,
        ),
        "as many shares as the threshold": (
            pieces(lambda w, i, t: [t.pop(j) for j in sorted(t)[: len(t) - (threshold(w) - 1)]]), False,
        ),
        "shares of the round before": (
            pieces(lambda w, i, t: last_of(t, another(w, i), w.earlier["sealed"][another(w, i)][i])), True,
        ),
        "shares exchanged": (pieces(swap(of_told)), True),
        "one client's shares twice": (pieces(lambda w, i, t: last_of(t, sorted(t)[0], t[sorted(t)[1]])), True),
        "shares for another": (
            pieces(lambda w, i, t: last_of(t, sorted(t)[0], next(
                each for to, each in w.sealed[sorted(t)[0]].items() if to != i))), True,
        ),
        "the client's own message back": (
            pieces(lambda w, i, t: last_of(t, sorted(t)[0], w.sealed[i].get(sorted(t)[0], bytes(96)))), True,
        ),
        "invented shares": (pieces(lambda w, i, t: last_of(t, sorted(t)[0], os.urandom(96))), True),
        "empty shares": (pieces(lambda w, i, t: last_of(t, sorted(t)[0], b"")), True),
        "the client among the senders": (pieces(lambda w, i, t: last_of(t, i, t[sorted(t)[0]])), True),
        "a colluder's shares of other values": (pieces(bogus_shares(bytes(80))), False),
        "a colluder's short shares": (pieces(bogus_shares(bytes(79))), True),
        "a colluder's long shares": (pieces(bogus_shares(bytes(81))), True),
    },
    "consistency": {
        "one survivor too few": (survivors(lambda w, i: some(w, threshold(w) - 1)), True),
        "as many survivors as the threshold": (survivors(lambda w, i: some(w, threshold(w))), False),
        "no survivors": (survivors(lambda w, i: ()), True),
        "without the client": (survivors(lambda w, i: w.everyone[1:]), True),
        "a survivor that there is not": (survivors(lambda w, i: (*w.everyone[:-1], len(w.everyone))), True),
        "one survivor twice for one too few": (
            survivors(lambda w, i: (*some(w, threshold(w) - 1), w.everyone[-1])), True,
        ),
    },
    "unmask": {
        "one signature too few": (
            signatures(lambda w, i, t: [t.pop(j) for j in sorted(t)[: len(t) - (threshold(w) - 1)]]), True,
        ),
        "as many signatures as the threshold": (
            signatures(lambda w, i, t: [t.pop(j) for j in sorted(t)[: len(t) - threshold(w)]]), False,
        ),
        "no signatures": (signatures(lambda w, i, t: t.clear()), True),
        "signatures exchanged": (signatures(swap(of_told)), True),
        "one signature twice": (signatures(lambda w, i, t: last_of(t, sorted(t)[0], t[sorted(t)[1]])), True),
        "a signature under the client's name": (
            signatures(lambda w, i, t: last_of(t, i, w.signed(w.everyone[-1], w.survivors))), True,
        ),
        "a signature of other survivors": (
            signatures(lambda w, i, t: last_of(t, w.everyone[-1], w.signed(w.everyone[-1], w.survivors[:-2]))), True,
        ),
        "a signature of one that is no survivor": (
            signatures(lambda w, i, t: last_of(t, len(w.everyone), t[i])), True,
        ),
        "a short signature": (signatures(lambda w, i, t: last_of(t, w.everyone[-1], t[w.everyone[-1]][:63])), True),
    },
}  # fmt: skip
"""By stage and name: the lie, and whether the client must refuse it. Those that it need not must tell nothing."""


def play(w, stage, lie, refused):
    """Tell client 0 a lie at a stage, the truth otherwise, and look for a leak."""
    for before in STAGES[1 : STAGES.index(stage)]:
        w.stage(before)
    if stage == "unmask":
        assert len(w.signatures) == len(w.everyone)
    assert w.tell(stage, 0, lie(w, 0)) is not refused
    w.stage(stage, told=[0])
    for after in STAGES[STAGES.index(stage) + 1 :]:
        w.stage(after)
    w.assert_nothing_leaks()


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_lie_is_refused_or_tells_nothing(stage, settings):
    clients, needed, colluders = settings
    for name, (lie, refused) in LIES[stage].items():
        if "colluder" in name and not colluders:
            continue
        if name.endswith("as the threshold") and needed == clients:
            continue  # that is the truth
        try:
            play(LyingServer(*settings), stage, lie, refused)
        except Exception as error:
            error.add_note(f"lie: {name}")
            raise


def told_of_some(rng, w, told, i, least):
    """Leave out a random part, or all but so many."""
    others = sorted(set(told) - {i})
    kept = rng.sample(others, rng.choice((len(others), max(0, len(others) - 1), min(len(others), max(0, least)))))
    return {j: told[j] for j in (*kept, *({i} & set(told)))}


def mixture(w, rng, most=4):
    """A round in which the server tells each of some clients less than there is, and signatures go astray."""
    cheated = set(rng.sample(w.honest, rng.randrange(len(w.honest) + 1)))
    t = w.setup.threshold
    lies = [stage for stage in STAGES[1:] if rng.random() < 0.6][:most]
    lists = []
    for stage in STAGES[1:]:
        if stage == "consistency":
            present = sorted(w.survivors)
            lists = [present, *(sorted(rng.sample(present, min(len(present), t + rng.randrange(3) - 1))) for _ in "ab")]
            w.survivors = rng.choice(lists) if stage in lies else present
            lists = rng.choice(([w.survivors], lists))
        for i in cheated if stage in lies else ():
            state = w.clients[i]._round
            if state is None or state.stage != STAGES.index(stage) - 1:
                continue
            if stage == "share":
                body = pack_pieces(told_of_some(rng, w, w.adverts, i, t - rng.randrange(3)))
            elif stage == "mask":
                got = {sender: to[i] for sender, to in w.sealed.items() if i in to}
                told = told_of_some(rng, w, got, i, t - 1 - rng.randrange(3))
                listed = set(state.drawn) & set(w.sealed)
                body = pack_ids(listed & set(told) if rng.random() < 0.5 else listed - (set(got) - set(told)))
                body += pack_pieces(told)
            elif stage == "consistency":
                body = w.told_survivors(i, rng.choice(lists))
            else:
                body = pack_pieces(told_of_some(rng, w, w.signatures, i, t - rng.randrange(2)))
            w.tell(stage, i, w.answer(stage, i, body))
        w.stage(stage, told=cheated if stage in lies else ())
    return w.assert_nothing_leaks()


@pytest.mark.search(3)
def test_mixtures_of_lies_tell_no_sum_of_fewer(rng, record_property):
    settings = [(5, 3, 0), (5, 4, 2), (5, 5, 4), (4, 3, 0), (6, 5, 3)]
    for each in settings:  # the oracle knows a sum when there is one
        w = LyingServer(*each, earlier=False)
        assert mixture(w, rng, most=0) == {frozenset(w.honest)}
    known = sum(len(mixture(LyingServer(*rng.choice(settings), earlier=False), rng)) for _ in range(30))
    record_property("rounds", 30)
    record_property("sums", known)


@pytest.mark.slow
@pytest.mark.search(2)
def test_mixtures_of_lies_isolate_nobody_in_a_sparse_graph(rng, record_property):
    w = LyingServer(*SPARSE, earlier=False)
    assert mixture(w, rng, most=0) == {frozenset(w.honest)}
    known = sum(len(mixture(LyingServer(*SPARSE, earlier=False), rng, rng.choice((1, 4)))) for _ in range(8))
    record_property("rounds", 8)
    record_property("sums", known)


# --- boundaries that the list above does not have --------------------------------------------------------------------
def test_a_survivor_that_is_no_member_is_refused():
    """It could sign for the survivors without a mask in common with anyone."""
    w = LyingServer(5, 3, earlier=False)
    del w.adverts[4]
    w.share(told=[4])
    w.stage("mask")
    assert w.survivors == (0, 1, 2, 3)
    assert not w.tell("consistency", 0, w.answer("consistency", 0, pack_ids([0, 1, 2, 4])))
    assert w.tell("consistency", 1, w.answer("consistency", 1, pack_ids([0, 1, 2])))


@pytest.mark.parametrize(("withheld", "accepted"), [(2, True), (3, False)])
def test_masks_with_as_many_as_the_threshold(withheld, accepted):
    """A client takes t - 1 others' shares, not fewer, and no survivor whose shares it did not get."""
    w = LyingServer(5, 3, earlier=False)
    w.share()
    told = {sender: to[0] for sender, to in w.sealed.items() if 0 in to and sender > withheld}
    assert w.tell("mask", 0, w.answer("mask", 0, pack_ids(told) + pack_pieces(told))) is accepted
    w.stage("mask", told=[0])
    if accepted:
        assert not w.tell("consistency", 0, w.answer("consistency", 0, pack_ids(w.everyone)))
    w.stage("consistency", told=[0])
    w.stage("unmask")
    w.assert_nothing_leaks()


@pytest.mark.parametrize("short", [0, 1])
def test_as_many_share_holders_survive_as_a_secret_needs(short):
    w = LyingServer(24, 16, 0, "auto", earlier=False)
    w.share()
    w.stage("mask")
    drawn = w.states[0].drawn
    needed = w.setup.shares_needed(len(drawn))
    others = set(w.everyone) - {0, *drawn}
    survivors = (0, *drawn[: needed - 1 - short], *others)
    assert len(survivors) >= 16
    assert w.tell("consistency", 0, w.answer("consistency", 0, w.told_survivors(0, survivors))) is not bool(short)


def test_a_sparse_graph_of_too_few_members_is_refused():
    """k is safe for all 20 clients, not where 18 are left, though these are the threshold."""
    for members in (18, 20):
        w = LyingServer(20, 18, 1, "auto", earlier=False)
        told = {j: w.adverts[j] for j in range(members)}
        assert w.tell("share", 0, w.answer("share", 0, pack_pieces(told))) is (members == 20)


def test_a_client_of_a_sparse_graph_has_masks_with_those_that_it_drew():
    w = LyingServer(24, 16, 0, "auto", earlier=False)
    w.share()
    pairs = itertools.permutations(w.everyone, 2)
    me, undrawn = next((i, j) for i, j in pairs if j not in w.states[i].drawn and i not in w.sealed[j])
    received = pack_pieces({sender: to[me] for sender, to in w.sealed.items() if me in to})
    assert not w.tell("mask", me, w.answer("mask", me, pack_ids({*w.states[me].drawn, undrawn}) + received))


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_client_answers_each_stage_once(stage):
    """A second answer, of the same or of other survivors, would reveal both secrets of a client."""
    w = LyingServer(5, 3, earlier=False)
    for each in STAGES[1 : STAGES.index(stage)]:
        w.stage(each)
    answer = w.answer(stage, 0, w.truth(stage, 0))
    assert w.tell(stage, 0, answer)
    assert not w.tell(stage, 0, answer)
    if stage == "consistency":
        assert not w.tell(stage, 0, w.answer(stage, 0, pack_ids([0, 1, 2])))
    w.stage(stage, told=[0])
    for each in STAGES[STAGES.index(stage) + 1 :]:
        w.stage(each)
    w.assert_nothing_leaks()


@pytest.mark.parametrize("stage", STAGES[2:])
def test_no_stage_is_left_out(stage):
    """A server that asks for the message of a later stage gets none, and the client's round ends."""
    w = LyingServer(5, 3, earlier=False)
    for each in STAGES[1 : STAGES.index(stage) - 1]:
        w.stage(each)
    answer = w.answer(stage, 0, pack_ids([]) + pack_pieces({}))
    with pytest.raises(ProtocolError, match=f"after stage .* comes not {stage}"):
        getattr(w.clients[0], STEPS[stage])(answer, *([w.updates[0]] * (stage == "mask")))
    assert w.clients[0]._round is None


def test_lists_of_clients_are_ascending_numbers_of_the_setup():
    for ids in ((1, 1), (2, 1), (0, 5), (5,), (0, 1, 2, 3, 4, 4)):
        with pytest.raises(FormatError, match=r"not ascending numbers below 5|list of 6 clients, of 5"):
            AggregationReader(struct.pack(f"<{len(ids) + 1}I", len(ids), *ids), 5).ids()
    assert AggregationReader(pack_ids(range(5)), 5).ids() == (0, 1, 2, 3, 4)
    assert AggregationReader(pack_ids(()), 5).ids() == ()
