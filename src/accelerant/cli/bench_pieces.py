"""What `accelerant bench train`, `decode` and `patch` share: a time limit, and a folder that a run can go on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from accelerant.bench.journal import Journal
    from accelerant.bench.record import Record, Row
    from accelerant.runtime.provider import ComputeDevice

__all__ = ["BudgetS", "Compare", "Device", "Json", "LimitS", "Out", "Pieces", "Report", "Resume", "peers_of"]

Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
BudgetS = Annotated[float, typer.Option(min=0.0, help="Seconds of steps behind each figure.")]
LimitS = Annotated[
    float | None, typer.Option(min=0.0, help="Begin nothing after so many seconds; --resume goes on later.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="A .json file for the record; or a folder, which gets record.json, record.csv, report.html, and "
        "rows.jsonl as they are measured.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run whose folder --out names.")]
Report = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots there.")]
Compare = Annotated[
    Path | None, typer.Option(metavar="BASELINE", help="A record to compare with; exit 1 where this run is slower.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of a table.")]


def peers_of(against: str) -> tuple[str, ...]:
    """The peers that --against names, each once: none for "none"."""
    return tuple(dict.fromkeys(part.strip() for part in against.split(",") if part.strip() not in ("", "none")))


@dataclass(frozen=True, slots=True)
class Pieces:
    """One invocation: the options that the three commands share.

    Attributes:
        device, limit_s, out, resume, report, compare, json_output: the options of those names.
    """

    device: str
    limit_s: float | None
    out: Path | None
    resume: bool
    report: Path | None
    compare: Path | None
    json_output: bool

    def run(
        self,
        suite: str,
        measure: Callable[[Record, ComputeDevice, Journal | None, float | None, Callable[[str], None]], None],
        asked: Callable[[Row], bool],
        same: Mapping[str, str],
    ) -> None:
        """Measure a suite, leave its files, and exit with the status.

        Args:
            suite: its name.
            measure: gets the record, the device, a journal where --out names a folder, the time of time.monotonic()
                after which nothing is begun, and what to tell the progress.
            asked: whether a row of a baseline was asked for in this run.
            same: options that a run which goes on must share with the one that began, by name.

        Raises:
            ConfigError: the options do not go together, or --resume meets another run's folder.
        """
        from accelerant.cli.bench import _Session

        until = None if self.limit_s is None else time.monotonic() + self.limit_s
        folder, (out, csv, report) = self._files()
        session = _Session(self.device, out, report, self.compare, self.json_output, csv=csv)

        def measured(record: Record) -> None:
            journal = None if folder is None else _journal(folder, record, self.resume, same)
            measure(record, session.device, journal, until, session.show)

        parts: Sequence[tuple[str, Callable[[Record], None]]] = [(suite, measured)]
        session.run(parts, asked)

    def _files(self) -> tuple[Path | None, tuple[Path | None, Path | None, Path | None]]:
        """The folder if --out names one; the files for the record, the table of its rows, and the page."""
        from accelerant.cli.bench import _make_folder

        folder = self.out if self.out is not None and (self.out.is_dir() or not self.out.suffix) else None
        if self.resume and folder is None:
            raise ConfigError("--resume: --out must name the folder of the run to go on with")
        if folder is None:
            return None, (self.out, None, self.report)
        _make_folder(folder)
        return folder, (folder / "record.json", folder / "record.csv", self.report or folder / "report.html")


def _journal(folder: Path, record: Record, resume: bool, same: Mapping[str, str]) -> Journal:
    from accelerant.bench.journal import Journal

    try:
        return Journal(folder / "rows.jsonl", record, resume=resume, asked=same)
    except FormatError as error:  # a usage error writes nothing: the record in the folder stays
        raise ConfigError(f"--resume: {error}; another folder starts anew") from None
