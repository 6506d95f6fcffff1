"""Finished cases on disk: a killed run loses only the case it was measuring, and a resumed run continues after it.

A journal is a file of JSON lines. The first has the environment and the options of the run, each other one a case:

    {"journal": 1, "environment": {...}, "asked": {"--against": "torch"}, "ceilings": {...}}
    {"done": "gelu 16384x4096-tanh bfloat16 torch", "rows": [...], "notes": [...], "took_s": {"timed calls": 0.4}}

A line that was cut short when the run was killed is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerant.bench.record import BenchmarkRecord, Environment, Row
from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import decode_json, open_regular, read_regular, typed

_FORMAT = 1
SAME = ("device", "accelerant", "commit", "packages", "driver")
"""Fields of the environment that a resumed run must share with the one that it continues."""


class Journal:
    """The journal of a run.

    Args:
        path: the file.
        record: gets the rows, notes, environment and ceilings of the run that is continued.
        resume: continue the run in the file.
        options: options and values that the rows of one run must share.

    Raises:
        ConfigError: the file exists and `resume` is false.
        FormatError: it is not a journal, or one of another device, commit, version or other options.
    """

    def __init__(
        self, path: Path, record: BenchmarkRecord, *, resume: bool, options: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.options = dict(options or {})
        self.done: set[str] = set()
        lines = read_regular(path, 1 << 30).splitlines(keepends=True) if path.exists() else []
        if lines and not resume:
            raise ConfigError(f"{path} is of an earlier run: --resume goes on with it, another folder starts a new one")
        whole = [line for line in lines if line.endswith(b"\n")]
        if whole:
            self._read(whole, record)
        if lines:
            with open(open_regular(path, os.O_RDWR), "r+b") as file:  # the next line must not continue a torn one
                file.truncate(sum(map(len, whole)))
        self._begun = bool(whole)

    def _read(self, lines: Sequence[bytes], record: BenchmarkRecord) -> None:
        try:
            head = decode_json(lines[0])
            if head["journal"] != _FORMAT:
                raise ValueError(f"format {head['journal']!r}")
            environment = typed(Environment, head["environment"])
            cases = [decode_json(line) for line in lines[1:]]
            rows = [Row.read(row) for case in cases for row in case["rows"]]
            done = {str(case["done"]) for case in cases}
            notes = [str(note) for case in cases for note in case["notes"]]
            ceilings = {str(name): float(value) for name, value in head["ceilings"].items()}
            options = {str(name): str(value) for name, value in head.get("asked", {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{self.path} is no journal of a run: {error}") from None
        here = record.environment
        for name in SAME:
            then, now = getattr(environment, name), getattr(here, name)
            if then != now:
                raise FormatError(f"{self.path} is of a run with {name} {then!r}; here it is {now!r}")
        for name in dict.fromkeys((*self.options, *options)):
            then, now = options.get(name, "not given"), self.options.get(name, "not given")
            if then != now:
                raise FormatError(f"{self.path} is of a run with {name} {then}; this one has {name} {now}")
        record.environment, record.ceilings = environment, ceilings
        record.rows, record.notes = rows, [*notes, f"interrupted, and continued at {here.time}"]
        self.done = done

    def begin(self, record: BenchmarkRecord) -> None:
        """Write the first line unless the file has it."""
        if not self._begun:
            self._begun = True
            environment = asdict(record.environment)
            head = {"journal": _FORMAT, "environment": environment, "asked": self.options, "ceilings": record.ceilings}
            self._write(head)

    def add(
        self, key: str, rows: Sequence[Row], notes: Sequence[str] = (), took_s: Mapping[str, float] | None = None
    ) -> None:
        """Write a finished case and the seconds of its activities; it is on disk when this returns."""
        self.done.add(key)
        body = {"done": key, "rows": [row.to_dict() for row in rows], "notes": list(notes)}
        self._write(body | ({"took_s": {name: round(s, 3) for name, s in took_s.items()}} if took_s else {}))

    def _write(self, body: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            file.write(json.dumps(body).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
