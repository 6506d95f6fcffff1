"""Reading and writing model folders in the format of Hugging Face's transformers, which is not needed for it.

config.json, and model.safetensors or its shards with model.safetensors.index.json. A model's Layout defines which
tensors, transposed and concatenated, form each of its own. Names, shapes and dtypes are checked before the model is
built. Only safetensors are read: a pickle may execute arbitrary code.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError, FormatError, MissingFile, UnsupportedCase
from accelerant.nn.models.gguf import GGUFFile
from accelerant.nn.quantization import float_state_dict, quantized_on_meta
from accelerant.runtime.files import Content, clipped, decode_json, open_regular, read_regular, write_together

_SINGLE, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_LONGEST_NAME = 255  # bytes, on Linux, macOS and Windows
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES_IN_MESSAGE = 4
_HEAD = "lm_head.weight"
_PIECE = 1 << 22  # elements that are quantized at a time


M = TypeVar("M", bound=nn.Module)
T = TypeVar("T", int, float, bool)


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint: name without the layout's prefix, shape, and whether it is the transpose of ours."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The checkpoint format of a kind of model, whose config has at least `layers` and `tied`.

    Attributes:
        model_type, architecture: as in config.json.
        prefix: prefix of all names except the head's; a checkpoint of the model without a head lacks it.
        embedding: name of the embedding, which is the head, "lm_head.weight", too if the config ties them.
        fields: field of our config -> its name in config.json, and its default there.
        required: field of config.json -> its supported values; a missing field has the first.
        from_fields: all fields of config.json, and the values of `fields` -> our config.
        more_fields: our config -> what config.json has besides `fields`.
        parts: our config -> for each of our tensors, the parts whose concatenation along rows it is.
        ignored: names of further tensors that a checkpoint may contain.
        represents: our config -> whether the format has a model of it.
    """

    model_type: str
    architecture: str
    prefix: str
    embedding: str
    fields: Mapping[str, tuple[str, int | float | bool]]
    required: Mapping[str, tuple[Any, ...]]
    from_fields: Callable[[Fields, dict[str, Any]], Any]
    more_fields: Callable[[Any], dict[str, Any]]
    parts: Callable[[Any], dict[str, tuple[Part, ...]]]
    ignored: re.Pattern[str]
    represents: Callable[[Any], bool] = lambda config: True

    def config(self, fields: Fields) -> Any:
        """Return the config that config.json describes; FormatError, UnsupportedCase or ConfigError if none does."""
        for name, supported in self.required.items():
            fields.require(name, *supported)
        values = {ours: fields.read(name, type(default), default) for ours, (name, default) in self.fields.items()}
        try:
            return self.from_fields(fields, values)
        except ConfigError as error:
            raise ConfigError(f"{fields.origin}: {error}") from None


_KINDS = {int: "an integer", float: "a finite number", bool: "true or false"}


class Fields:
    """Typed access to the fields of a config.json, whose origin is named in messages."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = values
        self.origin = origin

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value unchecked."""
        return self._values.get(name, default)

    def read(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return an int, bool or finite number of a field; raise FormatError for others, or none without a default."""
        value = self._values.get(name, default)
        fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not fits or (kind is float and not abs(value) <= sys.float_info.max):  # NaN, and integers above every float
            raise FormatError(f"{self.origin}: {name} must be {_KINDS[kind]}, got {clipped(value)}")
        return kind(value)

    def fields(self, name: str) -> Fields | None:
        """Return the fields of a field that is an object; None if it is absent or null."""
        if (value := self._values.get(name)) is None:
            return None
        if not isinstance(value, dict):
            raise FormatError(f"{self.origin}: {name} must be an object, got {clipped(value)}")
        return Fields(value, f"{self.origin}, {name}")

    def require(self, name: str, *supported: Any) -> None:
        """Raise UnsupportedCase unless a field has one of the supported values; a missing field has the first."""
        value = self._values.get(name, supported[0])
        if not any(value == option and isinstance(value, type(option)) for option in supported):
            raise self.unsupported(name, value, " or ".join(map(repr, supported)))

    def unsupported(self, name: str, value: Any, supported: str) -> UnsupportedCase:
        """Return the error for a field value that no model here supports."""
        return UnsupportedCase(f"{self.origin}: {name} must be {supported}, got {clipped(value)}")


# --- reading ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file, which is mapped while the tensor is in use."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str

    def read(self) -> Tensor:
        """Return the tensor, whose storage is the mapped file."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor


class Tensors:
    """Named tensors, read one at a time: each name's source is a tensor, or has its shape, dtype and `read`."""

    def __init__(self, sources: Mapping[str, Any]) -> None:
        self.sources = sources

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.sources[name].shape)

    def dtype(self, name: str) -> torch.dtype | str:
        """Return the dtype of a tensor, or its name if it is not floating point."""
        dtype: torch.dtype | str = self.sources[name].dtype
        return dtype if dtype in _DTYPES.values() else str(dtype)

    def read(self, name: str) -> Tensor:
        """Return a tensor, whose storage may be a mapped file."""
        source = self.sources[name]
        tensor: Tensor = source.detach() if isinstance(source, Tensor) else source.read()
        return tensor

    def rows(
        self, names: Mapping[str, str], part: Part, dtype: torch.dtype, device: torch.device | str | None
    ) -> Iterator[Tensor]:
        """Yield a matrix a few rows at a time, in a dtype and on a device."""
        whole = self.read(names[part.name])
        whole = whole.t() if part.transposed else whole
        for piece in whole.split(max(1, _PIECE // whole.shape[1])):
            yield piece.to(device=device, dtype=dtype)


def _open_files(paths: Iterable[Path]) -> Tensors:
    from safetensors import SafetensorError, safe_open

    found: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            os.close(open_regular(path))  # safetensors would wait for a pipe
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name in found:
                        raise FormatError(f"{path}: tensor {name!r} is in another file too")
                    kind = file.get_slice(name)
                    dtype = str(kind.get_dtype())
                    found[name] = StoredTensor(path, name, tuple(kind.get_shape()), _DTYPES.get(dtype, dtype))
        except FileNotFoundError:
            raise MissingFile(f"{path}: no such file, though the index names it") from None
        except (SafetensorError, OSError) as error:
            raise FormatError(f"{path} is not a complete safetensors file: {str(error)[:300]}") from error
    return Tensors(found)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The layout, config, name in messages, fields and tensors of what a model is read from."""

    layout: Layout
    config: Any
    origin: str
    fields: Fields
    open: Callable[[], Tensors]


def described(source: str | os.PathLike[str] | nn.Module, layouts: Sequence[Layout]) -> ModelSource:
    """Return what a folder, a GGUF file or a model is, whose tensors are not looked at.

    Errors as of LanguageModel.from_pretrained.
    """
    if isinstance(source, nn.Module):
        origin, state = type(source).__name__, source.state_dict
        given = getattr(source, "config", None)
        if not callable(getattr(given, "to_dict", None)):
            raise ConfigError(f"{origin} has no config: from_pretrained takes a folder or a transformers model")
        fields = Fields(given.to_dict(), f"{origin}.config")  # type: ignore[union-attr]  # checked above
        opened = lambda: Tensors(state())  # noqa: E731
    elif (path := Path(source)).suffix == ".gguf":
        file, origin = GGUFFile(path), str(source)
        fields, opened = Fields(file.fields, origin), lambda: Tensors(file.tensors)
    else:
        origin = str(source)
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder: pass one with {_CONFIG} and {_SINGLE}; nothing is downloaded")
        fields, opened = Fields(read_object(path / _CONFIG), str(path / _CONFIG)), lambda: _open(path)
    kind = fields.get("model_type")
    if (layout := next((each for each in layouts if each.model_type == kind), None)) is None:
        raise fields.unsupported("model_type", kind, " or ".join(repr(each.model_type) for each in layouts))
    return ModelSource(layout, layout.config(fields), origin, fields, opened)


def built(
    build: Callable[[Any], M], source: ModelSource, dtype: torch.dtype | None, device: torch.device | str | None,
    quantize: str | None = None,
) -> M:  # fmt: skip
    """Return the model that `build` makes of a source's config, whose tensors are checked before one is read.

    With `quantize` the linear layers are in integers of that kind, made of a few rows at a time.
    """
    layout, config, origin, tensors = source.layout, source.config, source.origin, source.open()
    count = len(tensors.sources)
    if config.layers > count:  # checked before generating names, of which a nonsensical number would be endless
        raise FormatError(f"{origin} has {count} tensors, too few for the {config.layers} layers of its config")
    names = _matched(tensors, layout, config, origin)
    parts = layout.parts(config)
    if dtype is None:
        found = tensors.dtype(names[next(iter(parts.values()))[0].name])
        assert isinstance(found, torch.dtype)  # for the type checker: others are refused before
        dtype = found
    with torch.device("meta"):
        model = build(config)
    layers = {} if quantize is None else quantized_on_meta(model, quantize)
    state: dict[str, Tensor] = {}
    for name, its in parts.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight" and path in layers:
            layers[path].load_rows(piece for part in its for piece in tensors.rows(names, part, dtype, device))
            state |= {f"{path}.{buffer}": value for buffer, value in layers[path].named_buffers()}
        else:
            state[name] = _concatenated(tensors, names, its, dtype, device)
    model.load_state_dict(state, assign=True)
    return model


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is one of a run of `accelerant train`, whose config.json names its format."""
    path = Path(folder) / _CONFIG
    return path.is_file() and "format" in read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model; raise FormatError for anything else."""
    try:
        value = decode_json(read_regular(path))
    except FileNotFoundError:
        raise MissingFile(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise FormatError(f"{path} is not valid JSON: {str(error)[:300]}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path} must hold an object, got {type(value).__name__}")
    return value


def _open(folder: Path) -> Tensors:
    if (folder / _SINGLE).is_file():
        return _open_files([folder / _SINGLE])
    if (folder / _INDEX).is_file():
        return _open_shards(folder)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise FormatError(
            f"{folder} has its weights as {pickles[0]}: a pickle may execute arbitrary code and is not read; save the "
            "model as safetensors (transformers: model.save_pretrained(folder))"
        )
    raise FormatError(f"{folder} has neither {_SINGLE} nor {_INDEX}")


def _open_shards(folder: Path) -> Tensors:
    listed = read_object(folder / _INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise FormatError(f"{folder / _INDEX}: weight_map must be an object of file names, got {listed!r}"[:300])
    files = sorted(set(listed.values()))
    for file in files:
        if Path(file).name != file or file in ("", "..") or len(file) > _LONGEST_NAME:
            raise FormatError(f"{folder / _INDEX}: {clipped(file)} is not the name of a file in this folder")
    tensors = _open_files([folder / file for file in files])
    if missing := [name for name in listed if name not in tensors.sources]:
        raise FormatError(f"{folder / listed[missing[0]]} lacks {_quoted(missing)}, which the index lists")
    return tensors


def _matched(tensors: Tensors, layout: Layout, config: Any, origin: str) -> dict[str, str]:
    """Check a checkpoint against a layout; return each part's name -> its full name in the checkpoint."""
    full: dict[str, str] = {}
    for name in tensors.sources:
        if (other := full.setdefault(name.removeprefix(layout.prefix), name)) != name:
            raise FormatError(f"{origin} has both {other!r} and {name!r}")
    required = [part for parts in layout.parts(config).values() for part in parts]
    if missing := [part.name for part in required if part.name not in full]:
        raise FormatError(f"{origin} lacks {_quoted(missing)}")
    known = {part.name for part in required} | ({_HEAD} if config.tied else set())
    surplus = [name for name in full if name not in known and not layout.ignored.fullmatch(name)]
    if surplus:
        raise FormatError(f"{origin} has {_quoted(surplus)}, which a {layout.architecture} of its config lacks")
    for part in required:
        name = full[part.name]
        if tensors.shape(name) != part.shape:
            raise FormatError(f"{origin}: {name!r} must be {part.shape}, got {tensors.shape(name)}")
        if isinstance(tensors.dtype(name), str):
            raise FormatError(f"{origin}: {name!r} must be floating point, got {tensors.dtype(name)}")
    if config.tied and _HEAD in full:
        a, b = full[_HEAD], full[layout.embedding]
        alike = tensors.dtype(a) == tensors.dtype(b) and tensors.shape(a) == tensors.shape(b)
        if not alike or not torch.equal(tensors.read(a), tensors.read(b)):
            raise FormatError(f"{origin}: {_HEAD!r} differs from {layout.embedding!r}, though the config ties them")
    return full


def _quoted(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_IN_MESSAGE} more" if len(names) > _NAMES_IN_MESSAGE else ""
    return ", ".join(map(repr, names[:_NAMES_IN_MESSAGE])) + more


def _concatenated(
    tensors: Tensors, names: Mapping[str, str], parts: tuple[Part, ...], dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:  # fmt: skip
    """Return a new tensor with the parts concatenated along rows."""
    read = [tensors.read(names[part.name]) for part in parts]
    rows = [tensor.t() if part.transposed else tensor for part, tensor in zip(parts, read, strict=True)]
    device = rows[0].device if device is None else device
    whole = torch.empty((sum(row.shape[0] for row in rows), *rows[0].shape[1:]), dtype=dtype, device=device)
    begin = 0
    for row in rows:
        whole[begin : begin + row.shape[0]] = row
        begin += row.shape[0]
    return whole


# --- writing ---------------------------------------------------------------------------------------------------------
def save(
    model: nn.Module, config: Any, path: str | os.PathLike[str], layouts: Sequence[Layout], *, max_shard_bytes: int
) -> None:
    """Write a model in the format of transformers; see LanguageModel.save_pretrained.

    Weights of an earlier model stay until all files are on the disk. A tensor larger than max_shard_bytes gets a file
    of its own.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    fields, tensors = checkpoint(model, config, layouts)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    before = {file.name for file in folder.iterdir() if _WEIGHTS.fullmatch(file.name) and file.is_file()}
    files: dict[str, Content] = {**_weights(tensors, max_shard_bytes), _CONFIG: _json(fields)}
    old = (before - files.keys()) | {_INDEX}  # an old model.safetensors would be read instead of the shards
    write_together({folder / name: content for name, content in files.items()}, [folder / name for name in old])


def checkpoint(model: nn.Module, config: Any, layouts: Sequence[Layout]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the fields of config.json and the tensors of a model by their names there; UnsupportedCase if none fit."""
    if (layout := next((each for each in layouts if each.represents(config)), None)) is None:
        raise UnsupportedCase(f"no format of Hugging Face's has a model of {config}: save its state_dict()")
    parts = layout.parts(config)
    state: dict[str, Tensor] = float_state_dict(model)
    if state.keys() != parts.keys():
        differing = sorted(state.keys() ^ parts.keys())
        raise UnsupportedCase(
            f"{layout.architecture} cannot represent {_quoted(differing)} of this model: layers were replaced, or have "
            "other biases; torch.save(model.state_dict(), path) keeps what it has"
        )
    fields = {name: getattr(config, ours) for ours, (name, _) in layout.fields.items()}
    fields |= layout.more_fields(config) | {
        "model_type": layout.model_type,
        "architectures": [layout.architecture],
        "dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
    }
    tensors = {
        part.name if part.name == _HEAD else layout.prefix + part.name: tensor
        for name, its in parts.items()
        for part, tensor in zip(its, _split(state[name], its), strict=True)
    }
    return fields, tensors


def _split(tensor: Tensor, parts: tuple[Part, ...]) -> list[Tensor]:
    rows = [part.shape[1] if part.transposed else part.shape[0] for part in parts]
    return [x.t() if part.transposed else x for part, x in zip(parts, tensor.detach().split(rows), strict=True)]


def _weights(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> dict[str, Content]:
    """Return the contents of one file, or of several and an index, by name."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards, size = [*shards, {}], 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        return {_SINGLE: functools.partial(_write_shard, shards[0])}
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = _json({"metadata": {"total_size": total}, "weight_map": weight_map})
    written = {file: functools.partial(_write_shard, shard) for file, shard in zip(files, shards, strict=True)}
    return {**written, _INDEX: index}


def _write_shard(tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
