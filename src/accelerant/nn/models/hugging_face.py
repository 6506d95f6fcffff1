"""Weights and configurations as Hugging Face's transformers lays them out in a folder, without needing transformers.

    config.json                                     the model's fields
    model.safetensors                               its tensors, or
    model.safetensors.index.json, model-*.safetensors    the same in several files ("shards")

A model's Layout says which of those tensors, turned and joined, make each of its own. Everything is checked before a
model is made: names, shapes, dtypes. Only safetensors are read: a pickle may run any code.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.runtime.files import decode_json, write_atomic

__all__ = ["Fields", "Layout", "Part", "load", "save"]

_SINGLE, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_SHOWN = 4  # names in a message


class _Config(Protocol):
    """What all our configs have."""

    @property
    def layers(self) -> int: ...


C = TypeVar("C", bound=_Config)
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint.

    Attributes:
        name: there, without the prefix that the whole model gives it.
        shape: there.
        turned: whether it is the transpose of ours, as the weights of transformers' Conv1D.
    """

    name: str
    shape: tuple[int, ...]
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Layout(Generic[C]):
    """How a kind of model stands in a checkpoint.

    Attributes:
        model_type, architecture: in config.json.
        prefix: before the names of everything but the head; a checkpoint of the bare model lacks it.
        config_of: Hugging Face's fields -> our config.
        config_to: the reverse.
        parts: our config -> for each of our tensors the parts that, one below the other, make it.
        tied: our config -> (the head's name there, the embedding's) where both are one tensor.
        ignored: names of what a checkpoint may hold besides.
    """

    model_type: str
    architecture: str
    prefix: str
    config_of: Callable[[Fields], C]
    config_to: Callable[[C], dict[str, Any]]
    parts: Callable[[C], dict[str, tuple[Part, ...]]]
    tied: Callable[[C], tuple[str, str] | None]
    ignored: re.Pattern[str]


class Fields:
    """The fields of a config.json, read with their types.

    Args:
        values: name -> value.
        origin: where they are from, for messages.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = values
        self.origin = origin

    def get(self, name: str, default: Any = None) -> Any:
        """A field as it is."""
        return self._values.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number; missing without a default, or something else: FormatError."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise FormatError(f"{self.origin}: {name} must be a whole number, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; missing without a default, or something else: FormatError."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
            raise FormatError(f"{self.origin}: {name} must be a finite number, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false; something else: FormatError."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise FormatError(f"{self.origin}: {name} must be true or false, got {value!r}")
        return value

    def fields(self, name: str) -> Fields | None:
        """Fields inside a field; None where there are none."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise FormatError(f"{self.origin}: {name} must be an object, got {value!r}")
        return Fields(value, f"{self.origin}, {name}")

    def require(self, name: str, *wanted: Any) -> None:
        """Raise UnsupportedCase unless a field has one of the values wanted; where it is missing it has the first."""
        value = self._values.get(name, wanted[0])
        if not any(value == each and isinstance(value, type(each)) for each in wanted):
            raise self.unsupported(name, value, " or ".join(map(repr, wanted)))

    def unsupported(self, name: str, value: Any, wanted: str) -> UnsupportedCase:
        """What to raise for a value that no model of ours serves."""
        return UnsupportedCase(f"{self.origin}: {name} must be {wanted}, got {value!r}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number above every float
        return False


# --- reading ---------------------------------------------------------------------------------------------------------


class _Tensors(Protocol):
    """Named tensors, read one by one."""

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype | str: ...
    def read(self, name: str) -> Tensor: ...


class _OfModel:
    """The tensors of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._state: dict[str, Tensor] = module.state_dict()

    def names(self) -> Iterable[str]:
        return self._state

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> torch.dtype | str:
        dtype = self._state[name].dtype
        return dtype if dtype in _DTYPES.values() else str(dtype)

    def read(self, name: str) -> Tensor:
        return self._state[name].detach()


class _OfFiles:
    """The tensors of one safetensors file or several, open as long as the stack is."""

    def __init__(self, paths: Iterable[Path], stack: ExitStack) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                raise FormatError(f"{path}: no such file, though the index names it") from None
            except (SafetensorError, OSError) as error:
                raise FormatError(f"{path} is no whole safetensors file: {error}") from error
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in self._files:
                    raise FormatError(f"{path}: tensor {name!r} stands in another file too")
                self._files[name] = file

    def names(self) -> Iterable[str]:
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | str:
        found = str(self._files[name].get_slice(name).get_dtype())
        return _DTYPES.get(found, found)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def load(
    make: Callable[[C], M],
    source: str | os.PathLike[str] | nn.Module,
    layout: Layout[C],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> M:
    """Make a model of a folder's weights, or of a transformers model's.

    Args:
        make: our config -> the model.
        source: folder, or module with a `config`.
        layout: of its kind.
        dtype: of the parameters; None: that of the embedding.
        device: where to; None: the CPU for a folder, and where the module is.

    Raises:
        ConfigError: no such folder.
        FormatError: a file that is not what it should be, tensors missing, surplus, or of another shape or dtype.
        UnsupportedCase: a field of the configuration asks for what our model does not do.
    """
    with ExitStack() as stack:
        tensors: _Tensors
        if isinstance(source, nn.Module):
            fields, tensors, origin = _fields_of_module(source), _OfModel(source), type(source).__name__
        else:
            folder = _folder(source)
            origin = str(folder)
            fields = Fields(_json(folder / _CONFIG), str(folder / _CONFIG))
        kind = fields.get("model_type")
        if kind != layout.model_type:
            raise fields.unsupported("model_type", kind, repr(layout.model_type))
        config = layout.config_of(fields)
        if not isinstance(source, nn.Module):
            tensors = _open(folder, stack)
        count = sum(1 for _ in tensors.names())
        if config.layers > count:  # asked before their names are made, which a nonsensical number would make endless
            raise FormatError(f"{origin} has {count} tensors, too few for the {config.layers} layers of its config")
        names = _matched(tensors, layout, config, origin)
        wanted = layout.parts(config)
        if dtype is None:
            dtype = _dtype_of(tensors, names[next(iter(wanted.values()))[0].name])
        state = {ours: _joined(tensors, names, parts, dtype, device) for ours, parts in wanted.items()}
    with torch.device("meta"):
        model = make(config)
    model.load_state_dict(state, assign=True)
    return model


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: name one with {_CONFIG} and {_SINGLE}; nothing is downloaded")
    return folder


def _fields_of_module(module: nn.Module) -> Fields:
    config = getattr(module, "config", None)
    if not callable(getattr(config, "to_dict", None)):
        raise ConfigError(
            f"{type(module).__name__} has no config: from_pretrained takes a folder or a transformers model"
        )
    return Fields(config.to_dict(), f"{type(module).__name__}.config")  # type: ignore[union-attr]  # asked above


def _json(path: Path) -> dict[str, Any]:
    try:
        value = decode_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise FormatError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path} must hold an object, got {type(value).__name__}")
    return value


def _open(folder: Path, stack: ExitStack) -> _Tensors:
    if (folder / _SINGLE).is_file():
        return _OfFiles([folder / _SINGLE], stack)
    if (folder / _INDEX).is_file():
        return _open_shards(folder, stack)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise FormatError(
            f"{folder} has its weights as {pickles[0]}: a pickle may run any code and is not read; save the model as "
            "safetensors (transformers: model.save_pretrained(folder))"
        )
    raise FormatError(f"{folder} has neither {_SINGLE} nor {_INDEX}")


def _open_shards(folder: Path, stack: ExitStack) -> _Tensors:
    listed = _json(folder / _INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise FormatError(f"{folder / _INDEX}: weight_map must be an object of file names, got {listed!r}"[:300])
    files = sorted(set(listed.values()))
    for file in files:
        if Path(file).name != file or file in ("", ".."):
            raise FormatError(f"{folder / _INDEX}: {file!r} is no name of a file in this folder")
    tensors = _OfFiles([folder / file for file in files], stack)
    there = set(tensors.names())
    missing = [name for name in listed if name not in there]
    if missing:
        raise FormatError(f"{folder / listed[missing[0]]} lacks {_named(missing)}, which the index says is there")
    return tensors


def _matched(tensors: _Tensors, layout: Layout[C], config: C, origin: str) -> dict[str, str]:
    """Each part's name -> its name there, when everything fits."""
    there: dict[str, str] = {}
    for name in tensors.names():
        other = there.setdefault(_bare(name, layout.prefix), name)
        if other != name:
            raise FormatError(f"{origin} has both {other!r} and {name!r}")
    wanted = [part for parts in layout.parts(config).values() for part in parts]
    missing = [part.name for part in wanted if part.name not in there]
    if missing:
        raise FormatError(f"{origin} lacks {_named(missing)}")
    tied = layout.tied(config)
    known = {part.name for part in wanted} | ({tied[0]} if tied else set())
    surplus = [name for name in there if name not in known and not layout.ignored.fullmatch(name)]
    if surplus:
        raise FormatError(f"{origin} has {_named(surplus)}, which a {layout.architecture} of its config has not")
    for part in wanted:
        name = there[part.name]
        if tensors.shape(name) != part.shape:
            raise FormatError(f"{origin}: {name!r} must be {part.shape}, got {tensors.shape(name)}")
        if isinstance(tensors.dtype(name), str):
            raise FormatError(f"{origin}: {name!r} must be of floating point, got {tensors.dtype(name)}")
    if tied and tied[0] in there and not _are_equal(tensors, there[tied[0]], there[tied[1]]):
        raise FormatError(f"{origin}: {tied[0]!r} differs from {tied[1]!r}, though the config ties them")
    return there


def _are_equal(tensors: _Tensors, a: str, b: str) -> bool:
    if tensors.dtype(a) != tensors.dtype(b) or tensors.shape(a) != tensors.shape(b):
        return False
    return torch.equal(tensors.read(a), tensors.read(b))


def _bare(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _dtype_of(tensors: _Tensors, name: str) -> torch.dtype:
    dtype = tensors.dtype(name)
    assert isinstance(dtype, torch.dtype)  # for the type checker: others are refused
    return dtype


def _joined(
    tensors: _Tensors,
    names: Mapping[str, str],
    parts: tuple[Part, ...],
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:
    """Memory of our own, with the parts one below the other."""
    read = [tensors.read(names[part.name]) for part in parts]
    rows = [tensor.t() if part.turned else tensor for part, tensor in zip(parts, read, strict=True)]
    whole = torch.empty(
        (sum(row.shape[0] for row in rows), *rows[0].shape[1:]),
        dtype=dtype,
        device=rows[0].device if device is None else device,
    )
    begin = 0
    for row in rows:
        whole[begin : begin + row.shape[0]] = row
        begin += row.shape[0]
    return whole


# --- writing ---------------------------------------------------------------------------------------------------------


def save(model: nn.Module, config: C, path: str | os.PathLike[str], layout: Layout[C], *, max_shard_bytes: int) -> None:
    """Write a model as transformers would.

    Args:
        model: its state has the tensors that the layout's parts make.
        config: of the model.
        path: folder, made if it is not there. Weights of another model in it are replaced.
        layout: of its kind.
        max_shard_bytes: of a file; where one tensor is larger, it has a file to itself.

    Raises:
        ConfigError: max_shard_bytes below 1.
        UnsupportedCase: the model has other tensors: quantised layers, say. Nothing is written then.
        OSError: the folder cannot be written. Each file is whole or absent.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    parts = layout.parts(config)
    state: dict[str, Tensor] = model.state_dict()
    if state.keys() != parts.keys():
        differing = sorted(state.keys() ^ parts.keys())
        raise UnsupportedCase(f"{layout.architecture} has no place for {_named(differing)} of this model")
    fields = layout.config_to(config) | {
        "model_type": layout.model_type,
        "architectures": [layout.architecture],
        "dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
    }
    named = {
        _full(part.name, layout.prefix): piece
        for ours, its in parts.items()
        for part, piece in zip(its, _pieces(state[ours], its), strict=True)
    }
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    before = {file.name for file in folder.iterdir() if _WEIGHTS.fullmatch(file.name) and file.is_file()}
    written = _write_weights(folder, named, max_shard_bytes)
    _write_json(folder / _CONFIG, fields)
    for name in before - written:  # of another model: an older model.safetensors would be read in the shards' place
        (folder / name).unlink()


def _full(name: str, prefix: str) -> str:
    """A tensor's name in the whole model: the head stands beside the rest."""
    return name if name == "lm_head.weight" else prefix + name


def _pieces(tensor: Tensor, parts: tuple[Part, ...]) -> list[Tensor]:
    rows = [part.shape[1] if part.turned else part.shape[0] for part in parts]
    split = tensor.detach().split(rows)
    return [piece.t() if part.turned else piece for part, piece in zip(parts, split, strict=True)]


def _write_weights(folder: Path, named: Mapping[str, Tensor], max_shard_bytes: int) -> set[str]:
    """One file, or several and an index; gives their names."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in named.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        _write_shard(folder / _SINGLE, shards[0])
        return {_SINGLE}
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        _write_shard(folder / file, shard)
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in named.values())
    _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return {*files, _INDEX}


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    ready = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, lambda temporary: save_file(ready, temporary, metadata={"format": "pt"}))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())
