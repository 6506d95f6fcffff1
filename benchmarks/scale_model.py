"""A cost model of several processes: collectives, and the steps that wait for them.

A collective over p processes, as a ring, sends `messages` one after the other and `share` of its bytes over each link:

    all_reduce      messages 2 (p - 1)   share 2 (p - 1) / p
    all_gather, reduce_scatter   p - 1   share (p - 1) / p      of the whole array
    send_recv       messages 1           share 1
    copied_sum      as all_reduce
    peer_sum        messages 1           share 2 (p - 1)        eight bytes for four, to each process

    time = latency messages + bytes share / bandwidth

(Thakur, Rabenseifner, Gropp 2005, section 4). Latency and bandwidth are fitted to this run. A collective of NCCL that
runs beside computation slows it down by `lost` of the collective's time, measured beside a product of matrices. Then

    data parallel      alone + sums that the backward pass, two thirds of the step, does not hide, at least the last
                       bucket's (Li et al. 2020, arXiv:2006.15704) + the gather of the rows of a tied embedding + passes
                       over memory: 2 of gradients that are copied into buckets; 5 of gathered rows; where copy engines
                       sum, 7 (p - 1) / p, of which others read 2, 2 are written and 3 add
    sharded            alone + what hides nothing: the gather of the outer parameters, the scatter of their gradients
                       - the update of the parameters that others hold
    tensor parallel    the weights' bytes over the memory's rate, / p + the rest of the time alone, which each process
                       has + all collectives, as none is hidden, each with its wait
    context parallel   alone / p + passes over memory that merge p parts + transfers that take longer than the work
                       + a wait for each of the p - 1 exchanges

An exchange ends when the last process arrives. Back to back, as latency is measured, all arrive together; between
products they do not. `waits` are what an exchange takes longer then, measured behind a product of matrices (WAITS);
records from before have none, and their predictions of the last two kinds are as if all arrived together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from accelerant.bench.record import Row

__all__ = ["BESIDE", "COPIED", "OPS", "PEER_SUM", "WAITS", "Costs", "Link", "outlook"]

PEER_SUM, COPIED = "peer_sum", "copied_sum"
"""Sums of small and of large arrays between the GPUs of one host: accelerant.runtime.processes."""

OPS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", PEER_SUM, COPIED)
BESIDE = "all_reduce beside a product"
"""Op of the row that measures both at once; its p50 is the part of the collective's time that the product loses."""

WAITS = {op: f"wait of {op} behind a product" for op in (PEER_SUM, "send_recv")}
"""Ops of the rows that measure what an exchange takes longer, in ms, after work that all processes do."""

_MOST = 1024
_BACKWARD = 2 / 3
_ADAM_BYTES = 28
"""Bytes of a parameter's update: weight, gradient and two moments in float32 read, three of them written."""


class Link(NamedTuple):
    """Latency of a message, and bandwidth, of a collective."""

    op: str
    latency_ms: float
    bytes_per_ms: float

    @classmethod
    def fitted(cls, op: str, measured: Mapping[tuple[int, int], float]) -> Link:
        """Fit times in ms by (processes, bytes), with equal weight of each time's relative error."""
        rows = np.array([(*_ring(op, p), size) for p, size in measured], float)
        times = np.array(list(measured.values()))
        terms = np.stack([rows[:, 0], rows[:, 1] * rows[:, 2]], axis=1) / times[:, None]
        latency, per_byte = np.linalg.lstsq(terms, np.ones(len(times)), rcond=None)[0]
        if latency <= 0:  # none of the sizes is small enough to show it
            latency, per_byte = 0.0, float(terms[:, 1].sum() / (terms[:, 1] ** 2).sum())
        return cls(op, float(latency), float(1 / per_byte))

    def ms(self, processes: int, size_bytes: float) -> float:
        """Return the time of one call; 0 for one process."""
        if processes == 1:
            return 0.0
        messages, share = _ring(self.op, processes)
        return self.latency_ms * messages + size_bytes * share / self.bytes_per_ms


def _ring(op: str, p: int) -> tuple[float, float]:
    """Return the messages that follow each other, and the share of the bytes that a link carries."""
    if op in ("send_recv", PEER_SUM):
        return 1, 1.0 if op == "send_recv" else 2.0 * (p - 1)
    twice = 2 if op in ("all_reduce", COPIED) else 1
    return twice * (p - 1), twice * (p - 1) / p


@dataclass(frozen=True)
class Costs:
    """Costs of a machine.

    Attributes:
        links: by collective.
        copy_bytes_per_ms: of the device's memory, read and written bytes together; infinite where unknown.
        lost: part of a hidden collective's time that the computation beside it loses.
        waits: of an exchange for the last process, in ms, by collective and number of processes.
        host: most processes whose GPUs reach each other's memory: those measured so. More use NCCL.
    """

    links: Mapping[str, Link]
    copy_bytes_per_ms: float = field(default=float("inf"))
    lost: float = 0.0
    host: int = _MOST
    waits: Mapping[tuple[str, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Row], copy_gb_s: float | None) -> Costs | None:
        """Return the costs that a record's rows of collectives show; None if one of them is missing."""
        times: dict[str, dict[tuple[int, int], float]] = {op: {} for op in OPS}
        lost, waits = [], dict[tuple[str, int], float]()
        kinds = {row: op for op, row in WAITS.items()}
        for row in rows:
            if row.suite != "scale" or row.p50 is None:
                continue
            if row.op in times:
                times[row.op][_processes_of(row), row.bytes] = row.p50
            elif row.op == BESIDE:
                lost.append(row.p50)
            elif row.op in kinds:
                waits[kinds[row.op], _processes_of(row)] = row.p50
        if not all(times[op] for op in OPS[:4]):
            return None
        links = {op: Link.fitted(op, measured) for op, measured in times.items() if measured}
        copied, host = copy_gb_s * 1e6 if copy_gb_s else float("inf"), max((p for p, _ in times[COPIED]), default=1)
        return cls(links, copied, float(np.median(lost)) if lost else 0.0, host, waits)

    def _sum(self, op: str, processes: int) -> Link:
        """Return the costs of a sum between GPUs of one host; all_reduce's where there is none."""
        return (self.links.get(op) if processes <= self.host else None) or self.links["all_reduce"]

    def _wait(self, op: str, processes: int) -> float:
        """Return the wait of an exchange between so many processes, or the most that were measured below; else 0."""
        counts = [count for each, count in self.waits if each == op and count <= processes]
        return self.waits[op, max(counts)] if counts else 0.0

    def predicted_ms(self, kind: str, **facts: Any) -> float:
        """Return the time of a kind of step: "data_parallel", "sharded", "tensor_parallel" or "context_parallel"."""
        found: float | tuple[float, float] = getattr(self, f"{kind}_ms")(**facts)
        return found[0] if isinstance(found, tuple) else found

    def data_parallel_ms(
        self, alone_ms: float, buckets: Sequence[int], processes: int, row_bytes: int = 0
    ) -> tuple[float, float]:
        """Return the time of a step that sums buckets of these bytes, and the part of it that waits for sums.

        `row_bytes` are of the rows of a tied embedding that each process sends.
        """
        if processes == 1 or not buckets:
            return alone_ms, 0.0
        link = self._sum(COPIED, processes)
        times = [link.ms(processes, size) for size in buckets]
        before, hiding = sum(times[:-1]), _BACKWARD * alone_ms
        shown = times[-1] + max(0.0, before - hiding)
        passes, lost = 5.0 * processes * row_bytes, self.lost * min(before, hiding)
        if row_bytes:
            passes += 2 * buckets[0]
            shown += self.links["all_gather"].ms(processes, processes * row_bytes)
        if link.op == COPIED:
            passes, lost = passes + 7 * (processes - 1) / processes * sum(buckets), 0.0
        return alone_ms + shown + passes / self.copy_bytes_per_ms + lost, shown

    def sharded_ms(self, alone_ms: float, block_params: int, outer_params: int, processes: int) -> float:
        """Return the time of a step whose parameters are gathered in bfloat16; gradients are scattered in float32."""
        gather, scatter = self.links["all_gather"], self.links["reduce_scatter"]
        shown = gather.ms(processes, 2 * outer_params) + scatter.ms(processes, 4 * outer_params)
        hidden = gather.ms(processes, 2 * block_params) + scatter.ms(processes, 4 * block_params)
        params = block_params + outer_params
        update = _ADAM_BYTES * params * (1 - 1 / processes) / self.copy_bytes_per_ms
        return alone_ms + shown + max(0.0, hidden - alone_ms) + self.lost * min(hidden, alone_ms) - update

    def tensor_parallel_ms(
        self, alone_ms: float, layers: int, width_bytes: int, vocabulary: int, processes: int, weight_bytes: int = 0
    ) -> float:
        """Return the time of decoding a token: two sums a layer and the embedding's, and the logits' gather.

        `weight_bytes` are read for each token; 0 if all of the time is divided.
        """
        each = self._sum(PEER_SUM, processes).ms(processes, width_bytes) + self._wait(PEER_SUM, processes)
        sums = (2 * layers + 1) * each
        reading = min(alone_ms, weight_bytes / self.copy_bytes_per_ms) if weight_bytes else alone_ms
        return alone_ms - reading * (1 - 1 / processes) + sums + self.links["all_gather"].ms(processes, 4 * vocabulary)

    def context_parallel_ms(self, alone_ms: float, q_bytes: int, kv_bytes: int, processes: int) -> float:
        """Return the time of causal attention forward; `q_bytes` and `kv_bytes` are of a process's queries and keys."""
        merged = 8.5 * (processes - 1) * q_bytes + 4 * kv_bytes  # passes over memory, of half of the rows
        transfer = (processes - 1) * self.links["send_recv"].ms(processes, 2 * kv_bytes)
        work = alone_ms / processes
        beside = work * (processes - 1) / processes  # the first block's keys are at hand, the last transfer is over
        shown = max(0.0, transfer - beside)
        waiting = (processes - 1) * self._wait("send_recv", processes)
        return work + merged / self.copy_bytes_per_ms + shown + max(waiting, self.lost * min(transfer, beside))


def _processes_of(row: Row) -> int:
    return int(row.case.rpartition(", ")[2].split()[0])


def outlook(alone_ms: float, buckets: Sequence[int], costs: Costs, row_bytes: int = 0) -> list[str]:
    """Return notes: predicted efficiencies to 1,024 processes, and where communication is half of a step."""
    sizes = [2**k for k in range(1, _MOST.bit_length())]
    steps = {p: costs.data_parallel_ms(alone_ms, buckets, p, row_bytes) for p in sizes}
    table = ", ".join(f"{p}: {step:.4g} ms ({alone_ms / step:.2f})" for p, (step, _) in steps.items())
    half = next((p for p, (step, shown) in steps.items() if shown > step / 2), None)
    where = f"from {half} processes on" if half else f"nowhere up to {_MOST} processes"
    remedy = "a larger batch, accumulate, or reduce_dtype=bfloat16 change that"
    return [
        f"predicted step, and its speed to that without communication, by processes: {table}",
        f"communication is more than half of a step {where}; {remedy}",
    ]
