"""Homomorphic encryption: Paillier compared with phe, BFV with TenSEAL (Microsoft SEAL).

Paillier's values are int64, a ciphertext each, never packed; rows are of 1000 values, scaled from other numbers of
them. Sums on a GPU are of 2^18 ciphertexts that are there. phe uses gmpy2 where it is installed, on one core. BFV's
rows are of one ciphertext, on a GPU one of 64 in a call; products are relinearized. Every result is decrypted and
compared before it is timed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from accelerant.bench.record import OURS, Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, option
from accelerant.bench.timer import Timing, time_ms
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime.host import usable_cores
from accelerant.runtime.provider import ComputeDevice

__all__ = ["HeSuite"]

_VALUES = 1000
_PHE_VALUES, _GPU_SUMS = 8, 2**18
_H200_PER_S = {
    (2048, "encrypt"): 50e3, (2048, "encrypt, fixed base"): 0.7e6, (2048, "add"): 100e6, (2048, "decrypt"): 200e3,
    (3072, "encrypt"): 15e3, (3072, "decrypt"): 60e3,
}  # fmt: skip
"""Targets on an H200, values per second."""

_Call = tuple[str, str, Callable[[], Any], Callable[[Any], list[int]]]
"""Operation, runner, the call, and the integers in its result."""


@dataclass(frozen=True)
class HeSuite(Suite):
    """Measure encryption, operations and decryption with Paillier and BFV, compared with phe and TenSEAL."""

    name = "he"
    examples: ClassVar[tuple[str, ...]] = ("", "--bits 2048 --device cpu --json")

    bits: tuple[str, ...] = option(("2048", "3072"), "Sizes of Paillier's keys, in bits.", same=True)
    slots: tuple[str, ...] = option(("8192",), "Slots of BFV's ciphertexts.", same=True)
    values: int | None = option(None, "Values of a call: by default 32 on a CPU, 16384 on a GPU.", min=1)
    budget_s: float = option(0.3, "Seconds of calls behind each figure.", min=0.0, same=True)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite; ConfigError for a size that keys do not have."""
        for bits in self.bits:
            if not bits.isdecimal() or int(bits) % 2 or not 2048 <= int(bits) <= 8192:
                raise ConfigError(f"--bits: wanted even numbers from 2048 to 8192, got {bits!r}")
        for slots in self.slots:
            if slots not in ("4096", "8192", "16384", "32768"):
                raise ConfigError(f"--slots: wanted 4096, 8192, 16384 or 32768, got {slots!r}")
        return self

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each size of keys and ciphertexts."""
        paillier = [SuiteCase(f"{bits} bits", functools.partial(self._measure, int(bits))) for bits in self.bits]
        bfv = [SuiteCase(f"BFV, {n} slots", functools.partial(self._measure_bfv, int(n))) for n in self.slots]
        return paillier + bfv

    def _measure(self, bits: int, run: SuiteRun) -> None:
        count = self.values or (16384 if run.gpu else 32)
        for op, runner, call, read in _calls(bits, count, run):
            run.progress(f"{op}, {bits} bits: {runner}")
            wanted = [2 * i if op == "add" else i for i in range(min(count, _PHE_VALUES))]
            if read(call())[: len(wanted)] != wanted:
                raise AccelerantError(f"{op} of {runner} with {bits} bits: the decrypted result is wrong")
            values = min(count, _PHE_VALUES) if runner != OURS else _GPU_SUMS if op == "add" and run.gpu else count
            target = _H200_PER_S.get((bits, op))
            timing = self._timed(call, run, runner, _VALUES / values)
            cores = 1 if runner != OURS or op.startswith(("add", "encrypt, fixed")) else usable_cores()
            note = f"{1e3 * _VALUES / timing.p50_ms:,.4g} values/s" + ("" if run.gpu else f", {cores} cores")
            ours = runner == OURS
            row = Row(
                self.name, op, f"{bits} bits, {_VALUES} values", runner, "kernels" if ours and run.gpu else "gmpy2",
                target=1e3 * _VALUES / target if ours and target and run.is_model("H200") else None, note=note,
                target_x=1.0 if ours and not run.gpu else None,
            )  # fmt: skip
            run.add(row.timed(timing))
        if importlib.util.find_spec("phe") is None:
            run.record.notes.append("phe is not installed: pip install phe")

    def _measure_bfv(self, n: int, run: SuiteRun) -> None:
        batch = 64 if run.gpu else 1
        for op, runner, call, read in _bfv_calls(n, batch, run):
            run.progress(f"{op}, {n} slots: {runner}")
            if read(call()) != _BFV_RESULTS[op]:
                raise AccelerantError(f"{op} of {runner} with {n} slots: the decrypted result is wrong")
            ours = runner == OURS
            timing = self._timed(call, run, runner, 1 / batch if ours else 1)
            wanted = 1e3 / _BFV_H200_PER_S if op == "bfv multiply" and n == 8192 and run.is_model("H200") else None
            note = f"{1e3 / timing.p50_ms:,.4g} ciphertexts/s" + ("" if run.gpu else f", {usable_cores()} cores") * ours
            row = Row(
                self.name, op, f"{n} slots, 1 ciphertext", runner, "kernels" if ours else "SEAL", note=note,
                target=wanted if ours else None, target_x=1.0 if ours and not run.gpu and op != "bfv rotate" else None,
            )  # fmt: skip
            run.add(row.timed(timing))
        if importlib.util.find_spec("tenseal") is None:
            run.record.notes.append("TenSEAL is not installed: pip install tenseal")

    def _timed(self, call: Callable[[], Any], run: SuiteRun, runner: str, scale: float) -> Timing:
        """Return the times of calls, multiplied by a factor."""
        timing = time_ms(call, run.torch_device if runner == OURS else torch.device("cpu"), budget_s=self.budget_s)
        p20, p50, p80 = (scale * ms for ms in (timing.p20_ms, timing.p50_ms, timing.p80_ms))
        return Timing(p20, p50, p80, timing.repeats, tuple(scale * sample for sample in timing.samples))


def _calls(bits: int, count: int, run: SuiteRun) -> Iterator[_Call]:
    """Yield the calls of a key size, phe's after ours."""
    from accelerant.privacy.he import paillier

    public, private = paillier.keygen(bits)
    x = torch.arange(count, device=run.torch_device)
    encrypted = public.encrypt(x)

    def read(c: Any) -> list[int]:
        found: list[int] = private.decrypt(c[:_PHE_VALUES]).tolist()
        return found

    summand = encrypted[np.arange(_GPU_SUMS) % count] if run.gpu else encrypted
    yield "encrypt", OURS, lambda: public.encrypt(x), read
    yield "encrypt, fixed base", OURS, lambda: public.encrypt(x, fast=True), read
    yield "encrypt, private key", OURS, lambda: private.encrypt(x), read
    yield "add", OURS, lambda: summand + summand, read
    yield "decrypt", OURS, lambda: private.decrypt(encrypted), lambda plain: plain[:_PHE_VALUES].tolist()
    if importlib.util.find_spec("phe") is None:
        return
    import phe

    theirs = phe.PaillierPublicKey(public.n)
    reader, numbers = phe.PaillierPrivateKey(theirs, private.p, private.q), range(min(count, _PHE_VALUES))
    listed = [theirs.encrypt(i) for i in numbers]
    for op in ("encrypt", "encrypt, fixed base", "encrypt, private key"):  # phe has one mode
        yield op, "phe", lambda: list(map(theirs.encrypt, numbers)), lambda all: list(map(reader.decrypt, all))
    yield "add", "phe", lambda: [c + c for c in listed], lambda all: list(map(reader.decrypt, all))
    yield "decrypt", "phe", lambda: list(map(reader.decrypt, listed)), list


_BFV_RESULTS = {
    "bfv encrypt": [1, 2, 3, 4], "bfv add": [2, 4, 6, 8], "bfv multiply": [1, 4, 9, 16], "bfv rotate": [2, 3, 4, 5],
    "bfv decrypt": [1, 2, 3, 4],
}  # fmt: skip
"""The first four slots after each operation on 1, 2, 3, ..."""

_BFV_H200_PER_S = 20 * 235
"""Target of products on an H200: 20 times TenSEAL on one core."""


def _bfv_calls(n: int, batch: int, run: SuiteRun) -> Iterator[_Call]:
    """Yield the calls of BFV, TenSEAL's after ours; it has no rotation of BFV vectors."""
    from accelerant.privacy.he import bfv

    public, private = bfv.keygen(n, rotations=[1], device="cuda" if run.gpu else "cpu")
    plain = np.tile(np.arange(1, n + 1) % 1000, (batch, 1))
    x, y = public.encrypt(plain), public.encrypt(plain)

    def read(c: Any) -> list[int]:
        found: list[int] = private.decrypt(c)[-1, :4].tolist()
        return found

    yield "bfv encrypt", OURS, lambda: public.encrypt(plain), read
    yield "bfv add", OURS, lambda: x + y, read
    yield "bfv multiply", OURS, lambda: x * y, read
    yield "bfv rotate", OURS, lambda: x.rotate(1), read
    yield "bfv decrypt", OURS, lambda: private.decrypt(x), lambda found: found[-1, :4].tolist()
    if importlib.util.find_spec("tenseal") is None:
        return
    import tenseal

    context = tenseal.context(tenseal.SCHEME_TYPE.BFV, poly_modulus_degree=n, plain_modulus=65537)
    values = plain[0].tolist()
    a, b = tenseal.bfv_vector(context, values), tenseal.bfv_vector(context, values)
    yield "bfv encrypt", "TenSEAL", lambda: tenseal.bfv_vector(context, values), lambda c: c.decrypt()[:4]
    yield "bfv add", "TenSEAL", lambda: a + b, lambda c: c.decrypt()[:4]
    yield "bfv multiply", "TenSEAL", lambda: a * b, lambda c: c.decrypt()[:4]
    yield "bfv decrypt", "TenSEAL", a.decrypt, lambda found: found[:4]


if __name__ == "__main__":
    run_command(HeSuite)
