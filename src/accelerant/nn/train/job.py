"""A whole training run: prepare, train, finish; and the same from a checkpoint.

Everything that can be wrong with the input is found before the run's folder is touched.
"""

from __future__ import annotations

import platform
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from accelerant._version import __version__
from accelerant.errors import AccelerantError, DivergenceError, FormatError, OutOfMemory
from accelerant.nn.models.gpt import GPT, GPTConfig
from accelerant.nn.train.batches import Tokens, require_windows
from accelerant.nn.train.checkpoint import load_checkpoint, require_same_shapes, save_checkpoint, write_atomic
from accelerant.nn.train.corpus import Corpus, load_corpus, ngram_baselines
from accelerant.nn.train.environment import StopRequest, numerics
from accelerant.nn.train.folder import RunFolder
from accelerant.nn.train.lock import RunLock
from accelerant.nn.train.loop import Loop, LoopEvents, autocast
from accelerant.nn.train.metrics import MetricsFile, StepRecord, peak_memory_bytes
from accelerant.nn.train.optim import (
    expected_optimizer_tensors,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
)
from accelerant.nn.train.presets import RunConfig
from accelerant.nn.train.report import build_report
from accelerant.nn.train.tokenizer import ByteTokenizer, Tokenizer, load_bpe, train_bpe

__all__ = ["Outcome", "Progress", "resume_training", "run_training"]


class Progress(Protocol):
    """Who watches a run."""

    def phase(self, text: str) -> None:
        """Something that takes a while begins."""

    def note(self, text: str) -> None:
        """Something the user should know."""

    def advance(self, share: float, text: str = "") -> None:
        """So much of the phase is done, 0 to 1; while training, of what `text` names."""

    def begin(self, *, done: int, total: int, device: str) -> None:
        """Training starts, with `done` of `total` steps behind it."""

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


@dataclass(frozen=True, slots=True)
class _Material:
    """A corpus turned into tokens."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens


def run_training(
    run: RunConfig,
    out: Path,
    device: torch.device,
    *,
    progress: Progress,
    ledger: Callable[[], Mapping[str, Any]],
) -> Outcome:
    """Train from the beginning and write everything to a folder.

    Args:
        run: what to do.
        out: the folder; made if it is not there. A finished run in it is replaced, an unfinished one kept.
        device: where to train.
        progress: is told what happens.
        ledger: gives the ledger's dictionary, for the report.

    Returns:
        The summary; after SIGINT or SIGTERM, with a checkpoint written.

    Raises:
        ConfigError: the data or the folder cannot be used, or another run uses the folder.
        OutOfMemory: a micro-batch does not fit the device.
        DivergenceError: a loss or gradient is not finite any more.
    """
    folder = RunFolder(out)
    folder.require_usable()
    with RunLock(out) as lock:
        material = _prepare(run, progress, tokenizer_from=None)
        lock.take()
        folder.require_usable()  # others may have written while the text was read
        note = folder.start()
        if note:
            progress.note(note)
        with numerics(deterministic=run.deterministic, cpu_threads=run.recipe.cpu_threads):
            session = _Session(run, folder, material, device, progress, ledger)
            folder.write_config(session.description())
            tokenizer_json = material.tokenizer.to_json()
            if tokenizer_json is not None:
                write_atomic(folder.tokenizer, tokenizer_json.encode())
            return session.run(0)


def resume_training(
    out: Path,
    device: torch.device,
    *,
    progress: Progress,
    ledger: Callable[[], Mapping[str, Any]],
) -> Outcome:
    """Continue an interrupted run where its last checkpoint stands.

    On the same device, the losses are those that the run would have had without the interruption.

    Args:
        out: the run's folder; the rest as for `run_training`.

    Raises:
        FormatError: there is no run or checkpoint, or it is torn, of another shape, or of other data.
        ConfigError: the data cannot be read any more, or another process has the run.
        OutOfMemory: a micro-batch does not fit the device.
        DivergenceError: a loss or gradient is not finite any more.
    """
    folder = RunFolder(out)
    folder.read_config()
    if folder.finished:  # perhaps in a folder that cannot be written: no lock
        return Outcome(folder.read_summary(), already_finished=True)
    with RunLock(out):
        return _resume(folder, device, progress, ledger)


def _resume(
    folder: RunFolder, device: torch.device, progress: Progress, ledger: Callable[[], Mapping[str, Any]]
) -> Outcome:
    config = folder.read_config()
    if folder.finished:
        return Outcome(folder.read_summary(), already_finished=True)
    run = RunConfig.from_dict(config.get("run", {}))
    if not folder.checkpoint.is_file():
        command = run.command(str(folder.path), device.type)
        advice = f": start again with: {command}" if command else ": start it again"
        raise FormatError(f"no checkpoint {folder.checkpoint}: none was written yet{advice}")
    tensors, document = load_checkpoint(folder.checkpoint)
    material = _prepare(run, progress, tokenizer_from=folder.tokenizer)
    if material.corpus.sha256 != document.get("corpus_sha256"):
        raise FormatError(f"the data of {folder.path} changed since its checkpoint: restore it, or start a new run")
    with numerics(deterministic=run.deterministic, cpu_threads=run.recipe.cpu_threads):
        session = _Session(run, folder, material, device, progress, ledger)
        session.restore(tensors)
        return session.run(int(document["step"]))


def _prepare(run: RunConfig, progress: Progress, *, tokenizer_from: Path | None) -> _Material:
    progress.phase("reading the text")
    corpus = load_corpus(run.data)
    tokenizer: Tokenizer
    if run.recipe.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif tokenizer_from is not None:
        tokenizer = load_bpe(tokenizer_from)
    else:
        tokenizer = train_bpe(corpus, run.recipe.vocab_size, phase=progress.phase, watch=progress.advance)
    progress.phase("encoding the text")
    held_out = tokenizer.encode(corpus.held_out)
    train = tokenizer.encode(corpus.train, progress.advance)
    require_windows(train, run.recipe.context, "training")
    require_windows(held_out, run.recipe.context, "held-out")
    return _Material(corpus, tokenizer, train, held_out)


class _Session:
    """One process's share of a run: model, optimiser, and what is written about them."""

    def __init__(
        self,
        run: RunConfig,
        folder: RunFolder,
        material: _Material,
        device: torch.device,
        progress: Progress,
        ledger: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._run = run
        self._folder = folder
        self._material = material
        self._device = device
        self._progress = progress
        self._ledger = ledger
        self._saved_step: int | None = None
        recipe = run.recipe
        torch.manual_seed(run.seed)
        self._config = GPTConfig(
            vocab_size=material.tokenizer.vocab_size,
            context=recipe.context,
            layers=recipe.layers,
            heads=recipe.heads,
            width=recipe.width,
        )
        self._model = GPT(self._config).to(device)  # drawn on the host: the same weights for every device
        self._optimizer = make_optimizer(self._model, recipe)

    def description(self) -> dict[str, Any]:
        """What config.json says."""
        corpus = self._material.corpus
        return {
            "run": self._run.to_dict(),
            "model": self._config.to_dict(),
            "parameters": self._model.parameter_count(),
            "corpus": {
                "source": corpus.source,
                "sha256": corpus.sha256,
                "train_documents": len(corpus.train),
                "train_bytes": corpus.train_bytes,
                "train_tokens": len(self._material.train),
                "held_out_documents": len(corpus.held_out),
                "held_out_bytes": corpus.held_out_bytes,
                "held_out_tokens": len(self._material.held_out),
            },
            "device": self._device_name(),
            "backend": self._device.type,
            "versions": {
                "accelerant": __version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a checkpoint's tensors in place, after checking all of them.

        Raises:
            FormatError: they are of another shape.
        """
        wanted = _prefixed("model", self._model.state_dict())
        wanted |= _prefixed("optimizer", expected_optimizer_tensors(self._model))
        states = {name: tensor for name, tensor in tensors.items() if name.startswith("random.")}
        found = {name: tensor for name, tensor in tensors.items() if name not in states}
        require_same_shapes(self._folder.checkpoint, found, wanted)
        self._model.load_state_dict(_without_prefix("model", found))
        load_optimizer_tensors(self._model, self._optimizer, _without_prefix("optimizer", found))
        if "random.cpu" in states:
            torch.set_rng_state(states["random.cpu"])
        if self._device.type == "cuda" and "random.cuda" in states:
            torch.cuda.set_rng_state(states["random.cuda"], self._device)

    def run(self, start: int) -> Outcome:
        """Train from a step on, then finish; or stop with a checkpoint when a signal asks for it."""
        began = time.monotonic()
        metrics = MetricsFile(self._folder.metrics, keep_steps=start)
        with StopRequest() as stop:
            events = LoopEvents(self._progress.records, self._save, lambda: bool(stop), self._progress.advance)
            loop = Loop(
                self._model,
                self._optimizer,
                self._run,
                tokens=self._material.train,
                held_out=self._material.held_out,
                byte_lengths=self._material.tokenizer.byte_lengths,
                device=self._device,
                metrics=metrics,
                events=events,
            )
            self._progress.begin(done=start, total=self._run.recipe.steps, device=self._device_name())
            try:
                done = loop.run(start)
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory(error) from None
            except DivergenceError as error:
                raise DivergenceError(f"{error}; {self._last_checkpoint(start)}") from error
            finally:
                self._progress.end()
            if stop:
                return self._interrupted(done, stop.signal)
        try:
            return Outcome(self._finish(loop, metrics, began))
        except KeyboardInterrupt:  # the last step's checkpoint stands: resuming comes straight back here
            return self._interrupted(done, signal.SIGINT)

    def _save(self, step: int) -> None:
        tensors = _prefixed("model", self._model.state_dict())
        tensors |= _prefixed("optimizer", optimizer_tensors(self._model, self._optimizer))
        tensors["random.cpu"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self._device)
        document = {"step": step, "corpus_sha256": self._material.corpus.sha256}
        save_checkpoint(self._folder.checkpoint, tensors, document)
        self._saved_step = step

    def _interrupted(self, done: int, number: int | None) -> Outcome:
        summary = {
            "status": "interrupted",
            "steps_done": done,
            "steps": self._run.recipe.steps,
            "out": str(self._folder.path),
            "resume": self._folder.resume_command,
        }
        return Outcome(summary, signal=number)

    def _last_checkpoint(self, start: int) -> str:
        step = self._saved_step or start
        if not step:
            return "there is no checkpoint yet"
        return f"the last good checkpoint, of step {step}, is kept in {self._folder.checkpoint}"

    def _out_of_memory(self, error: Exception) -> AccelerantError:
        micro_batch = self._run.recipe.micro_batch
        advice = f"start anew with --micro-batch {micro_batch // 2}" if micro_batch > 1 else "take a smaller preset"
        reason = str(error).split("\n", maxsplit=1)[0]
        return OutOfMemory(f"a micro-batch of {micro_batch} does not fit the device: {advice} ({reason})")

    def _finish(self, loop: Loop, metrics: MetricsFile, began: float) -> dict[str, Any]:
        self._progress.phase("measuring the held-out loss")
        validation = loop.validate(self._run.recipe.validation_sizes[1])
        unigram, bigram = ngram_baselines(self._material.corpus.train, self._material.corpus.held_out)
        self._progress.phase("writing a sample")
        sample = self._sample()
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in self._model.state_dict().items()}
        records = metrics.records
        summary = {
            "status": "done",
            "preset": self._run.recipe.name,
            "device": self._device_name(),
            "parameters": self._model.parameter_count(),
            "steps": self._run.recipe.steps,
            "tokens": self._run.recipe.steps * self._run.recipe.tokens_per_step,
            "train_loss": round(float(np.mean([record.loss for record in records[-20:]])), 4),
            "validation_loss": round(validation.nats_per_token, 4),
            "validation_nats_per_byte": round(validation.nats_per_byte, 4),
            "validation_tokens": validation.tokens,
            "unigram_nats_per_byte": round(unigram, 4),
            "bigram_nats_per_byte": round(bigram, 4),
            "tokens_per_s": round(float(np.median([record.tokens_per_s for record in records])), 1),
            "peak_memory_bytes": peak_memory_bytes(self._device),
            "seconds": round(time.monotonic() - began, 2),
            "out": str(self._folder.path),
            "report": str(self._folder.report),
        }
        self._write_results(tensors, sample, summary, records)
        return summary

    def _write_results(
        self, tensors: dict[str, Tensor], sample: str, summary: dict[str, Any], records: Sequence[StepRecord]
    ) -> None:
        from safetensors.torch import save_file

        folder = self._folder
        write_atomic(folder.model, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        write_atomic(folder.sample, sample.encode())
        html = build_report(
            summary=summary, config=self.description(), records=records, ledger=self._ledger(), sample=sample
        )
        write_atomic(folder.report, html.encode())
        folder.write_json(folder.summary, summary)  # last: it says that the run is whole

    def _sample(self) -> str:
        prompt = torch.tensor([self._material.tokenizer.encode_text("\n\n")], device=self._device)
        generator = torch.Generator(device=self._device).manual_seed(self._run.seed)
        tokens, size = prompt, self._run.recipe.sample_size
        with autocast(self._device):
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


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
