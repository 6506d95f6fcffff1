"""The prover of Groth16, with a key kept ready for many proofs.

    pi_A = alpha1 + sum w_i A_i + r delta1
    pi_B = beta2 + sum w_i B2_i + s delta2              pi_B1 the same of beta1, B1, delta1
    pi_C = sum_private w_i C_i + sum_j p_j H_j + s pi_A + r pi_B1 - r s delta1

with p_j of quotient.py and r, s fresh from the system's entropy. Source: Groth 2016, eprint 2016/260, section 3.2.

r and s, their product and multiples are computed in constant time. The sums over the witness and the sums of H are not:
their time and memory accesses depend on the witness.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.encoding import decode_points
from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field import launch as field_launch
from accelerant.algebra.field import words as host
from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.algebra.ntt import LOG_MOST
from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.zk.formats.circuit import Witness
from accelerant.zk.formats.zkey import Zkey
from accelerant.zk.groth16.chosen import Devices, chosen_places
from accelerant.zk.groth16.host_key import HostKey
from accelerant.zk.groth16.keys import Progress, ProvingKey, Stages, UnreducedError
from accelerant.zk.groth16.proof import Proof
from accelerant.zk.groth16.quotient import scalars_of
from accelerant.zk.groth16.verification_key import VerificationKey
from accelerant.zk.groth16.verifier import verify

__all__ = ["Prover", "prove"]

U64 = npt.NDArray[np.uint64]


class Prover:
    """A proving key, ready for proofs of many witnesses.

    >>> prover = Prover("circuit.zkey")
    >>> proof = prover.prove("witness.wtns")
    >>> verify(prover.verification_key, proof.public, proof)
    True

    The header's points, which hide the witness, are found to be finite, on their curves and in their subgroups. Those
    of the sections are believed (zk.formats.Zkey.check asks). A proof that a wrong key gives does not verify, and is
    not handed out; that it was not may tell a bit of the witness to who made the key.

    Attributes:
        family: "bn254" or "bls12_381".
        n_vars: values of a witness.
        n_public: public inputs.
        domain_size: points of the transforms.
        verification_key: that of the circuit.
        timings: stage -> seconds of the CPU's clock, of reading the key and of the last proof.
        spans: part -> seconds that the device spent on it for the last proof; parts overlap. Empty on the CPU.
    """

    def __init__(self, zkey: Zkey | str | Path, *, device: Devices = "auto", progress: Progress | None = None) -> None:
        """Read a key, and bring it to a device.

        Args:
            zkey: a Groth16 .zkey file, or one that is open, which need not stay so.
            device: "cpu", "cuda", "cuda:1", "opencl", or what accelerant.devices() lists; several of them, as in
                ["cuda:0", "cuda:1"], share each sum. "auto" is what the setting backend (ACCELERANT_BACKEND) names;
                without one an NVIDIA GPU, if it is there, and torch imported already or the domain of 2^16 points or
                more; else the CPU.
            progress: called with the name of each stage before it begins.

        Raises:
            FormatError: the file is not what it claims to be, or a point of its header is infinity, off its curve or
                out of the subgroup; names section and offset.
            UnsupportedCase: a domain of one point, which snarkjs does not make, or of more than 2^27.
            ConfigError: no backend has that name, or no device that number.
            BackendUnavailable: the backend is not there; says why.
            OutOfMemory: the device's is not even enough for the constraints and the vectors of a proof.
        """
        if not isinstance(zkey, Zkey):
            with Zkey.open(zkey) as opened:
                self._read(opened, device, progress)
        else:
            self._read(zkey, device, progress)

    def _read(self, zkey: Zkey, device: Devices, progress: Progress | None) -> None:
        if not 2 <= zkey.domain_size <= 1 << LOG_MOST:
            raise UnsupportedCase(f"{zkey.path}: a domain of {zkey.domain_size} points; it may have 2 to 2^{LOG_MOST}")
        stages = Stages(progress)
        self._progress = progress
        self._path = zkey.path
        self._pairing = family_of(zkey.family)
        self.family, self.n_vars, self.n_public = zkey.family, zkey.n_vars, zkey.n_public
        self.domain_size = zkey.domain_size
        self._field = scalars_of(self._pairing)
        with stages("key: header"):
            # Checks the header's points: with delta1 = beta1 = 0 proofs verify under the genuine key and hide nothing
            self.verification_key = VerificationKey.from_zkey(zkey)
        self._key = _key(zkey, chosen_places(device, zkey.domain_size), stages)
        g1, g2 = self._pairing.g1, self._pairing.g2
        self._g1 = {name: _one(g1, getattr(zkey, name)) for name in ("alpha1", "beta1", "delta1")}
        self._g2 = {name: _one(g2, getattr(zkey, name)) for name in ("beta2", "delta2")}
        self._key_timings = self.timings = stages.timings
        self.spans: dict[str, float] = {}

    def __repr__(self) -> str:
        sizes = f"{self.n_vars} signals, domain {self.domain_size}"
        return f"Prover({str(self._path)!r}, {self.family}, {sizes}, {self.device})"

    @property
    def device(self) -> str:
        """Where the key is: "cpu", "cuda:0", ..."""
        return self._key.label

    def explain(self) -> str:
        """Where the key's sections are, and how sums are made, in words."""
        return self._key.explain()

    def prove(
        self,
        witness: Witness | str | Path,
        *,
        verified: bool = True,
        insecure_randomness_for_tests: tuple[int, int] | None = None,
    ) -> Proof:
        """A proof, different each time.

        Args:
            witness: a .wtns file, or one that is open.
            verified: verify the proof before it is handed out: about 3 ms.
            insecure_randomness_for_tests: (r, s), integers from 0 to below the order, instead of fresh ones. A proof
                with r and s that are known, or used for another proof, gives the witness away.

        Raises:
            ConfigError: randomness that is no two such integers.
            FormatError: the file is not what it claims to be, of another curve or circuit; or the proof does not
                verify, since the witness does not satisfy the constraints.
        """
        return self._begin(witness, self._randomness(insecure_randomness_for_tests))(verified)

    def prove_many(self, witnesses: Iterable[Witness | str | Path], *, verified: bool = True) -> Iterator[Proof]:
        """Proofs of witnesses, in their order.

        On a device the next witness is read, copied and begun with before the last one's proof is put together and
        verified, so that the device has work all the time. On the CPU it is as calling prove for each.

        Args:
            witnesses: .wtns files; one ahead is taken.
            verified: as prove.

        Raises:
            FormatError: as prove, when it is that witness's turn: the proofs before it have been handed out. Those
                after it are not made.
            Exception: what `witnesses` raises, likewise.
        """
        ends: deque[Callable[[bool], Proof]] = deque()
        left = iter(witnesses)
        while True:
            try:
                ends.append(self._begin(next(left), self._randomness(None)))
            except StopIteration:
                break
            except Exception:
                yield from (end(verified) for end in ends)
                raise
            if len(ends) > 1:
                yield ends.popleft()(verified)
        yield from (end(verified) for end in ends)

    # --- parts ---------------------------------------------------------------------------------------------------

    def _begin(self, witness: Witness | str | Path, randomness: U64) -> Callable[[bool], Proof]:
        """Begin with a witness; what is returned ends it, verified or not."""
        stages, files = Stages(self._progress), ExitStack()
        with files:
            opened = witness if isinstance(witness, Witness) else files.enter_context(Witness.open(witness))
            self._check_witness(opened)
            with _reduced(opened):
                summed = self._key.begin(opened.values, stages)
            open_until_the_end = files.pop_all()

        def end(verified: bool) -> Proof:
            with open_until_the_end:
                with stages("blinding"):
                    blinds = self._blinds(randomness)
                with _reduced(opened):
                    found = summed()
            with stages("proof"):
                public = tuple(host.decode(self._field, found.public))
                proof = self._assembled(found.sums, randomness, blinds, public)
            if verified:
                with stages("verification"):
                    self._verify(proof, public)
            self.timings, self.spans = self._key_timings | stages.timings, found.spans
            return proof

        return end

    def _check_witness(self, witness: Witness) -> None:
        if witness.family != self.family:
            raise FormatError(f"{witness.path} is a witness on {witness.family}; {self._path} is on {self.family}")
        if witness.n_values != self.n_vars:
            raise FormatError(
                f"{witness.path} has {witness.n_values} values, {self._path} has {self.n_vars} signals: "
                "the witness is of another circuit"
            )

    def _randomness(self, given: tuple[int, int] | None) -> U64:
        """R, s: (2, 4) canonical words."""
        field = self._field
        if given is None:
            return host.random(field, (2,))
        if not isinstance(given, tuple | list) or len(given) != 2 or not all(_below(x, field.modulus) for x in given):
            raise ConfigError("insecure_randomness_for_tests must be two Python integers from 0 to below the order r")
        return host.encode(field, list(given))

    def _blinds(self, randomness: U64) -> tuple[U64, U64]:
        """What of a proof depends on no witness: delta1 times r, s and -r s, and delta2 times s."""
        g1, g2, field = self._pairing.g1, self._pairing.g2, self._field
        r, s = randomness[:1], randomness[1:]
        rs = field_launch.binary(HOST, field, "mul", r, s, "canonical")
        minus_rs = field_launch.unary(HOST, field, "neg", rs, "canonical")
        of_delta1: U64 = launch.multiply(HOST, g1, self._g1["delta1"], np.concatenate([r, s, minus_rs]))
        of_delta2: U64 = launch.multiply(HOST, g2, self._g2["delta2"], s)
        return of_delta1, of_delta2

    def _assembled(
        self, sums: dict[str, U64], randomness: U64, blinds: tuple[U64, U64], public: tuple[int, ...]
    ) -> Proof:
        g1, g2 = self._pairing.g1, self._pairing.g2
        of_delta1, s_delta2 = blinds
        a = _added(g1, self._g1["alpha1"], sums["A"], of_delta1[:1])
        b1 = _added(g1, self._g1["beta1"], sums["B1"], of_delta1[1:2])
        b2 = _added(g2, self._g2["beta2"], sums["B2"], s_delta2)
        mixed = launch.multiply(HOST, g1, np.concatenate([a, b1]), np.ascontiguousarray(randomness[::-1]))
        c = _added(g1, mixed[:1], mixed[1:], of_delta1[2:], sums["C"], sums["H"])
        (pi_a, pi_c), (pi_b,) = _affine(g1, np.concatenate([a, c])), _affine(g2, b2)
        return Proof(self.family, pi_a, pi_b, pi_c, public)

    def _verify(self, proof: Proof, public: tuple[int, ...]) -> None:
        try:
            valid = verify(self.verification_key, public, proof)
        except FormatError:  # points off their curves come of points in the key that are
            valid = False
        if not valid:
            raise FormatError(
                "the proof does not verify and is not handed out: the witness does not satisfy the constraints of "
                f"{self._path}, or that key is damaged"
            )


def prove(zkey: Zkey | str | Path, witness: Witness | str | Path, *, device: Devices = "auto") -> Proof:
    """One proof; a Prover is for many.

    >>> proof = prove("circuit.zkey", "witness.wtns")

    Args:
        zkey: a Groth16 .zkey file.
        witness: a .wtns file.
        device: as Prover.

    Raises:
        As Prover and Prover.prove.
    """
    return Prover(zkey, device=device).prove(witness)


def _key(zkey: Zkey, places: Sequence[MemorySpace], stages: Stages) -> ProvingKey:
    if list(places) == [HOST]:
        return HostKey(zkey, stages)
    from accelerant.zk.groth16.device_key import DeviceKey
    from accelerant.zk.groth16.split_key import SplitKey

    return DeviceKey(zkey, places[0], stages) if len(places) == 1 else SplitKey(zkey, places, stages)


@contextmanager
def _reduced(witness: Witness) -> Iterator[None]:
    """Word the error where a value in the file is not below r."""
    try:
        yield
    except UnreducedError:
        witness.check()
        raise FormatError(f"{witness.path} has changed while it was read") from None


def _below(value: object, modulus: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < modulus


def _one(curve: Curve[Any], words: U64) -> U64:
    return np.array(words, np.uint64).reshape(1, *curve.shape)


def _added(curve: Curve[Any], *points: U64) -> U64:
    """The sum of points, the first (1, *shape), the others of as many words."""
    total, *rest = points
    for point in rest:
        total = launch.add(HOST, curve, total, HOST.contiguous(point.reshape(total.shape)))
    return total


def _affine(curve: Curve[Any], points: U64) -> list[Any]:
    """Python points of words in Montgomery form."""
    canonical = launch.from_montgomery(HOST, curve, points)
    return decode_points(curve, canonical, check=False)
