"""Rows on disk as they are measured: a killed run loses the case it was at, and the next one goes on from there.

A file of JSON lines. The first says where and with what it was begun; each other one is a case that is done:

    {"journal": 1, "environment": {...}, "asked": {"--against": "torch"}, "ceilings": {...}}
    {"done": "gelu 16384x4096-tanh bfloat16 torch", "rows": [...], "notes": [...], "took_s": {"timed calls": 0.4}}

A line that was being written when the run was killed is torn, and counts as not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerant.bench.record import Environment, Record, Row
from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import decode_json

__all__ = ["SAME", "Journal"]

_FORMAT = 1
SAME = ("device", "accelerant", "commit", "packages", "driver")
"""What a run that goes on must share with the one that began."""


class Journal:
    """The lines of a run.

    Args:
        path: of the file.
        record: gets what the file holds; its environment and ceilings become those of the run that began.
        resume: whether to go on with the file's run.
        asked: options and their values that the rows of one run must share.

    Raises:
        ConfigError: the file is there, and `resume` is false.
        FormatError: it is no journal, or one of another device, commit or version, or of a run that was asked for
            something else.
    """

    def __init__(self, path: Path, record: Record, *, resume: bool, asked: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.asked = dict(asked or {})
        self.done: set[str] = set()
        found = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if found and not resume:
            raise ConfigError(f"{path} is of an earlier run: --resume goes on with it, another folder starts anew")
        whole = [line for line in found if line.endswith(b"\n")]
        if whole:
            self._read(whole, record)
        if found:
            with path.open("r+b") as file:  # a torn line must not be continued by the next one
                file.truncate(sum(map(len, whole)))
        self._begun = bool(whole)

    def _read(self, lines: Sequence[bytes], record: Record) -> None:
        try:
            head = decode_json(lines[0])
            if head["journal"] != _FORMAT:
                raise ValueError(f"format {head['journal']!r}")
            environment = Environment(**head["environment"])
            rest = [decode_json(line) for line in lines[1:]]
            rows = [Row.read(row) for line in rest for row in line["rows"]]
            done = {str(line["done"]) for line in rest}
            notes = [str(note) for line in rest for note in line["notes"]]
            ceilings = {str(name): float(value) for name, value in head["ceilings"].items()}
            asked = {str(name): str(value) for name, value in head.get("asked", {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{self.path} is no journal of a run: {error}") from None
        here = record.environment
        for name in SAME:
            then, now = getattr(environment, name), getattr(here, name)
            if then != now:
                raise FormatError(f"{self.path} is of a run with {name} {then!r}; here it is {now!r}")
        for name in dict.fromkeys((*self.asked, *asked)):
            if asked.get(name) != self.asked.get(name):
                raise FormatError(
                    f"{self.path} is of a run with {_said(name, asked)}; this one has {_said(name, self.asked)}"
                )
        record.environment, record.ceilings = environment, ceilings
        record.rows, record.notes = rows, [*notes, f"interrupted, and continued at {here.time}"]
        self.done = done

    def begin(self, record: Record) -> None:
        """Write the first line, if it is not there yet."""
        if not self._begun:
            self._begun = True
            environment = asdict(record.environment)
            head = {"journal": _FORMAT, "environment": environment, "asked": self.asked, "ceilings": record.ceilings}
            self._write(head)

    def add(
        self, done: str, rows: Sequence[Row], notes: Sequence[str] = (), took_s: Mapping[str, float] | None = None
    ) -> None:
        """Write a case, with the seconds that its parts took; it is on disk when this returns."""
        self.done.add(done)
        body = {"done": done, "rows": [row.to_dict() for row in rows], "notes": list(notes)}
        self._write(body | ({"took_s": {name: round(s, 3) for name, s in took_s.items()}} if took_s else {}))

    def _write(self, body: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(json.dumps(body).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _said(name: str, asked: Mapping[str, str]) -> str:
    return f"{name} {asked[name]}" if name in asked else f"no word of {name}"
