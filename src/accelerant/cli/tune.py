"""`accelerant tune`: measure once which implementations and launch parameters are the fastest on this device."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.bench import check_writable
from accelerant.cli.help import examples
from accelerant.cli.terminal import ProgressLine
from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import decode_json, escaped, plain, read_regular, write_atomic

if TYPE_CHECKING:
    import torch

    from accelerant.bench.tuning import TuneResult
    from accelerant.runtime.dispatch.choice_store import CandidateTimes

_EXAMPLES = """\
accelerant tune
accelerant tune --op softmax --op gelu --dtype bfloat16
accelerant tune --list
accelerant tune --out nvidia-h200.json --serves 'NVIDIA H100'"""


@examples(_EXAMPLES)
def tune(
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated.")] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="float32, bfloat16 or float16; may be repeated. Default: bfloat16 and float32."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    launches: Annotated[bool, typer.Option(help="Tune launch parameters, too: compiles every candidate.")] = True,
    listed: Annotated[bool, typer.Option("--list", help="Measure nothing; show the known results.")] = False,
    workers: Annotated[
        int, typer.Option(min=1, help="Number of processes that compile the implementations first.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the known results to this file, in the format of the shipped tables, after each op. If the "
            "time limit ends the run, other entries of the file are kept.",
        ),
    ] = None,
    serves: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="Another device model that the table serves.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Start no further call after this many seconds; results are kept.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Race the implementations of the ops and tune their launches on this device; the results are kept on disk."""
    import torch

    from accelerant.bench.subjects import OPS
    from accelerant.bench.suite import check_names, dtypes_named
    from accelerant.bench.tuning import count_calls, tune_ops
    from accelerant.runtime import registry
    from accelerant.runtime.dispatch.choice_store import choices

    check_names("--op", "op", op or (), tuple(OPS))
    dtypes = list(dtypes_named(dtype or ("bfloat16", "float32")).values())
    chosen = registry.find_device(device, torch_tensors=True)
    if not chosen.torch_device:
        raise ConfigError(f"--device: tune measures devices that torch has tensors on; {device} is not one")
    if out is not None:
        check_writable("--out", out)
    torch_device = torch.device(chosen.torch_device)
    until = None if max_seconds is None else time.monotonic() + max_seconds
    before = _entries_of(out) if out is not None and until is not None and out.exists() else {}
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
        raise FormatError(f"--out: {table} exists and is no table of choices: {error}") from None


def _write(table: Path, device: torch.device, serves: Sequence[str], before: Mapping[str, Any]) -> int:
    """Write the known results of a device, and `before` where there is no newer one; return the number of entries."""
    from accelerant.runtime.dispatch.choice_store import choices

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
