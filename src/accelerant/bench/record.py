"""What a benchmark run leaves: rows with the hardware and versions beside them, losses first.

record.save(path)              JSON, written whole or not at all
print(record.table())          for people
compare(old, new)              rows that became slower
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from accelerant._version import __version__
from accelerant.errors import FormatError
from accelerant.runtime.provider import ComputeDevice

__all__ = ["Environment", "Record", "Row", "compare"]

_PACKAGES = ("torch", "triton", "cuda-core", "numpy", "llvmlite")


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and with what a record was made."""

    device: str
    backend: str
    architecture: str
    driver: str
    system: str
    python: str
    accelerant: str
    packages: dict[str, str]
    time: str

    @classmethod
    def of(cls, device: ComputeDevice) -> Environment:
        """Of this process and a device."""
        versions = {}
        for package in _PACKAGES:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        versions["torch"] = torch.__version__
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
        return cls(
            device=device.name,
            backend=device.backend,
            architecture=device.architecture,
            driver=str(device.properties.get("driver", "")),
            system=platform.platform(terse=True),
            python=platform.python_version(),
            accelerant=__version__,
            packages=versions,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation of one case, measured.

    Attributes:
        suite, op, case: what; the case holds sizes, dtype and direction.
        runner: "accelerant" or the peer's name.
        implementation: what really ran: "triton (own)", "torch"; for a peer its name.
        unit: of the three quantiles, "ms" or "us".
        p20, p50, p80: quantiles.
        bytes, flops: least work of the case; 0 where it has no meaning.
        ceiling: which ceiling bounds the case: "copy", "matmul", or empty.
        percent_of_ceiling: of the measured ceiling of this device in this run.
        target: the p50 to reach on this device, where the case names one.
        speedup: of accelerant over the fastest peer that ran, on accelerant's rows.
        note: why a peer did not run.
    """

    suite: str
    op: str
    case: str
    runner: str
    implementation: str
    unit: str = "ms"
    p20: float | None = None
    p50: float | None = None
    p80: float | None = None
    bytes: int = 0
    flops: int = 0
    ceiling: str = ""
    percent_of_ceiling: float | None = None
    target: float | None = None
    speedup: float | None = None
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes a row the same in two records."""
        return self.suite, self.op, self.case, self.runner


@dataclass(slots=True)
class Record:
    """The result of a run."""

    environment: Environment
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def ordered(self) -> list[Row]:
        """Cases that were lost first, by how much; then the rest; a case's rows together."""
        worst: dict[tuple[str, str, str], float] = {}
        for row in self.rows:
            if row.speedup is not None:
                worst[row.key[:3]] = row.speedup
        order = {key: i for i, key in enumerate(dict.fromkeys(row.key[:3] for row in self.rows))}
        lost = {key for key, speedup in worst.items() if speedup < 1.0}
        return sorted(
            self.rows,
            key=lambda row: (
                row.key[:3] not in lost,
                worst.get(row.key[:3], 0.0) if row.key[:3] in lost else 0,
                order[row.key[:3]],
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "environment": asdict(self.environment),
            "ceilings": self.ceilings,
            "rows": [asdict(row) for row in self.ordered()],
        }

    def save(self, path: Path) -> None:
        """Write as JSON under a temporary name, then rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read what `save` wrote.

        Raises:
            FormatError: it is not a record.
        """
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            known = {one.name for one in fields(Row)}
            rows = [Row(**{name: value for name, value in row.items() if name in known}) for row in table["rows"]]
            return cls(Environment(**table["environment"]), table["ceilings"], rows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{path} is not a benchmark record: {error}") from None

    def table(self) -> str:
        """For people: losses first."""
        head = ("op", "case", "runner", "ran", "p50", "to reach", "p20-p80", "% of ceiling", "speedup")
        lines = [head]
        for row in self.ordered():
            if row.p50 is None:
                lines.append((row.op, row.case, row.runner, "did not run", "-", "", row.note, "", ""))
                continue
            percent = "" if row.percent_of_ceiling is None else f"{row.percent_of_ceiling:.0f}% of {row.ceiling}"
            speedup = "" if row.speedup is None else f"{row.speedup:.2f}x"
            target = f"{row.target:.4g}" if row.target and row.runner == "accelerant" else ""
            spread = f"{row.p20:.4g}-{row.p80:.4g}"
            median = f"{row.p50:.4g} {row.unit}"
            lines.append((row.op, row.case, row.runner, row.implementation, median, target, spread, percent, speedup))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        body = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        where = f"{self.environment.device} ({self.environment.architecture}), " + ", ".join(
            f"{name} {version}" for name, version in self.environment.packages.items()
        )
        ceilings = ", ".join(f"{name} {value:.4g}" for name, value in self.ceilings.items())
        return "\n".join([where, f"ceilings measured in this run: {ceilings}" if ceilings else "", *body])


def compare(old: Record, new: Record, *, tolerance: float = 0.05) -> list[str]:
    """A line for each of accelerant's rows that became slower by more than the tolerance, or is missing.

    Args:
        old: the baseline.
        new: this run; must be of the same device.
        tolerance: fraction of the baseline's median that counts as noise.

    Raises:
        FormatError: the records are of different devices.
    """
    if old.environment.device != new.environment.device:
        raise FormatError(f"the baseline is of {old.environment.device}, this run of {new.environment.device}")
    now = {row.key: row for row in new.rows}
    lines = []
    for row in old.rows:
        if row.runner != "accelerant" or row.p50 is None:
            continue
        other = now.get(row.key)
        if other is None or other.p50 is None:
            lines.append(f"{row.op} {row.case}: was {row.p50:.4g} {row.unit}, did not run now")
        elif other.p50 > row.p50 * (1 + tolerance):
            lines.append(
                f"{row.op} {row.case}: {row.p50:.4g} -> {other.p50:.4g} {row.unit} ({other.p50 / row.p50:.2f}x)"
            )
    return lines
