"""Settings of secure aggregation: which thresholds and graphs are safe, and the parties that use them.

Threshold. With n clients, of which c collude with a malicious server, 2 t > n + c is required (Bonawitz et al. 2017,
"Practical secure aggregation for privacy-preserving machine learning", CCS 2017, eprint 2017/281, section 6.2): two
lists of survivors with t signatures each share an honest signer, who signs only one, so all honest clients that reveal
shares agree on the survivors.

Sparse graph. As in SecAgg+ (Bell et al. 2020, "Secure single-server aggregation with (poly)logarithmic overhead", CCS
2020, eprint 2020/704, section 4, the malicious variant), each client draws k others itself, after their keys are
fixed, and splits its secrets among them and itself with the threshold t_k = ceil((k + 1) t / n). It has masks in common
with those that it drew and those that drew it. The consistency check stays that of Bonawitz et al., over all clients,
so k bounds masks and shares, and not the n signatures. With its masked input each client signs which of those that it
drew it was told had left, and the digest of the members' keys. Who holds its shares checks that none of them is a
survivor, and that all have one list of members, before it signs the survivors: a server could tell a client that all
have left, take its input without masks, and let the others reveal its seed.

Assume that the server learns the sum over a set S of at most half of the honest clients. Members of S have no masks in
common with other honest survivors. b_u of u in S is revealed only if t_k - 1 of those that u drew are survivors that
reveal it: members of S, or colluders. So for all dropouts, which the server may choose after seeing the graph, this has
at most the probability

    sum over s = 1 to (n - c) / 2 of  C(n - c, s) P[H(n - 1, s - 1 + c, k) >= t_k - 1]^s

where H is hypergeometric: k draws of n - 1, of which s - 1 + c count. The term s = 1 also bounds that colluders alone
reconstruct a client's secret. The settings refuse k where the sum is above 2^-40. Sets of more than half overlap, so
the server learns one sum. Colluders are chosen before the round. With every pair, S is all honest survivors.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from accelerant._renamed import renamed_arguments
from accelerant.errors import ConfigError, ShapeError
from accelerant.privacy.dp.ledger.events import check_number, check_whole
from accelerant.privacy.mpc.secagg.encoding import Encoding, make_encoding
from accelerant.privacy.mpc.secagg.messages import crypto

if TYPE_CHECKING:
    from accelerant.privacy.dp.ledger.ledger import LedgerLike
    from accelerant.privacy.mpc.secagg.client import AggregationClient
    from accelerant.privacy.mpc.secagg.server import AggregationServer
    from accelerant.runtime.registry import DeviceLike

SECURITY: Final = -40.0  # log2 of the probability that a sparse graph fails
_MOST_CLIENTS = 65_535
_MOST_SIZE = 1 << 31


@renamed_arguments(clip="max_abs")
@dataclass(frozen=True)
class SecureAggregation:
    """The settings that all parties of secure aggregation share, and the constructor of each party.

        setup = mpc.SecureAggregation(clients=10, threshold=7, size=len(update), max_abs=1.0)
        client = setup.client(3, signing_key, verification_keys)         # in each client's process
        server = setup.server(round_number, verification_keys)           # once per round

    Five times a message goes from each client to the server, `server.receive` takes it, and `server.advance` returns
    the answers, by client; `client.advertise`, `share_keys`, `masked_input`, `consistency` and `unmask` take an answer
    and return the next message. `server.finish` then returns the sum over the clients whose masked input arrived.

    Args:
        clients: n, at most 65,535.
        threshold: t, the least number of clients that must stay to the end.
        size: elements of an update.
        max_abs: largest magnitude of an element; larger ones are clipped to it. Given max_norm, that norm by default.
        max_norm: L2 norm to which an update is scaled down; required with noise.
        noise_multiplier: standard deviation of the noise in the sum over its sensitivity, where only the fewest honest
            clients stay that the settings allow (Encoding.least); more add more. 0: none.
        step: a power of two of which values are rounded to multiples; by default the finest that the sum has room for.
        max_weight: clients may have whole weights from 1 to this; 1 for plain sums, and with noise.
        colluders: c, the largest number of clients that work together with the server, or leave out their noise.
        neighbours: k of the sparse graph; "auto" for about the least safe one; None: every pair of clients has a mask.
            Each client needs t_k of k + 1 holders to stay, so larger k let rounds succeed with more dropouts.

    Raises:
        ConfigError: a number out of range; 2 threshold <= clients + colluders; a graph that is not safe; sums that
            may exceed 2^31 steps.

    Trust: the server may be malicious, with up to `colluders` clients. Verification keys are authentic (a PKI). The
    server learns the sum over the survivors of the mask stage, who takes part, and when they leave. Colluders may send
    any values: nothing here stops poisoning, or hides what the sum itself tells (noise_multiplier does). A server that
    asks clients for different things, such as updates of different models, can make all but one of them send zeros:
    `about` of AggregationClient.advertise binds a round to one request (Pasquini et al. 2022, CCS 2022, "Eluding secure
    aggregation in federated learning via model inconsistency"). Who reads a noisy sum and is a client knows its own
    noise: count it as a colluder. Sums are mod 2^32. Not audited.
    """

    clients: int
    threshold: int
    size: int
    _: KW_ONLY
    max_abs: float | None = None
    max_norm: float | None = None
    noise_multiplier: float = 0.0
    step: float | None = None
    max_weight: int = 1
    colluders: int = 0
    neighbours: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("clients", 2, _MOST_CLIENTS), ("threshold", 1, self.clients), ("size", 1, _MOST_SIZE),
            ("max_weight", 1, 2**20), ("colluders", 0, self.clients - 1),
        ):  # fmt: skip
            if check_whole(name, getattr(self, name), least) > most:
                raise ConfigError(f"{name} must be {least} to {most}, got {getattr(self, name)}")
        if 2 * self.threshold <= self.clients + self.colluders:
            raise ConfigError(
                f"threshold must be above (clients + colluders) / 2 = {(self.clients + self.colluders) / 2:g}, got "
                f"{self.threshold}: a malicious server could unmask with two lists of survivors"
            )
        if self.neighbours == "auto":
            object.__setattr__(self, "neighbours", least_neighbours(self.clients, self.threshold, self.colluders))
        elif self.neighbours is not None:
            k = check_whole("neighbours", self.neighbours, 1)
            failure = failure_log2(self.clients, self.clients, self.threshold, self.colluders, k)
            if failure > SECURITY:
                raise ConfigError(
                    f"neighbours must be at least {least_neighbours(self.clients, self.threshold, self.colluders)} for "
                    f"{self.clients} clients, threshold {self.threshold} and {self.colluders} colluders, got {k}: the "
                    f"server may isolate clients with probability 2^{failure:.0f}"
                )
        for name in ("max_abs", "max_norm", "step"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_number(name, getattr(self, name)))
        check_number("noise_multiplier", self.noise_multiplier, open_below=False)
        _ = self.encoding

    @functools.cached_property
    def encoding(self) -> Encoding:
        """The map between updates and integers modulo 2^32."""
        honest = self.threshold - self.colluders
        fails = 0.0 if self.neighbours is None else 2.0**SECURITY
        return make_encoding(
            self.clients, honest // 2 + 1 if fails else honest, fails, self.size, self.max_abs, self.max_norm,
            self.noise_multiplier, self.step, self.max_weight,
        )  # fmt: skip

    def degree(self, members: int) -> int:
        """Return the number of others among which each of so many clients splits its secrets."""
        return members - 1 if self.neighbours is None else min(int(self.neighbours), members - 1)

    def shares_needed(self, degree: int) -> int:
        """Return how many shares reconstruct a secret that is split among so many others and its owner."""
        return local_threshold(self.clients, self.threshold, degree) if self.neighbours else self.threshold

    def is_safe(self, members: int) -> bool:
        """Return whether the graph is safe for so many members of a round."""
        found = failure_log2(self.clients, members, self.threshold, self.colluders, self.degree(members))
        return found <= SECURITY

    def client(
        self, identity: int, signing_key: Any, verification_keys: Sequence[bytes], *,
        state_path: str | Path | None = None, ledger: LedgerLike = None, device: DeviceLike = "cpu",
    ) -> AggregationClient:  # fmt: skip
        """Return a client, which takes part in one round after another.

        Args:
            identity: its number, from 0.
            signing_key: Ed25519PrivateKey of the package cryptography.
            verification_keys: of all clients by number, 32 bytes each; authentic.
            state_path: file that keeps the last round's number, so that no round is repeated after a restart.
            ledger: a PrivacyLedger, or its file, of this client's own data: records each round before the masked
                update is sent, so that its budget ends the rounds whatever a server does. Those that fail later
                count as well.
            device: of the masks.
        """
        from accelerant.privacy.mpc.secagg.client import AggregationClient

        return AggregationClient(
            self, identity, signing_key, verification_keys, state_path=state_path, ledger=ledger, device=device
        )

    def server(
        self, round_number: int, verification_keys: Sequence[bytes], *, ledger: LedgerLike = None,
        device: DeviceLike = "cpu",
    ) -> AggregationServer:  # fmt: skip
        """Return the server of one round.

        Args:
            round_number: above those of all earlier rounds, below 2^63.
            verification_keys: as for `client`.
            ledger: a PrivacyLedger or its file: records the release before clients unmask it; its unit is what one
                client contributes.
            device: of the sum.
        """
        from accelerant.privacy.mpc.secagg.server import AggregationServer

        return AggregationServer(self, round_number, verification_keys, ledger=ledger, device=device)

    def context(self, round_number: int, verification_keys: Sequence[bytes], about: bytes = b"") -> bytes:
        """Return the digest of settings, round, keys and `about`, 32 bytes, that each message carries.

        Raises ShapeError unless there is a key of 32 bytes for each client, and ConfigError for a round out of range.
        """
        check_whole("round_number", round_number, 0)
        if len(verification_keys) != self.clients or any(len(key) != 32 for key in verification_keys):
            raise ShapeError(f"wanted {self.clients} verification keys of 32 bytes, got {len(verification_keys)}")
        text = json.dumps([round_number, asdict(self), hashlib.sha256(about).hexdigest()], sort_keys=True).encode()
        return hashlib.sha256(b"".join((b"AcSA1", *map(bytes, verification_keys), text))).digest()


def make_identities(clients: int) -> tuple[list[Any], list[bytes]]:
    """Return fresh signing keys and verification keys, where one process simulates all clients."""
    signing = [crypto("asymmetric.ed25519").Ed25519PrivateKey.generate() for _ in range(clients)]
    return signing, [key.public_key().public_bytes_raw() for key in signing]


def local_threshold(clients: int, threshold: int, degree: int) -> int:
    """Return t_k, the shares of degree + 1 that reconstruct a secret; the threshold itself where every pair masks."""
    return min(degree + 1, max(1, -(-(degree + 1) * threshold // clients)))


@functools.lru_cache(maxsize=256)
def failure_log2(clients: int, members: int, threshold: int, colluders: int, k: int) -> float:
    """Return log2 of the bound of the module's docstring, for the members of a round; minus infinity where it is 0."""
    k = min(k, members - 1)
    if k == members - 1:
        return -math.inf if 2 * threshold > members + colluders else 0.0
    logs = np.append(0.0, np.cumsum(np.log(np.arange(1.0, members + 1))))  # of factorials

    def choose(n: int, r: NDArray[Any] | int) -> Any:
        return logs[n] - logs[r] - logs[n - r]

    total, needed = members - 1, local_threshold(clients, threshold, k) - 1
    terms = []
    for s in range(1, (members - colluders) // 2 + 1):
        marked = s - 1 + colluders
        counted = np.arange(max(needed, k - (total - marked), 0), min(k, marked) + 1)
        if counted.size:
            tail = np.logaddexp.reduce(choose(marked, counted) + choose(total - marked, k - counted)) - choose(total, k)
            terms.append(choose(members - colluders, s) + s * min(0.0, float(tail)))
    return float(np.logaddexp.reduce(terms)) / math.log(2) if terms else -math.inf


@functools.lru_cache(maxsize=64)
def least_neighbours(clients: int, threshold: int, colluders: int) -> int:
    """Return a safe k, found by bisection: one less is not safe, or is safe only by the rounding of t_k."""
    unsafe, safe = 0, clients - 1
    while safe - unsafe > 1:
        middle = (unsafe + safe) // 2
        if failure_log2(clients, clients, threshold, colluders, middle) <= SECURITY:
            safe = middle
        else:
            unsafe = middle
    return safe
