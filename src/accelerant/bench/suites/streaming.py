"""Arrays streamed in chunks: the time beside the pinned copy's, and how much of copies and work overlapped."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from torch import Tensor

from accelerant.bench.ceilings import measure_link
from accelerant.bench.record import Record, Row
from accelerant.bench.suites.bandwidth import size_name
from accelerant.bench.timer import Timing, wall_ms
from accelerant.errors import AccelerantError
from accelerant.runtime.memory.limits import available_bytes
from accelerant.runtime.provider import ComputeDevice
from accelerant.runtime.streams.transfer import ChunkedRun, stream_chunks

__all__ = ["rows"]

_ALLOWED_ERROR = 1e-2


def rows(record: Record, device: ComputeDevice, where: torch.device, budget_s: float) -> list[Row]:
    """stream_chunks beside the same chunks one after the other, and its overlap.

    The function is as many products as take about as long on an H200 as a chunk's way there, so that each of the three
    stages could hide the others.

    Args:
        record: gets the link's ceilings unless it has them.
        device, where: where.
        budget_s: seconds for each figure.

    Raises:
        AccelerantError: the streamed result is wrong.
    """
    if "host to device GB/s" not in record.ceilings:
        record.ceilings |= measure_link(where, budget_s=budget_s)
    work = _Work(device, where)
    label = f"{size_name(work.array.nbytes)} in {size_name(work.chunk_bytes)} chunks, {work.products} products each"
    base = Row(
        "runtime", "stream", f"{label}, {work.memory}", "", "", bytes=work.array.nbytes, ceiling="host to device",
    )  # fmt: skip
    runs: list[ChunkedRun] = []
    streamed = wall_ms(lambda: runs.append(work.streamed()), where, budget_s=budget_s, least=5)
    first = work.out.clone()
    work.out.zero_()
    sequence = wall_ms(work.in_sequence, where, budget_s=budget_s, least=5)
    error = float((first.double() - work.out.double()).norm() / work.out.double().norm())
    if not error <= _ALLOWED_ERROR:
        raise AccelerantError(f"stream_chunks: relative error {error:.3g} against the same chunks in sequence")
    overlap = Timing.of([run.overlap for run in runs])
    parts = ", ".join(
        f"{name} {1e3 * statistics.median(getattr(run, field) for run in runs):.3g} ms"
        for name, field in (("in", "copy_in_s"), ("compute", "compute_s"), ("out", "copy_out_s"))
    )
    return [
        _timed(replace(base, runner="accelerant", implementation="stream_chunks", note=parts), streamed),
        _timed(replace(base, runner="in sequence", implementation="torch, one stream"), sequence),
        _timed(
            replace(
                base, op="stream overlap", runner="accelerant", implementation="stream_chunks", unit="x",
                better="higher", bytes=0, ceiling="", note="1 is none, 3 is all three stages at once",
            ),
            overlap,
        ),
    ]  # fmt: skip


def _timed(row: Row, timing: Timing) -> Row:
    return replace(row, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms)


class _Work:
    """The array, its function and its chunks."""

    def __init__(self, device: ComputeDevice, where: torch.device) -> None:
        gpu = where.type == "cuda"
        width = 4096 if gpu else 256
        size = 2**30 if gpu and available_bytes("cpu") > 2**33 else 2**28 if gpu else 2**22
        dtype = torch.bfloat16 if gpu else torch.float32
        self.products = 3 if gpu else 1
        self.chunk_bytes = size // 32 if gpu else size // 8
        self.memory = "pinned" if gpu else "pageable"
        self.device, self.where = device, where
        shape = (size // width // dtype.itemsize, width)
        self.array = torch.empty(shape, dtype=dtype, pin_memory=gpu)
        self.array.copy_(torch.randn(shape, device=where, dtype=dtype))
        self.out = torch.empty(shape, dtype=dtype, pin_memory=gpu)
        self.weight = (torch.randn(width, width, device=where) / width**0.5).to(dtype)
        self.step = self.chunk_bytes // width // dtype.itemsize

    def function(self, x: Tensor) -> Tensor:
        for _ in range(self.products):
            x = x @ self.weight
        return x

    def streamed(self) -> ChunkedRun:
        return stream_chunks(
            self.function, self.array, device=self.device, chunk_bytes=self.chunk_bytes, out=self.out, atomic=False
        )

    def in_sequence(self) -> None:
        with torch.no_grad():
            for begin in range(0, len(self.array), self.step):
                chunk = self.array[begin : begin + self.step].to(self.where, non_blocking=True)
                self.out[begin : begin + self.step].copy_(self.function(chunk), non_blocking=True)
