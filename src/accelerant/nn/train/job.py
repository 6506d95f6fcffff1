"""A whole training run: prepare, train, finish; and the same from a checkpoint.

Everything that can be wrong with the input is found before the run's folder is touched.
"""

from __future__ import annotations

import platform
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from accelerant._version import __version__
from accelerant.errors import AccelerantError, ConfigError, FormatError, OutOfMemory
from accelerant.nn.layers import require_float8
from accelerant.nn.models.gpt import GPT, GPTConfig
from accelerant.nn.train.callbacks import Callback, Extension, TensorBoard
from accelerant.nn.train.checkpoint import Checkpoints, write_tensors
from accelerant.nn.train.config import RunConfig, TrainConfig
from accelerant.nn.train.corpus import Material, prepare_material
from accelerant.nn.train.data import Source, TokenSource
from accelerant.nn.train.environment import numerics
from accelerant.nn.train.folder import RunFolder, RunLock
from accelerant.nn.train.history import History, StepRecord
from accelerant.nn.train.objective import Evaluation, autocast
from accelerant.nn.train.report import build_report
from accelerant.nn.train.tokenfile import Tokens
from accelerant.nn.train.trainer import Trainer
from accelerant.runtime.files import write_atomic

__all__ = ["Outcome", "Progress", "resume_training", "run_training", "windows_at_once"]

_CPU_TOKENS = 4096  # at once: logits of more leave the caches and take gigabytes (small: 64 windows, 4.5 GB)


class Progress(Protocol):
    """Who watches a run."""

    def phase(self, text: str) -> None:
        """Something that takes a while begins."""

    def note(self, text: str) -> None:
        """Something the user should know."""

    def advance(self, share: float, text: str = "") -> None:
        """So much of the phase is done, 0 to 1; while training, of what `text` names."""

    def begin(self, *, done: int, total: int, device: str, predicted_bytes: int | None) -> None:
        """Training starts, with `done` of `total` steps behind it; its peak of memory as predicted, if it was."""

    def records(self, records: Sequence[StepRecord]) -> None:
        """Steps were done."""

    def end(self) -> None:
        """Training is over, by whatever way."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        summary: of JSON values; `status` is "done" or "interrupted".
        signal: the signal that ended it early, or None.
        already_finished: whether there was nothing left to do.
    """

    summary: dict[str, Any]
    signal: int | None = None
    already_finished: bool = False


def run_training(
    run: RunConfig,
    out: Path,
    device: torch.device,
    *,
    progress: Progress,
    ledger: Callable[[], Mapping[str, Any]],
    extension: Extension | None = None,
) -> Outcome:
    """Train from the beginning and write everything to a folder.

    Args:
        run: what to do.
        out: the folder; made if it is not there. A finished run in it is replaced, an unfinished one kept.
        device: where to train.
        progress: is told what happens.
        ledger: gives the ledger's dictionary, for the report.
        extension: what makes the steps in place of the Trainer's own; closed at the end.

    Returns:
        The summary; after SIGINT or SIGTERM, with a checkpoint written.

    Raises:
        ConfigError: the data or the folder cannot be used, another run uses the folder, or the device has no fp8.
        MissingDependency: the run logs to TensorBoard, which is not installed.
        OutOfMemory: a micro-batch does not fit the device.
        DivergenceError: a loss or gradient is not finite any more.
    """
    if run.precision == "fp8":
        require_float8(device)
    extension = extension or Extension()
    extension.require(run)
    folder = RunFolder(out)
    folder.require_usable()
    if run.log == "tensorboard":
        TensorBoard(out)  # says that it is not installed before an older run is removed
    with RunLock(out) as lock, closing(extension):
        material = prepare_material(run, progress, tokenizer_from=None)
        source = extension.source(material.train, _configured(run, out, device, extension), material.sha256)
        lock.take()
        folder.require_usable()  # others may have written while the text was read
        note = folder.start()
        if note:
            progress.note(note)
        with numerics(deterministic=run.deterministic, cpu_threads=run.recipe.cpu_threads):
            session = _Session(run, folder, material, device, progress, ledger, extension, source)
            folder.write_config(session.description())
            tokenizer_json = material.tokenizer.to_json()
            if tokenizer_json is not None:
                write_atomic(folder.tokenizer, tokenizer_json.encode())
            return session.run(resume=False)


def resume_training(
    out: Path,
    device: torch.device,
    *,
    progress: Progress,
    ledger: Callable[[], Mapping[str, Any]],
    extension: Extension | None = None,
) -> Outcome:
    """Continue an interrupted run where its last checkpoint stands.

    On the same device, the losses are those that the run would have had without the interruption.

    Args:
        out: the run's folder; the rest as for `run_training`.

    Raises:
        ConfigError: the run had an extension, and this is none or another.
        FormatError: there is no run or checkpoint, or it is torn, of another shape, or of other data.
        ConfigError: the data cannot be read any more, or another process has the run.
        OutOfMemory: a micro-batch does not fit the device.
        DivergenceError: a loss or gradient is not finite any more.
    """
    folder = RunFolder(out)
    folder.read_config()
    if folder.finished:  # perhaps in a folder that cannot be written: no lock
        return Outcome(folder.read_summary(), already_finished=True)
    with RunLock(out), closing(extension or Extension()) as chosen:
        return _resume(folder, device, progress, ledger, chosen)


def _resume(
    folder: RunFolder,
    device: torch.device,
    progress: Progress,
    ledger: Callable[[], Mapping[str, Any]],
    extension: Extension,
) -> Outcome:
    config = folder.read_config()
    if config.get("extension", Extension.name) != extension.name:
        raise ConfigError(f"the run in {folder.path} is one of {config['extension']}: go on with --resume")
    if folder.finished:
        return Outcome(folder.read_summary(), already_finished=True)
    run = RunConfig.from_dict(config.get("run", {}))
    if not Checkpoints(folder.path).exist:
        command = run.command(str(folder.path), device.type, extension.words(folder.path))
        advice = f": start again with: {command}" if command else ": start it again"
        raise FormatError(f"no checkpoint {folder.checkpoint}: none was written yet{advice}")
    material = prepare_material(run, progress, tokenizer_from=folder.tokenizer)
    source = extension.source(material.train, _configured(run, folder.path, device, extension), material.sha256)
    with numerics(deterministic=run.deterministic, cpu_threads=run.recipe.cpu_threads):
        return _Session(run, folder, material, device, progress, ledger, extension, source).run(resume=True)


class _Told(Callback):
    """Passes on what happens to who watches the run."""

    def __init__(self, progress: Progress, device: str) -> None:
        self._progress = progress
        self._device = device

    def begin(self, trainer: Trainer, done: int, total: int) -> None:
        """Training starts."""
        predicted = trainer.history.predicted_peak_bytes
        self._progress.begin(done=done, total=total, device=self._device, predicted_bytes=predicted)

    def records(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        """Steps were done."""
        self._progress.records(records)

    def advance(self, trainer: Trainer, share: float, text: str) -> None:
        """So much is done."""
        self._progress.advance(share, text)

    def note(self, trainer: Trainer, text: str) -> None:
        """Something the user should know."""
        self._progress.note(text)


class _Session:
    """One process's share of a run: a Trainer of a GPT, and what is written about it."""

    def __init__(
        self,
        run: RunConfig,
        folder: RunFolder,
        material: Material,
        device: torch.device,
        progress: Progress,
        ledger: Callable[[], Mapping[str, Any]],
        extension: Extension,
        source: Source | None,
    ) -> None:
        self._run = run
        self._extension = extension
        self._folder = folder
        self._material = material
        self._device = device
        self._progress = progress
        self._ledger = ledger
        recipe = run.recipe
        torch.manual_seed(run.seed)
        self._config = GPTConfig(
            vocab_size=material.tokenizer.vocab_size,
            context=recipe.context,
            layers=recipe.layers,
            heads=recipe.heads,
            width=recipe.width,
        )
        self._model = GPT(self._config)  # drawn on the host: the same weights for every device
        told = _Told(progress, self._device_name())
        config = _configured(run, folder.path, device, extension)
        self._trainer = Trainer(self._model, config, callbacks=[told, extension])
        self._training = self._source(material.train, "training") if source is None else source
        self._trainer.step = extension.attach(self._trainer)

    def description(self) -> dict[str, Any]:
        """What config.json says."""
        more = self._extension.description()
        return {
            **({"extension": self._extension.name, self._extension.name: more} if more else {}),
            "run": self._run.to_dict(),
            "model": self._config.to_dict(),
            "parameters": self._model.parameter_count(),
            "corpus": self._material.description,
            "device": self._device_name(),
            "backend": self._device.type,
            "versions": {
                "accelerant": __version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def run(self, *, resume: bool) -> Outcome:
        """Train, from the last checkpoint on where that is asked, then finish; or stop where a signal asks for it."""
        began, recipe = time.monotonic(), self._run.recipe
        self._progress.phase("looking at the model")
        sizes, count = recipe.validation_sizes, recipe.validations
        try:
            history = self._trainer.run(
                self._training,
                self._source(self._material.held_out, "held-out", sizes[0]),
                folder=self._folder.path,
                resume=resume,
                evaluate_at={round(recipe.steps * k / (count + 1)) for k in range(1, count + 1)},
            )
        except OutOfMemory as error:
            raise self._out_of_memory(error) from None
        finally:
            self._progress.end()
        if history.signal is not None:
            return self._interrupted(history.steps, history.signal)
        try:
            return Outcome(self._finish(history, began))
        except KeyboardInterrupt:  # the last step's checkpoint stands: resuming comes straight back here
            return self._interrupted(history.steps, signal.SIGINT)

    def _source(self, tokens: Tokens, part: str, evaluated: int = 0) -> TokenSource:
        config, sha256 = self._trainer.config, self._material.sha256
        return TokenSource(tokens, config, fingerprint=sha256, part=part, evaluation_tokens=evaluated)

    def _interrupted(self, done: int, number: int | None) -> Outcome:
        summary = {
            "status": "interrupted",
            "steps_done": done,
            "steps": self._run.recipe.steps,
            "out": str(self._folder.path),
            "resume": self._folder.resume_command,
        }
        return Outcome(summary, signal=number)

    def _out_of_memory(self, error: Exception) -> AccelerantError:
        micro_batch = self._run.recipe.micro_batch
        advice = f"start anew with --micro-batch {micro_batch // 2}" if micro_batch > 1 else "take a smaller preset"
        return OutOfMemory(f"a micro-batch of {micro_batch} does not fit the device: {advice} ({error})")

    def _validate(self, tokens: int) -> tuple[Evaluation, float, int]:
        """The held-out loss over about that many tokens: nats a token, nats a byte, and tokens read."""
        source = self._source(self._material.held_out, "held-out", tokens)
        evaluation = self._trainer.measure(source, step=self._run.recipe.steps)
        lengths, size = self._material.tokenizer.byte_lengths, 0
        for _, targets in source.in_order(self._trainer.config.micro_batch):
            size += int(lengths[targets.numpy()].sum())
        count = evaluation.rows * self._run.recipe.context
        return evaluation, evaluation.loss * count / max(1, size), count

    def _finish(self, history: History, began: float) -> dict[str, Any]:
        self._progress.phase("measuring the held-out loss")
        validation, per_byte, validated = self._validate(self._run.recipe.validation_sizes[1])
        unigram, bigram = self._material.baselines()
        self._progress.phase("writing a sample")
        sample = self._sample()
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in self._model.state_dict().items()}
        records = history.records
        summary = {
            "status": "done",
            "preset": self._run.recipe.name,
            "device": self._device_name(),
            "parameters": self._model.parameter_count(),
            "steps": history.steps,
            "tokens": history.steps * self._run.recipe.tokens_per_step,
            "train_loss": round(float(np.mean([r.loss for r in records[-20:]])), 4) if records else None,
            "validation_loss": round(validation.loss, 4),
            "validation_nats_per_byte": round(per_byte, 4),
            "validation_tokens": validated,
            "unigram_nats_per_byte": round(unigram, 4),
            "bigram_nats_per_byte": round(bigram, 4),
            "tokens_per_s": round(float(np.median([r.tokens_per_s or 0.0 for r in records])), 1) if records else None,
            "peak_memory_bytes": history.peak_memory_bytes,
            "reserved_memory_bytes": history.reserved_memory_bytes,
            "predicted_peak_bytes": history.predicted_peak_bytes,
            "seconds": round(time.monotonic() - began, 2),
            "out": str(self._folder.path),
            "report": str(self._folder.report),
        }
        more = self._extension.results()
        if more:
            summary[self._extension.name] = more
        if history.reason:
            summary["stopped"] = history.reason
        if self._trainer.profile:
            summary["profile"] = [str(self._folder.path / name) for name in ("kernels.txt", "trace.json")]
        self._write_results(tensors, sample, summary, records)
        return summary

    def _write_results(
        self, tensors: dict[str, Tensor], sample: str, summary: dict[str, Any], records: Sequence[StepRecord]
    ) -> None:
        folder = self._folder
        write_tensors(folder.model, tensors, {"format": "pt"})
        write_atomic(folder.sample, sample.encode())
        html = build_report(
            summary=summary,
            config=self.description(),
            records=records,
            ledger=self._ledger(),
            sample=sample,
            curves=self._extension.curves(),
            remarks=self._extension.remarks(),
        )
        write_atomic(folder.report, html.encode())
        folder.write_json(folder.summary, summary)  # last: it says that the run is whole

    def _sample(self) -> str:
        prompt = torch.tensor([self._material.tokenizer.encode_text("\n\n")], device=self._device)
        generator = torch.Generator(device=self._device).manual_seed(self._run.seed)
        tokens, size = prompt, self._run.recipe.sample_size
        with autocast(self._device, self._trainer.precision):
            for start in range(0, size, 16):
                count = min(16, size - start)
                tokens = self._model.generate(tokens, count, temperature=0.7, top_k=100, generator=generator)
                self._progress.advance((start + count) / size)
        return self._material.tokenizer.decode(tokens[0, prompt.shape[1] :].tolist())

    def _device_name(self) -> str:
        if self._device.type == "cuda":
            return f"{self._device} ({torch.cuda.get_device_name(self._device)})"
        threads = torch.get_num_threads()
        return f"{self._device} ({threads} thread{'s' * (threads != 1)})"


def _configured(run: RunConfig, folder: Path, device: torch.device, extension: Extension) -> TrainConfig:
    return extension.configured(_train_config(run, folder, device))


def _train_config(run: RunConfig, folder: Path, device: torch.device) -> TrainConfig:
    """A run's recipe as the Trainer's config."""
    recipe = run.recipe
    return TrainConfig(
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        accumulate=recipe.batch_size // windows_at_once(recipe.micro_batch, recipe.context, device),
        context=recipe.context,
        learning_rate=recipe.learning_rate,
        warmup=recipe.warmup,
        final_lr_ratio=recipe.final_lr_ratio,
        weight_decay=recipe.weight_decay,
        beta1=recipe.beta1,
        beta2=recipe.beta2,
        clip=recipe.clip,
        precision=run.precision,
        graph="auto",
        device=str(device),
        seed=run.seed,
        deterministic=run.deterministic,
        folder=str(folder),
        checkpoint_every_s=recipe.checkpoint_every_s,
        log=run.log,
        profile=run.profile,
        recompute=("blocks.*",) if run.recompute else (),
    )


def windows_at_once(micro_batch: int, context: int, device: torch.device) -> int:
    """The micro-batch to compute with: on the CPU its largest divisor whose tokens stay near the caches."""
    if device.type != "cpu":
        return micro_batch
    most = max(1, _CPU_TOKENS // context)
    return next(count for count in range(min(micro_batch, most), 0, -1) if micro_batch % count == 0)
