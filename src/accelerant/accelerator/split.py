"""One large call in parts: which calls can be divided, and the GPUs of a host that share one.

A call is divided by rows, images, attention's heads, transforms of a batch, or points of a sum of multiples. Parts run
one after the other where limits of time or memory ask for it (facade.py), or at once on several GPUs.

Each GPU has a thread, which launches on the caller's current stream of that GPU. Arguments and results travel between
GPUs by peer copies, and between the host and a GPU on its own link. So a call gains whose work outweighs the copies:
`devices_worth_using` weighs them. Elementwise functions of an array on one GPU never do, since the link is slower than
the memory.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from accelerant.accelerator import methods
from accelerant.accelerator.methods import METHODS, Results, Tensors
from accelerant.algebra.field.field import prime_field
from accelerant.zk.elliptic_curve import curve as curve_named

_PEER_BYTES_PER_S, _HOST_BYTES_PER_S = 2e11, 2.5e10
"""Speeds of a GPU's links to another one and to the host's pageable memory."""

_PART_S = 2e-4  # cost of a part: a thread that launches, and copies that wait for each other


@dataclass(frozen=True, slots=True)
class Split:
    """A call divided along the first dimension of its first `count` tensors, or the points of a sum on a `curve`."""

    tensors: Tensors
    count: int
    shape: tuple[int, ...]
    curve: str = ""

    @property
    def rows(self) -> int:
        """The number of rows, images, heads, transforms or points."""
        return math.prod(self.shape)

    def part(self, low: int, high: int) -> Tensors:
        """Return the arguments of some rows."""
        if self.curve:
            return self.tensors[0][..., low:high, :], self.tensors[1][low:high]
        return *[x[low:high] for x in self.tensors[: self.count]], *self.tensors[self.count :]

    def joined(self, parts: Iterable[Tensors]) -> Results:
        """Return the results of all rows, from those of consecutive parts."""
        if self.curve:
            group = curve_named(self.curve)
            return torch.as_tensor(functools.reduce(group.add, [total for (total,) in parts]))
        whole: list[torch.Tensor] = []
        low = 0
        for part in parts:
            whole = whole or [y.new_empty((self.rows, *y.shape[1:])) for y in part]
            high = low + part[0].shape[0]
            for target, y in zip(whole, part, strict=True):
                target[low:high] = y
            low = high
        if len(self.shape) > 1:
            whole = [y.reshape(*self.shape, *y.shape[2:]) for y in whole]
        return whole[0] if len(whole) == 1 else tuple(whole)


def split_along_rows(name: str, tensors: Tensors, options: Mapping[str, Any], *, heads: bool = True) -> Split | None:
    """Return a call as one that divides into parts, with `heads` attention's, too; None for one that cannot."""
    method, first = METHODS[name], tensors[0]
    if name == "msm" and first.ndim in (2, 3) and first.shape[-2:-1] == tensors[1].shape[:1]:
        return Split(tensors, 2, (first.shape[-2],), options.get("curve", methods.DEFAULT_CURVE))
    if name == "ntt" and first.ndim > 1 + (prime_field(options.get("field", methods.DEFAULT_FIELD)).limbs > 1):
        return Split(tensors, 1, (first.shape[0],))
    if method.merge in (None, "stack") or (method.whole is not None and method.whole(tensors, options)):
        return None
    count = methods.joined_arguments(name, tensors, options)
    one_row = first.ndim < 2 and (method.merge == "rows" or count < len(tensors))
    if not count or not first.ndim or (one_row and method.merge != "first"):
        return None
    if heads and name == "attention" and len({x.shape[1] for x in tensors}) == 1 and first.numel():
        each = tuple([x.reshape(-1, 1, *x.shape[2:]) for x in tensors])
        return Split(each, count, tuple(first.shape[:2]))
    return Split(tensors, count, (first.shape[0],))


# --- several devices -------------------------------------------------------------------------------------------------


def work_s(name: str, tensors: Tensors, options: Mapping[str, Any]) -> float:
    """Return the seconds that a call's work takes on one GPU, roughly."""
    spec = METHODS[name]
    return max(spec.flops(tensors, tensors[0], **options) / spec.per_s, sum(x.nbytes for x in tensors) / 4e12)


def devices_worth_using(seconds: float, size_bytes: int, rows: int, most: int, *, on_host: bool) -> int:
    """Return the number of devices, 1 to `most`, with which a call of `seconds` on one of them ends first.

    Arguments and result, of `size_bytes`, travel from the host over a link of each device, or from the first device.
    """

    def total_s(count: int) -> float:
        if on_host:
            copies = size_bytes / count / _HOST_BYTES_PER_S
        else:
            copies = size_bytes * (count - 1) / count / _PEER_BYTES_PER_S
        return seconds / count + copies + (count * _PART_S if count > 1 else 0.0)

    return min(range(1, max(1, min(rows, most)) + 1), key=total_s)


def run_on_devices(name: str, cut: Split, options: Mapping[str, Any], devices: Sequence[torch.device]) -> Results:
    """Run the parts of a call at once, one on each device; return the joined result where the arguments are."""
    home = cut.tensors[0].device
    bounds = [cut.rows * i // len(devices) for i in range(len(devices) + 1)]
    # Copies in the caller's thread, so that they follow what made the arguments.
    parts = [
        tuple(x.to(device, non_blocking=True) for x in cut.part(low, high))
        for device, (low, high) in zip(devices, pairwise(bounds), strict=True)
    ]
    streams = [torch.cuda.current_stream(device) if device.type == "cuda" else None for device in devices]

    def run(part: Tensors, stream: torch.cuda.Stream | None) -> Tensors:
        on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
        with torch.no_grad(), on_stream:
            return methods.tensors_of(METHODS[name].run(*part, **options))

    with ThreadPoolExecutor(len(devices), "accelerant-split") as threads:
        tasks = [
            threads.submit(contextvars.copy_context().run, run, part, stream)
            for part, stream in zip(parts, streams, strict=True)
        ]
        results = [task.result() for task in tasks]
    with torch.no_grad():
        return cut.joined(tuple(y.to(home) for y in result) for result in results)
