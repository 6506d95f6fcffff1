"""A run in pieces: each one's rows are on disk as soon as it is measured, and none is begun after the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from accelerant.bench.journal import Journal
from accelerant.bench.record import Record, Row
from accelerant.errors import AccelerantError
from accelerant.runtime import registry

__all__ = ["Piece", "measure_pieces"]

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """What is measured together, because it is compared: the runners of one case.

    Attributes:
        suite: of its rows.
        key: what it is, for the journal: no other piece of the run has it.
        measure: appends rows to the record, each as it is measured; gets what to tell the progress.
    """

    suite: str
    key: str
    measure: Callable[[Record, Progress], None]


def measure_pieces(
    record: Record,
    pieces: Sequence[Piece],
    *,
    where: torch.device | None = None,
    journal: Journal | None = None,
    until: float | None = None,
    progress: Progress = lambda _: None,
) -> None:
    """Measure into a record, and piece by piece into a journal.

    Args:
        record: gets rows.
        pieces: those that the journal has are left out, and so is one with the key of one before it.
        where: the device, to tell an error that ends its use in this process from a piece's own.
        journal: gets each piece as soon as it is done.
        until: the time of time.monotonic() after which no further piece is begun; a note names those that are missing.
        progress: told what is measured next.

    Raises:
        Exception: the first that a piece ended with; its row says so, and the other pieces were measured first.
        DeviceLost: a piece ended the use of the device; those after it are left to a run that goes on.
        AccelerantError: a journal that the run goes on with has such a row.
    """
    failed: Exception | None = None if journal is None else _failed(record.rows)
    if journal is not None:
        journal.begin(record)
    once = {each.key: each for each in pieces}.values()
    left = [each for each in once if journal is None or each.key not in journal.done]
    for i, piece in enumerate(left):
        if until is not None and time.monotonic() > until:
            missing = "; ".join(each.key for each in left[i:])
            record.notes.append(f"stopped by its time limit; not measured: {missing}")
            break
        rows, notes = len(record.rows), len(record.notes)
        ended: Exception | None = None
        try:
            piece.measure(record, _counted(progress, i, len(left)))
        except Exception as error:  # noqa: BLE001 - the other pieces' figures are worth having
            failed, ended = failed or error, error
            note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            record.rows.append(Row(piece.suite, piece.key, _FAILED, "accelerant", "", note=note))
        if journal is not None:
            journal.add(piece.key, record.rows[rows:], record.notes[notes:])
        lost = None if ended is None or where is None else registry.provider_of(where).lost(ended)
        if lost is not None:
            if left[i + 1 :]:
                missing = "; ".join(each.key for each in left[i + 1 :])
                record.notes.append(f"stopped, since the device was lost; not measured: {missing}")
            raise lost from ended
    if failed is not None:
        raise failed


_FAILED = "failed"
"""The case of the row that a piece ended with which raised."""


def _failed(rows: Sequence[Row]) -> AccelerantError | None:
    for row in rows:
        if row.case == _FAILED and row.p50 is None:
            return AccelerantError(f"{row.op}: {row.note}")
    return None


def _counted(progress: Progress, i: int, count: int) -> Progress:
    return lambda what: progress(f"[{i + 1}/{count}] {what}")
