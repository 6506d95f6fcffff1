"""`accelerant train`: a language model from text, in one command."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from accelerant.cli.help import examples, option
from accelerant.config import flag_of, settings
from accelerant.errors import ConfigError, DeviceLost, MissingDependency, TimeLimitExceeded
from accelerant.runtime.files import exact, plain

if TYPE_CHECKING:
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from accelerant.nn.train.callbacks import Extension
    from accelerant.nn.train.config import RunConfig

_EXAMPLES = """\
accelerant train
accelerant train notes.txt --out runs/notes
accelerant train ~/books --preset small --epochs 3 --out runs/books
accelerant train notes.txt --init-from ./gpt2 --epochs 2 --out runs/notes
accelerant train --preset gpt2 --gpus 8
accelerant train --resume runs/books"""

_PROFILED_STEPS = 5


_results = partial(option, panel="Text and results")
_speed = partial(option, panel="Speed and memory")
_privacy = partial(option, panel="Private training")
_shape = partial(option, panel="The model")


@examples(_EXAMPLES)
@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a language model on text and write model, metrics, sample and report to a folder.

    Ctrl-C writes a checkpoint, prints the command that continues the run, and exits with status 130.
    """

    call: typer.Context
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="Text to train on; the same as --data PATH.")
    ] = None
    preset: str | None = option("tiny, small, gpt2, llama or rnn (an LSTM). Default: tiny.")
    data: list[str] | None = option(
        "Text to train on. Default: stdlib.", metavar="stdlib|PATH...", panel="Text and results"
    )
    steps: int | None = option("Optimizer steps. Default: the preset's. With --resume: steps in all, to train on.")
    epochs: float | None = option("Passes over the text, instead of --steps. With --resume: passes in all.")
    init_from: str | None = option(
        "Start from the model and tokenizer in this folder: GPT-2 of Hugging Face, or an earlier run.", metavar="DIR"
    )
    learning_rate: float | None = option("Peak learning rate. Default: the preset's; with --init-from a tenth of it.")
    device: str | None = option("auto, cuda, opencl, webgpu or cpu. Default: auto; with --resume, the run's.")
    out: str | None = _results("Folder for the results. Default: runs/PRESET.", metavar="DIR")
    resume: str | None = _results("Continue the interrupted run in this folder.", metavar="DIR")
    overwrite: bool = _results("Remove an earlier run in the folder. Default: move it to a subfolder.", default=False)
    seed: int | None = option("Seed of the weights, batches, held-out text and sample. Default: 0.")
    context: int | None = _shape("Tokens in a window. Default: the preset's.")
    layers: int | None = _shape("Number of layers. Default: the preset's.")
    width: int | None = _shape("Features of a token, a multiple of the heads. Default: the preset's.")
    heads: int | None = _shape("Attention heads of a layer. Default: the preset's.")
    batch_size: int | None = _speed("Windows per step; with --private on average. Default: the preset's.")
    microbatch: int | None = _speed("Windows on the device at a time. Default: the preset's, or what fits.")
    threads: int | None = _speed(
        "Threads on the CPU. Default: OMP_NUM_THREADS, else 1 for tiny and rnn, whose steps are too small to "
        "share, and one per core for the others."
    )
    deterministic: bool | None = _speed(
        "Same seed, same bits. Default: yes on the CPU, no on a GPU, where it costs speed."
    )
    recompute: bool = _speed("Recompute activations in the backward pass: less memory, more time.", default=False)
    profile: bool = _results(
        "Profile some steps: trace.json for Chrome, kernels.txt with the time by kernel.", default=False
    )
    log: str | None = _results("Log of the steps. Default: jsonl.", metavar="jsonl|tensorboard")
    precision: str | None = _speed(
        "Precision of the training: auto, float32, bfloat16, float16 or fp8. Default: auto, bfloat16 on a GPU "
        "that supports it, else float32.",
        metavar="NAME",
    )
    gpus: int | None = _speed(
        "Train on N GPUs of this machine, with a process for each; with --device cpu in N processes. For more "
        "machines: torchrun. Default: 1; with --resume, as many as before.",
        metavar="N",
    )
    max_restarts: int | None = _speed(
        "With --gpus: how often processes of which one was killed are started again, from the last checkpoint. "
        "Default: 3.",
        metavar="N",
    )
    reduce_dtype: str | None = _speed(
        "In which several GPUs add up gradients: float32, or bfloat16 for half the traffic. Default: float32.",
        metavar="NAME",
    )
    private: bool = _privacy(
        "Differentially private steps (DP-SGD); needs a target or a noise multiplier.", default=False
    )
    federated: bool = _privacy(
        "Simulate ten clients that learn scikit-learn's digits by secure aggregation, without and with noise. "
        "--steps: rounds.",
        default=False,
    )
    target_epsilon: float | None = _privacy("With --private: epsilon at the end, which determines the noise.")
    delta: float | None = _privacy("With --private: delta. Default: 1e-5.")
    max_grad_norm: float | None = option(
        "Norm to which the gradient is clipped; with --private each window's. Default: 1."
    )
    max_seconds: float | None = option(
        "End after so many seconds, with a checkpoint and exit status 1. Default: no limit."
    )
    noise_multiplier: float | None = _privacy(
        "With --private: noise over the clipping norm. With a target: stop there."
    )
    insecure_noise: bool = _privacy(
        "With --private: noise from Philox, for research; recorded in the ledger.", default=False
    )
    ledger: str | None = _privacy(
        "With --private: privacy ledger of all trainings on these data. Default: one in the run's folder.",
        metavar="FILE",
    )
    json_output: bool = option("Print one JSON object at the end, and no progress.", "--json", default=False)

    def run(self) -> None:
        """Check the options, then train in this process, or in those that it starts."""
        given = self._given()
        if self.federated:
            self._simulate_clients(given)
            return
        private = [name for name in _OF_PRIVATE if name != "max_grad_norm"]
        if not self.private and (alone := [name for name in given if name in private]):
            raise ConfigError(f"{flag_of(alone[0])} goes with --private")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"--steps {self.steps} and --epochs {self.epochs:g} exclude each other: give one of them")
        # Must be set before torch is loaded: threads that spin while they wait occupy cores that others need.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise the library may use a single core
        if self.gpus is not None and self.gpus < 1:
            raise ConfigError(f"--gpus must be above 0, got {self.gpus}")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ConfigError(f"--max-restarts must be 0 or more, got {self.max_restarts}")
        if self.resume is None:
            run = self._configured(given)
            folder = Path(self.out or run.training.out or "")
            self._train(folder, run, self._extension(folder, given) if self.private else None)
            return
        if fixed := [name for name in given if name not in _OF_RESUME]:
            raise ConfigError(f"--resume continues a run as it was: leave out {flag_of(fixed[0])}")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps must be above 0, got {self.steps}")
        self._train(Path(self.resume), None, _resumed(Path(self.resume)))

    def _given(self) -> dict[str, Any]:
        """Return the options of the training that are on the command line; paths of texts are `data`."""
        sources = [*(self.data or ()), *(self.paths or ())]
        values = {**vars(self), "data": sources or None}
        defaults = {one.name: one.default for one in fields(self) if one.name not in _NOT_OF_TRAINING}
        return {name: values[name] for name, default in defaults.items() if values[name] is not default}

    def _simulate_clients(self, given: dict[str, Any]) -> None:
        if other := [name for name in given if name not in _OF_CLIENTS]:
            raise ConfigError(
                f"--federated takes {', '.join(map(flag_of, _OF_CLIENTS))} and --json, not {flag_of(other[0])}"
            )
        from accelerant.privacy.federated.simulation import digits_demonstration

        reports = digits_demonstration(**given)
        if self.json_output:
            print(json.dumps({name: report.to_dict() for name, report in reports.items()}))
            return
        for name, report in reports.items():
            clients = "/".join(str(len(each)) for each in report.survivors)
            epsilon = plain(report.epsilon, up=True)
            print(f"{name}: accuracy {report.accuracies[-1]:.1%}, epsilon {epsilon} at delta {exact(report.delta)}")
            print(f"  rounds of {clients} clients; client 3 leaves the second one after its keys are shared")
            for stage, spent in report.stages.items():
                traffic = f"{spent.bytes_up:>11,} bytes up {spent.bytes_down:>11,} down"
                print(f"  {stage:12} {traffic}, clients {spent.clients_s:.2f} s, server {spent.server_s:.2f} s")

    def _configured(self, given: dict[str, Any]) -> RunConfig:
        import torch

        from accelerant.nn.train.config import preset

        run = preset("tiny" if self.preset is None else self.preset).resized(self.batch_size, self.microbatch)
        own = (*_OF_RUN, *([] if self.private else ["max_grad_norm"]))
        changes = {name: given[name] for name in own if name in given}
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads must be above 0, got {self.threads}")
        if self.threads is not None or "OMP_NUM_THREADS" in os.environ:
            changes["cpu_threads"] = torch.get_num_threads() if self.threads is None else self.threads
        if self.init_from is not None:
            if shape := [name for name in ("layers", "width", "heads") if given.get(name)]:
                raise ConfigError(f"--init-from gives the model its shape: leave out --{shape[0]}")
            changes.setdefault("learning_rate", run.training.learning_rate / 10)
            changes["init_from"] = os.path.abspath(os.path.expanduser(self.init_from))
        if run.model == "rnn" and self.heads is not None:
            raise ConfigError(f"--heads is for a GPT, and {run.name} is a recurrent model: leave it out")
        return run.replaced(
            data=_sources(given.get("data", ["stdlib"])),
            recompute=("blocks.*",) if self.recompute else (),
            profile=_PROFILED_STEPS if self.profile else None,
            **changes,
        )

    def _extension(self, folder: Path, given: dict[str, Any]) -> Extension:
        from accelerant.nn.train.history import RunFolder
        from accelerant.privacy.dp.ledger import PrivacyLedger
        from accelerant.privacy.dp.training.run import PrivateRun, PrivateSettings

        if find_spec("dp_accounting") is None:  # before the text is read, which may take long
            raise MissingDependency("dp-accounting", "privacy", "--private")
        path = folder / RunFolder.LEDGER if self.ledger is None else Path(self.ledger).expanduser()
        if self.ledger is not None and rank() == 0:  # likewise
            if path.is_dir() or not (path.parent.is_dir() or path.resolve().parent == folder.resolve()):
                raise ConfigError(f"--ledger {self.ledger} must be a file, in a folder that exists")
            if path.is_file() and path.stat().st_size:
                PrivacyLedger.read(path)
        values = {name: given[name] for name in _OF_PRIVATE if name in given and name != "ledger"}
        # a link in a run's folder is not written through
        path = path.absolute() if self.ledger is None else path.resolve()
        return PrivateRun(PrivateSettings(str(path), **values))

    def _train(self, out: Path, run: RunConfig | None, extension: Extension | None) -> None:
        """Start a run, or continue the one in `out` if `run` is None; rank 0 prints the outcome."""
        if run is None or self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # must be set before CUDA starts

        from accelerant.cli.train_view import SilentView, make_view
        from accelerant.nn.train.history import RunFolder
        from accelerant.nn.train.job import resume_training, run_training
        from accelerant.runtime.compilation.cache import watch_compilation
        from accelerant.runtime.processes import Processes
        from accelerant.runtime.time_limit import time_limit

        backend, origin = self.device, "--device"
        if run is None and backend is None:  # the same device continues with the same losses
            folder = RunFolder(out)
            backend, origin = folder.read_config().get("backend"), f"the backend in {folder.config}"
        again = None if run is not None else self.steps is not None or self.epochs is not None
        processes = _Processes(self.gpus, self.max_restarts, self.call.obj)
        processes.start(out, str(backend or ""), again, private=run is not None and extension is not None)
        several = world_size() > 1
        torch_tensors = extension is not None or several
        if run is not None and (run.model == "rnn" or run.training.precision not in ("auto", "float32")):
            torch_tensors = True
        device = choose_device(backend, origin, tensor_devices=True, torch_tensors=torch_tensors)
        if device.type not in ("cuda", "cpu") and (extension is not None or several):
            what = "several processes train" if extension is None else "--private trains"
            raise ConfigError(f"{what} on cuda or cpu, got {device}")
        start = partial(resume_training, steps=self.steps, epochs=self.epochs)
        if run is not None:
            default = device.type == "cpu"
            run = run.replaced(deterministic=default if self.deterministic is None else self.deterministic)
            start = partial(run_training, run, overwrite=self.overwrite, epochs=self.epochs)
        first = rank() == 0
        view = make_view(quiet=self.json_output) if first else SilentView()
        limit = time_limit(self.max_seconds, "--max-seconds")
        with closing(view), watch_compilation(view.compiling), joined(device), _resumable(out), limit:
            if run is not None and Processes().on_first(partial(_restarted, out, run)):
                start = partial(resume_training)
            outcome = start(out, device, progress=view, extension=extension)
        if first and self.json_output:
            print(json.dumps(outcome.summary))
        elif first:
            view.outcome(outcome)
        if outcome.signal is not None:
            raise typer.Exit(128 + outcome.signal)


_NOT_OF_TRAINING = frozenset({"call", "paths", "federated", "json_output"})
_OF_CLIENTS = ("steps", "delta", "noise_multiplier", "seed")
_OF_PRIVATE = ("target_epsilon", "delta", "max_grad_norm", "noise_multiplier", "insecure_noise", "ledger")
_OF_RESUME = ("resume", "steps", "epochs", "device", "gpus", "max_restarts", "max_seconds")
_OF_RUN = (
    "context", "layers", "width", "heads", "steps", "seed", "log", "precision", "reduce_dtype", "learning_rate",
)  # fmt: skip
"""Options that a federated simulation, private training, a resumed run and RunConfig take."""


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    """Add the command that continues the run of a folder to the error of a time limit."""
    from accelerant.nn.train.checkpoint import Checkpoints
    from accelerant.nn.train.history import RunFolder

    try:
        yield
    except TimeLimitExceeded as error:
        if not Checkpoints(out).exist:
            raise
        raise TimeLimitExceeded(f"{error}; continue with: {RunFolder(out).resume_command}") from None


def _resumed(folder: Path) -> Extension | None:
    """Return the extension of an existing run; None if it is not private."""
    from accelerant.nn.train.history import RunFolder

    config = RunFolder(folder).read_config()
    if "private" not in config:
        return None
    from accelerant.privacy.dp.training.run import PrivateRun

    return PrivateRun.of(config["private"])


def _sources(names: list[str]) -> tuple[str, ...]:
    """Return absolute paths, so that --resume finds them from any folder."""
    if "stdlib" in names:
        if len(names) > 1:
            raise ConfigError("--data takes stdlib or paths, not both")
        return ("stdlib",)
    return tuple(dict.fromkeys(os.path.abspath(os.path.expanduser(name)) for name in names))


@dataclass(frozen=True, slots=True)
class _Processes:
    """The processes that a command line asks for: --gpus, --max-restarts, and all its arguments."""

    gpus: int | None
    restarts: int | None
    arguments: Sequence[str]

    def start(self, out: Path, backend: str, extended: bool | None, *, private: bool) -> None:
        """Start the processes and exit with their status; return if this process trains.

        `extended` is whether a run that is resumed has a new number of steps; None for a new run. A new `private` one
        does not begin again by itself, which would spend privacy that its ledger does not have.
        """
        if world_size() > 1:
            if self.gpus not in (None, world_size()):
                raise ConfigError(
                    f"--gpus {self.gpus} starts processes itself: leave it out under torchrun, or give it alone"
                )
            return
        from accelerant.nn.train.checkpoint import Checkpoints
        from accelerant.nn.train.history import RunFolder

        gpus = self.gpus
        if gpus is None and extended is not None and (extended or not RunFolder(out).finished):
            gpus = self._as_before(out, backend)
        if gpus is None or gpus == 1:
            if self.restarts is not None:
                raise ConfigError(f"--max-restarts {self.restarts} goes with --gpus, of 2 or more")
            return

        ledger = out / RunFolder.LEDGER

        def kept() -> str:
            if private and ledger.is_file() and not Checkpoints(out).exist:
                return ""
            step = Checkpoints(out).written[0]
            return f"from the checkpoint of step {step:,}" if step else "from the beginning: there is no checkpoint yet"

        def advice() -> str:
            folder = RunFolder(out)
            if folder.finished:
                return ""
            if Checkpoints(out).exist:
                return f"continue with:  {folder.resume_command}"
            if private and ledger.is_file():
                return (
                    f"there is no checkpoint yet, and a private run that begins again spends more: give it --ledger "
                    f"{shlex.quote(str(ledger))} and another --out, to count what was spent"
                )
            return f"there is no checkpoint yet; start again with:  {shlex.join(['accelerant', *self.arguments])}"

        spawn(
            gpus, backend, self.arguments, restarts=_RESTARTS if self.restarts is None else self.restarts, kept=kept,
            advice=advice,
        )  # fmt: skip

    @staticmethod
    def _as_before(out: Path, backend: str) -> int:
        """Return the number of processes that wrote a run's checkpoint; raise ConfigError if there are fewer GPUs."""
        import torch

        from accelerant.nn.train.checkpoint import Checkpoints

        count = Checkpoints(out).written[1]
        if count > 1 and backend.lower() != "cpu" and count > (present := torch.cuda.device_count()):
            raise ConfigError(
                f"the run in {out} trained in {count} processes, and this machine has {present} GPU"
                f"{'s' * (present != 1)}: give --gpus to go on in another number, or start torchrun as before"
            )
        return count


_RESTARTS = 3


def _restarted(out: Path, run: RunConfig) -> bool:
    """Return whether a launcher restarted the processes, and the folder holds what they wrote of the same run."""
    from accelerant.nn.train.checkpoint import Checkpoints
    from accelerant.nn.train.history import RunFolder
    from accelerant.runtime.processes import attempt, launch_id

    folder = RunFolder(out)
    if not attempt() or not (folder.finished or Checkpoints(out).exist):
        return False
    config = folder.read_config()
    if launch_id():
        return bool(config.get("launch") == launch_id())
    return not folder.finished and bool(config.get("run") == json.loads(json.dumps(run.to_dict())))


def choose_device(
    backend: object, origin: str, *, tensor_devices: bool = False, torch_tensors: bool = False
) -> torch.device:
    """Return this process's device of a backend; None and "auto" mean that in the settings. Errors name the origin.

    With `tensor_devices` it may be one of OpenCL or WebGPU, whose tensors are DeviceTensors; "auto" passes over them
    with `torch_tensors`, for training that they cannot do.
    """
    import torch

    from accelerant.runtime import registry
    from accelerant.runtime.files import clipped
    from accelerant.tensors.tensor import TENSOR_DEVICES, named

    if backend is None or backend == "auto":
        backend = settings().backend
        given = os.environ.get("ACCELERANT_BACKEND") == backend
        origin = "ACCELERANT_BACKEND" if given else "the setting backend"
    known = ("auto", "cuda", *(TENSOR_DEVICES if tensor_devices else ()), "cpu")
    if not isinstance(backend, str) or backend.lower() not in known:
        names = f"{', '.join(known[:-1])} or cpu"
        advice = "" if origin == "--device" else f": training needs {names[6:]}, give --device to choose"
        raise ConfigError(f"{origin} must be {names}, got {clipped(backend)}{advice}")
    chosen = registry.find_device(backend, torch_tensors=torch_tensors or not tensor_devices)
    if chosen.backend in TENSOR_DEVICES:
        return named(chosen)
    device = own_device(torch.device(chosen.torch_device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


train = TrainCommand


# --- processes: started with torch's elastic launcher, or joined where torchrun started them --------------------------
_MEETING_S = 300.0  # for the processes of all machines to begin
_ENDING_S = "60"  # for a step and its checkpoint after Ctrl-C, before the launcher kills the processes
_LOST = 75  # status of a process whose device is lost: another process may do better (EX_TEMPFAIL of sysexits.h)


def world_size() -> int:
    """Return the number of processes that torchrun, or `spawn`, has started; 1 without them."""
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """Return the number of this process among them."""
    return _number("RANK", 0) if world_size() > 1 else 0


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} in the environment must be a whole number, got {text[:40]!r}: torchrun sets it")
    return int(text)


def spawn(
    count: int, backend: str | None, arguments: Sequence[str], *, restarts: int, kept: Callable[[], str],
    advice: Callable[[], str],
) -> NoReturn:  # fmt: skip
    """Run the command line `accelerant ARGUMENTS` in this number of processes, and exit with their status.

    All are started again, at most `restarts` times and from what `kept` names, if one of them was ended by a signal or
    has lost its device; an error that a process reports itself is final. `advice` returns what to do after a final end.
    """
    import torch

    if (backend or settings().backend).lower() != "cpu" and count > (present := torch.cuda.device_count()):
        gpus = f"{present} GPU{'s' * (present != 1)}"
        raise ConfigError(
            f"--gpus {count} is more than this machine has, {gpus}: with --device cpu it starts processes"
        )
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from accelerant.runtime.processes import OWN_LAUNCH

    logging.disable(logging.CRITICAL)  # the processes say why they end
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _ENDING_S)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or each process warns of another that has ended
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # rank 0 has the store: it outlives a launcher that is killed
    )
    taken = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    taken = [name for name in taken if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]  # nohup stays so
    name = f"{OWN_LAUNCH}{os.getpid()}-{uuid.uuid4().hex}"
    try:
        for number in itertools.count():
            config = LaunchConfig(
                1, 1, count, run_id=f"{name}.{number}", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                local_addr="localhost", max_restarts=0, signals_to_handle=",".join(taken),
            )  # fmt: skip
            try:
                elastic_launch(config, sys.executable)("-m", "accelerant", *arguments)
                break
            except ChildFailedError as failed:
                status, reason = _cause(failed)
            if not reason or number == restarts or not (going_on := kept()):
                if reason:
                    print(f"accelerant: {reason}{f', restarts: {number}' * bool(number)}", file=sys.stderr)
                if status not in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM) and (text := advice()):
                    print(f"accelerant: {text}", file=sys.stderr)
                raise typer.Exit(status)
            again = f"starting all {count} processes again (restart {number + 1} of at most {restarts})"
            print(f"accelerant: {reason}: {again}, {going_on}", file=sys.stderr, flush=True)
    except SignalException as ended:
        raise typer.Exit(128 + ended.sigval) from None
    raise typer.Exit(0)


def _cause(failed: ChildFailedError) -> tuple[int, str]:
    """Return the status of a failed group, and what ended it; "" for an error or the launcher's signal."""
    for rank, failure in sorted(failed.failures.items(), key=lambda each: each[1].timestamp):
        if failure.exitcode == _LOST:
            return 1, f"rank {rank} has lost its device"
        if failure.exitcode < 0 and failure.exitcode not in (-signal.SIGTERM, -signal.SIGINT):
            number = -failure.exitcode
            known = signal.Signals(number).name if number in set(signal.Signals) else ""
            return 128 + number, f"rank {rank} was ended by signal {number}{f' ({known})' * bool(known)}"
    code = failed.get_first_failure()[1].exitcode
    return (code if code > 0 else 128 - code), ""


def own_device(device: torch.device) -> torch.device:
    """Return this process's device, of the kind of `device`; raise ConfigError if there is no GPU for it."""
    import torch

    if device.type != "cuda" or world_size() == 1:
        return device
    index, present = _number("LOCAL_RANK", 0), torch.cuda.device_count()
    if index >= present:
        gpus = f"{present} GPU{'s' * (present != 1)}"
        raise ConfigError(f"rank {rank()} is process {index} of this machine, counted from 0, which has {gpus}")
    return torch.device("cuda", index)


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Join the other processes for the block, over gloo or NCCL; alone, do nothing. ConfigError if they do not meet."""
    if world_size() == 1:
        yield
        return
    import torch
    from torch import distributed
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    from accelerant.runtime.host import usable_cores
    from accelerant.runtime.processes import OWN_LAUNCH, launch_id

    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(f"WORLD_SIZE is {world_size()} and {missing[0]} is not set: start with --gpus, or torchrun")
    if own := launch_id().startswith(OWN_LAUNCH):
        _end_with(int(launch_id().split("-")[1]))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, number, size = next(rendezvous("env://", timeout=timedelta(seconds=_MEETING_S)))
        # torchrun's agent keeps one store for all attempts (torch 2.13), with the addresses of processes that died.
        store = PrefixStore(f"attempt-{_number('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend, place = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
        distributed.init_process_group(backend, store=store, rank=number, world_size=size, device_id=place)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:300]
        raise ConfigError(f"rank {rank()} cannot meet the other processes at {address}: {reason}") from None
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // _number("LOCAL_WORLD_SIZE", 1)))
    try:
        yield
    except (DeviceLost, torch.AcceleratorError) as error:
        lost = error if isinstance(error, DeviceLost) else DeviceLost(str(error).split("\n", maxsplit=1)[0])
        if own:
            vars(lost)["exit_status"] = _LOST
        raise lost from error.__cause__
    distributed.destroy_process_group()  # not after an error, when others may be waiting


def _end_with(launcher: int) -> None:
    """Send this process SIGTERM, once, when its launcher has died: nothing else would end it.

    Linux's PR_SET_PDEATHSIG sends it for each thread of the launcher, and the second one interrupts a checkpoint.
    """

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    if sys.platform != "win32":
        threading.Thread(target=watch, name="accelerant-launcher", daemon=True).start()
