"""Training as a job: `accelerant train`'s runs, in the job's folder, which go on from their checkpoints."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accelerant.nn.train.config import preset as find_preset
from accelerant.nn.train.folder import RunFolder
from accelerant.nn.train.job import resume_training, run_training
from accelerant.ops.aten.device import TENSOR_DEVICES, named
from accelerant.runtime import registry
from accelerant.runtime.ledger import ledger
from accelerant.service.jobs.worker import Context, Suspended

if TYPE_CHECKING:
    from accelerant.nn.train.history import StepRecord

__all__ = ["run"]

_CHECKPOINT_S = 20.0
"""Seconds between checkpoints: work of a run that is lost with its worker."""


class _Reports:
    """Reports a run's progress; a cancelled run ends at once, one that the server suspends after a checkpoint."""

    def __init__(self, context: Context) -> None:
        self._context, self._total, self._share = context, 1, 0.0
        self._suspended = False

    def phase(self, text: str) -> None:
        """Report what begins."""
        self._tell(text)

    def advance(self, share: float, text: str = "") -> None:
        """Report what lasts."""
        self._tell(f"{text} {share:.0%}".strip())

    def note(self, text: str) -> None:
        """Ignore what is for the terminal."""

    def begin(self, *, done: int, total: int, device: str, predicted_bytes: int | None) -> None:
        """Note the number of steps."""
        self._total = total

    def records(self, records: Sequence[StepRecord]) -> None:
        """Report the last step and its loss."""
        if records:
            last = records[-1]
            self._share = last.step / (self._total + 1)
            self._tell(f"step {last.step}/{self._total}, loss {last.loss:.4f}")

    def end(self) -> None:
        """Ignore the end of the steps."""

    def _tell(self, text: str) -> None:
        if self._suspended:
            return
        try:
            self._context.progress(self._share, text)
        except Suspended:
            self._suspended = True
            signal.raise_signal(signal.SIGTERM)  # the run writes a checkpoint after its step


def run(
    context: Context, *, preset: str = "tiny", data: Sequence[str] = (), text: bytes | None = None, **changes: Any
) -> dict[str, np.ndarray]:
    """Train a language model; return the files of its folder as bytes: model, tokenizer (empty for bytes), summary.

    Args:
        context: the worker's; its folder has the run.
        preset: as of `accelerant train`.
        data: absolute paths, or ("stdlib",).
        text: text to train on instead.
        changes: fields of RunConfig and TrainConfig, as steps, seed and learning_rate; None is the preset's.

    Raises ConfigError for values that `accelerant train` refuses.
    """
    out = context.directory / "run"
    chosen = registry.choose(context.device)
    device: Any = named(chosen) if chosen.backend in TENSOR_DEVICES else None
    if device is None:
        import torch

        device = torch.device(chosen.torch_device)
    folder, reports = RunFolder(out), _Reports(context)
    if folder.checkpoint.exists():
        outcome = resume_training(out, device, progress=reports, ledger=lambda: ledger().to_dict())
    else:
        if text is not None:
            Path(context.directory, "text.txt").write_bytes(text)
            data = (str(context.directory / "text.txt"),)
        given = {name: value for name, value in changes.items() if value is not None}
        config = find_preset(preset).replaced(
            data=tuple(data) or ("stdlib",),
            deterministic=device.type == "cpu",
            checkpoint_every_s=_CHECKPOINT_S,
            **given,
        )
        outcome = run_training(config, out, device, progress=reports, ledger=lambda: ledger().to_dict(), overwrite=True)
    if outcome.signal is not None:
        raise Suspended("the run has a checkpoint")
    summary = {name: value for name, value in outcome.summary.items() if name not in ("out", "report")}
    contents = {
        "model": folder.model.read_bytes(),
        "tokenizer": folder.tokenizer.read_bytes() if folder.tokenizer.exists() else b"",
        "summary": json.dumps(summary).encode(),
    }
    return {name: np.frombuffer(content, np.uint8) for name, content in contents.items()}
