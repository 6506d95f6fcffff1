"""Several processes and devices: what training, decoding and proofs gain from them, beside the cost model.

torch's elastic launcher starts each number of processes for each case (scale_work.py); proofs have threads or workers
of their own (scale_zk.py). Predictions come from the collectives measured in the same run (scale_model.py), so the case
`collectives` comes first.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from accelerant.bench.record import DEVICE, OURS, Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.bench.suites.bandwidth import size_name
from accelerant.bench.suites.model import MODELS
from accelerant.bench.suites.scale_jobs import measure_jobs
from accelerant.bench.suites.scale_model import BESIDE, OPS, Costs, outlook
from accelerant.bench.suites.scale_work import ATTENTION, DECODED, SHARDED
from accelerant.bench.suites.scale_zk import Key, measure_many, measure_msm, measure_proof
from accelerant.bench.timer import Timing
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime.host import usable_cores
from accelerant.runtime.memory.limits import size_text
from accelerant.runtime.provider import ComputeDevice

__all__ = ["CASES", "ScaleSuite"]

CASES = ("collectives", "data", "tensor", "context", "sharded", "proof", "many", "msm", "jobs")

_PROGRAM = "accelerant.bench.suites.scale_work"

_DATA_X = {32: 0.98, 4: 0.93}
_SHARDED_X, _TENSOR_X, _CONTEXT_X = 1.1, 1.6, 1.85
"""Targets on two H200: of the speed of one device alone by batch; of torch's sharded step; of one device."""


@dataclass(frozen=True)
class ScaleSuite(Suite):
    """Measure training, decoding, attention and proofs over several devices of this host; predict up to 1,024."""

    name = "scale"
    examples: ClassVar[tuple[str, ...]] = (
        "", "--cases collectives,data --batch 32,4", "--processes 1,2,4 --parameters 14M --device cpu",
    )  # fmt: skip

    cases_: tuple[str, ...] | None = option(
        None, f"Of {', '.join(CASES)}; by default all.", flags=("--cases",), metavar="LIST", comma=True
    )
    processes: tuple[str, ...] | None = option(
        None, "Numbers of processes. By default 2, 4, 8, as many as there are GPUs; on a CPU 2.",
        metavar="LIST", comma=True,
    )  # fmt: skip
    parameters: str | None = option(
        None, f"Of the GPT, of {', '.join(MODELS)}. By default 124M; on a CPU 0.5M.", metavar="SIZE"
    )
    batch: tuple[str, ...] | None = option(
        None, "Sequences of each process of the GPT. By default 32 and 4; on a CPU 4.", metavar="LIST", comma=True
    )
    against: tuple[str, ...] = option(
        ("torch",), "torch (DistributedDataParallel, FSDP2, compiled on a GPU), or none.", metavar="LIST", comma=True
    )
    log_points: int | None = option(None, "Log2 of msm's points. By default 26; on a CPU 10.", min=1, max=28)
    constraints: int | None = option(None, "Of the proofs. By default 1048001; on a CPU 500.", min=1)
    proofs: int | None = option(None, "Proofs of each worker. By default 150; on a CPU 4.", min=2)
    steps: int = option(20, "Samples behind each figure.", min=3)

    limit_each_s: float = option(600.0, "Seconds that each case may take with a number of processes.", min=1.0)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with the device's defaults; ConfigError for an unknown name or too many processes."""
        check_names("--cases", "case", self.cases_ or (), CASES)
        check_names("--against", "peer", self.against, ("torch",))
        check_names("--parameters", "size", [self.parameters] if self.parameters else [], tuple(MODELS))
        gpu = device.torch_device.startswith("cuda")
        most = torch.cuda.device_count() if gpu else 64
        given = self.processes or [str(n) for n in (2, 4, 8) if n <= (most if gpu else 2)] or ["1"]
        if not all(text.isdecimal() and 1 <= int(text) <= most for text in given):
            raise ConfigError(f"--processes: wanted numbers from 1 to {most}, got {','.join(given)}")
        batch = self.batch or (("32", "4") if gpu else ("4",))
        if not all(text.isdecimal() and int(text) for text in batch):
            raise ConfigError(f"--batch: wanted numbers from 1 on, got {','.join(batch)}")
        return replace(
            self, processes=tuple(given), parameters=self.parameters or ("124M" if gpu else "0.5M"), batch=batch,
            log_points=self.log_points or (26 if gpu else 10), proofs=self.proofs or (150 if gpu else 4),
            constraints=self.constraints or (1_048_001 if gpu else 500),
        )  # fmt: skip

    def prepare(self, run: SuiteRun) -> None:
        """Measure the copy rate."""
        run.require_ceiling("copy")

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each number of processes, collectives first: the predictions need them."""
        counts = sorted({int(text) for text in self.processes or ()})
        measures: dict[str, Callable[[int, SuiteRun], None]] = {
            name: functools.partial(self._launch, name) for name in _ROWS
        }
        key = Key(self.constraints or 1)
        measures |= {
            "msm": functools.partial(measure_msm, self.log_points or 1, self.steps),
            "proof": functools.partial(measure_proof, key, self.steps),
            "many": functools.partial(measure_many, key, self.proofs or 2),
        }
        measures["jobs"] = measure_jobs
        return [
            SuiteCase(f"{name}, {count} processes", functools.partial(measures[name], count))
            for name in CASES
            for count in counts
            if name in (self.cases_ or CASES) and not (name == "collectives" and count == 1)
        ]

    def measure(self, run: SuiteRun) -> None:
        """Measure all cases; add the fitted costs."""
        try:
            super().measure(run)
        finally:
            costs = _costs(run)
            backend = "nccl" if run.gpu else "gloo"
            if costs is not None:
                run.record.notes += [
                    f"{op} by {backend}: {link.latency_ms * 1e3:.1f} us a message, {link.bytes_per_ms / 1e6:.3g} GB/s"
                    for op, link in costs.links.items()
                ]
                run.record.notes.append(f"a hidden all_reduce slows computation down by {costs.lost:.2f} of its time")

    def _launch(self, name: str, count: int, run: SuiteRun) -> None:
        """Measure a case in so many processes, and add its rows, also those before a failure."""
        run.progress(f"scale: {name} in {count} processes")
        settings: dict[str, Any] = {
            "case": name, "gpu": run.gpu, "steps": self.steps, "peer": "torch" in self.against,
            "parameters": self.parameters, "batch": [int(text) for text in self.batch or ()],
        }  # fmt: skip
        found, error = _launched(count, settings, self.limit_each_s)
        run.add(*_ROWS[name](_Found(found, count, run, self)))
        if error is not None:
            raise error


@dataclass(frozen=True, slots=True)
class _Found:
    """Results of a case, in the order in which rank 0 wrote them."""

    results: list[dict[str, Any]]
    count: int
    run: SuiteRun
    suite: ScaleSuite

    def named(self, name: str, **values: Any) -> dict[str, Any] | None:
        """Return the first result of a name with these values."""
        for result in self.results:
            if result["name"] == name and all(result.get(key) == value for key, value in values.items()):
                return result
        return None

    def alone_ms(self, **values: Any) -> float:
        """Return the time of one process without the others."""
        alone = self.named("alone", **values)
        return Timing.of(alone["samples"]).p50_ms if alone else 0.0

    def target(self, value: float) -> float | None:
        """Return a target, which holds on two H200."""
        return value if self.count == 2 and self.run.is_model("H200") else None

    def predicted(self, row: Row, predict: Callable[[Costs], float], measured_ms: float) -> list[Row]:
        """Return the cost model's row beside a measured one; none without measured collectives."""
        costs = _costs(self.run)
        if costs is None or self.count == 1:
            return []
        ms = predict(costs)
        note = f"{ms / measured_ms:.3f} of the measured time"
        named = replace(row, op=f"predicted {row.op}", runner=DEVICE, implementation="cost model", note=note)
        return [replace(named, p20=ms, p50=ms, p80=ms, target=None, target_x=None, peak_bytes=None, samples=())]


def _costs(run: SuiteRun) -> Costs | None:
    return Costs.of(run.record.rows, run.record.ceilings.get("copy GB/s"))


# --- rows of each case -----------------------------------------------------------------------------------------------


def _collective_rows(found: _Found) -> list[Row]:
    backend, rows = "nccl" if found.run.gpu else "gloo", []
    for result in found.results:
        if result["name"] in OPS:
            case = f"{size_name(result['bytes'])}, {found.count} processes"
            row = Row("scale", result["name"], case, DEVICE, backend, bytes=result["bytes"])
            rows.append(row.timed(Timing.of(result["samples"])))
        elif result["name"] == "beside":
            row = Row("scale", BESIDE, f"lost part of its time, {found.count} processes", DEVICE, backend, unit="x")
            rows.append(row.timed(Timing.of(result["samples"])))
    return rows


def _data_rows(found: _Found) -> list[Row]:
    rows, config = [], MODELS[str(found.suite.parameters)]
    for result in found.results:
        batch, timing = result["batch"], Timing.of(result["samples"])
        case = f"GPT {found.suite.parameters} {batch}x{config.context}, {found.count} processes"
        row = Row("scale", "step", case, OURS, "TrainStep")
        alone = found.alone_ms(batch=batch)
        if result["name"] == "alone":
            buckets = result["buckets"]
            named = replace(row, op="step without communication", runner=DEVICE)
            rows.append(named.timed(timing))
            continue
        if result["name"] == "beside":
            lost = timing.p50_ms
            row = replace(row, op="all_reduce beside a step", runner=DEVICE, implementation="TrainStep", unit="x")
            rows.append(replace(row.timed(timing), note="part of the sums' time that the step loses"))
            if (costs := _costs(found.run)) is not None and batch == found.results[0]["batch"]:
                found.run.record.notes += [f"{case}: {note}" for note in outlook(alone, buckets, costs, lost)]
            continue
        note = f"{alone / timing.p50_ms:.3f} of the speed without communication"
        if result["name"] == "torch":
            compiled = ", torch.compile" * found.run.gpu
            row = replace(row, runner="torch", implementation=f"DistributedDataParallel{compiled}")
            rows.append(replace(row.timed(timing), note=f"plain PyTorch; {note[:5]} of the speed of ours alone"))
            continue
        aim = _DATA_X.get(batch) if found.suite.parameters == "124M" else None
        rows.append(replace(row.timed(timing), note=note, target=None if aim is None else found.target(alone / aim)))
        rows += found.predicted(
            row, lambda costs, alone=alone, sums=buckets, lost=lost: costs.data_parallel_ms(  # type: ignore[misc]
                alone, sums, found.count, lost
            )[0],
            timing.p50_ms,
        )  # fmt: skip
    return rows


def _sharded_rows(found: _Found) -> list[Row]:
    config, batch = SHARDED[found.run.gpu]
    name = "Llama 1B" if found.run.gpu else "Llama, tiny"
    base = Row("scale", "sharded step", f"{name} {batch}x{config.context}, {found.count} processes", OURS, "TrainStep")
    rows, peer = [], found.named("torch") or {}
    for result in found.results:
        timing = Timing.of(result["samples"])
        row = replace(base.timed(timing), peak_bytes=result.get("peak_bytes"))
        note = f"{1e3 * result['tokens'] / timing.p50_ms:,.0f} tokens/s a process"
        if row.peak_bytes:
            note += f", {size_text(row.peak_bytes)} at the peak"
        if result["name"] == "alone":
            rows.append(replace(row, op="unsharded step without communication", runner=DEVICE, note=note))
        elif result["name"] == "torch":
            compiled = ", compiled blocks" * found.run.gpu
            rows.append(replace(row, runner="torch", implementation=f"FSDP2{compiled}", note=note))
        else:
            aim = found.target(_SHARDED_X) if peer else None
            rows.append(replace(row, note=note, target_x=aim, target_bytes=peer.get("peak_bytes")))
            alone = found.named("alone") or {}
            outer = alone.get("outer", 0)
            rows += found.predicted(
                base,
                lambda costs, outer=outer, result=result: costs.sharded_ms(  # type: ignore[misc]
                    found.alone_ms(), result["params"] - outer, outer, found.count
                ),
                timing.p50_ms,
            )
    return rows


def _split_rows(found: _Found, op: str, case: str, aim: float, predict: Callable[[Costs, float], float]) -> list[Row]:
    """Return the rows of one device, of all, and the prediction, of each result of a case."""
    rows = []
    for result in found.results:
        timing, what = Timing.of(result["samples"]), result.get("what")
        row = Row("scale", op, ", ".join(filter(None, (case, what, f"{found.count} processes"))), OURS, "split")
        if result["name"] == "alone":
            rows.append(replace(row, op=f"{op} on one device", runner=DEVICE, implementation="whole").timed(timing))
            continue
        alone = found.alone_ms(what=what) if what else found.alone_ms()
        note = f"{alone / timing.p50_ms:.3f} of the speed on one device"
        rows.append(replace(row.timed(timing), note=note, target=found.target(alone / aim), error=result.get("error")))
        if what in (None, "forward"):
            rows += found.predicted(row, lambda costs, alone=alone: predict(costs, alone), timing.p50_ms)  # type: ignore[misc]
    return rows


def _tensor_rows(found: _Found) -> list[Row]:
    config, length = DECODED[found.run.gpu]
    name = "Llama 8B" if found.run.gpu else "Llama, tiny"

    def predict(costs: Costs, alone_ms: float) -> float:
        return costs.tensor_parallel_ms(alone_ms, config.layers, 2 * config.width, config.vocab_size, found.count)

    return _split_rows(found, "decode", f"{name}, 1 token after {length}, bfloat16", _TENSOR_X, predict)


def _context_rows(found: _Found) -> list[Row]:
    B, Hq, Hkv, T, D = ATTENTION[found.run.gpu]
    size = B * T // found.count * D * (2 if found.run.gpu else 4)

    def predict(costs: Costs, alone_ms: float) -> float:
        return costs.context_parallel_ms(alone_ms, Hq * size, Hkv * size, found.count)

    return _split_rows(found, "causal attention", f"{B}x{Hq}/{Hkv}x{T}x{D}", _CONTEXT_X, predict)


_ROWS: dict[str, Callable[[_Found], list[Row]]] = {
    "collectives": _collective_rows, "data": _data_rows, "sharded": _sharded_rows, "tensor": _tensor_rows,
    "context": _context_rows,
}  # fmt: skip


# --- processes -------------------------------------------------------------------------------------------------------


def _launched(
    processes: int, settings: Mapping[str, Any], limit_s: float
) -> tuple[list[dict[str, Any]], AccelerantError | None]:
    """Return what rank 0 of so many processes measured, and the error that ended them."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.jsonl"
        command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        package = str(Path(__file__).absolute().parents[4])
        paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = {} if settings["gpu"] else {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes))}
        done = subprocess.Popen(
            [*command, "-m", _PROGRAM, json.dumps(settings), str(out)], text=True, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **threads, "PYTHONPATH": paths},
        )  # fmt: skip
        error = None
        try:
            _, said = done.communicate(timeout=limit_s)
        except BaseException as reason:  # Ctrl-C, too, which does not reach another session
            done.terminate()  # the launcher ends its processes
            done.communicate()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            error = AccelerantError(f"{processes} processes did not end within {limit_s:g} s")
        else:
            if done.returncode:
                lines = [line for line in said.splitlines() if "Error" in line] or said.splitlines()
                error = AccelerantError(
                    f"{processes} processes ended with status {done.returncode}: {' '.join(lines[:2])}"
                )
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
        return [json.loads(line) for line in lines], error
