"""Noise for private releases: secure, Philox's, the keystream below, torch's own, and a fill of the same memory.

What is timed of ours is what a release does: noise added to float32 values in place, rounded to a grid where it is
secure; of Philox's also draws alone, which only write. Its mean and spread are checked first, to six standard errors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.bench.pieces import Piece
from accelerant.bench.record import DEVICE, Record, Row
from accelerant.bench.timer import Timing, time_ms
from accelerant.errors import AccelerantError
from accelerant.runtime.provider import ComputeDevice

__all__ = ["check_noise", "pieces"]

_OURS = "accelerant"
_CHECKED = 2**20
_STD = 1.0
_ASKED_MS = {"secure": 8.0, "Philox": 0.30, "keystream": 2**30 / 1e9}
"""On an H200, of 2^28 draws; of the keystream's bytes 1.0 TB/s."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """One call to time: the row's op, what it does, its runner, its bytes, and what it is asked to take."""

    op: str
    how: str
    runner: str
    implementation: str
    call: Callable[[], object]
    bytes: int
    asked: str = ""
    note: str = ""


def pieces(exponent: int, where: torch.device, device: ComputeDevice, budget_s: float) -> list[Piece]:
    """What to measure of 2^exponent draws."""
    return [Piece("dp", f"noise 2^{exponent}", functools.partial(_measure, exponent, where, device, budget_s))]


def check_noise(x: Tensor, std: float, what: str) -> None:
    """That values are noise of mean 0 and this deviation.

    Raises:
        AccelerantError: mean or deviation is more than six standard errors away.
    """
    values = x.flatten()[:_CHECKED].double()
    n = values.numel()
    spread, mean = (float(each) for each in torch.std_mean(values))
    if not abs(mean) < 6 * std / math.sqrt(n) or not abs(spread / std - 1) < 6 / math.sqrt(2 * n):
        raise AccelerantError(f"{what}: {n} draws of deviation {std} have mean {mean:.5g}, deviation {spread:.6g}")


def _measure(
    exponent: int, where: torch.device, device: ComputeDevice, budget_s: float,
    record: Record, progress: Callable[[str], None],
) -> None:  # fmt: skip
    from accelerant.privacy.dp.noise import FastSource, SecureSource, choose_grid
    from accelerant.privacy.random import SecureStream

    n = 1 << exponent
    x = torch.zeros(n, dtype=torch.float32, device=where)
    grid = choose_grid(_STD, _STD, n)
    secure, fast, stream = SecureSource(), FastSource(), SecureStream()
    for source in (secure, fast):
        progress(f"noise, 2^{exponent}: {source.name}, checked")
        x.zero_()
        source.add_gaussian_([x], _STD, grid=grid)
        check_noise(x, _STD, source.name)
    del source
    steps = f"{_STD / grid:g} grid steps in a deviation"
    timed = [
        _Timed("noise", "secure", _OURS, secure.name, lambda: secure.add_gaussian_([x], _STD, grid=grid), 8 * n,
               "secure", f"added to float32 in place, {steps}"),
        _Timed("noise", "Philox", _OURS, fast.name, lambda: fast.add_gaussian_([x], _STD, grid=grid), 8 * n,
               note="added to float32 in place"),
        _Timed("noise", "Philox", "torch", "torch.randn, add_", lambda: x.add_(torch.randn_like(x)), 8 * n),
        _Timed("noise", "Philox, drawn alone", _OURS, fast.name, lambda: fast.fill_gaussian_([x], _STD), 4 * n,
               "Philox"),
        _Timed("noise", "Philox, drawn alone", "torch", "torch.normal_", lambda: x.normal_(), 4 * n),
        _Timed("noise", "fill", DEVICE, "fill_", lambda: x.fill_(1.0), 4 * n),
        _Timed("keystream", "words", _OURS, "chacha20", lambda: stream.words(n, where), 4 * n, "keystream"),
    ]  # fmt: skip
    for each in timed:
        progress(f"{each.op}, 2^{exponent}: {each.how}, {each.runner}")
        timing = time_ms(each.call, where, budget_s=budget_s)
        record.rows.append(_row(each, exponent, where, device, timing))


def _row(each: _Timed, exponent: int, where: torch.device, device: ComputeDevice, timing: Timing) -> Row:
    asked = _ASKED_MS.get(each.asked) if exponent == 28 and "H200" in device.name else None
    note = f"{timing.p50_ms * 1e6 / (1 << exponent):.3g} ns each"
    if where.type == "cpu":
        note += f", {torch.get_num_threads()} threads of torch"
    return Row(
        "dp", each.op, f"2^{exponent} {each.how}", each.runner, each.implementation,
        p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms, bytes=each.bytes, ceiling="copy", target=asked,
        note="; ".join(filter(None, (note, each.note))), samples=timing.samples,
    )  # fmt: skip
