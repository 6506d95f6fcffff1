"""Checkpoints of several processes: torch.distributed.checkpoint (DCP) over safetensors files.

Each process writes its shards to one safetensors file in the folder checkpoint-shards-STEP, while training goes on. The
checkpoint itself is a file as of one process, whose document lists the shards with offsets, sizes and SHA-256 in place
of tensors. Rank 0 writes it last, so that a checkpoint is complete or absent. Any number of processes reads it.

DCP's own `.metadata` is a pickle, which runs code when it is loaded: none is written or read. Between the processes of
one training DCP sends its plans as pickles: they trust each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import zeros as distributed_zeros

from accelerant.errors import FormatError
from accelerant.runtime.files import clipped, open_regular, typed

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor: the number of its file, where it begins in the tensor, and its shape."""

    file: int
    offsets: list[int]
    sizes: list[int]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor and its chunks."""

    dtype: str
    shape: list[int]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards that a checkpoint lists: their folder, name, bytes and SHA-256 of each, and the tensors by name."""

    folder: str
    files: list[tuple[str, int, str]]
    tensors: dict[str, Entry]

    @classmethod
    def of(cls, path: Path, listed: object) -> Shards:
        """Return the shards that a checkpoint's document lists; raise FormatError if they are no tensors' parts.

        Each tensor must be covered by its chunks, so that no more is allocated for it than its files have.
        """
        try:
            shards: Shards = typed(cls, listed, "shards")
            files = [(name, r"\d+\.safetensors") for name, _, _ in shards.files]
            for name, pattern in ((shards.folder, r"checkpoint-shards-\d+"), *files):
                if not re.fullmatch(pattern, name):
                    raise ValueError(f"{clipped(name)} is no name of a shard")
            for name, entry in shards.tensors.items():
                if entry.dtype not in _DTYPES:
                    raise ValueError(f"{clipped(name)} has the dtype {clipped(entry.dtype)}")
                inside = all(
                    0 <= chunk.file < len(files) and len(chunk.offsets) == len(chunk.sizes) == len(entry.shape)
                    and all(0 <= begin <= begin + chunk.sizes[i] <= entry.shape[i]
                            for i, begin in enumerate(chunk.offsets))
                    for chunk in entry.chunks
                )  # fmt: skip
                if not inside or sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.shape):
                    raise ValueError(f"the chunks of {clipped(name)} do not cover its shape {entry.shape}")
            held = sum(prod(entry.shape) * _DTYPES[entry.dtype].itemsize for entry in shards.tensors.values())
            if held > (most := sum(size for _, size, _ in shards.files)):
                raise ValueError(f"tensors of {held:,} bytes in files of {most:,}")
        except ValueError as error:
            raise FormatError(f"checkpoint {path} is of another program: {error}") from None
        return shards

    def verify(self, path: Path, rank: int = 0, size: int = 1) -> None:
        """Read this rank's share of the files, and raise FormatError for one that is missing, torn or altered."""
        for name, wanted, digest in self.files[rank::size]:
            file = path.parent / self.folder / name
            try:
                with open(open_regular(file), "rb") as opened:
                    found = os.fstat(opened.fileno()).st_size
                    intact = found == wanted and hashlib.file_digest(opened, "sha256").hexdigest() == digest
            except OSError as error:
                raise FormatError(f"checkpoint {path} is damaged: {file}: {error.strerror}") from None
            if not intact:
                raise FormatError(f"checkpoint {path} is damaged: {file} does not match its checksum")


def _key(name: str, offsets: list[int]) -> str:
    """Return the name of a chunk in its file."""
    return f"{name}:{','.join(map(str, offsets))}"


# --- writing ---------------------------------------------------------------------------------------------------------
class _Writer(FileSystemWriter):
    """Writes one file for each process; `commit` gets the list of the shards on rank 0 when all have been written."""

    def __init__(self, folder: Path, write: Callable[..., None], commit: Callable[[Shards], None]) -> None:
        super().__init__(folder)
        self._folder, self._write, self._commit = folder, write, commit

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files after the ranks."""
        return [dataclasses.replace(plan, storage_data=f"{rank:05}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this process's file to the disk."""
        tensors: dict[str, Tensor] = {}
        storages: set[int] = set()
        results, file = [], self._folder / plan.storage_data
        for item in plan.items:
            tensor = cast(Tensor, planner.resolve_data(item)).detach().contiguous()
            storage = tensor.untyped_storage()
            whole = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
            storages.add(storage.data_ptr())
            offsets = list(item.index.offset or ())
            tensors[_key(item.index.fqn, offsets)] = tensor if whole else tensor.clone()  # no shared memory
            results.append((item.index, tensor.nbytes, (item.index.fqn, offsets, list(tensor.shape))))
        self._write(file, tensors, {})
        with open(file, "rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
            stored = file.name, os.fstat(written.fileno()).st_size, digest
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([WriteResult(index, size, (stored, chunk)) for index, size, chunk in results])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """List the shards of all processes, on rank 0, and commit."""
        files: list[tuple[str, int, str]] = []
        chunks: dict[str, list[Chunk]] = {}
        for written in filter(None, results):
            files.append(written[0].storage_data[0])
            for result in written:
                name, offsets, sizes = result.storage_data[1]
                chunks.setdefault(name, []).append(Chunk(len(files) - 1, offsets, sizes))
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)  # for the type checker: only tensors are given
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = Entry(dtype, list(stored.size), chunks[name])
        self._commit(Shards(self._folder.name, files, tensors))


class _KeptStager(DefaultStager):
    """A stager of many checkpoints, whose memory is used again."""

    def __init__(self, options: StagingOptions) -> None:
        super().__init__(options)
        vars(self._state_dict_stager)["close"] = lambda: None  # torch 2.11 closes it after every copy


class ShardSaver:
    """Writes one checkpoint after the other in the background.

    Tensors are copied to the host, from a GPU into pinned memory that later checkpoints use again, before `start`
    returns. The collectives of the writing have a group of their own, over gloo.
    """

    def __init__(self, write: Callable[..., None], *, pinned: bool) -> None:
        self._write = write
        self._group = distributed.new_group(backend="gloo")
        options = {"use_pinned_memory": pinned, "use_non_blocking_copy": pinned}
        self._stager = _KeptStager(StagingOptions(use_shared_memory=False, use_async_staging=False, **options))
        self._writing: Future[Any] | None = None

    def start(self, folder: Path, tensors: dict[str, Tensor], commit: Callable[[Shards], None]) -> None:
        """Begin to write shards to a folder, in every process; rank 0 calls `commit` with their list."""
        writer, groups = _Writer(folder, self._write, commit), {"process_group": self._group}
        saving = async_save(tensors, storage_writer=writer, async_stager=self._stager, **groups)
        self._writing = cast(Future[Any], saving)

    def finished(self, *, wait: bool) -> bool:
        """Return whether the writing has ended, once for each `start`; OSError, with the rank, where it failed."""
        if self._writing is None or not (wait or self._writing.done()):
            return False
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except CheckpointException as failed:
            rank, (error, _) = min(failed.failures.items())
            if isinstance(error, OSError):
                raise OSError(error.errno, f"rank {rank}: {error.strerror or error}", error.filename) from None
            raise OSError(f"rank {rank} cannot write a checkpoint: {type(error).__name__}: {error}") from error
        return True


# --- reading ---------------------------------------------------------------------------------------------------------
class _Reader(FileSystemReader):
    """Reads the chunks that a plan asks for."""

    def __init__(self, path: Path, shards: Shards) -> None:
        super().__init__(path.parent / shards.folder)
        self._checkpoint, self._shards = path, shards
        chunks = ((name, chunk) for name, entry in shards.tensors.items() for chunk in entry.chunks)
        self._files = {_key(name, chunk.offsets): (chunk.file, chunk.sizes) for name, chunk in chunks}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return shapes and chunks as DCP describes them."""
        entries: dict[str, Any] = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=_DTYPES[entry.dtype]),
                size=torch.Size(entry.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in entry.chunks
                ],
            )
            for name, entry in self._shards.tensors.items()
        }
        return Metadata(state_dict_metadata=entries, storage_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Copy the parts that the plan names into its tensors, file by file."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[int, list[Any]] = {}
        for item in plan.items:
            key = _key(item.storage_index.fqn, list(item.storage_index.offset or ()))
            by_file.setdefault(self._files[key][0], []).append((key, item))
        for number, items in by_file.items():
            file = self._checkpoint.parent / self._shards.folder / self._shards.files[number][0]
            try:
                with safe_open(file, framework="pt") as opened:
                    for key, item in items:
                        target = planner.resolve_tensor(item).detach()
                        parts = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                        if list(opened.get_slice(key).get_shape()) != self._files[key][1]:
                            other = f"{clipped(key)} has another shape"
                            raise FormatError(f"checkpoint {self._checkpoint} is damaged: {other}")
                        target.copy_(opened.get_slice(key)[parts] if parts else opened.get_tensor(key))
                        planner.commit_tensor(item, target)
            except (SafetensorError, OSError) as error:
                raise FormatError(f"checkpoint {self._checkpoint} is damaged: {file}: {str(error)[:300]}") from None
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


def load_shards(path: Path, shards: Shards, names: Mapping[str, str], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return verified shards' tensors under new names, sharded as in the model's state `like`, else on the host."""
    found: dict[str, Tensor] = {}
    for name, stored in names.items():
        entry = shards.tensors[stored]
        shape, dtype = torch.Size(entry.shape), _DTYPES[entry.dtype]
        owner = _owner(name, shape, like)
        found[stored] = (
            torch.zeros(shape, dtype=dtype) if owner is None  # zeros: a crafted list of chunks may leave gaps
            else distributed_zeros(shape, dtype=dtype, device_mesh=owner.device_mesh, placements=owner.placements)
        )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(cast(dict[str, Any], found), storage_reader=_Reader(path, shards), no_dist=True)
    return {name: found[stored] for name, stored in names.items()}


def _owner(name: str, shape: torch.Size, like: Mapping[str, Tensor]) -> DTensor | None:
    """Return the sharded parameter of a tensor ("model.NAME", or "optimizer.NAME.KIND" of its shape), if it has one."""
    kind, _, rest = name.partition(".")
    parameter = like.get(rest if kind == "model" else rest.rpartition(".")[0])
    return parameter if isinstance(parameter, DTensor) and parameter.shape == shape else None


def placed(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors, those of sharded parameters as shards; `like` is the model's state by name."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        if (owner := _owner(name, tensor.shape, like)) is not None and not isinstance(tensor, DTensor):
            mesh = owner.device_mesh
            result[name] = distribute_tensor(tensor.to(mesh.device_type), mesh, owner.placements, src_data_rank=None)
    return result
