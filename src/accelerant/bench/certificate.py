"""The parity certificate: a table of every op on every device present, compared with the reference, as JSON and HTML.

certificate = certify(devices)              one row for an op, a dtype (or a field or curve) and a device
certificate.save(folder)                    certificate.json and certificate.html
Certificate.load(path)                      FormatError unless its SHA-256 is that of its content

A row says which implementation ran, by the ledger, the worst error and its share of the tolerance, and the fallbacks in
the meantime. The SHA-256 shows that a table was not changed by accident. It is no signature: whoever changes the table
can compute it anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Literal

from accelerant._version import __version__
from accelerant.bench.certificate_checks import CertificateCheck, checks, compare
from accelerant.bench.record import installed_version
from accelerant.errors import (
    BackendUnavailable,
    CompileError,
    ConfigError,
    FallbackWarning,
    FormatError,
    MissingDependency,
    UnsupportedCase,
    UnsupportedDtype,
)
from accelerant.ops._cases import Tolerance
from accelerant.runtime import registry
from accelerant.runtime.dispatch import explain_quietly
from accelerant.runtime.files import decode_json, read_regular, typed, write_together
from accelerant.runtime.html_page import card, document, facts, table
from accelerant.runtime.ledger import OpRecord, ledger
from accelerant.runtime.provider import ComputeDevice

Verdict = Literal["exact", "within", "wrong", "not served"]
"""Equal, within the tolerance, neither (or the call raised), or refused with a reason."""

_PACKAGES = ("torch", "numpy", "triton", "llvmlite", "cuda-core", "pyopencl", "wgpu")
_NO_DIALECT = "has no dialect of"
"""In the CompileError of a kernel that was not written for a backend."""

_REFUSED = (UnsupportedCase, UnsupportedDtype, MissingDependency, BackendUnavailable)
_TORCH_LACKS = re.compile(r"not (currently )?implemented for|Could not run 'aten::")
"""In torch's NotImplementedError for a dtype or a device; one of ours is a wrong row."""


@dataclass(frozen=True, slots=True)
class CertifiedDevice:
    """A device of the certificate."""

    label: str
    name: str
    architecture: str
    driver: str


@dataclass(frozen=True, slots=True)
class CertificateRow:
    """One op in one dtype, or over one field or curve, on one device.

    Attributes:
        implementation: what ran, by the ledger: "triton (own)"; several are joined by commas.
        cases, left_out: cases that were compared, and those that a quick certificate leaves out.
        exact: whether results must be equal.
        error: the worst, relative to the result's largest element if that is above 1; None where nothing was compared.
        tolerance: relative and absolute bound; both 0 where results must be equal.
        of_tolerance: largest share of the tolerance that an element takes; above 1 is wrong.
        fallbacks: to another implementation or to the host, during the cases.
        note: for a wrong row the case and what was found, for one that is not served the reason.
    """

    op: str
    dtype: str
    backend: str
    device: str
    implementation: str
    cases: int
    left_out: int
    exact: bool
    error: float | None
    tolerance: tuple[float, float]
    of_tolerance: float | None
    fallbacks: int
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The table, and what it was made with.

    Attributes:
        scope: in words, which cases were run.
        sha256: of the other fields as JSON with sorted keys; "" for the one of this content.
    """

    accelerant: str
    time: str
    system: str
    python: str
    packages: dict[str, str]
    scope: str
    devices: list[CertifiedDevice]
    rows: list[CertificateRow]
    sha256: str = ""

    def __post_init__(self) -> None:
        content = {name: value for name, value in asdict(self).items() if name != "sha256"}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        found = hashlib.sha256(text.encode()).hexdigest()
        if self.sha256 not in ("", found):
            raise FormatError(f"the certificate was changed: its SHA-256 is {found}, not {self.sha256}")
        object.__setattr__(self, "sha256", found)

    @property
    def wrong(self) -> list[CertificateRow]:
        """The rows that fail the certificate."""
        return [row for row in self.rows if row.verdict == "wrong"]

    def to_json(self) -> str:
        """Return the certificate as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write certificate.json and certificate.html into a folder, both or neither, and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = folder / "certificate.json", folder / "certificate.html"
        write_together(dict(zip(paths, (self.to_json().encode(), build_page(self).encode()), strict=True)))
        return paths

    @classmethod
    def load(cls, path: Path) -> Certificate:
        """Read certificate.json; FormatError for another file, or one whose content was changed."""
        try:
            found: Certificate = typed(cls, decode_json(read_regular(path)), str(path))
        except ValueError as error:
            raise FormatError(f"{path} is no certificate: {error}") from None
        if not found.rows:
            raise FormatError(f"{path} is no certificate: it has no rows")
        return found


def certify(
    devices: Sequence[ComputeDevice], *, ops: Iterable[str] = (), quick: bool = False,
    progress: Callable[[str], object] = lambda text: None,
) -> Certificate:  # fmt: skip
    """Run every op's cases on devices and compare with the reference.

    Args:
        devices: from registry.devices() or registry.choose(); absent ones are left out.
        ops: names of ops, all by default.
        quick: a case of each op, in float32, and one field and curve of a shape.
        progress: called with what is being checked.

    Raises:
        ConfigError: no op has such a name, or no device is there.
    """
    present = [device for device in devices if device.available]
    if not present:
        raise ConfigError("certify: there is no device to certify")
    planned, wanted = checks(quick=quick), set(ops)
    if unknown := wanted - {check.op for check in planned}:
        known = ", ".join(sorted({check.op for check in planned}))
        raise ConfigError(f"certify: there is no op {', '.join(sorted(unknown))}; there are {known}")
    planned = [check for check in planned if not wanted or check.op in wanted]
    rows = []
    for device in present:
        for i, check in enumerate(planned):
            progress(f"{device.label}: {check.op} {check.dtype} ({i + 1} of {len(planned)})")
            rows.append(_row(check, device))
    scope = "a case of each op, in float32, one field and curve of each shape" if quick else "every case"
    if wanted:
        scope += f", of {', '.join(sorted(wanted))} alone"
    return Certificate(
        accelerant=__version__,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        system=platform.platform(terse=True),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := installed_version(name))},
        scope=scope,
        devices=[_certified(device) for device in present],
        rows=rows,
    )


def _certified(device: ComputeDevice) -> CertifiedDevice:
    driver = next(
        (str(device.properties[key]) for key in ("driver_version", "driver") if device.properties.get(key)), ""
    )
    return CertifiedDevice(device.label, device.name, device.architecture, driver)


def _row(check: CertificateCheck, device: ComputeDevice) -> CertificateRow:
    """Run a check's cases on a device until one is wrong."""
    worst, share, count, note = 0.0, 0.0, 0, ""
    verdict: Verdict = "exact" if check.exact else "within"
    before, fallbacks = _calls(), ledger().fallback_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # the row counts them
        for name, run in check.cases.items():
            try:
                if check.exact and not registry.create(device.backend).has_custom_kernels():
                    raise UnsupportedCase(f"Accelerant has no kernels for {device.backend}")
                found = explain_quietly(lambda run=run: list(run(device))).result
            except Exception as error:  # noqa: BLE001 - a call that raises is a wrong row
                verdict, note = "wrong", f"{name}: {type(error).__name__}: {_first_line(error)}"
                if _is_refusal(error):
                    verdict, note = "not served", _first_line(error)
                break
            tolerance = check.tolerance if _is_own(before) else check.library_tolerance
            for part in found:
                error_of, share_of = compare(part, tolerance)
                worst, share = max(worst, error_of), max(share, share_of)
                if share_of > 1 and verdict != "wrong":
                    verdict, note = "wrong", f"{name}: {part.part} is {_shown(error_of)}"
            count += 1
            if verdict == "wrong":
                break
    compared = count > 0
    return CertificateRow(
        op=check.op, dtype=check.dtype, backend=device.backend, device=device.label, implementation=_ran(before),
        cases=count, left_out=check.left_out, exact=check.exact, error=_finite(worst) if compared else None,
        tolerance=_pair(check.tolerance if _is_own(before) else check.library_tolerance),
        of_tolerance=_finite(share) if compared else None, fallbacks=ledger().fallback_count() - fallbacks,
        verdict=verdict, note=note,
    )  # fmt: skip


def _is_refusal(error: Exception) -> bool:
    if isinstance(error, CompileError):
        return _NO_DIALECT in str(error)
    if isinstance(error, NotImplementedError):
        return _TORCH_LACKS.search(str(error)) is not None
    return isinstance(error, _REFUSED)


def _pair(tolerance: Tolerance) -> tuple[float, float]:
    return tolerance.relative, tolerance.absolute


def _finite(value: float) -> float:
    """Return a number that JSON has: the largest one for infinity."""
    return min(value, 1e308)


def _shown(error: float) -> str:
    return "not the reference's" if math.isinf(error) else f"{error:.2g} from the reference"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _calls() -> dict[int, int]:
    return {id(record): record.calls for record in ledger().records()}


def _since(before: dict[int, int]) -> list[OpRecord]:
    """Return the ledger's records of the ops that were called since."""
    return [record for record in ledger().records() if record.calls > before.get(id(record), 0)]


def _is_own(before: dict[int, int]) -> bool:
    return all(record.own for record in _since(before))


def _ran(before: dict[int, int]) -> str:
    names = (f"{record.implementation} (own)" if record.own else record.implementation for record in _since(before))
    return ", ".join(dict.fromkeys(names))


# --- the page --------------------------------------------------------------------------------------------------------

_STYLE = """
.soft { font-size: 13.5px; margin: 0 0 12px; }
.warn { border-color: var(--two); }
table { font-size: 13px; } th, td { padding: 5px 14px 5px 0; white-space: nowrap; }
td.wide { white-space: normal; min-width: 220px; overflow-wrap: anywhere; }
code { font: 12.5px ui-monospace, monospace; overflow-wrap: anywhere; }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--soft); font-size: 13.5px; }
.matrix { display: grid; gap: 6px 18px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); }
.line { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 10px; align-items: center; stroke: none;
  border-bottom: 1px solid var(--edge); padding: 3px 0; }
.line b { font-weight: 500; overflow-wrap: anywhere; } .line span { display: flex; gap: 4px; flex-wrap: wrap;
  justify-content: flex-end; max-width: 215px; }
.line i { width: auto; height: auto; margin: 0; padding: 4px 6px; font: 11.5px/1 ui-monospace, monospace;
  border-radius: 4px; border: 1px solid var(--edge);
  color: var(--soft); }
.keys .line { display: inline; border: 0; padding: 0; }
.line i.good { color: var(--three); border-color: currentColor; font-weight: 400; }
.line i.bad { color: var(--card); background: var(--two); border-color: var(--two); }
"""
_FOOTER = (
    "Errors are relative to the largest element of the reference if that is above 1. A row of a dtype is forward and "
    "backward, compared with the reference in float64; one of a field or curve is compared with Python's integers."
)
_SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "uint32": "u32"}
_KEYS = (
    '<span class="line"><i class="good">right</i></span><span class="line"><i class="bad">wrong</i></span>'
    '<span class="line"><i>not served</i></span>'
)
_MARKS: dict[Verdict, str] = {"exact": "good", "within": "good", "wrong": "bad", "not served": "none"}
_HEAD = ("op", "dtype", "implementation", "cases", "worst error", "of tolerance", "fallbacks", "verdict", "remark")


def build_page(certificate: Certificate) -> str:
    """Return the certificate as a page of HTML that loads nothing from anywhere."""
    wrong = certificate.wrong
    served = [row for row in certificate.rows if row.verdict != "not served"]
    title = "Parity certificate"
    lead = f"Accelerant {certificate.accelerant} on {certificate.system}, {certificate.time}: {certificate.scope}"
    figures = [
        ("verdict", "holds" if not wrong else "fails", f"{len(wrong)} of {len(served)} rows are wrong"),
        ("exact", str(sum(row.verdict == "exact" for row in served)), "rows, integer for integer"),
        ("within tolerance", str(sum(row.verdict == "within" for row in served)), "rows, forward and backward"),
        ("not served", str(len(certificate.rows) - len(served)), "rows, each with its reason"),
        ("fallbacks", str(sum(row.fallbacks for row in served)), "counted by the ledger"),
    ]
    versions = [("Python", certificate.python), *certificate.packages.items()]
    body = [
        f"<h1>{title}</h1>",
        f'<p class="lead">{escape(lead)}</p>',
        facts(figures),
        card("Wrong", _whole_table(wrong, certificate.devices), "warn") if wrong else "",
        f'<p class="keys">{_KEYS}</p>',
        *(_device_card(device, certificate.rows) for device in certificate.devices),
        card("Versions", table((), ([("", name), ("", version)] for name, version in versions))),
        f"<footer>{_FOOTER} SHA-256 of the content:<br><code>{certificate.sha256}</code></footer>",
    ]
    return document(title, _STYLE, body)


def _device_card(device: CertifiedDevice, rows: Sequence[CertificateRow]) -> str:
    mine = [row for row in rows if row.device == device.label]
    about = ", ".join(filter(None, (device.name, device.architecture, device.driver)))
    by_op: dict[str, list[CertificateRow]] = {}
    for row in mine:
        by_op.setdefault(row.op, []).append(row)
    lines = "".join(
        f'<div class="line"><b>{escape(op).replace("_", "_<wbr>")}</b><span>{"".join(map(_chip, of_op))}</span></div>'
        for op, of_op in by_op.items()
    )
    whole = f"<details><summary>All {len(mine)} rows</summary>{_whole_table(mine, ())}</details>"
    return card(device.label, f'<p class="soft">{escape(about)}</p><div class="matrix">{lines}</div>{whole}')


def _chip(row: CertificateRow) -> str:
    told = f"{row.verdict}: {row.note}" if row.note else f"{row.verdict}, by {row.implementation}, {row.cases} cases"
    return f'<i class="{_MARKS[row.verdict]}" title="{escape(told)}">{escape(_SHORT.get(row.dtype, row.dtype))}</i>'


def _whole_table(rows: Sequence[CertificateRow], devices: Sequence[CertifiedDevice]) -> str:
    several = len(devices) > 1
    head = (*["device"] * several, *_HEAD)
    cells = ([*[("", row.device)] * several, *_cells(row)] for row in rows)
    return table(head, cells, numbers=("cases", "worst error", "of tolerance", "fallbacks"))


def _cells(row: CertificateRow) -> list[tuple[str, str]]:
    cases = f"{row.cases} of {row.cases + row.left_out}" if row.left_out else str(row.cases)
    error = "" if row.error is None else "0" if row.error == 0 else f"{row.error:.1e}"
    share = (
        ""
        if row.of_tolerance is None or row.exact
        else f"{row.of_tolerance:.0%}"
        if row.of_tolerance < 10
        else "> 1000%"
    )
    return [
        ("", row.op), ("", row.dtype), ("", row.implementation), ("number", cases), ("number", error),
        ("number", share), ("number", str(row.fallbacks)), (_MARKS[row.verdict], row.verdict), ("wide", row.note),
    ]  # fmt: skip
