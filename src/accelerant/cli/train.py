"""`accelerant train`: a language model from text, in one command."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.launch import joined, launch, own_device, rank, world_size
from accelerant.config import settings
from accelerant.errors import ConfigError
from accelerant.runtime.files import exact, plain

if TYPE_CHECKING:
    import torch

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


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("train", epilog=_EXAMPLES, rich_help_panel="Training")(train)


def _option(text: str, *flags: str, panel: str | None = None, metavar: str | None = None) -> Any:
    """Return an option in a group of the help; without flags, those that typer makes of the parameter's name."""
    return typer.Option(*flags, metavar=metavar, help=text, rich_help_panel=panel)


_results = partial(_option, panel="Text and results")
_speed = partial(_option, panel="Speed and memory")
_privacy = partial(_option, panel="Private training")
_shape = partial(_option, panel="The model")


def train(
    call: typer.Context,
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="Text to train on; the same as --data PATH.")
    ] = None,
    preset: Annotated[str | None, _option("tiny, small, gpt2 or rnn (an LSTM). Default: tiny.")] = None,
    data: Annotated[list[str] | None, _results("Text to train on. Default: stdlib.", metavar="stdlib|PATH...")] = None,
    steps: Annotated[
        int | None, _option("Optimizer steps. Default: the preset's. With --resume: steps in all, to train on.")
    ] = None,
    epochs: Annotated[
        float | None, _option("Passes over the text, instead of --steps. With --resume: passes in all.")
    ] = None,
    init_from: Annotated[
        str | None,
        _option(
            "Start from the model and tokenizer in this folder: GPT-2 of Hugging Face, or an earlier run.",
            metavar="DIR",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None, _option("Peak learning rate. Default: the preset's; with --init-from a tenth of it.")
    ] = None,
    device: Annotated[
        str | None, _option("auto, cuda, opencl, webgpu or cpu. Default: auto; with --resume, the run's.")
    ] = None,
    out: Annotated[str | None, _results("Folder for the results. Default: runs/PRESET.", metavar="DIR")] = None,
    resume: Annotated[str | None, _results("Continue the interrupted run in this folder.", metavar="DIR")] = None,
    overwrite: Annotated[
        bool, _results("Remove an earlier run in the folder. Default: move it to a subfolder.", "--overwrite")
    ] = False,
    seed: Annotated[int | None, _option("Seed of the weights, batches, held-out text and sample. Default: 0.")] = None,
    context: Annotated[int | None, _shape("Tokens in a window. Default: the preset's.")] = None,
    layers: Annotated[int | None, _shape("Number of layers. Default: the preset's.")] = None,
    width: Annotated[int | None, _shape("Features of a token, a multiple of the heads. Default: the preset's.")] = None,
    heads: Annotated[int | None, _shape("Attention heads of a layer. Default: the preset's.")] = None,
    batch_size: Annotated[
        int | None, _speed("Windows per step; with --private on average. Default: the preset's.")
    ] = None,
    micro_batch: Annotated[
        int | None, _speed("Windows on the device at a time. Default: the preset's, or what fits.")
    ] = None,
    threads: Annotated[
        int | None,
        _speed(
            "Threads on the CPU. Default: OMP_NUM_THREADS, else 1 for tiny and rnn, whose steps are too small to "
            "share, and one per core for the others."
        ),
    ] = None,
    deterministic: Annotated[
        bool | None, _speed("Same seed, same bits. Default: yes on the CPU, no on a GPU, where it costs speed.")
    ] = None,
    recompute: Annotated[
        bool, _speed("Recompute activations in the backward pass: less memory, more time.", "--recompute")
    ] = False,
    profile: Annotated[
        bool, _results("Profile some steps: trace.json for Chrome, kernels.txt with the time by kernel.", "--profile")
    ] = False,
    log: Annotated[str | None, _results("Log of the steps. Default: jsonl.", metavar="jsonl|tensorboard")] = None,
    precision: Annotated[
        str | None,
        _speed(
            "Precision of the training: auto, float32, bfloat16, float16 or fp8. Default: auto, bfloat16 on a GPU "
            "that supports it, else float32.",
            metavar="NAME",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        _speed(
            "Train on N GPUs of this machine, with a process for each; with --device cpu in N processes. For more "
            "machines: torchrun. Default: 1; with --resume, as many as before.",
            metavar="N",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        _speed(
            "With --gpus: how often processes of which one was killed are started again, from the last checkpoint. "
            "Default: 3.",
            metavar="N",
        ),
    ] = None,
    reduce_dtype: Annotated[
        str | None,
        _speed(
            "In which several GPUs add up gradients: float32, or bfloat16 for half the traffic. Default: float32.",
            metavar="NAME",
        ),
    ] = None,
    private: Annotated[
        bool, _privacy("Differentially private steps (DP-SGD); needs a target or a noise multiplier.", "--private")
    ] = False,
    federated: Annotated[
        bool,
        _privacy(
            "Simulate ten clients that learn scikit-learn's digits by secure aggregation, without and with noise. "
            "--steps: rounds.",
            "--federated",
        ),
    ] = False,
    target_epsilon: Annotated[
        float | None, _privacy("With --private: epsilon at the end, which determines the noise.")
    ] = None,
    delta: Annotated[float | None, _privacy("With --private: delta. Default: 1e-5.")] = None,
    max_grad_norm: Annotated[
        float | None, _privacy("With --private: norm to which a window's gradient is clipped. Default: 1.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, _privacy("With --private: noise over the clipping norm. With a target: stop there.")
    ] = None,
    insecure_noise: Annotated[
        bool, _privacy("With --private: noise from Philox, for research; recorded in the ledger.", "--insecure-noise")
    ] = False,
    ledger: Annotated[
        str | None,
        _privacy(
            "With --private: privacy ledger of all trainings on these data. Default: one in the run's folder.",
            metavar="FILE",
        ),
    ] = None,
    json_output: Annotated[bool, _option("Print one JSON object at the end, and no progress.", "--json")] = False,
) -> None:
    """Train a language model on text and write model, metrics, sample and report to a folder.

    Ctrl-C writes a checkpoint, prints the command that continues the run, and exits with status 130.
    """
    sources = [*(data or ()), *(paths or ())]
    sizes = {"context": context, "layers": layers, "width": width, "heads": heads}
    chosen = {
        **{f"--{name}": value for name, value in sizes.items()},
        "--preset": preset, "--data": sources or None, "--out": out, "--overwrite": overwrite or None, "--seed": seed,
        "--batch-size": batch_size, "--micro-batch": micro_batch, "--threads": threads,
        "--deterministic": deterministic, "--recompute": recompute or None, "--profile": profile or None,
        "--log": log, "--precision": precision, "--private": private or None, "--init-from": init_from,
        "--learning-rate": learning_rate, "--reduce-dtype": reduce_dtype,
    }  # fmt: skip
    dp_options: dict[str, Any] = {
        "--target-epsilon": target_epsilon, "--delta": delta, "--max-grad-norm": max_grad_norm,
        "--noise-multiplier": noise_multiplier, "--insecure-noise": insecure_noise or None, "--ledger": ledger,
    }  # fmt: skip
    if federated:
        used = {"--steps": steps, "--delta": delta, "--noise-multiplier": noise_multiplier, "--seed": seed}
        every = {**chosen, **dp_options, "--resume": resume, "--device": device, "--epochs": epochs, "--gpus": gpus}
        every["--max-restarts"] = max_restarts
        if given := [name for name, value in every.items() if value is not None and name not in used]:
            raise ConfigError(f"--federated takes {', '.join(used)} and --json, not {given[0]}")
        _federated(
            {name[2:].replace("-", "_"): value for name, value in used.items() if value is not None}, json_output
        )
        return
    if not private and (alone := [name for name, value in dp_options.items() if value is not None]):
        raise ConfigError(f"{alone[0]} goes with --private")
    if steps is not None and epochs is not None:
        raise ConfigError(f"--steps {steps} and --epochs {epochs:g} exclude each other: give one of them")
    # Must be set before torch is loaded: threads that spin while they wait occupy cores that others need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise the library may use a single core
    if gpus is not None and gpus < 1:
        raise ConfigError(f"--gpus must be above 0, got {gpus}")
    if max_restarts is not None and max_restarts < 0:
        raise ConfigError(f"--max-restarts must be 0 or more, got {max_restarts}")
    processes = _Processes(gpus, max_restarts, call.obj)
    if resume is not None:
        if given := [name for name, value in chosen.items() if value is not None]:
            raise ConfigError(f"--resume continues a run as it was: leave out {given[0]}")
        if steps is not None and steps < 1:
            raise ConfigError(f"steps must be above 0, got {steps}")
        again = _resumed(Path(resume))
        _run(Path(resume), None, device, json_output, extension=again, processes=processes, steps=steps, epochs=epochs)
        return
    import torch

    from accelerant.nn.train.config import preset as find_preset

    run = find_preset("tiny" if preset is None else preset).resized(batch_size, micro_batch)
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be above 0, got {threads}")
    if threads is None and "OMP_NUM_THREADS" in os.environ:
        threads = torch.get_num_threads()
    if init_from is not None and (given := [name for name, value in sizes.items() if name != "context" and value]):
        raise ConfigError(f"--init-from gives the model its shape: leave out --{given[0]}")
    if run.model == "rnn" and heads is not None:
        raise ConfigError(f"--heads is for a GPT, and {run.name} is a recurrent model: leave it out")
    if init_from is not None and learning_rate is None:
        learning_rate = run.training.learning_rate / 10
    changes = {
        **sizes, "steps": steps, "seed": seed, "log": log, "precision": precision, "cpu_threads": threads,
        "reduce_dtype": reduce_dtype,
        "learning_rate": learning_rate, "init_from": init_from and os.path.abspath(os.path.expanduser(init_from)),
    }  # fmt: skip
    run = run.replaced(
        data=_sources(sources or ["stdlib"]),
        recompute=("blocks.*",) if recompute else (),
        profile=_PROFILED_STEPS if profile else 0,
        **{name: value for name, value in changes.items() if value is not None},
    )
    folder = Path(run.training.folder if out is None else out)
    extension = _extension(folder, dp_options) if private else None
    _run(folder, run, device, json_output, deterministic, extension, processes, overwrite=overwrite, epochs=epochs)


def _federated(options: dict[str, Any], json_output: bool) -> None:
    """Run digits_demonstration and print its reports."""
    from accelerant.privacy.federated.simulation import digits_demonstration

    reports = digits_demonstration(**options)
    if json_output:
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


def _extension(folder: Path, options: dict[str, Any]) -> Extension:
    """Return the extension of a private run; an option that was not given is None."""
    from accelerant.nn.train.folder import RunFolder
    from accelerant.privacy.dp.ledger import Ledger
    from accelerant.privacy.dp.training.run import PrivateRun, PrivateSettings

    given = {name: value for name, value in options.items() if value is not None}
    secure, ledger = not given.pop("--insecure-noise", False), given.pop("--ledger", None)
    path = folder / RunFolder.LEDGER if ledger is None else Path(ledger).expanduser()
    if ledger is not None and rank() == 0:  # before the text is read, which may take long
        if path.is_dir() or not (path.parent.is_dir() or path.resolve().parent == folder.resolve()):
            raise ConfigError(f"--ledger {ledger} must be a file, in a folder that exists")
        if path.is_file() and path.stat().st_size:
            Ledger.read(path)
    values = {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
    path = path.absolute() if ledger is None else path.resolve()  # a link in a run's folder is not written through
    return PrivateRun(PrivateSettings(str(path), secure=secure, **values))


def _resumed(folder: Path) -> Extension | None:
    """Return the extension of an existing run; None if it is not private."""
    from accelerant.nn.train.folder import RunFolder

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


def _run(
    out: Path, run: RunConfig | None, backend: str | None, as_json: bool, deterministic: bool | None = None,
    extension: Extension | None = None, processes: _Processes | None = None, **options: Any,
) -> None:  # fmt: skip
    """Start a run, or continue the one in `out` if `run` is None; then print the outcome. Rank 0 alone prints.

    `deterministic` is for a new run; by default it is true on the CPU only, where it costs nothing. `options` are those
    of run_training or resume_training.
    """
    if run is None or deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # must be set before CUDA starts

    import accelerant
    from accelerant.cli.train_view import SilentView, make_view
    from accelerant.nn.train.folder import RunFolder
    from accelerant.nn.train.job import resume_training, run_training
    from accelerant.runtime.compilation.cache import watch_compilation
    from accelerant.runtime.processes import Processes

    origin = "--device"
    if run is None and backend is None:  # the same device continues with the same losses
        folder = RunFolder(out)
        backend, origin = folder.read_config().get("backend"), f"the backend in {folder.config}"
    if processes is not None:
        again = None if run is not None else any(value is not None for value in options.values())
        processes.start(out, str(backend or ""), again, private=run is not None and extension is not None)
    torch_tensors = extension is not None or world_size() > 1
    if run is not None and (run.model == "rnn" or run.training.precision not in ("auto", "float32")):
        torch_tensors = True
    device = choose_device(backend, origin, tensor_devices=True, torch_tensors=torch_tensors)
    if device.type not in ("cuda", "cpu") and (extension is not None or world_size() > 1):
        what = "several processes train" if extension is None else "--private trains"
        raise ConfigError(f"{what} on cuda or cpu, got {device}")
    if run is not None:
        run = run.replaced(deterministic=device.type == "cpu" if deterministic is None else deterministic)
    first = rank() == 0
    view = make_view(quiet=as_json) if first else SilentView()
    with closing(view), watch_compilation(view.compiling), joined(device):
        if run is not None and Processes().on_first(partial(_restarted, out, run)):
            run = None
            options = {}
        start = resume_training if run is None else partial(run_training, run)
        outcome = start(
            out, device, progress=view, ledger=lambda: accelerant.ledger().to_dict(), extension=extension, **options
        )  # fmt: skip
    if not first:
        pass
    elif as_json:
        print(json.dumps(outcome.summary))
    else:
        view.outcome(outcome)
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)


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
        from accelerant.nn.train.folder import RunFolder

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

        launch(
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
    """Return whether a launcher started the processes again, and the folder has what they wrote of this very run."""
    from accelerant.nn.train.checkpoint import Checkpoints
    from accelerant.nn.train.folder import RunFolder
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
    from accelerant.tensors.device import TENSOR_DEVICES, named

    if backend is None or backend == "auto":
        backend = settings().backend
        given = os.environ.get("ACCELERANT_BACKEND") == backend
        origin = "ACCELERANT_BACKEND" if given else "the setting backend"
    known = ("auto", "cuda", *(TENSOR_DEVICES if tensor_devices else ()), "cpu")
    if not isinstance(backend, str) or backend.lower() not in known:
        names = f"{', '.join(known[:-1])} or cpu"
        advice = "" if origin == "--device" else f": training needs {names[6:]}, give --device to choose"
        raise ConfigError(f"{origin} must be {names}, got {clipped(backend)}{advice}")
    chosen = registry.choose(backend, torch_tensors=torch_tensors or not tensor_devices)
    if chosen.backend in TENSOR_DEVICES:
        return named(chosen)
    device = own_device(torch.device(chosen.torch_device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
