"""The parity certificate: a table of every op on every device present, compared with the reference, as JSON and HTML.

Tensor ops are compared with their reference in float64 on the CPU, within the tolerances of their cases.py; integer ops
with Python's integers, exactly. Arguments are drawn on the CPU, so that every device gets the same numbers. The SHA-256
shows that a table was not changed by accident; it is no signature.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import platform
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from accelerant import errors
from accelerant._version import __version__
from accelerant.algebra.curve import weierstrass as group_law
from accelerant.algebra.curve.parameters import CURVES, curve_of
from accelerant.algebra.field.field import prime_field
from accelerant.algebra.field.memory_space import space_at
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.algebra.ntt.plan import ntt_reference
from accelerant.bench.record import installed_version
from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.ops.registry import PublicOp, SampleInput, Tolerance, draw, public_ops
from accelerant.runtime import registry
from accelerant.runtime.dispatch import explain_quietly
from accelerant.runtime.files import decode_json, read_regular, typed, write_together
from accelerant.runtime.html_page import render
from accelerant.runtime.ledger import OpRecord, ledger
from accelerant.runtime.provider import ComputeDevice
from accelerant.tensors.tensor import tensor_device, to

Verdict = Literal["exact", "within", "wrong", "not served"]
"""Equal, within the tolerance, neither (or the call raised), or refused with a reason."""

_PACKAGES = ("torch", "numpy", "triton", "llvmlite", "cuda-core", "pyopencl", "wgpu")
_NO_DIALECT = "has no dialect of"  # in the CompileError of a kernel that was not written for a backend

_REFUSED = (UnsupportedCase, errors.UnsupportedDtype, errors.MissingDependency, errors.BackendUnavailable)
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
    """One op in one dtype, or over one field or curve, on one device, by the `implementation` that the ledger names.

    `error` is relative to the result's largest element if that is above 1; `of_tolerance`, the largest share of the
    tolerance, is above 1 where a row is wrong. `left_out` are cases that a quick certificate leaves out.
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
    """The table; `scope` says which cases were run, `sha256` is of the other fields as JSON with sorted keys."""

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
    """Run every op's cases on the devices present and compare with the reference; ConfigError if there are none."""
    if not (present := [device for device in devices if device.available]):
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
        devices=[
            CertifiedDevice(
                one.label, one.name, one.architecture,
                str(one.properties.get("driver_version") or one.properties.get("driver") or ""),
            )
            for one in present
        ],
        rows=rows,
    )  # fmt: skip


def _row(check: CertificateCheck, device: ComputeDevice) -> CertificateRow:
    """Run a check's cases on a device until one is wrong."""
    worst, share, count, note = 0.0, 0.0, 0, ""
    verdict: Verdict = "exact" if check.exact else "within"
    before, fallbacks = {id(record): record.calls for record in ledger().records()}, ledger().fallback_count()

    def called() -> list[OpRecord]:
        return [record for record in ledger().records() if record.calls > before.get(id(record), 0)]

    def allowed() -> Tolerance:
        return check.tolerance if all(record.own for record in called()) else check.library_tolerance

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.FallbackWarning)  # the row counts them
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
            tolerance = allowed()
            for part in found:
                error_of, share_of = compare(part, tolerance)
                worst, share = max(worst, error_of), max(share, share_of)
                if share_of > 1 and verdict != "wrong":
                    far = "not the reference's" if math.isinf(error_of) else f"{error_of:.2g} from the reference"
                    verdict, note = "wrong", f"{name}: {part.part} is {far}"
            count += 1
            if verdict == "wrong":
                break
    ran = dict.fromkeys(f"{record.implementation}{' (own)' * record.own}" for record in called())
    farthest, of_tolerance = (min(value, 1e308) if count else None for value in (worst, share))  # JSON has no infinity
    return CertificateRow(
        op=check.op, dtype=check.dtype, backend=device.backend, device=device.label, implementation=", ".join(ran),
        cases=count, left_out=check.left_out, exact=check.exact, error=farthest,
        tolerance=(allowed().relative, allowed().absolute), of_tolerance=of_tolerance,
        fallbacks=ledger().fallback_count() - fallbacks, verdict=verdict, note=note,
    )  # fmt: skip


def _is_refusal(error: Exception) -> bool:
    if isinstance(error, errors.CompileError):
        return _NO_DIALECT in str(error)
    if isinstance(error, NotImplementedError):
        return _TORCH_LACKS.search(str(error)) is not None
    return isinstance(error, _REFUSED)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


# --- the page --------------------------------------------------------------------------------------------------------
_SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "uint32": "u32"}
_MARKS: dict[Verdict, str] = {"exact": "good", "within": "good", "wrong": "bad", "not served": "none"}


def build_page(certificate: Certificate) -> str:
    """Return the certificate as a page of HTML that loads nothing from anywhere."""
    rows, wrong, several = certificate.rows, certificate.wrong, len(certificate.devices) > 1
    served = [row for row in rows if row.verdict != "not served"]
    devices = []
    for device in certificate.devices:
        mine = [row for row in rows if row.device == device.label]
        by_op = {name: [row for row in mine if row.op == name] for name in dict.fromkeys(row.op for row in mine)}
        devices.append((device, by_op, list(map(_cells, mine))))
    figures = [
        ("verdict", "holds" if not wrong else "fails", f"{len(wrong)} of {len(served)} rows are wrong"),
        ("exact", str(sum(row.verdict == "exact" for row in served)), "rows, integer for integer"),
        ("within tolerance", str(sum(row.verdict == "within" for row in served)), "rows, forward and backward"),
        ("not served", str(len(rows) - len(served)), "rows, each with its reason"),
        ("fallbacks", str(sum(row.fallbacks for row in served)), "counted by the ledger"),
    ]
    return render(
        "bench/certificate.html",
        title="Parity certificate",
        certificate=certificate,
        figures=figures,
        head=[
            "op",
            "dtype",
            "implementation",
            "cases",
            "worst error",
            "of tolerance",
            "fallbacks",
            "verdict",
            "remark",
        ],
        numbers=("cases", "worst error", "of tolerance", "fallbacks"),
        wrong=[[*[("", row.device)] * several, *_cells(row)] for row in wrong],
        devices=devices,
        marks=_MARKS,
        short=_SHORT,
        versions=[("Python", certificate.python), *certificate.packages.items()],
    )


def _cells(row: CertificateRow) -> list[tuple[str, str]]:
    cases = f"{row.cases} of {row.cases + row.left_out}" if row.left_out else str(row.cases)
    error = "" if row.error is None else "0" if row.error == 0 else f"{row.error:.1e}"
    share = ""
    if row.of_tolerance is not None and not row.exact:
        share = f"{row.of_tolerance:.0%}" if row.of_tolerance < 10 else "> 1000%"
    return [
        ("", row.op), ("", row.dtype), ("", row.implementation), ("number", cases), ("number", error),
        ("number", share), ("number", str(row.fallbacks)), (_MARKS[row.verdict], row.verdict), ("wide", row.note),
    ]  # fmt: skip


# --- what is checked: each op's cases on one device against its reference, forward and backward -----------------------
EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Found:
    """A result and what the reference gives: tensors, or lists that are equal or not; `part` names it in messages."""

    actual: Any
    expected: Any
    part: str = "y"


Case = Callable[[ComputeDevice], Iterable[Found]]
"""Runs one case on a device."""


@dataclass(frozen=True, slots=True)
class CertificateCheck:
    """A row of the certificate: an op in one dtype, or over one field or curve, its cases and tolerances."""

    op: str
    dtype: str
    cases: dict[str, Case]
    tolerance: Tolerance = EXACT
    library_tolerance: Tolerance = EXACT
    left_out: int = 0

    @property
    def exact(self) -> bool:
        """Whether results must be equal."""
        return self.tolerance == EXACT


def checks(*, quick: bool = False) -> list[CertificateCheck]:
    """Return every check; a quick certificate has a case of each op, in float32, and one field or curve of a shape."""
    return [*_tensor_checks(quick), *_integer_checks(quick)]


def compare(found: Found, tolerance: Tolerance) -> tuple[float, float]:
    """Return the largest error, relative to the largest element if that is above 1, and its share of the tolerance.

    A share above 1 is wrong. Results that must be equal have the share 0 or infinity, and so have other shapes.
    """
    actual, expected = found.actual, found.expected
    if not isinstance(actual, Tensor) or tolerance == EXACT:
        same = torch.equal(actual.cpu(), expected) if isinstance(actual, Tensor) else actual == expected
        return (0.0, 0.0) if same else (math.inf, math.inf)
    if actual.shape != expected.shape:
        return math.inf, math.inf
    if not actual.numel():
        return 0.0, 0.0
    y, reference = actual.detach().cpu().to(torch.float64), expected.detach()
    if actual.dtype == torch.float16:  # a number beyond its range is an infinity in it
        limit = torch.finfo(torch.float16).max
        y, reference = (torch.where(reference.isfinite(), each.clamp(-limit, limit), each) for each in (y, reference))
    largest = max(1.0, reference.abs().nan_to_num(posinf=1.0).max().item())
    bound = tolerance.absolute * largest + tolerance.relative * reference.abs()
    equal = (y == reference) | (y.isnan() & reference.isnan())
    worst = {"nan": math.inf, "posinf": math.inf}
    error = torch.where(equal, 0.0, (y - reference).abs()).nan_to_num(**worst)
    share = torch.where(equal, 0.0, error / bound).nan_to_num(**worst)  # also of a finite y where infinity is right
    return error.max().item() / largest, share.max().item()


# --- tensor ops ------------------------------------------------------------------------------------------------------
def _tensor_checks(quick: bool) -> Iterator[CertificateCheck]:
    """Yield a check for each op and dtype; a quick one has the sample with the most elements."""
    from accelerant.ops.multi_tensor import cases as optimizer

    kinds: list[tuple[str, Any, Callable[..., Iterator[Found]]]] = [("adamw_step", optimizer, _run_adamw)]
    for op in public_ops().values():
        plain = getattr(importlib.import_module(f"{op.package}.cases"), "KIND", "") == "plain"
        kinds.insert(-1, (op.name, op.cases, partial(_run_sample, op, not plain)))
    for name, cases, run in kinds:
        samples, library = cases.SAMPLES, getattr(cases, "TORCH_TOLERANCES", None) or cases.TOLERANCES
        if quick:
            samples = [max(samples, key=lambda each: sum(torch.Size(s).numel() for s in each.shapes if s is not None))]
        for dtype, tolerance in cases.TOLERANCES.items():
            if not quick or dtype == torch.float32:
                runs: dict[str, Case] = {sample.name: partial(run, sample, dtype) for sample in samples}
                left_out, short = len(cases.SAMPLES) - len(samples), str(dtype).removeprefix("torch.")
                yield CertificateCheck(name, short, runs, tolerance, library[dtype], left_out)


def on_device(x: Tensor | None, device: ComputeDevice) -> Tensor | None:
    """Copy a tensor of the CPU to a device; UnsupportedCase if its backend has no tensors, or none of the dtype."""
    if x is None or device.backend == "cpu":
        return x
    if x.dtype == torch.float64 and device.torch_type == "mps":
        raise UnsupportedCase("torch's mps has no float64")
    if not device.torch_device and tensor_device(device) is None:
        raise UnsupportedCase(f"{device.backend} has no tensors")
    return to(x, device)


def _run_sample(
    op: PublicOp, learns: bool, sample: SampleInput, dtype: torch.dtype, device: ComputeDevice
) -> Iterator[Found]:
    tensors = sample.tensors(dtype)
    exact = [  # copies: in float64 on the CPU `moved` are the tensors themselves, and both gradients one object
        x.to(torch.float64, copy=True) if x is not None and x.is_floating_point() else x for x in tensors
    ]
    moved = [on_device(x, device) for x in tensors]
    for x in (*moved, *exact):
        if learns and x is not None and x.is_floating_point():
            x.requires_grad_()
    ys, references = _tuple(op.function(*moved, **sample.options)), _tuple(op.reference(*exact, **sample.options))
    if len(ys) != len(references):
        raise AssertionError(f"{op.name} gave {len(ys)} results, its reference {len(references)}")
    for i, (y, reference) in enumerate(zip(ys, references, strict=True)):
        yield Found(y, reference, f"y{i}" if len(ys) > 1 else "y")
    pairs = [
        (y, reference, draw(tuple(y.shape), y.dtype, seed=99 + i))
        for i, (y, reference) in enumerate(zip(ys, references, strict=True))
        if y.requires_grad
    ]
    if not pairs:
        return
    torch.autograd.backward([y for y, _, _ in pairs], [on_device(dy, device) for _, _, dy in pairs])
    torch.autograd.backward([reference for _, reference, _ in pairs], [dy.double() for _, _, dy in pairs])
    for i, (x, right) in enumerate(zip(moved, exact, strict=True)):
        if x is not None and right is not None and x.requires_grad:
            yield Found(x.grad, right.grad, f"gradient of argument {i}")


def _tuple(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


_ADAMW: dict[str, Any] = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "maximize": False}


def _run_adamw(sample: SampleInput, dtype: torch.dtype, device: ComputeDevice) -> Iterator[Found]:
    """Two steps, the second from the state of the first."""
    from accelerant.ops.multi_tensor import AdamWGroup, Tensors, Update, Workspace, adamw_reference, adamw_step, case_of

    params = [_present(on_device(x, device)) for x in sample.tensors(dtype)]
    grads = [_present(on_device(draw(x.shape, dtype, seed=500 + i), device)) for i, x in enumerate(params)]
    first, second = ([torch.zeros_like(x) for x in params] for _ in range(2))
    counters = [torch.zeros((), device=x.device) for x in params]
    tensors = Tensors([*params], [*grads], [*first], [*second], [], [*counters], [0] * len(params))
    workspace = Workspace(params[0].device)
    for step in (1, 2):
        exact = [[x.cpu().double().clone() for x in some] for some in (params, grads, first, second)]
        table = workspace.table(tensors)
        adamw_step(case_of(table, workspace.device), Update(tensors, [AdamWGroup(**_ADAMW)], workspace, table))
        for i, (p, g, m, v) in enumerate(zip(*exact, strict=True)):
            expected = adamw_reference(p, g, m, v, step, **_ADAMW)
            found = zip(("parameter", "m", "v"), (params[i], first[i], second[i]), expected, strict=True)
            yield from (Found(actual.clone(), right, f"{name} {i} after step {step}") for name, actual, right in found)


def _present(x: Tensor | None) -> Tensor:
    if x is None:
        raise AssertionError("the samples of optimizers have no absent tensor")
    return x


# --- integer ops -----------------------------------------------------------------------------------------------------
_ONE_OF_EACH = {"babybear", "goldilocks", "bn254_fr", "bn254_g1"}
"""Fields and curves of a quick certificate: elements of 32 bits, of 64, and of several words."""

_MODULUS = (1 << 1024) - 105  # an odd modulus of 1,024 bits


def _integer_checks(quick: bool) -> Iterator[CertificateCheck]:
    fields = [field for name, field in FIELDS.items() if not quick or name in _ONE_OF_EACH]
    for field in fields:
        for name in _FIELD_OPS:
            runs: dict[str, Case] = {f"{n} elements": partial(_run_field, field, name, n) for n in (1, 300)}
            yield CertificateCheck(f"field_{name}", field.name, runs)
    for field in fields:
        if field.two_adicity >= 12 and not (quick and field.limbs == 1 and field.word_bits == 32):
            options: dict[str, dict[str, Any]] = {"forward": {}, "inverse": {"inverse": True}, "coset": {"coset": 7}}
            options["inverse coset"] = options["inverse"] | options["coset"]
            cases: dict[str, Case] = {
                f"2^{bits} {name}": partial(_run_transform, field, 1 << bits, given)
                for bits in (1, 8, 12)
                for name, given in options.items()
            }
            kept = {name: cases[name] for name in ("2^12 inverse coset",)} if quick else cases
            yield CertificateCheck("ntt", field.name, kept, left_out=len(cases) - len(kept))
    for name in CURVES:
        if not quick or name in _ONE_OF_EACH:
            for op in ("add", "neg", "mul", "is_on_curve"):
                yield CertificateCheck(f"curve_{op}", name, {"edges": partial(_run_curve, name, op)})
            yield CertificateCheck("msm", name, {f"{n} points": partial(_run_msm, name, n) for n in (1, 33)})
    yield CertificateCheck("bigint_mul", "1024 bits", {"8 numbers": partial(_run_residues, False)})
    yield CertificateCheck("bigint_pow", "1024 bits", {"8 numbers": partial(_run_residues, True)})
    yield CertificateCheck("chacha20", "uint32", {"3000 words": _run_keystream})
    yield CertificateCheck("shamir", "goldilocks", {"3 of 5": _run_shamir})


def _elements(field: Field, n: int, seed: int) -> list[int]:
    """Return elements of a field, the edges first, in a drawn order."""
    rng, p = random.Random(f"{field.name} {n} {seed}"), field.modulus
    values = [0, 1, 2, p - 2, p - 1, p // 2, *(2**k for k in range(16, p.bit_length(), 16)), p - 2**16]
    edges = list(dict.fromkeys(value for value in values if 0 <= value < p))
    rng.shuffle(edges)
    return [*edges, *(rng.randrange(p) for _ in range(n))][:n]


_EXPONENT = 65537
_FIELD_OPS: dict[str, Callable[[list[int], list[int], int], Any]] = {
    "add": lambda x, y, p: [(a + b) % p for a, b in zip(x, y, strict=True)],
    "sub": lambda x, y, p: [(a - b) % p for a, b in zip(x, y, strict=True)],
    "mul": lambda x, y, p: [a * b % p for a, b in zip(x, y, strict=True)],
    "square": lambda x, y, p: [a * a % p for a in x],
    "neg": lambda x, y, p: [-a % p for a in x],
    "inv": lambda x, y, p: [pow(a, -1, p) for a in x],
    "pow": lambda x, y, p: [pow(a, _EXPONENT, p) for a in x],
    "sum": lambda x, y, p: sum(x) % p,
    "dot": lambda x, y, p: sum(a * b for a, b in zip(x, y, strict=True)) % p,
}


def _run_field(field: Field, op: str, n: int, device: ComputeDevice) -> Iterator[Found]:
    prime = prime_field(field.name)
    x, y = _elements(field, n, 1), _elements(field, n, 2)
    if op == "inv":
        x = [value or 1 for value in x]
    arguments: tuple[Any, ...] = (prime.encode(x),)
    if op in ("add", "sub", "mul", "dot"):
        arguments = (*arguments, prime.encode(y))
    elif op == "pow":
        arguments = (*arguments, _EXPONENT)
    found = getattr(prime, op)(*arguments, device=device)
    yield Found(prime.decode(found), _FIELD_OPS[op](x, y, field.modulus))


def _run_transform(field: Field, n: int, options: dict[str, Any], device: ComputeDevice) -> Iterator[Found]:
    from accelerant.zk.multi_scalar import ntt

    x, prime = _elements(field, n, 3), prime_field(field.name)
    y = ntt(prime.encode(x), field.name, device=device, **options)
    yield Found(prime.decode(y), ntt_reference(x, field=field.name, **options))


def _points(name: str) -> list[Any]:
    """Return multiples of the generator: 1, 2, 3, r - 1, infinity."""
    curve: Any = curve_of(name)
    return [group_law.multiply(curve, k, curve.generator) for k in (1, 2, 3, curve.order - 1, 0)]


def _run_curve(name: str, op: str, device: ComputeDevice) -> Iterator[Found]:
    from accelerant.zk.elliptic_curve import curve as curve_named

    curve: Any = curve_of(name)
    group, points = curve_named(name), _points(name)
    pairs = [(p, q) for p in points for q in points]
    first, second = (group.encode([pair[i] for pair in pairs]) for i in (0, 1))
    if op == "add":
        expected = [group_law.add(curve, p, q) for p, q in pairs]
        yield Found(group.decode(group.add(first, second, device=device)), expected)
    elif op == "neg":
        expected = [group_law.negate(curve, p) for p, _ in pairs]
        yield Found(group.decode(group.neg(first, device=device)), expected)
    elif op == "mul":
        scalars = [0, 1, 2, curve.order - 1, 2**128 + 3]
        expected = [group_law.multiply(curve, k, p) for k, p in zip(scalars, points, strict=True)]
        yield Found(group.decode(group.mul(group.encode(points), scalars, device=device)), expected)
    else:
        wrong = group.encode(points[:3])
        wrong.reshape(3, -1)[:, 0] ^= np.uint64(1)
        yield Found(group.is_on_curve(group.encode(points[:3]), device=device).tolist(), [True] * 3)
        yield Found(group.is_on_curve(wrong, device=device).tolist(), [False] * 3, "points off the curve")


def _run_msm(name: str, n: int, device: ComputeDevice) -> Iterator[Found]:
    from accelerant.zk.elliptic_curve import curve as curve_named

    curve: Any = curve_of(name)
    group, points = curve_named(name), _points(name)
    rng = random.Random(f"{name} {n}")
    multiples = [rng.choice((1, 2, 3, curve.order - 1, 0)) for _ in range(n)]
    by_multiple = dict(zip((1, 2, 3, curve.order - 1, 0), points, strict=True))
    scalars = [0, 1, curve.order - 1, *(rng.randrange(curve.order) for _ in range(n))][-n:]
    total = sum(s * k for s, k in zip(scalars, multiples, strict=True)) % curve.order
    base = group.precompute([by_multiple[k] for k in multiples], device=device)
    yield Found(group.decode(base.msm(scalars)), group_law.multiply(curve, total, curve.generator))


def _run_residues(power: bool, device: ComputeDevice) -> Iterator[Found]:
    from accelerant.algebra.bigint import residues_of

    rng = random.Random(17)
    x = [0, 1, _MODULUS - 1, *(rng.randrange(_MODULUS) for _ in range(5))]
    y = [_MODULUS - 1, 5, _MODULUS - 1, *(rng.randrange(_MODULUS) for _ in range(5))]
    numbers = residues_of(x, _MODULUS, space_at(device))
    if power:
        found, expected = numbers.power([_EXPONENT]), [pow(a, _EXPONENT, _MODULUS) for a in x]
    else:
        others = residues_of(y, _MODULUS, space_at(device))
        found, expected = numbers.times(others), [a * b % _MODULUS for a, b in zip(x, y, strict=True)]
    yield Found([int(value) for value in found.ints()], expected)


def _run_keystream(device: ComputeDevice) -> Iterator[Found]:
    """The keystream kernel at a counter that crosses 2^32; chacha20_words is checked by RFC 8439's vectors."""
    from accelerant.privacy.random import KEYSTREAM_BLOCK, chacha20_words, keystream_source, lanes

    provider, n, first = registry.create(device.backend), 3000, 2**32 - 90
    blocks = -(-n // 16)
    source, grid, block, size = keystream_source(), -(-blocks // KEYSTREAM_BLOCK), KEYSTREAM_BLOCK, n
    if source.pick(provider.dialects)[0] == "llvm":  # which writes whole vectors of blocks
        grid, block = -(-blocks // lanes()), 1
        size = grid * lanes() * 16
    kernel = provider.compile(source, device=device.index)
    key = np.arange(3, 11, dtype=np.uint32)
    state = provider.copy_to_device(np.concatenate([key, np.zeros(2, np.uint32)]), device.index)
    counter = provider.copy_to_device(np.array([first], np.uint64), device.index)
    words = provider.zeros(size, np.uint32, device.index)
    provider.launch(kernel, (grid,), (block,), (state, counter, words, size, 1))
    provider.synchronize(device.index)
    expected = chacha20_words(key, first, blocks).T.reshape(-1)[:n]
    yield Found(provider.copy_to_host(words, np.uint32, (size,))[:n].tolist(), expected.tolist())


def _run_shamir(device: ComputeDevice) -> Iterator[Found]:
    from accelerant.privacy.mpc import shamir

    secret = torch.tensor([0, 1, -1, 2**62, -(2**62), 12345])
    shares = shamir.split(on_device(secret, device), threshold=3, count=5)
    yield Found(shamir.combine(shares[1:4]).cpu().tolist(), secret.tolist())
