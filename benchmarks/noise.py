"""Noise of differential privacy: the rate of secure and of Philox draws, of the keystream, and of torch's own.

Noise is timed as a release adds it: to float32 values in place, rounded to a grid where it is secure; Philox's also as
draws alone, which only write. Mean and spread are checked first, to six standard errors. More draws than a chunk are
made chunk by chunk in the same memory, so that 10^9 of them need no more than 2^28.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from accelerant.bench.record import DEVICE, OURS, Row
from accelerant.bench.suite import CpuColumn, Suite, SuiteCase, SuiteRun, option
from accelerant.bench.timer import Timing, synchronize, threads_text, time_ms
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime.memory.limits import available_bytes
from accelerant.runtime.provider import ComputeDevice

__all__ = ["NoiseCall", "NoiseSuite", "check_noise", "measure_noise", "noise_calls", "noise_row"]

_NOISE_MS = {"secure": 8.0, "Philox": 0.30, "keystream": 2**30 / 1e9}
"""Targets of 2^28 draws on an H200; of the keystream 1.0 TB/s."""

_CHECKED = 2**20
_STD = 1.0
_CHUNK, _CPU_CHUNK = 2**28, 2**24
"""Most draws at a time."""

_DRAW_BYTES = 16
"""Peak memory of a draw: its value, what it is added to, and temporaries of torch's own."""

_CPU_DRAWS = 2**22
"""Draws of the CPU column, from which the others are scaled."""

_VARIANTS = ("secure", "Philox", "Philox, drawn alone", "fill", "words")


@dataclass(frozen=True)
class NoiseSuite(Suite):
    """Measure draws of noise: secure, Philox's and torch's, any number of them in bounded memory."""

    name = "noise"
    examples: ClassVar[tuple[str, ...]] = ("", "--draws 1e9", "--draws 2^20 --device cpu --json")

    draws: str | None = option(None, "Draws: 1e9, 2^28, 1000000. By default 2^28; on a CPU 2^22.", metavar="N")
    budget_s: float = option(0.3, "Seconds of calls behind each figure of one chunk.", min=0.0, same=True)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with a number of draws; ConfigError for a text that is none."""
        gpu = device.torch_device.startswith("cuda")
        return replace(self, draws=str(_count(self.draws or ("2^28" if gpu else "2^22"))))

    def prepare(self, run: SuiteRun) -> None:
        """Measure the copy ceiling."""
        run.require_ceiling("copy", self.budget_s)

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each kind of noise."""
        n = int(self.draws or 0)

        def measure(variant: str, run: SuiteRun) -> None:
            measure_noise(n, self.budget_s, run, suite=self.name, variants=(variant,))

        def on_cpu(variant: str, run: SuiteRun) -> CpuColumn:
            few = min(n, _CPU_DRAWS)
            measure_noise(few, self.budget_s, run, suite=self.name, variants=(variant,))
            note = threads_text() + (f", scaled from {_number(few)} draws" if few < n else "")
            ours = [row for row in run.record.rows if row.runner == OURS and row.p50]
            return {(row.op, f"{_number(n)} {variant}"): ((row.p50 or 0.0) * n / few, note) for row in ours}

        return [
            SuiteCase(
                f"{_number(n)} {variant}", functools.partial(measure, variant),
                on_cpu=functools.partial(on_cpu, variant),
            )
            for variant in _VARIANTS
        ]  # fmt: skip

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of the number of draws."""
        return row.suite == self.name and row.case.startswith(f"{_number(int(self.draws or 0))} ")


def _count(text: str) -> int:
    """Return the whole number of a text: "1e9", "2^28", "1,000"."""
    match = re.fullmatch(r"(?:2\^(\d{1,2})|(\d{1,13})(?:e(\d{1,2}))?)", text.replace(",", "").replace("_", "").strip())
    count = 0 if match is None else 1 << int(match[1]) if match[1] else int(match[2]) * 10 ** int(match[3] or 0)
    if not 0 < count <= 2**45:
        raise ConfigError(f"--draws: wanted 1 to 2^45 draws, like 1e9 or 2^28; got {text!r}")
    return count


def _number(n: int) -> str:
    return f"2^{n.bit_length() - 1}" if n & (n - 1) == 0 else f"{n:,}"


@dataclass(frozen=True, slots=True)
class NoiseCall:
    """A call to time: fields of its row, and the key of its target. It is called with memory for its draws."""

    op: str
    variant: str
    runner: str
    implementation: str
    call: Callable[[Tensor], object]
    bytes: int
    target: str = ""
    note: str = ""


def check_noise(x: Tensor, std: float, name: str) -> None:
    """Check that values are noise of mean 0 and deviation `std`.

    Raises:
        AccelerantError: mean or deviation is more than six standard errors away.
    """
    values = x.flatten()[:_CHECKED].double()
    n = values.numel()
    spread, mean = (float(value) for value in torch.std_mean(values))
    if not abs(mean) < 6 * std / math.sqrt(n) or not abs(spread / std - 1) < 6 / math.sqrt(2 * n):
        raise AccelerantError(f"{name}: {n} draws of deviation {std} have mean {mean:.5g}, deviation {spread:.6g}")


def noise_calls(n: int, device: torch.device) -> Iterator[NoiseCall]:
    """Yield the calls of n draws: ours, torch's own, a fill of the same memory, and the keystream."""
    from accelerant.privacy.dp.noise import FastSource, SecureSource, choose_grid
    from accelerant.privacy.random import SecureStream

    grid = choose_grid(_STD, sensitivity=_STD, dimensions=n)
    secure, fast, stream = SecureSource(), FastSource(), SecureStream()
    steps = f"{_STD / grid:g} grid steps in a deviation"
    yield NoiseCall("noise", "secure", OURS, secure.name, lambda x: secure.add_gaussian_([x], _STD, grid=grid), 8 * n,
                    "secure", f"added to float32 in place, {steps}")  # fmt: skip
    yield NoiseCall("noise", "Philox", OURS, fast.name, lambda x: fast.add_gaussian_([x], _STD, grid=grid), 8 * n,
                    note="added to float32 in place")  # fmt: skip
    yield NoiseCall("noise", "Philox", "torch", "torch.randn, add_", lambda x: x.add_(torch.randn_like(x)), 8 * n)
    alone = "Philox, drawn alone"
    yield NoiseCall("noise", alone, OURS, fast.name, lambda x: fast.fill_gaussian_([x], _STD), 4 * n, "Philox")
    yield NoiseCall("noise", alone, "torch", "torch.normal_", lambda x: x.normal_(), 4 * n)
    yield NoiseCall("noise", "fill", DEVICE, "fill_", lambda x: x.fill_(1.0), 4 * n)
    yield NoiseCall(
        "keystream", "words", OURS, "chacha20", lambda x: stream.words(x.numel(), device), 4 * n, "keystream"
    )


def measure_noise(
    n: int, budget_s: float, run: SuiteRun, *, suite: str = "dp", variants: tuple[str, ...] = _VARIANTS
) -> None:
    """Append the rows of n draws, those of noise checked first."""
    where = run.torch_device
    chunk = min(n, _CHUNK if run.gpu else _CPU_CHUNK)
    while chunk > _CHECKED and chunk * _DRAW_BYTES > available_bytes(run.device):
        chunk //= 2
    x = torch.zeros(chunk, dtype=torch.float32, device=where)
    for one in noise_calls(n, where):
        if one.variant not in variants:
            continue
        run.progress(f"{one.op}, {_number(n)}: {one.variant}, {one.runner}")
        if one.op == "noise" and one.runner == OURS:
            one.call(x.zero_())
            check_noise(x, _STD, one.implementation)
        if chunk == n:
            timing, how = time_ms(functools.partial(one.call, x), where, budget_s=budget_s), ""
        else:
            timing, how = _streamed(one, x, n, run)
        run.add(replace(noise_row(one, n, run, timing, suite), timing=how))


def _streamed(one: NoiseCall, x: Tensor, n: int, run: SuiteRun) -> tuple[Timing, str]:
    """Make n draws a chunk at a time; return the times of its chunks, each scaled to n draws, and how it was done."""
    where, chunk, samples = run.torch_device, x.numel(), list[float]()
    one.call(x)
    synchronize(where)
    began = time.perf_counter()
    for done in range(0, n, chunk):
        size = min(chunk, n - done)
        start = time.perf_counter()
        one.call(x[:size])
        synchronize(where)
        if size == chunk:
            samples.append((time.perf_counter() - start) * 1e3 * n / chunk)
        run.progress(f"{one.op}, {_number(n)}: {one.variant}, {one.runner}, {100 * (done + size) // n}%")
    took = time.perf_counter() - began
    return Timing.of(
        samples, wall=True
    ), f"{-(-n // chunk)} chunks of {_number(chunk)} in {took:.3g} s, scaled from each"


def noise_row(one: NoiseCall, n: int, run: SuiteRun, timing: Timing, suite: str = "dp") -> Row:
    """Return the row of a call."""
    target = _NOISE_MS.get(one.target) if n == 1 << 28 and run.is_model("H200") else None
    note = f"{timing.p50_ms * 1e6 / n:.3g} ns each, {n / timing.p50_ms / 1e6:.3g} G draws/s"
    note += "" if run.gpu else f", {threads_text()} of torch"
    row = Row(
        suite, one.op, f"{_number(n)} {one.variant}", one.runner, one.implementation, bytes=one.bytes, ceiling="copy",
        target=target, note="; ".join(filter(None, (note, one.note))),
    )  # fmt: skip
    return row.timed(timing)


if __name__ == "__main__":
    run_command(NoiseSuite)
