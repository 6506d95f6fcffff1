"""The Groth16 prover, and the compilation of its first proof's kernels.

    pi_A = alpha1 + sum w_i A_i + r delta1
    pi_B = beta2 + sum w_i B2_i + s delta2              pi_B1 the same of beta1, B1, delta1
    pi_C = sum_private w_i C_i + sum_j p_j H_j + s pi_A + r pi_B1 - r s delta1

with p_j of keys.py and r, s fresh from the system's entropy. Source: Groth 2016, eprint 2016/260, section 3.2.

r and s, their product and multiples are computed in constant time. The sums over the witness and the sum over H are
not: their time and memory accesses depend on the witness.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accelerant._renamed import renamed_arguments
from accelerant.algebra.curve import launch
from accelerant.algebra.curve.launch import kernel_source
from accelerant.algebra.curve.pairing import product_is_one
from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import Curve, decode_points
from accelerant.algebra.field import launch as field_launch
from accelerant.algebra.field import words as field_words
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.ntt import LOG_MOST
from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.runtime import registry
from accelerant.runtime.compilation.cache import KernelCache, compiling
from accelerant.runtime.host import python_child, usable_cores
from accelerant.runtime.providers.cpu import CpuProvider
from accelerant.runtime.registry import DeviceLike
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.formats.circuit import Witness
from accelerant.zk.formats.zkey import Zkey
from accelerant.zk.groth16 import keys
from accelerant.zk.groth16.keys import U64, ProgressCallback, SparseMatrix, Stages, quotient, snarkjs_scalar_field
from accelerant.zk.groth16.proof import Proof
from accelerant.zk.groth16.verifier import Statement, VerificationKey
from accelerant.zk.multi_scalar import Devices

if TYPE_CHECKING:
    from accelerant.zk.groth16.device_key import DeviceKey


class Prover:
    """A proving key in memory, for proofs of many witnesses.

    >>> prover = Prover("circuit.zkey")
    >>> proof = prover.prove("witness.wtns")
    >>> verify(prover.verification_key, proof.public, proof)
    True

    The points of the header, which hide the witness, are checked to be finite, on their curves and in their subgroups.
    The points of the sections are not checked (see zk.formats.Zkey.check). A proof made with a wrong key does not
    verify and is not returned; its absence may tell the maker of the key one bit of the witness.

    Attributes:
        family: "bn254", "bls12_381", or a registered one.
        n_vars: values of a witness.
        n_public: public inputs.
        domain_size: size of the transforms.
        verification_key: the verification key of the circuit.
        timings: stage -> seconds of wall time, of reading the key and of the last proof. "key: compile" and "compile"
            are the compilation of kernels, or their loading from the disk cache; no other stage includes it.
        spans: part -> seconds of device time of the last proof; parts overlap. Empty on the CPU.
    """

    def __init__(
        self, zkey: Zkey | str | Path, *, device: DeviceLike = None, devices: Devices = None,
        progress: ProgressCallback | None = None,
    ) -> None:  # fmt: skip
        """Read a key and copy it to a device.

        Args:
            zkey: a Groth16 .zkey file, or an open one, which may be closed afterwards.
            device: "cpu", "cuda", "cuda:1", "opencl", or a device of accelerant.devices(). None or "auto" follows the
                setting `backend` (ACCELERANT_BACKEND); without one it takes an NVIDIA GPU if there is one and torch is
                imported already or the domain has 2^16 points or more, else the CPU.
            devices: several, as in ["cuda:0", "cuda:1"], instead of one: they share each sum.
            progress: called with the name of each stage before it begins.

        Raises:
            FormatError: the file is malformed, or a point of its header is infinity, off its curve or outside the
                subgroup; names section and offset.
            UnsupportedCase: a domain of one point, which snarkjs does not make, or of more than 2^27.
            ConfigError: unknown backend or device number.
            BackendUnavailable: the backend is unavailable; says why.
            OutOfMemory: the constraints and the vectors of a proof do not fit the device.
        """
        with nullcontext(zkey) if isinstance(zkey, Zkey) else Zkey.open(zkey) as opened:
            self._read(opened, device, devices, progress)

    def _read(self, zkey: Zkey, device: DeviceLike, devices: Devices, progress: ProgressCallback | None) -> None:
        if not 2 <= zkey.domain_size <= 1 << LOG_MOST:
            raise UnsupportedCase(f"{zkey.path}: a domain of {zkey.domain_size} points; it may have 2 to 2^{LOG_MOST}")
        stages = Stages(progress, "key: compile")
        self._progress, self._path, self._pairing = progress, zkey.path, family_of(zkey.family)
        self.family, self.domain_size = zkey.family, zkey.domain_size
        self.n_vars, self.n_public = zkey.n_vars, zkey.n_public
        self._field = snarkjs_scalar_field(self._pairing)
        with stages("key: header"):
            # Checks the header's points: with delta1 = beta1 = 0 proofs verify under the genuine key and hide nothing
            self.verification_key = VerificationKey.from_zkey(zkey)
        self._key = proving_key(zkey, device, stages, devices)
        g1, g2 = self._pairing.g1, self._pairing.g2
        self._g1 = {name: _point(g1, getattr(zkey, name)) for name in ("alpha1", "beta1", "delta1")}
        self._g2 = {name: _point(g2, getattr(zkey, name)) for name in ("beta2", "delta2")}
        self._key_timings = self.timings = stages.timings
        self.spans: dict[str, float] = {}

    def __repr__(self) -> str:
        sizes = f"{self.n_vars} signals, domain {self.domain_size}"
        return f"Prover({str(self._path)!r}, {self.family}, {sizes}, {self.device})"

    @property
    def device(self) -> str:
        """Name of the device that holds the key: "cpu", "cuda:0", ..."""
        return self._key.label

    def explain(self) -> str:
        """Describe where the key's sections are stored and how they are summed."""
        return self._key.explain()

    @renamed_arguments(verified="verify")
    def prove(
        self, witness: Witness | str | Path, *, verify: bool = True,
        insecure_randomness_for_tests: tuple[int, int] | None = None,
    ) -> Proof:  # fmt: skip
        """Return a proof, different at each call.

        Args:
            witness: a .wtns file, or an open one.
            verify: verify the proof before it is returned: about 3 ms.
            insecure_randomness_for_tests: (r, s), integers from 0 to below the order, instead of fresh ones. If r and s
                are known, or used for a second proof, the proof reveals the witness.

        Raises:
            ConfigError: the randomness is not two such integers.
            FormatError: the file is malformed, or of another curve or circuit; or the proof does not verify, since the
                witness does not satisfy the constraints.
        """
        return self._begin(witness, self._randomness(insecure_randomness_for_tests))(verify)

    @renamed_arguments(verified="verify")
    def prove_many(self, witnesses: Iterable[Witness | str | Path], *, verify: bool = True) -> Iterator[Proof]:
        """Yield the proofs of witnesses, in order.

        On a device the next witness is read, copied and launched before the previous proof is assembled and verified,
        so that the device does not idle. On the CPU it is the same as calling prove for each.

        Args:
            witnesses: .wtns files; read one ahead of the proofs.
            verify: as for prove.

        Raises:
            FormatError: as prove, after the proofs of the preceding witnesses were yielded; later ones are not made.
            Exception: errors of `witnesses`, likewise.
        """
        pending: deque[Callable[[bool], Proof]] = deque()
        remaining = iter(witnesses)
        while True:
            try:
                pending.append(self._begin(next(remaining), self._randomness(None)))
            except StopIteration:
                break
            except Exception:
                yield from (finish(verify) for finish in pending)
                raise
            if len(pending) > 1:
                yield pending.popleft()(verify)
        yield from (finish(verify) for finish in pending)

    def _begin(self, witness: Witness | str | Path, randomness: U64) -> Callable[[bool], Proof]:
        """Start a proof; return a function that finishes it, verified or not."""
        g1, g2 = self._pairing.g1, self._pairing.g2
        stages, files = Stages(self._progress), ExitStack()
        with files:
            opened = witness if isinstance(witness, Witness) else files.enter_context(Witness.open(witness))
            if opened.family != self.family:
                raise FormatError(f"{opened.path} is a witness on {opened.family}; {self._path} is on {self.family}")
            if opened.n_values != self.n_vars:
                raise FormatError(
                    f"{opened.path} has {opened.n_values} values, {self._path} has {self.n_vars} signals: "
                    "the witness is of another circuit"
                )
            with _reduced(opened):
                key = self._key.begin(opened, stages)
            open_until_the_end = files.pop_all()

        def finish(verify: bool) -> Proof:
            with open_until_the_end:
                with stages("blinding"):
                    delta1, s_delta2 = self._blinding(randomness)
                with _reduced(opened):
                    inputs = key.public()
                with stages("blinding"):  # while a device computes the sums
                    public = tuple(field_words.decode(self._field, inputs))
                    statement = Statement(self.verification_key, public) if verify else None
                    if statement is not None and self._key.label != HOST.label:  # else nothing runs meanwhile
                        statement.prepare()
                sum_a, sum_b1 = key.sum("A"), key.sum("B1")
                with stages("blinding"):
                    a = _sum(g1, self._g1["alpha1"], sum_a, delta1[:1])
                    b1 = _sum(g1, self._g1["beta1"], sum_b1, delta1[1:2])
                    scaled = launch.multiply(HOST, g1, np.concatenate([a, b1]), np.ascontiguousarray(randomness[::-1]))
                    c = _sum(g1, scaled[:1], scaled[1:], delta1[2:])
                sum_b2, sum_c, sum_h = (key.sum(name) for name in ("B2", "C", "H"))
            with stages("proof"):
                b2 = _sum(g2, self._g2["beta2"], sum_b2, s_delta2)
                c = _sum(g1, c, sum_c, sum_h)
                (pi_a, pi_c), (pi_b,) = (
                    decode_points(curve, launch.from_montgomery(HOST, curve, points))
                    for curve, points in ((g1, np.concatenate([a, c])), (g2, b2))
                )
                proof = Proof(self.family, pi_a, pi_b, pi_c, public)
            if statement is not None:
                with stages("verification"):
                    self._verify(statement, proof)
            self.timings, self.spans = self._key_timings | stages.timings, key.spans()
            return proof

        return finish

    def _randomness(self, fixed: tuple[int, int] | None) -> U64:
        """Return r and s, (2, 4) canonical words."""
        field = self._field
        if fixed is None:
            return field_words.random(field, (2,))
        pair = isinstance(fixed, tuple | list) and len(fixed) == 2
        if not pair or not all(
            isinstance(value, int) and not isinstance(value, bool) and 0 <= value < field.modulus for value in fixed
        ):
            raise ConfigError("insecure_randomness_for_tests must be two Python integers from 0 to below the order r")
        return field_words.encode(field, list(fixed))

    def _blinding(self, randomness: U64) -> tuple[U64, U64]:
        """Return the parts of a proof that depend on no witness: delta1 times r, s and -r s, and delta2 times s."""
        g1, g2, field = self._pairing.g1, self._pairing.g2, self._field
        r, s = randomness[:1], randomness[1:]
        rs = field_launch.elementwise(HOST, field, "mul", "canonical", r, s)
        minus_rs = field_launch.elementwise(HOST, field, "neg", "canonical", rs)
        delta1: U64 = launch.multiply(HOST, g1, self._g1["delta1"], np.concatenate([r, s, minus_rs]))
        delta2: U64 = launch.multiply(HOST, g2, self._g2["delta2"], s)
        return delta1, delta2

    def _verify(self, statement: Statement, proof: Proof) -> None:
        try:
            valid = statement.proved_by(proof)
        except FormatError:  # a point off its curve results from such points in the key
            valid = False
        if not valid:
            raise FormatError(
                "the proof does not verify and is not returned: the witness does not satisfy the constraints of "
                f"{self._path}, or that key is damaged"
            )


def prove(
    zkey: Zkey | str | Path, witness: Witness | str | Path, *, device: DeviceLike = None, devices: Devices = None
) -> Proof:
    """Return one proof; use a Prover, which has the same arguments and errors, for several.

    >>> proof = prove("circuit.zkey", "witness.wtns")
    """
    return Prover(zkey, device=device, devices=devices).prove(witness)


def proving_key(zkey: Zkey, device: DeviceLike, stages: Stages, devices: Devices = None) -> keys.HostKey | DeviceKey:
    """Read a key into the memory of a device, or of several; errors as those of Prover."""
    if (spaces := keys.spaces_of(device, zkey.domain_size, devices)) == (HOST,):
        return keys.HostKey(zkey, stages)
    from accelerant.zk.groth16.device_key import DeviceKey  # unused by a proof on the CPU

    return DeviceKey(zkey, spaces, stages)


@contextmanager
def _reduced(witness: Witness) -> Iterator[None]:
    """Turn UnreducedError into an error that names the value in the file."""
    try:
        yield
    except keys.UnreducedError:
        witness.check()
        raise FormatError(f"{witness.path} has changed while it was read") from None


def _point(curve: Curve[Any], words: U64) -> U64:
    return np.array(words, np.uint64).reshape(1, *curve.shape)


def _sum(curve: Curve[Any], *points: U64) -> U64:
    """Return the sum of points, (1, *shape); those after the first may have any shape."""
    total, *rest = points
    for point in rest:
        total = launch.add(HOST, curve, total, HOST.contiguous(point.reshape(total.shape)))
    return total


# --- kernels of a first proof, compiled in two processes -------------------------------------------------------------
_PROGRAM = "import sys; from accelerant.zk.groth16.prover import work; work(sys.argv[1], int(sys.argv[2]))"

_PAIRINGS = 4  # Pairings of a verification
_PATIENCE_S = 30.0  # Longest wait for one kernel, which takes a second or two, more on a busy machine
_LARGEST_DOMAIN = 1 << 17  # Larger transforms, run to compile their kernels, take as long as compiling them


def precompile_kernels(family: str, domain_size: int) -> None:
    """Start a process that compiles kernels, if they are not cached and a second core is usable."""
    provider = registry.create("cpu")
    if not isinstance(provider, CpuProvider) or usable_cores() == 1 or not sys.executable:
        return
    if KernelCache().has(provider.key_of(kernel_source(family_of(family).g1, "curve_mul"))):
        return
    with contextlib.suppress(OSError):  # the process limit is reached, or the executable is missing
        provider.wait_for = _CompilerProcess(family, domain_size).wait


def work(family: str, domain_size: int) -> None:
    """Run small inputs through a proof's kernels, but those of sums, printing each key before it is compiled."""
    provider = registry.create("cpu")
    if isinstance(provider, CpuProvider):
        provider.wait_for = lambda key: print(key, flush=True)
    pairing = family_of(family)
    curves: tuple[Curve[Any], ...] = (pairing.g1, pairing.g2)
    one = np.array([[1, 0, 0, 0]], np.uint64)
    points = [np.zeros((1, *curve.shape), np.uint64) for curve in curves]
    for curve, point in zip(curves, points, strict=True):
        launch.multiply(HOST, curve, point, one)
    if domain_size <= _LARGEST_DOMAIN:
        field, none = snarkjs_scalar_field(pairing), np.zeros(0, np.int64)
        quotient(SparseMatrix.from_entries(field, 2 * domain_size, none, none, np.zeros((0, 4), np.uint64)), one)
    for curve, point in zip(curves, points, strict=True):
        launch.add(HOST, curve, point, point)
    generators = [np.stack([curve_named(curve.name).generator] * _PAIRINGS) for curve in curves]
    product_is_one(pairing, *generators)


class _CompilerProcess:
    """The second process, and the key of the kernel it is compiling."""

    def __init__(self, family: str, domain_size: int) -> None:
        self._at, self._ended, self._pid = "", False, os.getpid()
        self._changed = threading.Condition()
        self._process = python_child(
            _PROGRAM,
            family,
            str(domain_size),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=self._listen, name="accelerant-precompile", daemon=True).start()

    def wait(self, key: str) -> None:
        """Return once the process is not compiling the kernel; one that takes too long is killed."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._at != key:
                return
            with compiling():
                in_time = self._changed.wait_for(lambda: self._at != key, _PATIENCE_S)
        if not in_time or not KernelCache().has(key):
            self._process.kill()
            self._ended = True
            self._set_current("")

    def _listen(self) -> None:
        with self._process:
            for line in self._process.stdout or ():
                self._set_current(line.strip())
            self._set_current("")

    def _set_current(self, key: str) -> None:
        with self._changed:
            self._at = "" if self._ended else key
            self._changed.notify_all()
