"""A server of secure aggregation that writes every answer itself, with colluding clients, and what both then know.

The knowledge is explicit: `known_sums` recombines the secrets from the shares that honest clients revealed and
colluders hold, removes every mask that these secrets give, and returns the sets of honest clients whose sum is left.
"""

import hashlib

import numpy as np
import torch

from accelerant.errors import FormatError, ProtocolError
from accelerant.privacy import mpc
from accelerant.privacy.mpc.secagg import messages
from accelerant.privacy.mpc.secagg.encoding import mask_sums
from accelerant.privacy.mpc.secagg.messages import (
    SHARE_BYTES,
    STAGES,
    AggregationReader,
    combined_shares,
    crypto,
    mask_seed,
    survivors_digest,
)
from accelerant.privacy.mpc.secagg.protocol import make_identities

REFUSED = (ProtocolError, FormatError)
STEPS = dict(zip(STAGES, ("advertise", "share_keys", "masked_input", "consistency", "unmask"), strict=True))
SIZE = 2


class LyingServer:
    """The clients of a setup, of which the last `colluders` work for the server, in a round after an earlier one."""

    def __init__(self, clients, threshold, colluders=0, neighbours=None, earlier=True):
        self.setup = mpc.SecureAggregation(
            clients, threshold, SIZE, max_abs=4.0, step=1.0, colluders=colluders, neighbours=neighbours
        )
        self.everyone = range(clients)
        self.honest, self.colluders = self.everyone[: clients - colluders], self.everyone[clients - colluders :]
        self.signing, self.keys = make_identities(clients)
        self.clients = [self.setup.client(i, key, self.keys) for i, key in enumerate(self.signing)]
        self.updates = [torch.tensor([i + 1 - 4, 4 - 2 * i]).clamp(-4, 4) for i in self.everyone]
        self.earlier = {}
        if earlier:
            self.begin(0)
            self.share()
            self.earlier = {"adverts": self.adverts, "sealed": self.sealed}
        self.begin(1)

    def begin(self, number):
        self.number, self.context = number, self.setup.context(number, self.keys)
        self.adverts = {i: client.advertise(number) for i, client in enumerate(self.clients)}
        self.states = [client._round for client in self.clients]
        self.sealed, self.inputs, self.statements, self.signatures, self.revealed = {}, {}, {}, {}, {}
        self.survivors = ()

    def answer(self, stage, i, body, *, party=None, context=None, code=None):
        code = STAGES.index(stage) if code is None else code
        return messages.pack_message(code, context or self.context, i if party is None else party, body)

    def tell(self, stage, i, answer):
        """Give a client an answer and keep what its message tells; return whether it did not refuse."""
        client = self.clients[i]
        try:
            message = getattr(client, STEPS[stage])(answer, *((self.updates[i],) if stage == "mask" else ()))
        except REFUSED:
            assert client._round is None
            return False
        body = message[42:-64]
        if stage == "share":
            self.sealed[i] = AggregationReader(body, len(self.everyone)).pieces()
        elif stage == "mask":
            self.inputs[i] = np.frombuffer(body[-4 * SIZE :], "<i4").astype(np.int64)
            self.statements[i] = body[: -4 * SIZE]
        elif stage == "consistency":
            self.signatures[i] = message[-64:]
        else:
            reader = AggregationReader(body, len(self.everyone))
            self.revealed[i] = reader.pieces(), reader.pieces()
        return True

    # --- true answers ------------------------------------------------------------------------------------------------
    def truth(self, stage, i):
        if stage == "share":
            return messages.pack_pieces(self.adverts)
        if stage == "mask":
            received = {sender: to[i] for sender, to in self.sealed.items() if i in to}
            return messages.pack_ids(set(self.states[i].drawn) & set(self.sealed)) + messages.pack_pieces(received)
        if stage == "consistency":
            return self.told_survivors(i, self.survivors)
        return messages.pack_pieces(self.signatures)

    def told_survivors(self, i, survivors):
        stated = {j: self.statements[j] for j in survivors if i in self.sealed.get(j, ()) and j in self.statements}
        return messages.pack_ids(survivors) + (messages.pack_pieces(stated) if self.setup.neighbours else b"")

    def share(self, told=()):
        """Let everyone share its keys but those that were told something."""
        for i in set(self.everyone) - set(told):
            assert self.tell("share", i, self.answer("share", i, self.truth("share", i)))

    def stage(self, stage, told=()):
        """Tell the honest clients that are in the round the truth, but for those that were told something already."""
        if stage == "share":
            return self.share(told)
        for i in set(self.honest) - set(told):
            if self.clients[i]._round is not None and self.clients[i]._round.stage == STAGES.index(stage) - 1:
                self.tell(stage, i, self.answer(stage, i, self.truth(stage, i)))
        if stage == "mask":
            self.survivors = (*sorted(self.inputs), *self.colluders)
            for i in self.colluders:
                missing = messages.pack_ids([])
                body = messages.pack_message(messages.STATEMENT, self.context, i, self.members + missing)
                self.statements[i] = missing + self.signing[i].sign(body)
        elif stage == "consistency":
            self.signatures |= {i: self.signed(i, self.survivors) for i in self.colluders}
        return None

    @property
    def members(self):
        return hashlib.sha256(messages.pack_pieces(self.adverts)).digest()

    def signed(self, i, survivors):
        """A colluder's signature of any survivors."""
        digest = survivors_digest(survivors, self.members)
        return self.signing[i].sign(messages.pack_message(messages.CONSISTENCY, self.context, i, digest))

    # --- what is known -----------------------------------------------------------------------------------------------
    def shares_of(self, owner, kind):
        """Shares of a client's seed (0) or key (1) by holder: revealed ones, and those that colluders decrypt."""
        found = {i: shown[kind][owner] for i, shown in self.revealed.items() if owner in shown[kind]}
        for i in set(self.colluders) & set(self.sealed.get(owner, ())):
            state = self.states[i]
            state.keys.setdefault(owner, (self.adverts[owner][42:74], self.adverts[owner][74:106]))
            both = state.aead(owner, owner, i).decrypt(bytes(12), self.sealed[owner][i], None)
            found[i] = both[kind * SHARE_BYTES :][:SHARE_BYTES]
        return found

    def secret(self, owner, kind):
        """The seed or key of an honest client, recombined, or None with too few shares of it."""
        holders = sorted((*self.states[owner].drawn, owner))
        needed = self.setup.shares_needed(len(holders) - 1)
        found = {holders.index(i) + 1: each for i, each in self.shares_of(owner, kind).items()}
        if len(found) < needed:
            return None
        used = sorted(found)[:needed]
        (secret,) = combined_shares([[found[i]] for i in used], used, needed, len(holders))
        state = self.states[owner]
        assert secret == (state.mask_key.private_bytes_raw() if kind else state.seed)
        return secret

    def known_sums(self):
        """Return the sets of honest clients whose sum the server and its colluders compute, and check that they do.

        Masks that are not known are independent and uniform. So a combination of masked inputs tells something only if
        they cancel in it: both sides of a pair's mask have one factor, and what has a mask that no other has is out.
        """
        masked = sorted(self.inputs)
        seeds = {u: self.secret(u, 0) for u in self.honest}
        keys = {u: self.secret(u, 1) for u in self.honest}
        from_bytes = crypto("asymmetric.x25519").X25519PrivateKey.from_private_bytes
        private = {u: from_bytes(key) for u, key in keys.items() if key}
        private |= {i: self.states[i].mask_key for i in self.colluders}
        group, known = {u: {u} for u in masked}, {u: [] for u in masked}
        hidden = {u for u in masked if not seeds[u]}
        for u in masked:
            known[u] += [(seeds[u], 1)] if seeds[u] else []
            for v in self.states[u].masked:
                if u in private:
                    known[u].append(mask_seed(private[u], self.adverts[v][74:106], self.context, u, v))
                elif v in private:
                    seed, _ = mask_seed(private[v], self.adverts[u][74:106], self.context, v, u)
                    known[u].append((seed, 1 if u < v else -1))
                elif v in self.inputs and u in self.states[v].masked:
                    both = group[u] | group[v]
                    group.update(dict.fromkeys(both, both))
                else:
                    hidden.add(u)
        sums = {frozenset(group[u]) for u in masked if not group[u] & hidden}
        for each in sums:
            mask = mask_sums([[seed for u in each for seed in known[u]]], SIZE)[0].numpy().astype(np.int64)
            bare = sum(self.inputs[u] for u in each) - mask - sum(self.updates[u].numpy() for u in each)
            assert not (bare % 2**32).any()
        return sums

    def assert_nothing_leaks(self):
        """No sum of fewer honest clients than the settings allow is known, and of none are both secrets."""
        honest = self.setup.threshold - len(self.colluders)
        least = honest // 2 + 1 if self.setup.neighbours else honest
        sums = self.known_sums()
        assert len(sums) <= 1
        assert all(len(each) >= least for each in sums), sums
        assert not any(self.secret(u, 0) and self.secret(u, 1) for u in self.honest)
        return sums
