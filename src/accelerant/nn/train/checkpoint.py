"""Checkpoints: files with checksums, the state of a training, and the parameters of its best evaluation.

A checkpoint is one safetensors file: named tensors, and in its header a JSON document and the SHA-256 of both. Reading
one never executes anything. `Checkpoints` keeps the last two of a folder; if the newer one is damaged, the older one is
used. Several processes write their tensors as shards (sharded_checkpoint.py), which the document lists.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelerant._renamed import renamed_arguments
from accelerant.errors import ConfigError, FormatError, MissingFile, UnsupportedCase
from accelerant.nn.optim import SGD, AdamW
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.environment import random_state, require_random, restore_random
from accelerant.nn.train.objective import Evaluation
from accelerant.nn.train.step import LossScale
from accelerant.runtime.files import clipped, decode_json, open_regular, remove_leftovers, typed, write_atomic
from accelerant.runtime.memory.limits import size_text
from accelerant.runtime.processes import Processes
from accelerant.tensors import DeviceTensor

if TYPE_CHECKING:
    from accelerant.nn.train.sharded_checkpoint import Shards, ShardSaver

_FORMAT = "accelerant-checkpoint-1"


@renamed_arguments(path="out")
def save_checkpoint(out: str | os.PathLike[str], tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """Write tensors and a JSON document as one file, atomically: if OSError is raised, an existing one stays intact."""
    # Copies: safetensors refuses tensors that share memory, as the views of a padded matrix do.
    host = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    text = json.dumps(document, sort_keys=True)
    write_tensors(Path(out), host, {"format": _FORMAT, "document": text, "sha256": _digest(host, text)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write host tensors, contiguous and without shared memory, as a safetensors file, as `save_checkpoint` does."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        write_atomic(path, lambda temporary: save_file(dict(tensors), temporary, metadata=metadata))
    except SafetensorError as error:  # its error for a full disk
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise OSError(f"cannot write {path}: {error}") from None
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors, to the host, and document; raise FormatError if the file is missing, torn, altered, or another.

    Of a checkpoint of several processes, tensors are whole, and random states those of rank 0.
    """
    path = Path(path)
    tensors, document, shards = _checked(path)
    return tensors if shards is None else _from_shards(path, document, shards, 0, {}), document


def _checked(path: Path, rank: int = 0, size: int = 1) -> tuple[dict[str, Tensor], dict[str, Any], Shards | None]:
    """Read a checkpoint's file, and verify this rank's share of its shards, if it has any."""
    if not path.is_file():
        raise MissingFile(f"no checkpoint {path}")
    tensors, metadata = read_tensors(path, "checkpoint")
    if metadata.get("format") != _FORMAT:
        raise FormatError(f"{path} is not a checkpoint of this program: format {metadata.get('format')!r}")
    text = metadata.get("document", "")
    if metadata.get("sha256") != _digest(tensors, text):
        raise FormatError(f"checkpoint {path} is damaged: its content does not match its checksum")
    try:
        document: dict[str, Any] = typed(dict[str, Any], decode_json(text), "document")
    except ValueError as error:
        raise FormatError(f"{path} is not a checkpoint of this program: {error}") from None
    if "shards" not in document:
        return tensors, document, None
    from accelerant.nn.train.sharded_checkpoint import Shards

    shards = Shards.of(path, document.pop("shards"))
    shards.verify(path, rank, size)
    return tensors, document, shards


def _from_shards(
    path: Path, document: dict[str, Any], shards: Shards, rank: int, like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of verified shards, and the random states that this rank had, of which JSON is a part."""
    from accelerant.nn.train.sharded_checkpoint import load_shards

    own = f"rank{rank}."
    names = {name: name for name in shards.tensors if not _OF_RANK.match(name)}
    names |= {name.removeprefix(own): name for name in shards.tensors if name.startswith(own)}
    tensors = load_shards(path, shards, names, like)
    if (rest := tensors.pop("random.json", None)) is not None:
        try:
            document["random"] = decode_json(rest.numpy().tobytes())
        except (ValueError, TypeError) as error:
            raise FormatError(f"checkpoint {path} has the state of no random generator: {error}") from None
    return tensors


_OF_RANK = re.compile(r"rank\d+\.random\.")


def read_tensors(path: Path, kind: str = "model", *, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a safetensors file's tensors, if wanted, and metadata; raise FormatError if it is missing or torn."""
    from safetensors import SafetensorError, safe_open

    try:
        os.close(open_regular(path))  # safetensors would wait for a pipe
        with safe_open(path, framework="pt") as file:
            names = file.keys() if tensors else ()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{kind} {path} is torn or not a {kind}: {str(error)[:300]}") from None


_SCALAR = bool | int | float | str | None
_DOCUMENT: dict[str, Any] = {
    "step": int, "total_steps": int, "data": str, "corpus_sha256": str, "position": dict[str, int],
    "config": dict[str, Any], "best": dict[str, float | None], "evaluations": list[Evaluation],
    "callbacks": list[tuple[str, dict[str, Any]]], "optimizer": dict[str, _SCALAR], "optimizer_class": str,
    "random": dict[str, list[float | None]], "seconds": float, "processes": int,
}  # fmt: skip


def _load_state(path: Path, like: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a training's checkpoint, the same in all processes; FormatError as `load_checkpoint`, or for a type."""
    processes, same = Processes(), dict[str, object]()
    with processes.agreed(same):
        tensors, document, shards = _checked(path, processes.rank, processes.size)
        if shards is None and any(type(each) is not Tensor for each in like.values()):
            from accelerant.nn.train.sharded_checkpoint import placed

            tensors = placed(tensors, like)
        same[f"checkpoint {path}"] = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    with processes.agreed({}):
        if shards is not None:
            tensors = _from_shards(path, document, shards, processes.rank, like)
        _require_types(path, document)
    return tensors, document


def _require_types(path: Path, document: dict[str, Any]) -> None:
    """Replace a document's values by those of the types that they must have; raise FormatError for another."""
    try:
        document |= {name: typed(kind, document[name], name) for name, kind in _DOCUMENT.items() if name in document}
        numbers = {"step": typed(int, document.get("step"), "step"), **document.get("position", {})}
        for name, number in numbers.items():
            if number < 0:
                raise ValueError(f"{clipped(name)} must be 0 or more, got {number}")
    except ValueError as error:
        raise FormatError(f"checkpoint {path} is of another program: {error}") from None


def is_full(error: OSError) -> bool:
    """Return whether an error says that a disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def require_space(folder: Path, parameters: int) -> None:
    """Raise ConfigError unless a folder's disk has room for the checkpoints and results of so many float32 parameters.

    They are three checkpoints, one of them being written, with two moments for each parameter. Those that exist count.
    """
    files = (*(folder / name for name in Checkpoints.NAMES), *folder.glob(f"{Checkpoints.SHARDS}/*"))
    present = sum(path.stat().st_size for path in files if path.is_file())
    needed = 3 * 3 * 4 * parameters + _RESULT_BYTES - present
    nearest = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    disk = shutil.disk_usage(nearest)
    if disk.total and disk.free < needed:  # /proc has neither, and is refused later
        needs = f"{size_text(needed)} for checkpoints and results, and its disk has {size_text(disk.free)} free"
        raise ConfigError(f"{folder} needs {needs}: free some, or give --out another folder")


_RESULT_BYTES = 4 << 20  # the report, metrics, and other small files


class Checkpoints:
    """The last checkpoint of a folder, `path`, and `previous`; of several processes each calls every method."""

    NAMES = ("checkpoint.safetensors", "checkpoint-previous.safetensors")
    SHARDS = "checkpoint-shards-*"

    def __init__(self, folder: Path) -> None:
        self.path, self.previous = (folder / name for name in self.NAMES)
        self._fresh = folder / f".{self.NAMES[0]}.new"
        self._processes = Processes()
        self._saver: ShardSaver | None = None
        self._written = False
        self._damaged = False  # the last one, which must not replace the previous one

    @property
    def exist(self) -> bool:
        """True if there is a checkpoint, intact or not."""
        return self.path.is_file() or self.previous.is_file()

    @property
    def size_bytes(self) -> int:
        """The size of the larger checkpoint, with its shards; 0 without one."""
        paths = filter(Path.is_file, (self.path, self.previous))
        return max((sum(each.stat().st_size for each in (path, *_shard_files(path))) for path in paths), default=0)

    @property
    def written(self) -> tuple[int, int]:
        """The step of the last checkpoint, and the number of processes that wrote it; 0 and 1 without one."""
        for path in filter(Path.is_file, (self.path, self.previous)):
            with suppress(FormatError, ValueError):  # resuming reports it
                return typed(int, _document(path).get("step"), "step"), max(1, len(_shard_files(path)))
        return 0, 1

    def save(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        """Write a checkpoint; the last one becomes the previous one, or stays if OSError is raised.

        On a full disk it takes the space of the previous one. Several processes write in the background, until
        `finished` returns True; random states are kept for each.
        """
        if self._processes.size == 1:
            self.make_room(lambda: self._commit(tensors, document))
            self._written = True
            return
        from accelerant.nn.train.sharded_checkpoint import ShardSaver

        if self._saver is None:
            self._saver = ShardSaver(write_tensors, pinned=any(tensor.is_cuda for tensor in tensors.values()))
        own = copy.deepcopy(dict(document))
        rest = torch.frombuffer(bytearray(json.dumps(own.pop("random", {})).encode()), dtype=torch.uint8)
        named = {**tensors, "random.json": rest}
        prefix = f"rank{self._processes.rank}."
        named = {f"{prefix * name.startswith('random.')}{name}": tensor for name, tensor in named.items()}

        def commit(shards: Shards) -> None:
            self._commit({}, {**own, "processes": self._processes.size, "shards": asdict(shards)})
            self._remove_unlisted()

        self._saver.start(self.path.parent / self.SHARDS.replace("*", str(own["step"])), named, commit)

    def finished(self, *, wait: bool) -> bool:
        """Return True once for each checkpoint that was written, with `wait` at its end; OSError, with the rank."""
        if self._saver is not None:
            return self._saver.finished(wait=wait)
        written, self._written = self._written, False
        return written

    def _commit(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        try:
            save_checkpoint(self._fresh, tensors, document)
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        if self.path.is_file() and not self._damaged:
            os.replace(self.path, self.previous)
        os.replace(self._fresh, self.path)  # a process killed before this line leaves the previous one
        self._damaged = False

    def _remove_unlisted(self) -> None:
        """Remove shards of which there is no checkpoint, unless one cannot be read."""
        try:
            listed = {_shards_of(path) for path in (self.path, self.previous) if path.is_file()}
        except FormatError:
            return
        for folder in self.path.parent.glob(self.SHARDS):
            if folder.name not in listed and re.fullmatch(r"\d+", folder.name.rpartition("-")[2]):
                shutil.rmtree(folder, ignore_errors=True)

    def make_room(self, write: Callable[[], None]) -> None:
        """Call `write`, and on a full disk again without the previous checkpoint, if the last one is there."""
        try:
            write()
        except OSError as error:
            if not (is_full(error) and self.path.is_file() and self.previous.is_file()):
                raise
            try:
                _checked(self.path)
            except FormatError:  # the previous one is the only one
                self.path.unlink()
            else:
                self.previous.unlink()
            write()

    def load(self, like: Mapping[str, Tensor] | None = None) -> tuple[dict[str, Tensor], dict[str, Any], str | None]:
        """Return the newest intact checkpoint, and a note if it is not the last; raise FormatError without one.

        `like` is the model's state: tensors of its sharded parameters (DTensor), and their optimizer's, are returned
        as this process's shards, whatever number of processes wrote them.
        """
        like = like or {}
        try:
            return *_load_state(self.path, like), None
        except FormatError as error:
            try:
                tensors, document = _load_state(self.previous, like)
            except FormatError:
                raise error from None
            self._damaged = True
            return tensors, document, f"{error}; using the previous one, of step {document.get('step')}"

    def clean(self) -> None:
        """Remove incomplete files of processes that were killed: of checkpoints, and of the run's other files."""
        if not self._processes.first:
            return
        remove_leftovers(self.path.parent)
        for path in self.path.parent.glob(".tmp??????"):  # of safetensors, which writes under a name of its own first
            if path.is_file():
                path.unlink()
        self._fresh.unlink(missing_ok=True)
        self._remove_unlisted()


def _document(path: Path) -> dict[str, Any]:
    """Return the document of a checkpoint, without its tensors and unchecked; raise FormatError if it has none."""
    metadata = read_tensors(path, "checkpoint", tensors=False)[1]
    try:
        document: dict[str, Any] = typed(dict[str, Any], decode_json(metadata.get("document", "")), "document")
    except ValueError as error:
        raise FormatError(f"checkpoint {path} is damaged: {error}") from None
    return document


def _shards_of(path: Path) -> str | None:
    """Return the name of the folder of a checkpoint's shards; None for one of a single process."""
    document = _document(path)
    try:
        return typed(str, document["shards"]["folder"], "folder") if "shards" in document else None
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"checkpoint {path} is damaged: {error}") from None


def _shard_files(path: Path) -> list[Path]:
    folder = _shards_of(path)
    return [] if folder is None else [*(path.parent / folder).glob("*.safetensors")]


def require_same_shapes(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise FormatError unless a checkpoint's tensors have the names, shapes and dtypes that are wanted."""
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found or name not in wanted:
            raise FormatError(f"checkpoint {path} is of another model: {name} is only in one of the two")
        if found[name].shape != wanted[name].shape:
            here, there = tuple(wanted[name].shape), tuple(found[name].shape)
            raise FormatError(f"checkpoint {path} is of another shape: {name} is {there}, the model wants {here}")
        if found[name].dtype != wanted[name].dtype:
            kinds = f"{name} is {found[name].dtype}, the model wants {wanted[name].dtype}"
            raise FormatError(f"checkpoint {path} is of another dtype: {kinds}")  # loading would round silently


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- the state of a training -----------------------------------------------------------------------------------------
_MAY_DIFFER = frozenset({
    "accumulate", "epochs", "steps", "device", "deterministic", "graph", "recompute",
    "evaluate_every", "evaluations", "patience", "min_delta", "keep_best",
    "out", "checkpoint_every", "checkpoint_every_s", "log", "profile", "predict_memory", "reduce_dtype", "timeout_s",
})  # fmt: skip
"""Settings that change a step's result by rounding at most; the number of steps is compared separately."""


def gathered(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, scale: LossScale | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what the next step depends on besides data: tensors, and JSON values; raise UnsupportedCase for others."""
    tensors = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise UnsupportedCase(f"the state of the model has a {type(value).__name__} ({name}): no checkpoint")
        tensors[f"model.{name}"] = value
    states, numbers = optimizer_state(model, optimizer)
    tensors |= {f"optimizer.{name}": value for name, value in states.items()}
    if scale is not None:
        tensors |= {f"loss_scale.{name}": value for name, value in scale.state().items()}
    drawn, rest = random_state(device)
    tensors |= {f"random.{name}": value for name, value in drawn.items()}
    tensors = {name: x.detach().cpu() if isinstance(x, DeviceTensor) else x for name, x in tensors.items()}
    return tensors, {"optimizer": numbers, "optimizer_class": type(optimizer).__name__, "random": rest}


def restored(
    path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any], model: nn.Module,
    optimizer: torch.optim.Optimizer, device: torch.device, scale: LossScale | None = None,
) -> None:  # fmt: skip
    """Check and restore the result of `gathered`; raise FormatError if it is of another model or shape."""
    own = {f"model.{name}": value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    require_same_shapes(path, {name: x for name, x in tensors.items() if name.startswith("model.")}, own)
    states = _part("optimizer", tensors)
    require_optimizer_tensors(path, model, optimizer, states, document.get("optimizer", {}))
    kind = type(optimizer).__name__
    if (wanted := document.get("optimizer_class", kind)) != kind:
        raise FormatError(f"checkpoint {path} is of another optimizer: {wanted}, got {kind}")
    drawn, rest = _part("random", tensors), document.get("random", {})
    require_random(path, drawn, rest, device)
    if scale is not None:
        scales = _part("loss_scale", tensors)
        require_same_shapes(path, scales, scale.state())
        scale.load(scales)
    model.load_state_dict(_part("model", tensors))
    load_optimizer(model, optimizer, states, document.get("optimizer", {}))
    restore_random(drawn, rest, device)  # last: loading may draw numbers


def require_same_config(path: Path, found: Mapping[str, Any], config: TrainConfig) -> None:
    """Raise ConfigError if a checkpoint has another value of a setting that changes the training."""
    for name, value in config.to_dict().items():
        if name not in _MAY_DIFFER and name in found and found[name] != value:
            raise ConfigError(f"checkpoint {path} was trained with {name}={clipped(found[name])}, got {value!r}")


def _part(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


_KINDS = dict.fromkeys(("Adam", "AdamW"), ("step", "exp_avg", "exp_avg_sq"))
"""State of each trained parameter after a step, by the optimizer's class."""


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state by "parameter.kind" names: tensors, and plain numbers; UnsupportedCase for any other type."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{kind}"] = value
            elif value is None or isinstance(value, bool | int | float | str):
                numbers[f"{name}.{kind}"] = value
            else:
                what = f"{type(optimizer).__name__} keeps a {type(value).__name__} ({kind} of {name})"
                raise UnsupportedCase(f"{what}: checkpoints hold tensors and numbers; train without out")
    return tensors, numbers


def require_optimizer_tensors(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, found: Mapping[str, Tensor],
    numbers: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Raise FormatError unless a checkpoint's optimizer state is complete and of these parameters and shapes."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if parameter in trained}
    ours = isinstance(optimizer, AdamW | SGD)  # their kernels rely on tensors of these shapes
    for full, number in (numbers or {}).items():
        if full.rpartition(".")[0] not in shapes or full in found or (ours and number is not None):
            raise FormatError(f"checkpoint {path} is of another model: optimizer.{clipped(full)} is {clipped(number)}")
    owners: dict[str, set[str]] = {}
    for full, tensor in found.items():
        name, _, kind = full.rpartition(".")
        if name not in shapes:
            raise FormatError(f"checkpoint {path} is of another model: optimizer.{full} belongs to no parameter")
        scalar = kind == "step" if ours else not tensor.dim()
        if tensor.shape != (() if scalar else shapes[name]):
            here, there = () if scalar else tuple(shapes[name]), tuple(tensor.shape)
            raise FormatError(f"checkpoint {path} is of another shape: optimizer.{full} is {there}, not {here}")
        if ours and not tensor.is_floating_point():
            raise FormatError(f"checkpoint {path} is of another dtype: optimizer.{full} is {tensor.dtype}")
        owners.setdefault(name, set()).add(kind)
    for name, kinds in owners.items():
        lacking = [kind for kind in _KINDS.get(type(optimizer).__name__, ()) if kind not in kinds]
        if lacking:
            raise FormatError(f"checkpoint {path} is of another model: optimizer.{name}.{lacking[0]} is not in it")


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> None:
    """Load the result of `optimizer_state`, whose names and shapes were checked."""
    index = {parameter: i for i, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    names = {name: index[parameter] for name, parameter in model.named_parameters() if parameter in index}
    state: dict[int, dict[str, Any]] = {}
    for full, value in {**tensors, **numbers}.items():
        name, _, kind = full.rpartition(".")
        state.setdefault(names[name], {})[kind] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# --- the best evaluation ---------------------------------------------------------------------------------------------
class BestModel:
    """The best evaluation so far, better by more than `min_delta`: decides when to stop, and keeps the parameters."""

    NAME = "best.safetensors"

    def __init__(self, patience: int | None, min_delta: float) -> None:
        self._patience = patience
        self._min_delta = min_delta
        self._loss = math.inf
        self._step = 0
        self._worse = 0
        self._copy: dict[str, Tensor] = {}

    @property
    def exhausted(self) -> bool:
        """True if the last `patience` evaluations brought no better loss."""
        return self._patience is not None and self._patience <= self._worse

    def update(self, evaluation: Evaluation) -> bool:
        """Take an evaluation; return whether it is the best so far."""
        if evaluation.loss < self._loss - self._min_delta:
            self._loss, self._step, self._worse = evaluation.loss, evaluation.step, 0
            return True
        self._worse += 1
        return False

    def keep(self, model: nn.Module, folder: Path | None) -> None:
        """Keep a copy of the parameters, in the folder, or in host memory if there is none."""
        state = model.state_dict()
        if folder is not None:
            save_checkpoint(folder / self.NAME, state, {"step": self._step, "loss": self._loss})
        else:
            self._copy = {name: value.detach().to("cpu", copy=True) for name, value in state.items()}

    def load_into(self, model: nn.Module, folder: Path | None) -> None:
        """Load the kept parameters, if any, into a model."""
        if folder is not None and (folder / self.NAME).is_file():
            model.load_state_dict(load_checkpoint(folder / self.NAME)[0])
        elif self._copy:
            model.load_state_dict(self._copy)

    def state(self) -> dict[str, Any]:
        """Return JSON values; `restore` is the inverse."""
        loss = None if math.isinf(self._loss) else self._loss
        return {"loss": loss, "step": self._step, "waited": self._worse}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        loss = state.get("loss")
        self._loss = math.inf if loss is None else float(loss)
        self._step, self._worse = int(state.get("step", 0)), int(state.get("waited", 0))
