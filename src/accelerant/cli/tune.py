"""`accelerant tune` and `profile`: the fastest implementations on this device, and where a script spends its time."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.bench import check_writable
from accelerant.cli.help import examples, option
from accelerant.cli.terminal import ProgressLine, print_table
from accelerant.errors import ConfigError, FormatError, MissingFile
from accelerant.runtime.files import decode_json, escaped, plain, read_regular, reason_of, write_atomic

if TYPE_CHECKING:
    import torch

    from accelerant.bench.neural import TuneResult
    from accelerant.runtime.dispatch.race import CandidateTimes

_EXAMPLES = """\
accelerant tune
accelerant tune --op softmax --op gelu --dtype bfloat16
accelerant tune --list
accelerant tune --out nvidia-h200.json --serves 'NVIDIA H100'"""


@examples(_EXAMPLES)
def tune(
    op: list[str] | None = option("Only this op; may be repeated."),
    dtype: list[str] | None = option("float32, bfloat16 or float16; may be repeated. Default: bfloat16 and float32."),
    device: str = option("auto, cuda or cpu.", default="auto"),
    launches: bool = option("Tune launch parameters, too: compiles every candidate.", default=True),
    listed: bool = option("Measure nothing; show the known results.", "--list", default=False),
    workers: int = option("Number of processes that compile the implementations first.", min=1, default=1),
    out: Path | None = option(
        "Write the known results to this file, in the format of the shipped tables, after each op. If the "
        "time limit ends the run, other entries of the file are kept.",
        metavar="FILE",
    ),
    serves: list[str] | None = option("Another device model that the table serves.", metavar="MODEL"),
    max_seconds: float | None = option("Start no further call after this many seconds; results are kept.", min=0.0),
    json_output: bool = option("Print JSON.", "--json", default=False),
) -> None:
    """Race the implementations of the ops and tune their launches on this device; the results are kept on disk."""
    import torch

    from accelerant.bench.neural import count_calls, tune_ops
    from accelerant.bench.subjects import OPS
    from accelerant.bench.suite import check_names, dtypes_named
    from accelerant.runtime import registry
    from accelerant.runtime.dispatch.race import choices

    check_names("--op", "op", op or (), tuple(OPS))
    dtypes = list(dtypes_named(dtype or ("bfloat16", "float32")).values())
    chosen = registry.find_device(device, torch_tensors=True)
    if not chosen.torch_device:
        raise ConfigError(f"--device: tune measures devices that torch has tensors on; {device} is not one")
    if out is not None:
        check_writable("--out", out)
    torch_device = torch.device(chosen.torch_device)
    until = None if max_seconds is None else time.monotonic() + max_seconds
    filled = out is not None and out.exists() and out.stat().st_size
    before = _entries_of(out) if out is not None and filled else {}  # also refuses any other file
    show = ProgressLine()
    results: list[TuneResult] = []
    stopped = False
    if not listed:
        for result in tune_ops(
            chosen, names=op or (), dtypes=dtypes, launches=launches, workers=workers, until=until, progress=show
        ):
            if out is not None and results and results[-1].op != result.op:
                _write(out, torch_device, serves or (), before)
            results.append(result)
            if not json_output:
                show("")
                _print(result)
        show("")
        missing = count_calls(op or (), dtypes) - len(results)
        if stopped := missing > 0:
            print(f"stopped by the time limit: {missing} of {missing + len(results)} calls not made", file=sys.stderr)
    entries = choices().entries(torch_device)
    if op:  # a key begins with the name of a direction: "softmax_bwd float32 ..."
        named = {key: key.split()[0].removesuffix("_fwd").removesuffix("_bwd") for key in entries}
        entries = {key: one for key, one in entries.items() if named[key] in op}
    if json_output:
        print(json.dumps({key: entry.to_dict() for key, entry in sorted(entries.items())}, indent=1))
    elif listed:
        _list(chosen.name, entries, choices().ignored(torch_device))
    if out is not None:
        count = _write(out, torch_device, serves or (), before if stopped else {})
        print(f"{out}: {count} entries", file=sys.stderr)
    if any(result.error for result in results):
        raise typer.Exit(1)


def _list(device: str, entries: Mapping[str, CandidateTimes], ignored: Iterable[str]) -> None:
    if not entries:
        print(f"no results for {escaped(device)}: `accelerant tune` measures them")
    for key, one in sorted(entries.items()):
        times = ", ".join(f"{name} {plain(ms)} ms" for name, ms in sorted(one.ms.items(), key=lambda pair: pair[1]))
        print(escaped(f"{key}: {times} ({one.table or 'this device'}, {one.date})"))
    for line in ignored:
        print(escaped(f"not used: {line}"), file=sys.stderr)


def _entries_of(table: Path) -> dict[str, Any]:
    try:
        return dict(decode_json(read_regular(table))["entries"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"--out: {table} exists and is no table of choices: {reason_of(error)}") from None


def _write(table: Path, device: torch.device, serves: Sequence[str], before: Mapping[str, Any]) -> int:
    """Write the known results of a device, and `before` where there is no newer one; return the number of entries."""
    from accelerant.runtime.dispatch.race import choices

    body = choices().table(device, serves=serves)
    body["entries"] = dict(sorted({**before, **body["entries"]}.items()))
    write_atomic(table, (json.dumps(body, indent=1) + "\n").encode())
    return len(body["entries"])


def _print(result: TuneResult) -> None:
    if result.error:
        print(f"{result.op} {result.case}: {result.error}", file=sys.stderr)
    decisions = dict.fromkeys(
        (decision.op, decision.case, decision.implementation, decision.reason) for decision in result.decisions
    )
    for name, case, implementation, reason in decisions:
        print(f"{name} {case} -> {implementation}: {reason}", flush=True)


_PROFILE_EXAMPLES = """\
accelerant profile train.py --epochs 1
accelerant profile --trace trace.json --max-rows 10 train.py
accelerant profile --json train.py > profile.json"""


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """A kernel, a torch operation or an op of Accelerant.

    Resources are a thread's and a block's; occupancy is CUPTI's estimate for the grid. Bytes and operations are the
    least that the work needs. `ceiling` is the share of the device's own limit: the larger one of bytes against a copy
    and of operations against a matrix product. None where unknown.
    """

    name: str
    calls: int
    total_ms: float
    share: float
    registers: int | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None
    gb_per_s: float | None = None
    gflop_per_s: float | None = None
    ceiling: float | None = None


@examples(_PROFILE_EXAMPLES, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def profile(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    trace: Path | None = option("Write a Chrome trace, for chrome://tracing or Perfetto.", metavar="FILE"),
    max_rows: int = option("Rows of a table at most.", min=1, default=20),
    ceilings: bool = option("Measure the device's own limits after the script, in a second.", default=True),
    json_output: bool = option(
        "Print JSON; the script's own output then goes to the error stream.", "--json", default=False
    ),
) -> None:
    """Run a Python script and show the time of each kernel, its resources, and its share of the device's limits.

    Without a GPU it shows torch's operations on the CPU. A second table has the ops of Accelerant, by the ledger's
    bytes and operations. The exit status is the script's; Ctrl-C ends the script, and the tables follow.
    """
    if not script.is_file():
        raise MissingFile(f"no file {script}")
    if trace is not None:
        check_writable("--trace", trace, script)
        trace = trace.absolute()  # the script may change the folder
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler reports its own start and stop
    import torch
    from torch.profiler import ProfilerActivity

    from accelerant.runtime.ledger import ledger

    gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
    ledger().reset()
    process, began = os.getpid(), time.perf_counter()
    with torch.profiler.profile(activities=activities, with_flops=not gpu, acc_events=True) as recorded:
        with _output_to_errors(json_output):
            status = _run(script, arguments or [])
        if os.getpid() != process:  # the script forked, and this is the child
            sys.exit(status)
        if gpu:
            torch.cuda.synchronize()
    wall_s = time.perf_counter() - began
    device = torch.device("cuda" if gpu else "cpu")
    ops = [row for row in ledger().to_dict()["ops"] if row["calls"]]
    limits = _ceilings(device) if ceilings and ops else {}
    kernels = _kernels(recorded, trace, ops, limits)
    on_device = bool(kernels)
    rows = kernels if on_device else _operations(recorded, limits)
    own = _own_ops(ops, limits)
    if json_output:
        report = {
            "script": str(script), "exit_status": status, "wall_s": wall_s,
            "device": str(device) if on_device else "cpu",
            "kernels" if on_device else "operations": list(map(asdict, rows)), "ops": list(map(asdict, own)),
            "ceilings": limits,
        }  # fmt: skip
        print(json.dumps(report, indent=1))
    else:
        _print_profile(rows, own, limits, max_rows, wall_s, "kernel" if on_device else "operation on the CPU")
        if gpu and not on_device:
            print("the script ran no kernel on the GPU, or CUPTI is not allowed to see it", file=sys.stderr)
    if trace is not None:
        print(f"wrote {escaped(str(trace))}", file=sys.stderr)
    sys.stdout.flush()
    raise SystemExit(status)


def _run(script: Path, arguments: Sequence[str]) -> int:
    """Run a script as Python does, and return its exit status; errors are printed as Python prints them."""
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("accelerant: interrupted", file=sys.stderr)
        return 130
    except BaseException as error:  # noqa: BLE001 - the script's own, which ends it with status 1
        traceback.print_exception(error)
        return 1
    finally:
        sys.stdout.flush()
    return 0


@contextmanager
def _output_to_errors(active: bool) -> Iterator[None]:
    """Send standard output, also that of other languages and children, to the error stream for a block."""
    if not active:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


# --- rows ------------------------------------------------------------------------------------------------------------
def _kernels(
    recorded: Any, trace: Path | None, ops: Sequence[Mapping[str, Any]], limits: Mapping[str, float]
) -> list[ProfileRow]:
    """Return the GPU's kernels and copies; write the trace, which alone has their resources."""
    with tempfile.TemporaryDirectory(prefix="accelerant-profile-") as folder:
        path = str(trace if trace is not None else Path(folder) / "trace.json")
        recorded.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            events = json.load(file)["traceEvents"]
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            by_name.setdefault(event["name"], []).append(event)
    total_us = sum(event["dur"] for group in by_name.values() for event in group) or 1.0
    rows = []
    for name, group in by_name.items():
        us, last = sum(event["dur"] for event in group), group[-1].get("args", {})
        ours = [
            op
            for op in ops
            if op["own"] and (op["op"] == name or f"#{name.removeprefix('fused_')} " in f"{op['case']} ")
        ]
        rates = _rates(us / 1e3, sum(op["bytes"] for op in ours), sum(op["flops"] for op in ours), limits)
        names = ("registers per thread", "shared memory", "est. achieved occupancy %")
        registers, shared, occupancy = (last.get(each) for each in names)
        rows.append(ProfileRow(name, len(group), us / 1e3, us / total_us, registers, shared, occupancy, *rates))
    return sorted(rows, key=lambda row: -row.total_ms)


def _operations(recorded: Any, limits: Mapping[str, float]) -> list[ProfileRow]:
    """Return torch's operations on the CPU, by the time in each of them alone."""
    found = [(each, each.self_cpu_time_total / 1e3) for each in recorded.key_averages() if each.self_cpu_time_total > 0]
    total = sum(ms for _, ms in found) or 1.0
    rows = [
        ProfileRow(each.key, each.count, ms, ms / total, None, None, None, *_rates(ms, 0, each.flops, limits))
        for each, ms in found
    ]
    return sorted(rows, key=lambda row: -row.total_ms)


def _own_ops(ops: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> list[ProfileRow]:
    total = sum(op["ms_total"] or 0.0 for op in ops) or 1.0
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for op in ops:
        groups.setdefault(f"{op['op']} {op['implementation']} {op['device']}", []).append(op)
    rows = []
    for name, group in groups.items():
        ms, *work = (sum(op[key] or 0 for op in group) for key in ("ms_total", "bytes", "flops"))
        calls = sum(op["calls"] for op in group)
        rows.append(ProfileRow(name, calls, ms, ms / total, None, None, None, *_rates(ms, work[0], work[1], limits)))
    return sorted(rows, key=lambda row: -row.total_ms)


def _rates(
    ms: float, size_bytes: float, flops: float, limits: Mapping[str, float]
) -> tuple[float | None, float | None, float | None]:
    """Return GB/s, GFLOP/s and the share of the device's limit; None where nothing is known."""
    if not ms or not (size_bytes or flops):
        return None, None, None
    gb_per_s, gflop_per_s = size_bytes / ms / 1e6, flops / ms / 1e6
    ceiling = None
    if limits:
        ceiling = max(gb_per_s / limits["copy GB/s"], gflop_per_s / 1e3 / limits["matmul TFLOP/s"])
    return gb_per_s or None, gflop_per_s or None, ceiling


def _ceilings(device: torch.device) -> dict[str, float]:
    """Return the device's limits; empty where the script left no memory for the measurement."""
    import torch

    from accelerant.bench.timer import measure_matmul

    try:
        return measure_matmul(device)
    except torch.OutOfMemoryError:
        print("no memory is left to measure the device's limits", file=sys.stderr)
        return {}


# --- text ------------------------------------------------------------------------------------------------------------
_TITLES = ("calls", "total ms", "%", "registers", "shared", "occupancy", "GB/s", "GFLOP/s", "of limit")


def _print_profile(
    rows: Sequence[ProfileRow],
    own: Sequence[ProfileRow],
    limits: Mapping[str, float],
    limit: int,
    wall_s: float,
    what: str,
) -> None:
    for title, table in ((what, rows), ("op of Accelerant", own)):
        if not table:
            continue
        shown = [_cells(row) for row in table[:limit]]
        if rest := table[limit:]:
            ms, share = sum(row.total_ms for row in rest), sum(row.share for row in rest)
            shown.append(_cells(ProfileRow(f"{len(rest)} others", sum(row.calls for row in rest), ms, share)))
        used = [i for i in range(len(_TITLES)) if any(cells[i + 1] != "-" for cells in shown)]
        titles = [_TITLES[i] for i in used]
        print_table((title, *titles), [(cells[0], *(cells[i + 1] for i in used)) for cells in shown], right=titles)
        print()
    known = "".join(f", {name} {value:,.4g}" for name, value in limits.items())
    print(f"{wall_s:.3f} s in all{known}")


def _cells(row: ProfileRow) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        escaped(row.name), f"{row.calls:,}", f"{row.total_ms:,.3f}", f"{row.share:.1%}", shown(row.registers, ","),
        shown(row.shared_bytes, ","), "-" if row.occupancy is None else f"{row.occupancy:g} %",
        shown(row.gb_per_s, ",.1f"), shown(row.gflop_per_s, ",.1f"), shown(row.ceiling, ".0%"),
    )  # fmt: skip
