"""`accelerant train`: the training of a language model on text, from the text to a report, and its continuation.

Input is checked as far as possible before the run's folder is changed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch

from accelerant._renamed import renamed_arguments
from accelerant._version import __version__
from accelerant.errors import ConfigError, FormatError, MissingFile, OutOfMemory
from accelerant.nn.layers import require_float8
from accelerant.nn.models import hugging_face
from accelerant.nn.models.char_rnn import CharRNN, CharRNNConfig
from accelerant.nn.models.gpt import GPT, GPTConfig
from accelerant.nn.models.language_model import LanguageModel
from accelerant.nn.models.llama import Llama, LlamaConfig
from accelerant.nn.train import checkpoint
from accelerant.nn.train.callbacks import Callback, Extension, TensorBoard
from accelerant.nn.train.config import (
    PRESETS,
    ModelName,
    RunConfig,
    TrainConfig,
    cpu_flops_per_s,
    duration_note,
    paths_of,
    windows_at_once,
)
from accelerant.nn.train.corpus import TokenizedText, Watcher, tokenize, tokenizer_hash
from accelerant.nn.train.data import Source, TokenSource
from accelerant.nn.train.environment import numerics
from accelerant.nn.train.history import History, RunFolder, RunLock, StepRecord, build_report
from accelerant.nn.train.objective import Evaluation, autocast
from accelerant.nn.train.parallel import share_of
from accelerant.nn.train.tokens import ByteTokenizer, Tokenizer, Tokens, load_bpe, load_exported
from accelerant.nn.train.trainer import Trainer
from accelerant.runtime import registry
from accelerant.runtime.files import typed, write_atomic
from accelerant.runtime.host import host_memory
from accelerant.runtime.ledger import ledger
from accelerant.runtime.processes import Processes, attempt, launch_id
from accelerant.runtime.registry import DeviceLike
from accelerant.tensors.tensor import TENSOR_DEVICES, named, serves

_GPT2_WIDTH = 768


class Progress(Watcher, Protocol):
    """Receives the progress of a run."""

    def note(self, text: str) -> None:
        """There is something that the user should know."""

    def begin(self, *, done: int, total: int, device: str, predicted_bytes: int | None) -> None:
        """Training starts after `done` of `total` steps; its peak memory is predicted, or None."""

    def records(self, records: Sequence[StepRecord]) -> None:
        """Steps were done."""

    def end(self) -> None:
        """Training ended, for whatever reason."""


class _Silent:
    """A Progress that shows nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """The result of a run: its summary (JSON values), the signal that interrupted it, or None.

    `already_finished`: there was nothing left to do. `summary["status"]` is "done" or "interrupted".
    """

    summary: dict[str, Any]
    signal: int | None = None
    already_finished: bool = False


@renamed_arguments(ledger="acl.ledger()")
def run_training(
    run: RunConfig, out: str | os.PathLike[str] | None = None, device: DeviceLike = None, *,
    progress: Progress | None = None, extension: Extension | None = None, overwrite: bool = False,
    epochs: float | None = None,
) -> TrainingOutcome:  # fmt: skip
    """Train from the beginning, or from the model in `run.init_from`, and write everything to a folder.

    Several processes of torch.distributed call this together; rank 0 writes, the others help with checkpoints at most.

    Args:
        out: the folder, by default the run's; created if absent. An earlier run in it is moved to a subfolder.
        device: as for accelerant.Accelerator; None for the automatic choice among devices of torch.
        progress: receives the run's progress.
        extension: replaces batches or steps; closed at the end.
        overwrite: whether an earlier run in the folder is removed instead, except its privacy ledger.
        epochs: passes over the training tokens, in place of the run's steps.

    Returns:
        The outcome; after SIGINT or SIGTERM with a checkpoint written.

    Raises:
        ConfigError: the data or a folder cannot be used, another run uses the folder, or the device or the model has
            no fp8; of several processes one has other settings, versions or data.
        FormatError, UnsupportedCase: the folder to begin with has no model, a damaged one, or one of another kind.
        MissingDependency: the run logs to TensorBoard, which is not installed.
        OutOfMemory: a micro-batch does not fit the device.
        DivergenceError: a loss or gradient is not finite.
    """
    if not isinstance(run, RunConfig):
        wanted = "a RunConfig, such as preset('tiny').replaced(data=path)"  # type: ignore[unreachable]
        raise ConfigError(f"run_training takes {wanted}; got {type(run).__name__}")
    out, device, progress = (
        Path(out or run.training.out or f"runs/{run.name}"),
        _torch_device(device),
        progress or _Silent(),
    )
    folder, lock, extension, processes = RunFolder(out), RunLock(out), extension or Extension(), Processes()
    with ExitStack() as stack:
        with processes.agreed(_settings(run, device)):
            if epochs is not None:
                run.epoch_steps(epochs, 1)  # raises for a bad value before anything is read
            run, initial, tokenizer = _checked(run, out, device, processes)
            extension.require(run)
            if processes.first:
                folder.require_usable()
                if run.training.log == "tensorboard":
                    TensorBoard(out)  # raises if it is not installed, before an earlier run is removed
                stack.enter_context(lock)
            stack.enter_context(closing(extension))
        known = None if tokenizer is None else RunFolder(Path(run.init_from or "")).tokenizer
        text = _tokenized(run, progress, known, extension)
        with processes.agreed({}):
            if tokenizer is not None and tokenizer_hash(text.tokenizer) != tokenizer_hash(tokenizer):
                other = f"another tokenizer than the model in {run.init_from}"
                raise ConfigError(f"{paths_of(run.data)[0]} has the tokens of {other}")
            if epochs is not None:
                run = run.replaced(steps=run.epoch_steps(epochs, len(text.train)))
            config, source = _configured(run, out, device, text, extension)
            if processes.first:
                lock.take()
                folder.require_usable()  # another process may have written while the text was read
                if note := folder.start(overwrite=overwrite):
                    progress.note(note)
        stack.enter_context(numerics(deterministic=config.deterministic, cpu_threads=run.cpu_threads))
        if device.type == "cpu" and processes.first and (note := duration_note(run, cpu_flops_per_s)):
            progress.note(note)
        with processes.agreed({}):
            session = _TextRun(run, config, folder, text, progress, extension, source, model=initial)
            if processes.first:
                session.describe(folder, launch=launch_id())
        return session.execute(resume=False)


def _torch_device(device: DeviceLike) -> torch.device:
    """Return a device as a torch.device, which is only the name of one of OpenCL or WebGPU."""
    if isinstance(device, torch.device):
        return device
    found = registry.find_device(device, torch_tensors=True)
    return named(found) if found.backend in TENSOR_DEVICES else torch.device(found.torch_device)


def _checked(
    run: RunConfig, out: Path, device: torch.device, processes: Processes
) -> tuple[RunConfig, LanguageModel | None, Tokenizer | None]:
    """Return a run that fits its folder, device and processes, and the model and tokenizer that it begins with."""
    if out.is_dir() and any(out.resolve() == Path(name).resolve() for name in paths_of(run.data)):
        raise ConfigError(f"--out {out} is a folder of the text, to which the run's files would be added: give another")
    share_of(run.training.batch_size, processes)
    _require_memory(run, device, processes)
    initial, tokenizer = None, None
    if run.init_from:
        run, initial, tokenizer = _initial(run, out)
    if run.model == "rnn" and (run.training.precision == "fp8" or run.training.recompute):
        option = "--recompute" if run.training.recompute else "--precision fp8"
        raise ConfigError(f"{option} is for the blocks of a GPT, and {run.name} is a recurrent model: leave it out")
    if run.training.precision == "fp8":
        require_float8(device)
    return run, initial, tokenizer


def _configured(
    run: RunConfig, out: Path, device: torch.device, text: TokenizedText, extension: Extension
) -> tuple[TrainConfig, Source | None]:
    """Return the trainer's config and the extension's source; ConfigError if the folder's disk is too small."""
    training = run.training
    rows = windows_at_once(training.microbatch, training.context, device)
    graph = "off" if run.model == "rnn" else training.graph  # a captured step of cuDNN's recurrent layers is untested
    places: dict[str, Any] = {
        "device": str(device),
        "out": str(out),
        "accumulate": training.batch_size // rows,
        "graph": graph,
    }
    config = extension.configured(dataclasses.replace(training, **places))
    source = extension.source(text.train, config, text.sha256)
    if Processes().first:
        checkpoint.require_space(out, run.parameter_count(text.tokenizer.vocab_size))
    return config, source


def _require_memory(run: RunConfig, device: torch.device, processes: Processes) -> None:
    """Raise ConfigError unless the host has memory for the tokens of a step, and for the model."""
    count, rows = run.parameter_count(0), run.training.batch_size
    each = 16 if device.type == "cpu" else 4  # with gradients and two moments; other devices get the host's weights
    tokens = 8 * (run.training.context + 1) * rows // processes.size
    for what, size in (
        (f"--batch-size {rows} has {{}} GiB of tokens a step in windows of {run.training.context:,}", tokens),
        (f"a model of {count:,} parameters takes {{}} GiB with its optimizer", each * count),
    ):
        if size > (free := host_memory().get("MemAvailable", size)):
            advice = "give a smaller one" if what.startswith("--") else "give fewer --layers, or a smaller --width"
            raise ConfigError(f"{what.format(f'{size >> 30:,}')}, and {free >> 30:,} GiB of memory are free: {advice}")


_HIDDEN = {"the text": "the text must be the same in each process: give each the same --data"}


def _settings(run: RunConfig, device: torch.device) -> dict[str, object]:
    """Return what must be the same in all processes of a run."""
    values = run.to_dict()
    recipe = values.pop("recipe")
    own = {"data", "init_from", "cpu_threads"}  # paths, whose content is compared; and what a machine's cores decide
    settings = {name: value for name, value in {**recipe, **values}.items() if name not in own}
    return {"accelerant": __version__, "torch": torch.__version__, "device": device.type, **settings}


def _tokenized(
    run: RunConfig, progress: Progress, tokenizer_from: Path | None, extension: Extension
) -> TokenizedText:  # fmt: skip
    """Return the text, the same in all processes: rank 0 reads it first, and the others find its tokenizer cached."""
    processes, same = Processes(), dict[str, object]()
    for turn in (True, False) if processes.size > 1 else (True,):
        with processes.agreed(same, _HIDDEN):
            if processes.first == turn:
                text = tokenize(run, progress, tokenizer_from=tokenizer_from, fixed=extension.name != Extension.name)
                for note in (*text.notes, *_seen(run, text.sha256, extension)):
                    progress.note(note)
            if not turn:
                same |= {"the text": text.sha256, "its tokenizer": tokenizer_hash(text.tokenizer)}
    name, description = extension.named(text.sha256, text.description)
    notes = text.notes if description is text.description else ()  # a private text's are for the terminal alone
    return dataclasses.replace(text, sha256=name, description=description, notes=notes)


@renamed_arguments(ledger="acl.ledger()")
def resume_training(
    out: str | os.PathLike[str], device: DeviceLike = None, *, progress: Progress | None = None,
    extension: Extension | None = None, steps: int | None = None, epochs: float | None = None,
) -> TrainingOutcome:  # fmt: skip
    """Continue an interrupted run from its last checkpoint.

    On the same device, the losses are those of an uninterrupted run.

    Args:
        out: the run's folder; the rest as for `run_training`.
        steps: a new number of steps in all, which extends a finished run; None for the run's.
        epochs: the same in passes over the training tokens.

    Raises:
        ConfigError: the run has another extension, its data cannot be read, another process uses its folder, or it has
            done more steps.
        FormatError: there is no run or checkpoint, or it is damaged, of another shape, or of other data.
        OutOfMemory: a micro-batch does not fit the device.
        DivergenceError: a loss or gradient is not finite.
    """
    out, device = Path(out), _torch_device(device)
    progress = progress or cast("Progress", _Silent())
    folder, processes, same = RunFolder(out), Processes(), dict[str, object]()
    chosen = extension or Extension()
    with ExitStack() as stack:
        with processes.agreed(same):
            if epochs is not None:
                chosen.require_extensible()
                values = folder.read_config()
                try:
                    corpus = typed(dict[str, Any], values.get("corpus"), "corpus")
                    tokens = typed(int, corpus.get("train_tokens"), "train_tokens")
                except ValueError as error:
                    raise FormatError(f"{folder.config} does not say how long the text is: {error}") from None
                steps = RunConfig.from_dict(values.get("run", {})).epoch_steps(epochs, tokens)
            if (finished := _finished(folder, steps)) is not None:  # without a lock: the folder may be read-only
                return finished
            if processes.first:
                stack.enter_context(RunLock(out))
            stack.enter_context(closing(chosen))
            if (finished := _finished(folder, steps)) is not None:  # by another process before the lock was taken
                return finished
            values = folder.read_config()
            spent = folder.read_summary().get("seconds") if folder.finished else None
            earlier_s = float(spent) if isinstance(spent, int | float) else 0.0
            if values.get("extension", Extension.name) != chosen.name:
                raise ConfigError(f"the run in {out} is one of {values['extension']}: continue it with --resume")
            run = RunConfig.from_dict(values.get("run", {}))
            if not checkpoint.Checkpoints(out).exist:
                command = run.command(str(out), device.type, chosen.words(out))
                advice = f": start again with: {command}" if command else ": start it again"
                raise FormatError(f"no checkpoint {folder.checkpoint}: none was written yet{advice}")
            share_of(run.training.batch_size, processes)
            shape = _stored_shape(folder, values) if run.init_from else None
            _require_stored(run, checkpoint.Checkpoints(out), shape)
            if changed := steps is not None and steps != run.steps:
                chosen.require_extensible()
                run = run.replaced(steps=steps)
            same |= _settings(run, device)
        text = _tokenized(run, progress, folder.tokenizer, chosen)
        with processes.agreed({}):
            config, source = _configured(run, out, device, text, chosen)
        stack.enter_context(numerics(deterministic=config.deterministic, cpu_threads=run.cpu_threads))
        with processes.agreed({}):
            more: dict[str, Any] = {"shape": shape, "earlier_s": earlier_s}
            session = _TextRun(run, config, folder, text, progress, chosen, source, **more)
        return session.execute(resume=True, config={**values, "run": run.to_dict()} if changed else None)


def _finished(folder: RunFolder, steps: int | None) -> TrainingOutcome | None:
    """Return the outcome of a finished run, None for one that goes on; raise FormatError if there is no run."""
    folder.read_config()
    if not folder.finished:
        return None
    summary = folder.read_summary()
    done = summary.get("steps")
    if steps is None or not isinstance(done, int) or steps == done:
        return TrainingOutcome(summary, already_finished=True)
    if steps < done:
        raise ConfigError(f"the run in {folder.path} has done {done:,} steps: give more, got {steps:,}")
    return None


def load_run(out: str | os.PathLike[str], device: DeviceLike = None) -> tuple[LanguageModel, Tokenizer]:
    """Return the model of a run's folder, in eval mode on `device` (the CPU), and its tokenizer.

    Of an unfinished run the last checkpoint is read. FormatError: no model, or a damaged file or one of another shape.
    """
    folder, place = RunFolder(Path(out)), _torch_device("cpu" if device is None else device)
    shape = _stored_shape(folder, folder.read_config())
    tokenizer: Tokenizer = load_bpe(folder.tokenizer) if folder.tokenizer.is_file() else ByteTokenizer()
    if checkpoint.Checkpoints(folder.path).exist and not folder.finished:
        path, saved = folder.checkpoint, checkpoint.Checkpoints(folder.path).load()[0]
        tensors = {name.removeprefix("model."): value for name, value in saved.items() if name.startswith("model.")}
    elif isinstance(shape, LlamaConfig) and folder.model.is_file():
        source = hugging_face.described(folder.path, Llama._layouts)
        return hugging_face.built(Llama, source, torch.float32, place).eval(), tokenizer
    elif folder.finished or folder.model.is_file():
        path, tensors = folder.model, checkpoint.read_tensors(folder.model)[0]
    else:
        raise FormatError(f"{folder.path} has no model yet: its first checkpoint was not written")
    if not _covers(shape, tokenizer) or shape.layers > len(tensors):
        raise FormatError(f"{path} is of another model than {folder.config}")
    with torch.device("meta"):
        model = _built(shape)
    checkpoint.require_same_shapes(path, tensors, model.state_dict())
    model.load_state_dict({name: value.to(place) for name, value in tensors.items()}, assign=True)
    return model.eval(), tokenizer


@renamed_arguments(folder="out")
def export_run(run: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write a run's model and tokenizer in the format of transformers, which gives the same tokens and logits.

    A model in the folder `out` is replaced. Raises FormatError as `load_run`, UnsupportedCase for a CharRNN, which
    transformers does not have, and OSError where the folder cannot be written.
    """
    if hugging_face.is_run(out):
        raise ConfigError(f"{out} is the folder of a run: export into another one")
    model, tokenizer = load_run(run)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    generation = Path(out) / "generation_config.json"
    if (end := tokenizer.end) is None:
        generation.unlink(missing_ok=True)  # of a model that was there
    else:
        RunFolder.write_json(generation, {"bos_token_id": end, "eos_token_id": end})


def _stored_shape(folder: RunFolder, config: Mapping[str, Any]) -> Shape:
    """Return the shape of the model that a run's config.json describes; raise FormatError if it has none."""
    try:
        fields = config.get("model")
        given = fields if isinstance(fields, dict) else {}
        kind = CharRNNConfig if "cell" in given else LlamaConfig if "kv_heads" in given else GPTConfig
        shape: Shape = typed(kind, fields, "model")
    except (ValueError, ConfigError) as error:
        raise FormatError(f"{folder.config} has no model: {error}") from None
    return shape


def _covers(shape: Shape, tokenizer: Tokenizer) -> bool:
    """Return whether a model has every token; Hugging Face's models may have some more than their BPE."""
    exact = isinstance(tokenizer, ByteTokenizer)
    return shape.vocab_size == tokenizer.vocab_size or (shape.vocab_size > tokenizer.vocab_size and not exact)


def _initial(run: RunConfig, out: Path) -> tuple[RunConfig, LanguageModel, Tokenizer]:
    """Return the run with the sizes of the model that it begins with, the model in float32, and its tokenizer."""
    folder = RunFolder(Path(run.init_from or ""))
    if not folder.path.is_dir():
        raise ConfigError(f"--init-from needs the folder of a run or of a GPT-2 model, got {run.init_from!r}")
    if out.resolve() == folder.path.resolve():
        raise ConfigError(f"--init-from and --out are both {out}: give --out another folder, or --resume to continue")
    if "format" in hugging_face.read_object(folder.config):
        model, tokenizer = load_run(folder.path)
    else:
        model, tokenizer = GPT.from_pretrained(folder.path, dtype=torch.float32), load_exported(folder.tokenizer)
    shape = model.config
    if not _covers(shape, tokenizer):
        sizes = f"{tokenizer.vocab_size:,} tokens, its model {shape.vocab_size:,}"
        raise FormatError(f"the tokenizer in {folder.path} has {sizes}")
    usual, context = PRESETS[run.name].training.context if run.name in PRESETS else 0, run.training.context
    if shape.context < context != usual:
        raise ConfigError(f"--context {context:,} is above the {shape.context:,} tokens of the model in {folder.path}")
    sized = run.replaced(
        model=_NAMES[type(model)], layers=shape.layers, width=shape.width,
        heads=getattr(shape, "heads", 1), vocab_size=shape.vocab_size, context=min(run.training.context, shape.context),
        tokenizer="bytes" if isinstance(tokenizer, ByteTokenizer) else "bpe",
    )  # fmt: skip
    return sized, model.train(), tokenizer


def _seen(run: RunConfig, sha256: str, extension: Extension) -> tuple[str, ...]:
    """Return a note if a run's first model was trained on text that the run holds out; refuse a private run."""
    try:
        config = hugging_face.read_object(RunFolder(Path(run.init_from)).config) if run.init_from else {}
    except FormatError:  # moved since the run began
        return ()
    match config:
        case {"corpus": {"sha256": text}, "run": {"seed": seed, "recipe": {"context": context}}} if text == sha256:
            knows = f"the model in {run.init_from} was trained on"
            if extension.name != Extension.name:
                advice = "epsilon would not cover that: begin with another"
                raise ConfigError(f"{knows} this text without noise, and {advice}")
            if (seed, context) != (run.training.seed, run.training.context):
                too_low = "some of the text that is held out here, so that the held-out loss is too low"
                return (f"{knows} {too_low}: give --seed {seed} and --context {context}, as there",)
    return ()


def _require_stored(run: RunConfig, checkpoints: checkpoint.Checkpoints, shape: Shape | None) -> None:
    """Raise FormatError, before anything is allocated, if a checkpoint is too small for its run's model."""
    vocab_size = 0
    if shape is not None:
        vocab_size = shape.vocab_size
        run = run.replaced(
            model=_NAMES[_MODELS[type(shape)]], layers=shape.layers, width=shape.width, context=shape.context
        )
    least = 2 * run.parameter_count(vocab_size)  # bytes, of the matrices in 16 bits
    if least > (size := checkpoints.size_bytes):
        sizes = f"{run.layers:,} layers of width {run.width:,}, {run.training.context:,} tokens"
        raise FormatError(f"checkpoint {checkpoints.path} has {size:,} bytes, too few for a model of {sizes}")


class _ProgressCallback(Callback):
    """Passes a trainer's events to a Progress; the first one, when a checkpoint was restored, also to `begun`."""

    def __init__(self, progress: Progress, device: str) -> None:
        self._progress = progress
        self._device = device
        self._rising = False
        self.begun: Callable[[], None] = lambda: None

    def begin(self, trainer: Trainer, done: int, total: int) -> None:
        self.begun()
        predicted = trainer.history.expected_peak_bytes
        self._progress.begin(done=done, total=total, device=self._device, predicted_bytes=predicted)

    def records(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        self._progress.records(records)

    def evaluated(self, trainer: Trainer, evaluation: Evaluation) -> None:
        if trainer.history.rising and not self._rising:
            self._rising = True
            self._progress.note(trainer.history.rising)

    def advance(self, trainer: Trainer, share: float, text: str) -> None:
        self._progress.advance(share, text)

    def note(self, trainer: Trainer, text: str) -> None:
        self._progress.note(text)


Shape = GPTConfig | LlamaConfig | CharRNNConfig
_MODELS: dict[type, type[LanguageModel]] = {GPTConfig: GPT, LlamaConfig: Llama, CharRNNConfig: CharRNN}
_NAMES: dict[type, ModelName] = {GPT: "gpt", Llama: "llama", CharRNN: "rnn"}


def _built(shape: Shape) -> LanguageModel:
    build: Callable[[Shape], LanguageModel] = _MODELS[type(shape)]
    return build(shape)


def _shape_of(run: RunConfig, vocab_size: int) -> Shape:
    context, width = run.training.context, run.width
    if run.model == "rnn":
        return CharRNNConfig(vocab_size, context, run.layers, width)
    if run.model == "gpt":
        return GPTConfig(vocab_size, context, run.layers, run.heads, width)
    hidden = 8 * math.ceil(width / 3)  # as many weights as a GPT's MLP
    return LlamaConfig(
        vocab_size, context, run.layers, run.heads, run.heads, width, hidden, rope_base=1e4, rope_scaling=None,
        tied=True,
    )  # fmt: skip


class _TextRun:
    """One process's part of a run: the Trainer of a language model, and, in rank 0, what is written about it."""

    def __init__(
        self, run: RunConfig, config: TrainConfig, folder: RunFolder, text: TokenizedText, progress: Progress,
        extension: Extension, source: Source | None,
        model: LanguageModel | None = None, shape: Shape | None = None, earlier_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._run, self._folder, self._text = run, folder, text
        self._began, self._earlier_s = time.monotonic(), earlier_s
        self._progress, self._extension = progress, extension
        self._device = device = torch.device(str(config.device))
        self._backend = device.type
        if device.type == "cuda":
            self._device_name = f"{device} ({torch.cuda.get_device_name(device)})"
        elif serves(str(config.device)):
            found = registry.find_device(config.device)
            self._backend, self._device_name = found.backend, f"{found.label} ({found.name})"
        else:
            threads = torch.get_num_threads()
            self._device_name = f"{device} ({threads} thread{'s' * (threads != 1)})"
        self._processes = processes = Processes()
        if processes.size > 1:
            self._device_name = f"{processes.size} processes on {self._device_name}"
        torch.manual_seed(config.seed)
        vocab_size = text.tokenizer.vocab_size
        if model is not None:
            shape = model.config
        self._shape = shape = _shape_of(run, vocab_size) if shape is None else shape
        self._model = model or _built(shape)  # initialized on the host: the same weights for every device
        # Outputs of layers begin as large as in GPT-2. With its deviations a width of 128 learns half as fast.
        larger = math.sqrt(_GPT2_WIDTH / run.width)
        if model is None and isinstance(self._model, GPT):
            self._model.reset_parameters(0.02 * larger)
        elif model is None and isinstance(self._model, Llama):
            for parameter in self._model.parameters():
                parameter.data *= larger if parameter.dim() == 2 else 1
        self._events = _ProgressCallback(progress, self._device_name)
        self._trainer = Trainer(self._model, config, callbacks=[self._events, extension])
        self._training = self._source(text.train, "training") if source is None else source
        if isinstance(self._training, TokenSource):
            self._training.vocab_size = shape.vocab_size
        self._trainer.step = extension.attach(self._trainer)

    def description(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        more, theirs = self._extension.description(), {}
        if isinstance(self._model, Llama):  # transformers and `accelerant generate` read the folder
            theirs = hugging_face.checkpoint(self._model, self._shape, Llama._layouts)[0]
            theirs |= dict.fromkeys(("bos_token_id", "eos_token_id"), self._text.tokenizer.end)
        return {
            **theirs,
            **({"extension": self._extension.name, self._extension.name: more} if more else {}),
            "run": self._run.to_dict(), "model": self._shape.to_dict(), "parameters": self._model.parameter_count(),
            "corpus": self._text.description, "device": self._device_name, "backend": self._backend,
            "versions": {
                "accelerant": __version__, "torch": torch.__version__, "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }  # fmt: skip

    def describe(self, folder: RunFolder, **more: Any) -> None:
        """Write the config and the tokenizer to a folder."""
        folder.write_config({**self.description(), **more})
        if isinstance(self._model, Llama):
            self._text.tokenizer.save_pretrained(folder.path)
        elif (tokenizer := self._text.tokenizer.to_json()) is not None:
            write_atomic(folder.tokenizer, tokenizer.encode())

    def execute(self, *, resume: bool, config: Mapping[str, Any] | None = None) -> TrainingOutcome:
        """Train, from the last checkpoint if `resume`, and write the results; a new `config` when that is restored."""
        if config is not None and self._processes.first:
            self._events.begun = partial(self._folder.reopen, config)
        run, steps = self._run, self._run.steps
        self._progress.phase("looking at the model")
        self._began = time.monotonic()
        try:
            held_out = self._source(self._text.held_out, "held-out", run.validation_sizes[0])
            at = {round(steps * k / (run.validations + 1)) for k in range(1, run.validations + 1)}
            folder = self._folder.path
            history = self._trainer.run(self._training, held_out, out=folder, resume=resume, evaluate_at=at)
        except OutOfMemory as error:
            rows = run.training.microbatch
            advice = f"start again with --microbatch {rows // 2}" if rows > 1 else "use a smaller preset"
            raise OutOfMemory(f"a micro-batch of {rows} does not fit the device: {advice} ({error})") from None
        except MissingFile:  # of the checkpoint to resume from
            raise
        except OSError as error:
            raise self._with_what_is_kept(error) from None
        finally:
            self._progress.end()
        if history.signal is not None:
            return self._interrupted(history.steps, history.signal)
        try:
            return TrainingOutcome(self._finish(history))
        except OSError as error:
            raise self._with_what_is_kept(error) from None
        except KeyboardInterrupt:  # the last step has a checkpoint: resuming returns here
            return self._interrupted(history.steps, signal.SIGINT)

    def _source(self, tokens: Tokens, part: str, evaluated: int = 0) -> TokenSource:
        config, sha256 = self._trainer.config, self._text.sha256
        source = TokenSource(tokens, config, fingerprint=sha256, part=part, evaluation_tokens=evaluated)
        source.vocab_size = self._shape.vocab_size
        return source

    def _interrupted(self, done: int, number: int) -> TrainingOutcome:
        resume, local = self._folder.resume_command, int(os.environ.get("LOCAL_WORLD_SIZE", self._processes.size))
        if self._processes.size > local:  # of several machines
            start = f"torchrun --nnodes {self._processes.size // local} --nproc-per-node {local} ... -m "
            resume = start + resume.partition(" --gpus ")[0]
        if self._folder.read_config().get("backend") != self._backend:
            resume += f" --device {self._backend}"
        summary = {
            "status": "interrupted", "steps_done": done, "steps": self._run.steps,
            "out": str(self._folder.path), "resume": resume,
        }  # fmt: skip
        return TrainingOutcome(summary, signal=number)

    def _finish(self, history: History) -> dict[str, Any]:
        run, folder, tokenizer, records = self._run, self._folder, self._text.tokenizer, history.records
        ended = time.monotonic()
        self._progress.phase("measuring the held-out loss")
        source = self._source(self._text.held_out, "held-out", run.validation_sizes[1])
        validation = self._trainer.measure(source, step=run.steps)
        if not self._processes.first:
            return {"status": "done"}
        tokens = validation.rows * run.training.context
        targets = (targets for _, targets in source.in_order(self._trainer.config.microbatch))
        text_bytes = sum(int(tokenizer.byte_lengths[part.numpy()].sum()) for part in targets)
        unigram, bigram = self._text.baselines()
        rising = dataclasses.replace(history, evaluations=[*history.evaluations, validation]).rising
        nats_per_byte = validation.loss * tokens / max(1, text_bytes)
        losses = [*((each.step, each.loss) for each in history.evaluations), (history.steps, validation.loss)]
        curve = [(step, loss * tokens / max(1, text_bytes)) for step, loss in losses]
        self._progress.phase("writing a sample")
        prompt, sample = self._sample()
        summary = {
            "status": "done", "preset": run.name, "device": self._device_name, "processes": self._processes.size,
            "parameters": self._model.parameter_count(), "steps": history.steps,
            "tokens": history.steps * run.tokens_per_step,
            "epochs": round(history.steps * run.tokens_per_step / len(self._text.train), 3),
            "train_loss": round(float(np.mean([r.loss for r in records[-20:]])), 4) if records else None,
            "validation_loss": round(validation.loss, 4),
            "validation_nats_per_byte": round(nats_per_byte, 4),
            "validation_tokens": tokens, "unigram_nats_per_byte": round(unigram, 4),
            "bigram_nats_per_byte": round(bigram, 4), "beats_bigram": nats_per_byte < bigram,
            "steps_to_bigram": None if nats_per_byte < bigram else steps_until(curve, bigram),
            "tokens_per_s": round(float(np.median([r.tokens_per_s or 0.0 for r in records])), 1) if records else None,
            "peak_memory_bytes": history.peak_memory_bytes, "reserved_memory_bytes": history.reserved_memory_bytes,
            "predicted_peak_bytes": history.predicted_peak_bytes,
            "expected_peak_bytes": history.expected_peak_bytes,
            "seconds": round(max(history.seconds - ended, self._earlier_s - self._began) + time.monotonic(), 2),
            "out": str(folder.path), "report": str(folder.report), "prompt": prompt, "sample": sample,
        }  # fmt: skip
        profile = [str(folder.path / name) for name in ("kernels.txt", "trace.json")] if self._trainer.profile else None
        more = {
            self._extension.name: self._extension.results(), "loss_scale": history.loss_scale, "restarts": attempt(),
            "stopped": history.reason, "held_out": rising, "profile": profile,
        }  # fmt: skip
        summary |= {name: value for name, value in more.items() if value}
        html = build_report(
            summary=summary, config=self.description(), records=records, ledger=ledger().to_dict(),
            sample=prompt + sample, curves=self._extension.curves(),
            remarks=[
                *(f"{text[0].upper()}{text[1:]}." for text in filter(None, (rising, *self._text.notes))),
                *self._extension.remarks(),
            ],
        )  # fmt: skip

        def write() -> None:
            self._write_model(folder.model)
            write_atomic(folder.sample, (prompt + sample).encode())
            write_atomic(folder.report, html.encode())
            folder.write_json(folder.summary, summary)  # last: its presence means that the run is complete

        checkpoint.Checkpoints(folder.path).make_room(write)
        return summary

    def _write_model(self, path: Path) -> None:
        tensors = self._model.state_dict()
        if isinstance(self._model, Llama):
            tensors = hugging_face.checkpoint(self._model, self._shape, Llama._layouts)[1]
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        checkpoint.write_tensors(path, tensors, {"format": "pt"})

    def _with_what_is_kept(self, error: OSError) -> OSError:
        """Return the error of a folder that cannot be written, with what is kept of the run, and where.

        Without a checkpoint the weights are written, a third of one: to the folder, or where temporary files go.
        """
        path, name = self._folder.path.absolute(), str(error.filename or "")
        own = checkpoint.is_full(error) or not path.is_dir() or Path(name).absolute().is_relative_to(path)
        if not self._processes.first or not own:
            return error
        if checkpoint.Checkpoints(path).exist:
            kept = f"step {checkpoint.Checkpoints(path).written[0]:,} is kept in a checkpoint, with more space: "
            kept += self._folder.resume_command
        else:
            kept = self._weights_elsewhere()
        kept = f"{str(error.strerror or error).partition('; ')[0]}; {kept}"
        return OSError(error.errno, kept, error.filename) if path.is_dir() else OSError(f"{kept}: '{name}'")

    def _weights_elsewhere(self) -> str:
        """Write the weights so far to the run's folder, or to a new temporary one with what reads them; say where."""
        try:
            self._write_model(self._folder.model)
            return f"the weights so far are in {self._folder.model}"
        except OSError:
            pass
        folder = None
        try:
            folder = RunFolder(Path(tempfile.mkdtemp(prefix="accelerant-weights-")))
            self.describe(folder)
            self._write_model(folder.model)
        except OSError as error:
            if folder is not None:
                shutil.rmtree(folder.path, ignore_errors=True)
            return f"nothing of the training is kept: no checkpoint was written, and no weights ({error.strerror})"
        return f"the weights so far are in {folder.model}, for --init-from {shlex.quote(str(folder.path))}"

    def _sample(self) -> tuple[str, str]:
        tokenizer, size = self._text.tokenizer, self._run.sample_size
        # A private run's sample must not quote a text.
        quotes = self._extension.name == Extension.name
        prompt = prompt_of(tokenizer.decode(self._text.held_out[:_PROMPT_TOKENS].tolist())) if quotes else "The "
        given = torch.tensor([tokenizer.encode_text(prompt)], device=self._trainer.device)
        with autocast(self._trainer.device, self._trainer.precision):
            tokens = self._model.generate(
                given, size, temperature=0.7, top_k=100, seed=self._run.training.seed,
                watch=lambda tokens: self._progress.advance((tokens.shape[1] - given.shape[1]) / size),
            )  # fmt: skip
        return prompt, tokenizer.decode(tokens[0, given.shape[1] :].tolist())


_PROMPT_TOKENS = 1 << 16  # of the held-out text


def prompt_of(text: str) -> str:
    """Return the word with which most lines of a text begin, and a space; without such lines its first characters."""
    words = Counter(re.findall(r"^([^\W\d_]+) ", text, re.MULTILINE))
    return f"{words.most_common(1)[0][0]} " if words else text.strip()[:16] or "\n"


def steps_until(curve: Sequence[tuple[int, float]], loss: float) -> int | None:
    """Return about how many steps more reach a loss; None if the curve is short, does not fall, or too slowly to tell.

    The loss is taken as linear in the logarithm of the step, by least squares. The result has a fifth more, rounded up
    to two digits. The curve has completed steps and loss, in order; the last one is above `loss`.
    """
    (last, now), points = curve[-1], [(math.log(step), value) for step, value in curve if step]
    if last < _FEWEST_STEPS or len({x for x, _ in points}) < 2 or now > min(value for _, value in curve):
        return None
    x, y = np.array(points).T
    slope = float(np.polyfit(x, y, 1)[0])
    if slope >= 0 or (growth := (now - loss) / -slope) > math.log(_MOST_GROWTH):
        return None
    more: float = 1.2 * last * math.expm1(growth)
    unit: int = 10 ** max(0, math.floor(math.log10(max(1.0, more))) - 1)
    return max(1, math.ceil(more / unit - 1e-6) * unit)


_FEWEST_STEPS = 20
_MOST_GROWTH = 100  # of the steps: an extrapolation beyond says nothing
