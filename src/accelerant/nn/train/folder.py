"""A run's folder: which files it has, when it may be used, and what happens to an older run in it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerant.errors import ConfigError, FormatError
from accelerant.nn.train.checkpoint import Checkpoints
from accelerant.runtime.files import decode_json, write_atomic

__all__ = ["RunFolder"]

_FORMAT = "accelerant-train-1"


class RunFolder:
    """The folder that a run writes to.

    config.json stands first and names the format; summary.json stands last and says that the run is finished.
    """

    FILES = (
        "config.json",
        "metrics.jsonl",
        "checkpoint.safetensors",
        "tokenizer.json",
        "model.safetensors",
        "sample.txt",
        "report.html",
        "summary.json",
        "checkpoint-previous.safetensors",
        "trace.json",
        "kernels.txt",
        "kernels.json",
        "privacy.json",
    )

    LEDGER = "privacy-ledger.jsonl"
    """Of a private run. It is never removed: what was spent on the data stays spent when the model is gone."""

    EVENT_LOGS = "tensorboard"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metrics, self.checkpoint, self.tokenizer = (path / name for name in self.FILES[:4])
        self.model, self.sample, self.report, self.summary = (path / name for name in self.FILES[4:8])

    @property
    def finished(self) -> bool:
        """Whether the run in the folder came to its end."""
        return self.summary.is_file()

    @property
    def resume_command(self) -> str:
        """The command that continues the run."""
        return f"accelerant train --resume {shlex.quote(str(self.path))}"

    def require_usable(self) -> None:
        """Check, without changing anything, that a run may write here.

        Raises:
            ConfigError: it cannot be written, or holds files of those names that are not a run's.
        """
        nearest = self.path
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        if not nearest.is_dir():
            raise ConfigError(f"cannot write to {self.path}: {nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot write to {self.path}: no permission in {nearest}")
        foreign = [name for name in (*self.FILES, self.EVENT_LOGS) if (self.path / name).exists()]
        if foreign and not self._is_ours():
            raise ConfigError(f"{self.path} holds {foreign[0]} of something else: give --out another folder")

    def start(self) -> str | None:
        """Make the folder ready for a new run.

        A finished run's files go, but for a privacy ledger, which is kept under another name; an unfinished one's are
        moved into a folder inside.

        Returns:
            What to tell the user, if anything.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        note = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / ".accelerant-write-test", b"")
            (self.path / ".accelerant-write-test").unlink()
            old = [self.path / name for name in self.FILES if (self.path / name).is_file()]
            if Checkpoints(self.path).exist and not self.finished:
                kept = self._free_name()
                kept.mkdir()
                for file in (*old, *self.path.glob(f"{self.LEDGER}*"), *self._event_logs()):
                    file.rename(kept / file.name)
                note = f"kept the unfinished run that was here: {RunFolder(kept).resume_command}"
            else:
                for file in sorted(old, key=lambda file: file != self.summary):
                    file.unlink()  # the summary first: a run half removed is not a finished one
                for log in self._event_logs():
                    shutil.rmtree(log)
                note = self._keep_ledger()
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path}: {error.strerror or error}") from None
        return note

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Write config.json."""
        self.write_json(self.config, {"format": _FORMAT, **values})

    def read_config(self) -> dict[str, Any]:
        """Read config.json.

        Raises:
            FormatError: it is not there, or not a run's.
        """
        try:
            values = decode_json(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FormatError(f"{self.path} holds no run: there is no {self.config.name}") from None
        except (OSError, ValueError) as error:
            raise FormatError(f"cannot read {self.config}: {error}") from None
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise FormatError(f"{self.config} is not a run's of this program")
        return values

    def read_summary(self) -> dict[str, Any]:
        """Read summary.json.

        Raises:
            FormatError: it is not a run's.
        """
        try:
            values = decode_json(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FormatError(f"cannot read {self.summary}: {error}") from None
        if not isinstance(values, dict):
            raise FormatError(f"{self.summary} is not a run's of this program")
        return values

    @staticmethod
    def write_json(path: Path, values: Mapping[str, Any]) -> None:
        """Write a JSON document for people and programs, atomically."""
        write_atomic(path, (json.dumps(values, indent=2) + "\n").encode())

    def _event_logs(self) -> list[Path]:
        """The folder that TensorBoard reads, where there is one."""
        log = self.path / self.EVENT_LOGS
        return [log] if log.is_dir() else []

    def _is_ours(self) -> bool:
        try:
            self.read_config()
        except FormatError:
            return False
        return True

    def _keep_ledger(self) -> str | None:
        """Give the ledger of the run that was here another name; what to tell of it."""
        ledger = self.path / self.LEDGER
        if not ledger.is_file():
            return None
        kept = self._free_name(ledger.stem, ledger.suffix)
        for file in self.path.glob(f"{self.LEDGER}*"):  # and what its writer keeps beside it
            file.rename(kept.with_name(kept.name + file.name.removeprefix(self.LEDGER)))
        return (
            f"kept the privacy ledger of the run that was here as {kept.name}: this run begins a new one. Trainings on "
            "the same data add up: give --ledger to go on with one"
        )

    def _free_name(self, stem: str = "unfinished", suffix: str = "") -> Path:
        number = 1
        while (self.path / f"{stem}-{number}{suffix}").exists():
            number += 1
        return self.path / f"{stem}-{number}{suffix}"
