"""Searches for a leak of secure aggregation: random dropouts, a hostile network, and what views tell."""

import numpy as np
import pytest
import torch

from accelerant.errors import FormatError, ProtocolError
from accelerant.privacy import mpc
from accelerant.privacy.mpc.secagg import messages
from accelerant.privacy.mpc.secagg.encoding import mask_sums
from accelerant.privacy.mpc.secagg.messages import STAGES, AggregationReader, mask_seed
from accelerant.privacy.mpc.secagg.protocol import make_identities

REFUSED = (ProtocolError, FormatError)


class Network:
    """Clients of one setup, and an adversary that is the server and the network between them."""

    def __init__(self, rng, number=0):
        self.rng, n = rng, rng.choice((4, 5, 7))
        colluders = rng.choice((0, 0, 1, 2 if n == 7 else 1))
        least = (n + colluders) // 2 + 1
        self.setup = mpc.SecureAggregation(n, rng.randint(least, n), 3, max_abs=4.0, step=1.0, colluders=colluders)
        self.signing, self.keys = make_identities(n)
        self.colluders = set(rng.sample(range(n), colluders))
        self.clients = [self.setup.client(i, key, self.keys) for i, key in enumerate(self.signing)]
        self.updates = [torch.tensor([rng.randint(-4, 4) for _ in range(3)]) for _ in range(n)]
        self.number, self.context = number, self.setup.context(number, self.keys)
        self.seen: list[bytes] = []
        self.revealed: dict[int, tuple[dict[int, bytes], dict[int, bytes]]] = {}

    def step(self, stage, i, answer):
        """A client's message, or None where it aborts."""
        client = self.clients[i]
        try:
            if stage == "advertise":
                message = client.advertise(self.number)
            elif stage == "mask":
                message = client.masked_input(answer, self.updates[i])
            else:
                message = getattr(client, {"share": "share_keys"}.get(stage, stage))(answer)
        except REFUSED:
            assert client._round is None
            return None
        if stage == "unmask":
            body = AggregationReader(message[42:-64], len(self.clients))
            self.revealed[i] = body.pieces(), body.pieces()
        self.seen.append(message)
        return message

    def changed(self, data, others):
        """A message as the network may deliver it: cut, altered, extended, another, an old one."""
        kind = self.rng.randrange(7)
        if kind == 0 and data:
            return data[: self.rng.randrange(len(data))]
        if kind == 1 and data:
            at = self.rng.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << self.rng.randrange(8)]) + data[at + 1 :]
        if kind == 2:
            return data + bytes(self.rng.randrange(1, 5))
        if kind == 3 and others:
            return self.rng.choice(others)
        if kind == 4 and self.seen:
            return self.rng.choice(self.seen)
        if kind == 5 and len(data) > 110:  # forged: another sender, with the signature of this one
            return data[:38] + self.rng.randrange(len(self.clients)).to_bytes(4, "little") + data[42:]
        return data

    def assert_nothing_leaks(self):
        """No client has both secrets out, and what is out unmasks no sum of fewer than the threshold's honest."""
        honest = set(range(len(self.clients))) - self.colluders
        holders = [self.revealed[i] for i in sorted(honest & set(self.revealed))]
        threshold, known = self.setup.threshold, len(self.colluders)
        seeds, keys = (
            {each for each in honest if sum(each in shown[kind] for shown in holders) + known >= threshold}
            for kind in (0, 1)
        )
        assert not seeds & keys
        assert all(not set(shown[0]) & set(shown[1]) for shown in holders)
        masked = {each for each in honest if self.masked.get(each)}
        if seeds & masked and masked - seeds <= keys:  # a sum can be unmasked
            assert len(seeds & masked) >= threshold - known


@pytest.mark.search(3)
def test_dropouts_and_a_hostile_network_give_the_exact_sum_or_an_abort(rng, record_property):
    """The server is honest, and the network changes messages in both directions."""
    outcomes = {"sums": 0, "aborts": 0}
    first = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]  # a quiet round, one that all leave, one of changed messages only
    for leaving, hostile in [
        *first,
        *((rng.choice((0.0, 0.05, 0.15)), rng.choice((0.0, 0.02, 0.1))) for _ in range(6)),
    ]:
        net = Network(rng)
        server, answers = net.setup.server(0, net.keys), dict.fromkeys(range(len(net.clients)), b"")
        net.masked = {}
        try:
            for stage in STAGES:
                for i, answer in answers.items():
                    if rng.random() < leaving:
                        continue
                    given = net.changed(answer, list(answers.values())) if rng.random() < hostile else answer
                    message = net.step(stage, i, given)
                    if message is None:
                        continue
                    copies = [net.changed(message, net.seen)] if rng.random() < hostile else []
                    for each in (*copies, message, *([message] if rng.random() < hostile else [])):
                        try:
                            server.receive(each)
                        except REFUSED:
                            continue
                answers = server.advance()
                if stage == "mask":
                    net.masked = dict.fromkeys(answers, True)
            result = server.finish()
        except ProtocolError:
            assert leaving or hostile
            outcomes["aborts"] += 1
        else:
            assert leaving < 1
            outcomes["sums"] += 1
            assert len(result.survivors) >= net.setup.threshold
            assert torch.equal(result.sum, sum(net.updates[i] for i in result.survivors).double())
        net.assert_nothing_leaks()
    assert min(outcomes.values()) > 0
    for name, count in outcomes.items():
        record_property(name, count)


@pytest.mark.search(1)
def test_bytes_of_strangers_are_refused(rng, record_property):
    """The parsers: any bytes end in FormatError or ProtocolError."""
    for _ in range(300):
        data = bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
        reader = AggregationReader(data, 7)
        try:
            for _ in range(3):
                assert len(rng.choice((reader.ids, reader.pieces))()) <= 7
            reader.end()
        except FormatError:
            pass
        head = b"AcSA\1" + bytes([rng.randrange(6)]) + bytes(32)
        with pytest.raises(REFUSED):
            messages.read_client(head + data, 2, bytes(32), [bytes(32)] * 7)
    record_property("messages", 300)


# --- what views tell -------------------------------------------------------------------------------------------------
def stripped_views(swapped, words, pair_mask):
    """What server and t - 1 = 3 colluding clients see of the inputs of two honest clients after an honest round.

    They know the honest clients' seeds, revealed at the end, and the masks with colluders. Left is x + the pair's mask;
    without it (pair_mask=False) the distinguisher must succeed.
    """
    setup = mpc.SecureAggregation(5, 5, words, max_abs=2.0**20, step=1.0, colluders=3)
    signing, keys = make_identities(5)
    clients = [setup.client(i, key, keys) for i, key in enumerate(signing)]
    low, high = torch.full((words,), -3.0), torch.full((words,), 70_000.0)
    updates = [high, low] if swapped else [low, high]
    updates += [torch.zeros(words)] * 3
    server, answers = setup.server(0, keys), dict.fromkeys(range(5), b"")
    for stage, step in zip(STAGES[:2], ("advertise", "share_keys"), strict=True):
        for i, answer in answers.items():
            server.receive(getattr(clients[i], step)(0 if stage == "advertise" else answer))
        answers = server.advance()
    views = []
    states = [client._round for client in clients]
    for i in (0, 1):
        message = clients[i].masked_input(answers[i], updates[i])
        y = np.frombuffer(message[42:-64], "<i4").astype(np.int64)
        others = range(1 if i else 0, 5) if not pair_mask else range(2, 5)
        others = [other for other in others if other != i]
        public = {other: states[i].keys[other][1] for other in others}
        seeds = [mask_seed(states[i].mask_key, public[o], states[i].context, i, o) for o in others]
        mask = mask_sums([[(states[i].seed, 1), *seeds]], words)[0].numpy()
        views.append((y - mask) & 0xFFFFFFFF)
    return np.stack(views)


def bits(views):
    """Features of each word: the bits of both clients' views."""
    return ((views[:, :, None] >> np.arange(32)) & 1).transpose(1, 0, 2).reshape(views.shape[1], -1)


def accuracy(first, second):
    """Accuracy of a logistic regression on the second half of two labeled sets, and the number of cases there."""
    x = torch.from_numpy(np.concatenate([first, second]).astype(np.float32)) - 0.5
    y = torch.cat([torch.zeros(len(first)), torch.ones(len(second))])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y, half = x[order], y[order], len(x) // 2
    weight = torch.zeros(x.shape[1])
    for _ in range(100):
        wrong = torch.sigmoid(x[:half] @ weight) - y[:half]
        weight -= 4 / half * (x[:half].T @ wrong)
    right = ((x[half:] @ weight > 0) == (y[half:] > 0)).double().mean()
    return float(right), len(x) - half


@pytest.mark.search(2)
def test_views_tell_nothing_of_the_inputs(record_property):
    """Inputs (low, high) and (high, low) have one sum: chi-square of bytes, and a trained distinguisher at chance."""
    rounds, words = 2, 1024
    first, second = (
        np.concatenate([stripped_views(swapped, words, True) for _ in range(rounds)], axis=1) for swapped in (0, 1)
    )
    for views in (first, second):
        counts = np.bincount(views.astype("<u4").view(np.uint8).reshape(-1), minlength=256)
        statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert statistic < 255 + 6 * np.sqrt(2 * 255)
    right, cases = accuracy(bits(first), bits(second))
    assert abs(right - 0.5) < 5 * 0.5 / np.sqrt(cases)
    control, _ = accuracy(*(bits(stripped_views(swapped, 64, False)) for swapped in (0, 1)))
    assert control == 1.0
    record_property("cases", cases)
    record_property("accuracy", right)
