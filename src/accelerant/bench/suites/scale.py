"""Several processes and devices: what training, decoding and proofs gain from them, beside the cost model.

torch's elastic launcher starts each number of processes for each case (scale_work.py); proofs, sums of points and jobs
have threads or workers of their own (scale_host.py). Predictions come from the collectives measured in the same run
(scale_model.py), so the case `collectives` comes first.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from accelerant.bench.record import DEVICE, Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.bench.suites.model import MODELS
from accelerant.bench.suites.scale_host import Key, measure_jobs, measure_many, measure_msm, measure_proof
from accelerant.bench.suites.scale_model import Costs, outlook
from accelerant.bench.timer import Timing
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime.host import usable_cores
from accelerant.runtime.memory.limits import size_text
from accelerant.runtime.provider import ComputeDevice

__all__ = ["CASES", "ScaleSuite", "rows"]

CASES = ("collectives", "data", "tensor", "context", "sharded", "proof", "many", "msm", "jobs")

_PROGRAM = "accelerant.bench.suites.scale_work"


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
            name: functools.partial(self._launch, name) for name in CASES[:5]
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
        run.add(*rows(found, count, run))
        if error is not None:
            raise error


def rows(found: Sequence[Mapping[str, Any]], count: int, run: SuiteRun) -> list[Row]:
    """Return the rows that rank 0 of `count` processes wrote, and a prediction beside those that have one.

    Besides fields of a Row a result may have `tokens` of a process, the time `alone_ms` of one device and what it is
    `than`, the speeds to reach, `aim` in those of one device and `aim_x` in torch's, and of `predict` the step's kind
    and facts; `outlook` if these are to be predicted for more processes.
    """
    costs = None if count == 1 else _costs(run)
    on_h200 = count == 2 and run.is_model("H200")
    made = []
    for one in found:
        fields = {name: one[name] for name in ("unit", "bytes", "error", "peak_bytes") if one.get(name) is not None}
        row = Row("scale", one["op"], f"{one['case']}, {count} processes", one["runner"], one["implementation"])
        row = replace(row, **fields).timed(timing := Timing.of(one["samples"]))
        alone: Any = one.get("alone_ms")
        notes = [one.get("note")]
        if than := one.get("than"):
            notes.append(f"{alone / timing.p50_ms:.3f} of the speed {than}")
        if tokens := one.get("tokens"):
            notes.append(f"{1e3 * tokens / timing.p50_ms:,.0f} tokens/s a process")
        if row.peak_bytes:
            notes.append(f"{size_text(row.peak_bytes)} at the peak")
        row = replace(row, note="; ".join(filter(None, notes)))
        if on_h200 and one.get("aim"):
            row = replace(row, target=alone / one["aim"])
        if on_h200 and one.get("aim_x"):
            row = replace(row, target_x=one["aim_x"])
        made.append(row)
        if costs is None or not one.get("predict"):
            continue
        kind, facts = one["predict"]
        ms = costs.predicted_ms(kind, alone_ms=alone, processes=count, **facts)
        note = f"{ms / timing.p50_ms:.3f} of the measured time"
        predicted = Row("scale", f"predicted {row.op}", row.case, DEVICE, "cost model", note=note)
        made.append(replace(predicted, p20=ms, p50=ms, p80=ms))
        if one.get("outlook"):
            run.record.notes += [f"{row.case}: {note}" for note in outlook(alone, costs=costs, **facts)]
    peaks = {row.op: row.peak_bytes for row in made if row.runner == "torch"}
    return [replace(row, target_bytes=peaks.get(row.op)) if row.target_x else row for row in made]


def _costs(run: SuiteRun) -> Costs | None:
    return Costs.of(run.record.rows, run.record.ceilings.get("copy GB/s"))


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
