"""`accelerant doctor`: checks of the installation, advice where one fails, and the parity certificate."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.help import examples
from accelerant.cli.terminal import ProgressLine, console, print_table

if TYPE_CHECKING:
    from accelerant.bench.certificate import Certificate
    from accelerant.cli.doctor_checks import Check

_EXAMPLES = """\
accelerant doctor
accelerant doctor --json > report.json
accelerant doctor --certify --out certificate"""

_COLORS = {"ok": "green", "warning": "yellow", "failed": "red"}


@examples(_EXAMPLES)
def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    certify: Annotated[bool, typer.Option("--certify", help="Compare every op on every device with its reference.")]
    = False,
    quick: Annotated[bool, typer.Option("--quick", help="Certify a case of each op, in float32, and one field and "
                                        "curve of each shape.")] = False,
    device: Annotated[list[str] | None, typer.Option("--device", metavar="NAME", help="Certify this backend or "
                                                     "device alone; may be repeated.")] = None,
    op: Annotated[list[str] | None, typer.Option("--op", metavar="NAME", help="Certify this op alone; may be "
                                                 "repeated.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Write certificate.json and "
                                             "certificate.html there.")] = None,
    check: Annotated[Path | None, typer.Option("--check", metavar="FILE", help="Check the SHA-256 of a "
                                               "certificate.json, and print its summary.")] = None,
) -> None:  # fmt: skip
    """Check the installation, compilers, cache and devices, and run a computation on each device.

    Each line is ok, warning or failed. Exit status 1 if something failed. With --certify, every op runs on every
    device instead, and is compared with its reference; exit status 1 if a row is wrong.
    """
    if check is not None:
        from accelerant.bench.certificate import Certificate

        return _print_certificate(Certificate.load(check))
    if certify:
        return _certify(device or [], op or [], quick, out, json_output)
    if quick or device or op or out:
        raise typer.BadParameter("--quick, --device, --op and --out belong to --certify")
    from accelerant.cli.doctor_checks import checks

    show = ProgressLine(every_s=math.inf)  # on a terminal only
    results: list[Check] = []
    for found in checks(lambda part: None if json_output else show(f"{part} ...")):
        results.append(found)
        if not json_output:
            show("")
            _print(found)
    counts = {status: sum(one.status == status for one in results) for status in _COLORS}
    if json_output:
        print(json.dumps({"counts": counts, "checks": [one.to_dict() for one in results]}, indent=1))
    else:
        print(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['failed']} failed")
    if counts["failed"]:
        raise typer.Exit(1)


def _print(check: Check) -> None:
    from rich.text import Text

    line = Text(f"{check.status:<8}", style=_COLORS[check.status])
    line.append(f"{check.name:<20} ", style="bold")
    line.append(check.found, style="default")
    shown = console()
    shown.print(line, soft_wrap=True)
    if check.advice:
        advice = Text(f"{'':29}to do: {check.advice}", style="" if check.status == "ok" else "bold")
        shown.print(advice, soft_wrap=True)


def _certify(names: list[str], ops: list[str], quick: bool, out: Path | None, json_output: bool) -> None:
    from accelerant.bench.certificate import certify
    from accelerant.runtime import registry

    devices = [registry.find_device(name) for name in names] or registry.devices()
    show = ProgressLine()
    certificate = certify(devices, ops=ops, quick=quick, progress=show)
    show("")
    paths = certificate.save(out) if out is not None else ()
    if json_output:
        print(certificate.to_json(), end="")
    else:
        _print_certificate(certificate)
        for path in paths:
            print(f"written: {path}")
    if certificate.wrong:
        raise typer.Exit(1)


def _print_certificate(certificate: Certificate) -> None:
    """Print how many rows of each device have each verdict, and every row that is wrong."""
    verdicts = ("exact", "within", "wrong", "not served")
    rows = []
    for device in certificate.devices:
        mine = [row for row in certificate.rows if row.device == device.label]
        counts = [str(sum(row.verdict == verdict for row in mine)) for verdict in verdicts]
        rows.append((device.label, *counts, str(sum(row.fallbacks for row in mine)), device.name))
    print_table(("device", *verdicts, "fallbacks", "name"), rows, right=(*verdicts, "fallbacks"))
    if certificate.wrong:
        print()
        wrong = [(row.op, row.dtype, row.device, row.implementation, row.note) for row in certificate.wrong]
        print_table(("wrong op", "dtype", "device", "implementation", "found"), wrong, prose=True)
    print(f"{certificate.scope}; {certificate.time}; SHA-256 {certificate.sha256}")
