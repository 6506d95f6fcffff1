"""Masks of secure aggregation, of all clients of a complete graph, beside the package cryptography and NumPy."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch

from accelerant.bench.record import OURS, Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, option, same_on_cpu
from accelerant.bench.timer import Timing, time_ms
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError
from accelerant.privacy.mpc.secagg.encoding import SignedSeed, mask_sums
from accelerant.privacy.mpc.secagg.messages import crypto
from accelerant.runtime.provider import ComputeDevice

__all__ = ["SecaggSuite"]

_TARGET_MS = 60.0
_PEER_MASKS = 8


@dataclass(frozen=True)
class SecaggSuite(Suite):
    """Measure the masks of secure aggregation: both ends of each pair, each client's own, and the sum of the inputs."""

    name = "secagg"
    examples: ClassVar[tuple[str, ...]] = ("", "--clients 10 --size 65536 --device cpu --json")

    clients: int | None = option(None, "Clients; by default 100, on a CPU 10.", min=2)
    size: int | None = option(None, "Elements of an update; by default 10^6, on a CPU 10^5.", min=1)
    budget_s: float = option(0.3, "Seconds of calls behind each figure.", min=0.0, same=True)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with its numbers."""
        gpu = device.torch_device.startswith("cuda")
        return replace(self, clients=self.clients or (100 if gpu else 10), size=self.size or (10**6 if gpu else 10**5))

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return the one case."""
        return [SuiteCase(self._case, self._measure, on_cpu=same_on_cpu(self._measure))]

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of these numbers."""
        return row.suite == self.name and row.case == self._case

    @property
    def _case(self) -> str:
        return f"{self.clients} clients, {self.size:,} elements"

    def _measure(self, run: SuiteRun) -> None:
        n, size, where = self.clients or 0, self.size or 0, run.torch_device
        pairs = {(i, j): os.urandom(32) for j in range(n) for i in range(j)}
        own: list[SignedSeed] = [(os.urandom(32), 1) for _ in range(n)]
        rows = [
            [own[i], *((pairs[min(i, j), max(i, j)], 1 if i < j else -1) for j in range(n) if j != i)] for i in range(n)
        ]

        def ours() -> torch.Tensor:
            total = torch.zeros(size, dtype=torch.int32, device=where)
            for row in mask_sums(rows, size, where):
                total += row
            return total.sub_(mask_sums([own], size, where)[0])

        run.progress(self._case)
        if bool(ours().any()):
            raise AccelerantError("the masks of all clients do not cancel")
        target = _TARGET_MS if (n, size) == (100, 10**6) and run.is_model("H200") else None
        row = Row(self.name, "masks", self._case, OURS, "chacha20_mask_sums", bytes=4 * n * size, target=target,
                  note=f"{n * n} masks and their removal from the sum")  # fmt: skip
        run.add(row.timed(time_ms(ours, where, budget_s=self.budget_s)))
        peer, few = np.zeros(size, np.uint32), [seed for seed, _ in rows[0][:_PEER_MASKS]]

        def plain() -> None:
            ciphers, zeros = crypto("ciphers"), bytes(4 * size)
            for seed in few:
                cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(seed, bytes(16)), None).encryptor()
                peer[:] += np.frombuffer(cipher.update(zeros), "<u4")

        timing = time_ms(plain, torch.device("cpu"), budget_s=self.budget_s)
        scaled = Timing.of([timing.p50_ms * n * n / len(few)], wall=True)
        row = Row(self.name, "masks", self._case, "numpy", "cryptography ChaCha20", bytes=4 * n * size,
                  note=f"on one core, scaled from {len(few)} masks")  # fmt: skip
        run.add(row.timed(scaled))


if __name__ == "__main__":
    run_command(SecaggSuite)
