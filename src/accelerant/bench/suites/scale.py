"""Several processes: collectives, training steps of a GPT, and what a cost model of these predicts for more processes.

torch's elastic launcher starts each number of processes, which measure a step without communication, collectives by
size, and the step with gradients summed over all, by ours and by torch's DistributedDataParallel.

A collective over p processes, as a ring, sends `messages` one after the other and `share` of its bytes over each link:

    all_reduce      messages 2 (p - 1)   share 2 (p - 1) / p
    all_gather, reduce_scatter   p - 1   share (p - 1) / p      of the whole array
    send_recv       messages 1           share 1

    time = latency messages + bytes share / bandwidth

(Thakur, Rabenseifner, Gropp 2005, section 4). Latency and bandwidth are fitted to this run. A step is then the step
without communication, plus the sums of gradients that the backward pass, two thirds of it, does not hide; the last
bucket's never is (Li et al. 2020, arXiv:2006.15704).
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerant.bench.record import DEVICE, OURS, Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.bench.suites.bandwidth import size_name
from accelerant.bench.suites.model import MODELS, TokenBatches
from accelerant.bench.timer import Timing
from accelerant.errors import AccelerantError, ConfigError
from accelerant.nn import GPT
from accelerant.nn.optim import AdamW
from accelerant.nn.train.parallel import BUCKET_BYTES
from accelerant.nn.train.step import TrainStep
from accelerant.runtime.host import usable_cores
from accelerant.runtime.provider import ComputeDevice

__all__ = ["Link", "ScaleSuite", "predicted_step_ms", "work"]

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
_MOST = 1024
_BACKWARD = 2 / 3
_WARM_UP = 4
_RATE = 1e-4
_PATIENCE_S = 120.0
"""Longest wait for another process in a collective, which then fails."""

_PROGRAM = "accelerant.bench.suites.scale"


# --- the cost model --------------------------------------------------------------------------------------------------


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
        """Return the time of one call."""
        messages, share = _ring(self.op, processes)
        return self.latency_ms * messages + size_bytes * share / self.bytes_per_ms


def _ring(op: str, p: int) -> tuple[float, float]:
    """Return the messages that follow each other, and the share of the bytes that a link carries."""
    messages, share = (p - 1, (p - 1) / p) if op != "send_recv" else (1, 1.0)
    return (2 * messages, 2 * share) if op == "all_reduce" else (messages, share)


def predicted_step_ms(alone_ms: float, gradient_bytes: int, processes: int, link: Link) -> tuple[float, float]:
    """Return the predicted time of a step with summed gradients, and the part that is communication, not hidden."""
    buckets = [BUCKET_BYTES] * (gradient_bytes // BUCKET_BYTES) + [gradient_bytes % BUCKET_BYTES]
    times = [link.ms(processes, size) for size in buckets if size]
    shown = max(times[-1], sum(times) - _BACKWARD * alone_ms) if processes > 1 else 0.0
    return alone_ms + shown, shown


# --- the suite -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleSuite(Suite):
    """Measure collectives and training steps over several processes of this host, and predict those of up to 1,024."""

    name = "scale"
    examples: ClassVar[tuple[str, ...]] = ("", "--processes 1,2,4 --parameters 14M --device cpu")

    processes: tuple[str, ...] | None = option(
        None, "Numbers of processes. By default 1, 2, 4, 8, as many as there are GPUs; on a CPU 1 and 2.",
        metavar="LIST", comma=True,
    )  # fmt: skip
    parameters: str | None = option(None, f"Of {', '.join(MODELS)}. By default 124M; on a CPU 0.5M.", metavar="SIZE")
    batch: int | None = option(None, "Sequences of each process. By default 32; on a CPU 4.", min=1)
    steps: int = option(20, "Timed steps, and calls of each collective.", min=3)

    limit_each_s: float = option(600.0, "Seconds that each number of processes may take.", min=1.0)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with the device's defaults; ConfigError for an unknown size or too many processes."""
        check_names("--parameters", "size", [self.parameters] if self.parameters else [], tuple(MODELS))
        gpu = device.torch_device.startswith("cuda")
        most = torch.cuda.device_count() if gpu else 64
        given = self.processes or [str(n) for n in (1, 2, 4, 8) if n <= (most if gpu else 2)]
        if not all(text.isdecimal() and 1 <= int(text) <= most for text in given):
            raise ConfigError(f"--processes: wanted numbers from 1 to {most}, got {','.join(given)}")
        return replace(
            self, processes=tuple(given), parameters=self.parameters or ("124M" if gpu else "0.5M"),
            batch=self.batch or (32 if gpu else 4),
        )  # fmt: skip

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return one case: the predictions need the measurements."""
        return [SuiteCase("all", functools.partial(_measure, self))]


def _measure(suite: ScaleSuite, run: SuiteRun) -> None:
    """Measure each number of processes, then add predictions and notes."""
    backend = "nccl" if run.gpu else "gloo"
    settings: dict[str, Any] = {name: getattr(suite, name) for name in ("parameters", "batch", "steps")}
    settings |= {"gpu": run.gpu, "limit_s": suite.limit_each_s}
    times: dict[str, dict[tuple[int, int], float]] = {op: {} for op in _OPS}
    alone, bytes_of_gradients = dict[int, float](), 0
    for p in sorted({int(text) for text in suite.processes or ()}):
        run.progress(f"{p} processes")
        found = _launched(p, settings)
        config = MODELS[str(suite.parameters)]
        case = f"GPT {suite.parameters} {suite.batch}x{config.context}, {p} processes"
        alone[p], bytes_of_gradients = Timing.of(found["alone"]).p50_ms, found["gradient_bytes"]
        for op, size, samples in found["collectives"]:
            row = Row("scale", op, f"{size_name(size)}, {p} processes", DEVICE, backend, bytes=size)
            run.add(row.timed(Timing.of(samples)))
            times[op][p, size] = Timing.of(samples).p50_ms
        step = Row("scale", "step without communication", case, DEVICE, "TrainStep")
        run.add(step.timed(Timing.of(found["alone"])))
        if p > 1:
            note = f"{alone[p] / Timing.of(found['ours']).p50_ms:.3f} of the speed without communication"
            step = replace(step, op="step", runner=OURS, note=note)
            run.add(step.timed(Timing.of(found["ours"])))
            run.add(
                replace(step, runner="torch", implementation=found["peer"], note="").timed(Timing.of(found["torch"]))
            )
            step = replace(step, op="predicted step", runner=DEVICE, implementation="cost model")
            link = Link.fitted("all_reduce", times["all_reduce"])
            predicted = predicted_step_ms(alone[p], bytes_of_gradients, p, link)[0]
            note = f"{predicted / Timing.of(found['ours']).p50_ms:.2f} of the measured time"
            run.add(replace(step, note=note, p20=predicted, p50=predicted, p80=predicted))
    links = {op: Link.fitted(op, measured) for op, measured in times.items() if measured}
    run.record.notes += [
        f"{op} by {backend}: {link.latency_ms * 1e3:.1f} us a message, {link.bytes_per_ms / 1e6:.3g} GB/s"
        for op, link in links.items()
    ]
    if links:
        run.record.notes += _outlook(alone[max(alone)], bytes_of_gradients, links["all_reduce"])


def _outlook(alone_ms: float, gradient_bytes: int, link: Link) -> list[str]:
    """Return notes: predicted efficiencies to 1,024 processes, and where communication is half of a step."""
    sizes = [2**k for k in range(1, _MOST.bit_length())]
    steps = {p: predicted_step_ms(alone_ms, gradient_bytes, p, link) for p in sizes}
    table = ", ".join(f"{p}: {step:.4g} ms ({alone_ms / step:.2f})" for p, (step, _) in steps.items())
    half = next((p for p, (step, shown) in steps.items() if shown > step / 2), None)
    where = f"from {half} processes on" if half else f"nowhere up to {_MOST} processes"
    remedy = "a larger batch, accumulate, or reduce_dtype=bfloat16 change that"
    return [
        f"predicted step, and its speed to that without communication, by processes: {table}",
        f"communication is more than half of a step {where}; {remedy}",
    ]


def _launched(processes: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what rank 0 of so many processes measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        package = str(Path(__file__).absolute().parents[4])
        paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = {} if settings["gpu"] else {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes))}
        done = subprocess.Popen(
            [*command, "-m", _PROGRAM, json.dumps(settings), str(out)], text=True, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **threads, "PYTHONPATH": paths},
        )  # fmt: skip
        try:
            _, said = done.communicate(timeout=settings["limit_s"])
        except BaseException as error:  # Ctrl-C, too, which does not reach another session
            os.killpg(done.pid, signal.SIGTERM)  # the launcher ends its processes
            done.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise AccelerantError(f"{processes} processes did not end within {settings['limit_s']:g} s") from None
        if done.returncode or not out.exists():
            lines = [line for line in said.splitlines() if "Error" in line] or said.splitlines()
            raise AccelerantError(f"{processes} processes ended with status {done.returncode}: {' '.join(lines[:2])}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


# --- in each process -------------------------------------------------------------------------------------------------


def work(settings: Mapping[str, Any], out: Path) -> None:
    """Measure one process's part; rank 0 writes the results."""
    rank, where = int(os.environ["LOCAL_RANK"]), torch.device("cpu")
    if settings["gpu"]:
        where = torch.device("cuda", rank)
        torch.cuda.set_device(where)
    config, batches = MODELS[settings["parameters"]], itertools.count()
    data = TokenBatches.drawn(config, settings["batch"], where)
    models = [GPT(config).to(where) for _ in range(3)]
    steps = {"alone": _own_step(models[0], where)}  # torch.distributed is not initialised yet
    nccl = {"backend": "nccl", "device_id": where} if settings["gpu"] else {"backend": "gloo"}
    dist.init_process_group(**nccl, timeout=timedelta(seconds=_PATIENCE_S))
    found: dict[str, Any] = {"gradient_bytes": sum(4 * param.numel() for param in models[0].parameters())}
    found["collectives"] = []
    if dist.get_world_size() > 1:
        sizes = (2**12, 2**20, 2**24, 2**26, 2**28) if settings["gpu"] else (2**10, 2**16, 2**20, 2**23)
        for op, size in itertools.product(_OPS, sizes):
            (samples,) = _in_turns([_collective(op, size, where)], where, settings["steps"])
            found["collectives"].append((op, size, samples))
        steps |= {"ours": _own_step(models[1], where), "torch": _torch_step(models[2], where)}
        found["peer"] = "DistributedDataParallel" + ", torch.compile" * settings["gpu"]
    calls = [lambda step=step: step(*data.batch(next(batches))) for step in steps.values()]
    found |= zip(steps, _in_turns(calls, where, settings["steps"]), strict=True)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found["alone"])
    found["alone"] = [max(each) for each in zip(*every, strict=True)]  # with communication all wait for the slowest
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.barrier()  # none ends while another one reads from it
    dist.destroy_process_group()


def _own_step(model: GPT, where: torch.device) -> Callable[[Tensor, Tensor], object]:
    precision = torch.bfloat16 if where.type == "cuda" else None
    step = TrainStep(
        model, AdamW(list(model.parameters()), lr=_RATE), model.loss, max_grad_norm=1.0, precision=precision
    )
    return lambda tokens, targets: step([(tokens, targets)], _RATE)


def _torch_step(model: GPT, where: torch.device) -> Callable[[Tensor, Tensor], object]:
    """Return the usual loop of plain PyTorch around our model, with torch's loss, clipping and optimizer."""
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[where.index] if where.type == "cuda" else None)
    forward: Callable[..., Tensor] = torch.compile(parallel) if where.type == "cuda" else parallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        with torch.autocast(where.type, torch.bfloat16, enabled=where.type == "cuda"):
            logits = forward(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _collective(op: str, size: int, where: torch.device) -> Callable[[], object]:
    """Return a call of a collective whose whole array has `size` bytes."""
    rank, p = dist.get_rank(), dist.get_world_size()
    whole, part = (torch.zeros(count, device=where) for count in (size // 4 // p * p, size // 4 // p))
    if op == "all_reduce":
        return functools.partial(dist.all_reduce, whole)
    if op == "all_gather":
        return functools.partial(dist.all_gather_into_tensor, whole, part)
    if op == "reduce_scatter":
        return functools.partial(dist.reduce_scatter_tensor, part, whole)
    received = torch.empty_like(whole)

    def exchange() -> None:
        sends = [dist.P2POp(dist.isend, whole, (rank + 1) % p), dist.P2POp(dist.irecv, received, (rank - 1) % p)]
        for request in dist.batch_isend_irecv(sends):
            request.wait()

    return exchange


def _in_turns(calls: Sequence[Callable[[], object]], where: torch.device, count: int) -> list[list[float]]:
    """Return for each call its wall times in ms; they take turns, as many in each process: collectives wait for all."""

    def once(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return 1e3 * (time.perf_counter() - start)

    rounds = [[once(call) for call in calls] for _ in range(_WARM_UP + count)]
    return [list(times) for times in zip(*rounds[_WARM_UP:], strict=True)]


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), Path(sys.argv[2]))
