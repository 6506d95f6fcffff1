# ruff: noqa: D102  nn.train.job.Progress documents the methods
"""The display of `accelerant train`: a progress bar on a terminal, lines elsewhere, and the summary.

Progress goes to the standard error stream, the summary to the standard output.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from accelerant.cli.terminal import COMPILING, console, is_live
from accelerant.errors import FormatError
from accelerant.runtime.files import escaped, exact, plain, typed

if TYPE_CHECKING:
    from rich.console import Console

    from accelerant.nn.train.history import StepRecord
    from accelerant.nn.train.job import TrainingOutcome

_LINE_EVERY_S = 5.0

_TITLE_COLUMNS, _MEMORY_COLUMNS, _DEVICE_COLUMNS = 56, 80, 104
"""Least widths of a terminal that shows title and rate, bar and memory, and the device; nothing is cut."""


class View:
    """Shows notes during the run, and a summary at its end."""

    def phase(self, text: str) -> None: ...
    def advance(self, share: float, text: str = "") -> None: ...
    def begin(self, *, done: int, total: int, device: str, predicted_bytes: int | None) -> None: ...
    def records(self, records: Sequence[StepRecord]) -> None: ...
    def end(self) -> None: ...
    def close(self) -> None: ...
    def compiling(self, begins: bool) -> None: ...

    def note(self, text: str) -> None:
        print(f"accelerant: {escaped(text)}", file=sys.stderr)

    def outcome(self, outcome: TrainingOutcome) -> None:
        """Print how the run ended."""
        summary = outcome.summary
        if outcome.already_finished:
            try:
                for name, kind in _FIELDS.items():
                    summary[name] = typed(kind, summary.get(name), name)
                for name, kind in _PRIVATE.items() if summary.get("private") else ():
                    typed(kind, summary["private"].get(name), f"private.{name}")
            except ValueError as error:
                raise FormatError(f"summary.json is not a run's of this program: {error}") from None
        if summary["status"] == "interrupted":
            print(f"Stopped after step {summary['steps_done']} of {summary['steps']}; a checkpoint is written.")
            print(f"Continue with:  {escaped(summary['resume'])}")
            return
        if outcome.already_finished:
            print("This run is already finished: there is nothing left to do.")
        print(_summary_text(summary))


def _summary_text(summary: dict[str, Any]) -> str:
    per_byte = f"{summary['validation_nats_per_byte']:.3f} nats a byte"
    if summary["validation_loss"] != summary["validation_nats_per_byte"]:
        per_byte += f" ({summary['validation_loss']:.3f} a token)"
    baselines = f"unigram {summary['unigram_nats_per_byte']:.3f}, bigram {summary['bigram_nats_per_byte']:.3f}"
    speed = "not recorded" if summary["tokens_per_s"] is None else f"{summary['tokens_per_s']:,.0f} tokens/s"
    memory = f"{summary['peak_memory_bytes'] / 2**20:,.0f} MiB"
    memory += " allocated at most" if (reserved := summary.get("reserved_memory_bytes")) else " resident at most"
    if (step := summary.get("predicted_peak_bytes")) and (expected := summary.get("expected_peak_bytes")):
        memory += f", {expected / 2**20:,.0f} MiB predicted ({step / 2**20:,.0f} MiB for a step)"
    if reserved:
        memory += f"; {reserved / 2**20:,.0f} MiB reserved by torch"
    lines = [
        f"validation loss  {per_byte}   ({baselines})",
        f"bigram model     {verdict(summary)}",
        f"throughput       {speed} on {summary['device']}",
        f"trained          {summary['steps']:,} steps, {summary['tokens']:,} tokens, {summary['seconds']:.0f} s",
        f"peak memory      {memory}",
        f"report           {summary['report']}",
    ]
    if rising := summary.get("held_out"):
        lines.append(f"held-out loss    {rising}")
    if private := summary.get("private"):
        whose = private["unit"] + ("" if private["secure"] else ", noise NOT secure")
        epsilon = plain(float(private["epsilon"]), up=True)
        lines.append(f"privacy          epsilon {epsilon} at delta {exact(private['delta'])} for each {whose}")
        lines.append(f"statement        {private['statement']}")
    if restarts := summary.get("restarts"):
        lines.append(f"restarts         {restarts}: a process had died; training went on from the last checkpoint")
    if summary.get("stopped"):
        lines.append(f"stopped early    {summary['stopped']}")
    if summary.get("profile"):
        lines.append(f"profile          {', '.join(summary['profile'])}")
    if prompt := summary.get("prompt"):
        shown = (prompt + (summary.get("sample") or "")).strip().splitlines()[:_SAMPLE_LINES] or [""]
        lines += [f"{'' if number else 'sample':<17}{line[:_SAMPLE_COLUMNS]}" for number, line in enumerate(shown)]
        lines.append(f"use it           accelerant sample {shlex.quote(summary['out'])} --prompt {_quoted(prompt)}")
    return "\n".join(map(escaped, lines))


_SAMPLE_LINES, _SAMPLE_COLUMNS = 4, 100


def _quoted(text: str) -> str:
    """Return a word of a command line, in double quotes if they do."""
    return f'"{text}"' if all(c.isalnum() or c in " _-.,:;" for c in text) else shlex.quote(text)


def verdict(summary: dict[str, Any]) -> str:
    """Return whether the model beats the bigram and the unigram model, or the command that trains it so far."""
    from accelerant.nn.train.config import PRESETS  # imports torch, which the command needs later than this module

    loss, bigram = summary["validation_nats_per_byte"], summary["bigram_nats_per_byte"]
    if summary["unigram_nats_per_byte"] <= loss < bigram:
        return "the unigram model has less loss than both: train on, or on more text"
    if loss < bigram:
        return f"beaten: {1 - loss / bigram:.1%} less loss"
    if (summary.get("private") or {}).get("target_epsilon") is not None:  # its noise is for its steps
        return "not beaten: for more, start a new run with more --steps or a larger --batch-size, into another --out"
    more, steps, known = summary.get("steps_to_bigram"), summary["steps"], PRESETS.get(summary["preset"])
    if more is not None:
        text, steps = f"not beaten yet; about {more:,} steps more", steps + more
    elif known is not None and steps < known.steps:
        text, steps = "not beaten yet; train on", known.steps
    else:
        return "not beaten; the loss no longer falls with the steps: more text, or another preset"
    return f"{text}:  accelerant train --resume {shlex.quote(summary['out'])} --steps {steps}"


_FIELDS: dict[str, Any] = {
    "status": Literal["done"], "preset": str, "validation_nats_per_byte": float, "validation_loss": float,
    "device": str,
    "unigram_nats_per_byte": float, "bigram_nats_per_byte": float, "tokens_per_s": float | None, "steps": int,
    "peak_memory_bytes": int, "reserved_memory_bytes": int | None, "predicted_peak_bytes": int | None,
    "expected_peak_bytes": int | None, "tokens": int,
    "seconds": float, "report": str, "private": dict[str, Any] | None, "stopped": str | None, "restarts": int | None,
    "profile": list[str] | None, "steps_to_bigram": int | None, "held_out": str | None, "out": str,
    "prompt": str | None, "sample": str | None,
}  # fmt: skip
_PRIVATE: dict[str, Any] = {
    "unit": str, "secure": bool, "target_epsilon": float | None, "epsilon": float | str, "delta": float,
    "statement": str,
}  # fmt: skip


class SilentView(View):
    """Shows nothing: that of all processes but rank 0."""

    def note(self, text: str) -> None: ...


class _PhaseText:
    """A phase of a run and its duration so far."""

    def __init__(self, text: str, inner: str = "", share: float = 0.0) -> None:
        self.text = text
        self._inner = inner
        self._first = self._share = share
        self._began = time.monotonic()

    @property
    def slow(self) -> bool:
        """True if it has lasted long enough to be shown."""
        return time.monotonic() - self._began > 1.0

    def within(self, inner: str, share: float) -> _PhaseText:
        """Return the phase of an operation within this one: this one, or a new one if the operation begins."""
        if inner == self._inner and share >= self._share:
            self._share = share
            return self
        return _PhaseText(inner or self.text, inner, share)

    def line(self, share: float) -> str:
        """Return the phase, the share done, and the time left."""
        text = f"{self.text}  {share:.0%}"
        if not self._first < share < 1:
            return text
        left = (time.monotonic() - self._began) * (1 - share) / (share - self._first)
        return f"{text}  {_clock(left)} left"


class LineView(View):
    """Prints a line every few seconds, for logs."""

    def __init__(self) -> None:
        self._total = 0
        self._device = ""
        self._last = self._began = self._stepped = 0.0
        self._done = 0
        self._phase = _PhaseText("")
        self._compiled = False

    def compiling(self, begins: bool) -> None:
        if begins and not self._compiled:
            self._compiled = True
            print(f"{COMPILING} ...", file=sys.stderr, flush=True)

    def phase(self, text: str) -> None:
        self._phase, self._last = _PhaseText(text), time.monotonic()
        print(f"{text} ...", file=sys.stderr, flush=True)

    def advance(self, share: float, text: str = "") -> None:
        self._phase = self._phase.within(text, share)
        now = time.monotonic()
        if now - self._last >= _LINE_EVERY_S:
            self._last = now
            print(self._phase.line(share), file=sys.stderr, flush=True)

    def begin(self, *, done: int, total: int, device: str, predicted_bytes: int | None) -> None:
        self._total, self._device, self._done = total, device, done
        self._last = self._began = self._stepped = time.monotonic()
        text = f"training on {device}: step {done} of {total}{_predicted(predicted_bytes)}"
        print(text, file=sys.stderr, flush=True)

    def records(self, records: Sequence[StepRecord]) -> None:
        now = time.monotonic()
        if records and (now - self._stepped >= _LINE_EVERY_S or records[-1].step == self._total):
            self._last = self._stepped = now
            record = records[-1]
            left = _clock((now - self._began) / (record.step - self._done) * (self._total - record.step))
            text = f"step {record.step}/{self._total}  {_numbers(record)}  {self._device}  {left} left"
            print(text, file=sys.stderr, flush=True)


class BarView(View):
    """Shows a spinner or a progress bar on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._status: Any = None
        self._phase = _PhaseText("")

    def phase(self, text: str) -> None:
        self._stop_status()
        self._phase = _PhaseText(text)
        self._status = self._console.status(text)
        self._status.start()

    def advance(self, share: float, text: str = "") -> None:
        self._phase = self._phase.within(text, share)
        if self._status is not None:
            self._status.update(self._phase.line(share))
        elif self._progress is not None and self._phase.slow:
            self._progress.update(self._task, numbers=self._phase.line(share))

    def compiling(self, begins: bool) -> None:
        if self._status is not None:
            self._status.update(COMPILING if begins else self._phase.text)
        elif self._progress is not None:
            self._progress.update(self._task, numbers=COMPILING if begins else "")

    def note(self, text: str) -> None:
        self._console.print(escaped(text), soft_wrap=True)

    def begin(self, *, done: int, total: int, device: str, predicted_bytes: int | None) -> None:
        self._stop_status()
        if predicted_bytes is not None:
            self.note(f"training on {device}{_predicted(predicted_bytes)}")
        parts = (  # least width of the terminal, and what it then shows
            (_TITLE_COLUMNS, TextColumn("[bold]training[/bold]")),
            (_MEMORY_COLUMNS, BarColumn(bar_width=None)),
            (0, MofNCompleteColumn()),
            (0, TextColumn("{task.fields[numbers]}")),
            (_DEVICE_COLUMNS, TextColumn("[dim]{task.fields[device]}[/dim]")),
            (0, TimeRemainingColumn(compact=True)),
        )
        shown = [part for least, part in parts if self._console.width >= least]
        self._progress = Progress(*shown, console=self._console, expand=True)
        self._task = self._progress.add_task("", total=total, completed=done, numbers="", device=device)
        self._progress.start()

    def records(self, records: Sequence[StepRecord]) -> None:
        if self._progress is not None and records:
            self._progress.update(
                self._task, completed=records[-1].step, numbers=_numbers(records[-1], self._console.width)
            )

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def close(self) -> None:
        self._stop_status()
        self.end()

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def make_view(*, quiet: bool) -> View:
    """Return the view for this process's standard error stream."""
    if quiet:
        return View()
    return BarView(console(stderr=True)) if is_live(sys.stderr) else LineView()


def _numbers(record: StepRecord, width: int = _DEVICE_COLUMNS) -> str:
    parts = (
        (0, f"loss {record.loss:.3f}"),
        (_TITLE_COLUMNS, f"{record.tokens_per_s or 0:,.0f} tokens/s"),
        (_MEMORY_COLUMNS, f"{record.peak_memory_bytes / 2**30:.1f} GiB"),
    )
    return "  ".join(text for least, text in parts if width >= least)


def _predicted(size: int | None) -> str:
    return "" if size is None else f", {size / 2**20:,.0f} MiB predicted"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
