"""Checkpoints that know when they are torn.

`Checkpoints` keeps the last two of a folder: where the newer one is torn, the one before it serves.

A checkpoint is one safetensors file: tensors by name, and in its header a JSON document and the SHA-256 of
that document and of every tensor. Nothing in it is ever executed on reading.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import FormatError
from accelerant.runtime.files import decode_json, write_atomic

__all__ = ["Checkpoints", "load_checkpoint", "require_same_shapes", "save_checkpoint", "write_tensors"]

_FORMAT = "accelerant-checkpoint-1"


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """Write tensors and a JSON document as one file, atomically.

    Args:
        path: where to; its folder exists.
        tensors: on any device; each is copied to the host.
        document: JSON values.

    Raises:
        OSError: the file cannot be written; an older one under that name stays whole.
    """
    # Copies: safetensors refuses tensors that share memory, as the views of a padded matrix do.
    host = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    text = json.dumps(document, sort_keys=True)
    metadata = {"format": _FORMAT, "document": text, "sha256": _digest(host, text)}
    write_tensors(path, host, metadata)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, atomically.

    Args:
        path: where to; its folder exists.
        tensors: on the host, contiguous, in memory of their own.
        metadata: of the file.

    Raises:
        OSError: the file cannot be written; an older one under that name stays whole.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        write_atomic(path, lambda temporary: save_file(dict(tensors), temporary, metadata=metadata))
    except SafetensorError as error:  # so it calls a full disk
        raise OSError(f"cannot write {path}: {error}") from None


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote: tensors on the host, and the document.

    Raises:
        FormatError: the file is missing, torn, altered, or something else.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FormatError(f"no checkpoint {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (SafetensorError, OSError) as error:
        raise FormatError(f"checkpoint {path} is torn or not a checkpoint: {error}") from None
    if metadata.get("format") != _FORMAT:
        raise FormatError(f"{path} is not a checkpoint of this program: format {metadata.get('format')!r}")
    text = metadata.get("document", "")
    if metadata.get("sha256") != _digest(tensors, text):
        raise FormatError(f"checkpoint {path} is damaged: its content does not match its checksum")
    document: dict[str, Any] = decode_json(text)
    return tensors, document


class Checkpoints:
    """The last checkpoint of a folder and the one before it.

    Attributes:
        path, previous: the files.
    """

    NAMES = ("checkpoint.safetensors", "checkpoint-previous.safetensors")

    def __init__(self, folder: Path) -> None:
        self.path, self.previous = (folder / name for name in self.NAMES)

    @property
    def exist(self) -> bool:
        """Whether there is one, whole or not."""
        return self.path.is_file() or self.previous.is_file()

    def save(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        """Write a checkpoint; the last becomes the one before it.

        Raises:
            OSError: it cannot be written; the last one stays.
        """
        fresh = self.path.with_name(f".{self.path.name}.new")
        save_checkpoint(fresh, tensors, document)
        if self.path.is_file():
            os.replace(self.path, self.previous)
        os.replace(fresh, self.path)  # killed before this line: the one before serves

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any], str | None]:
        """The newest whole checkpoint: tensors, document, and what to tell where that is not the last one.

        Raises:
            FormatError: neither is whole, or there is none.
        """
        try:
            return *load_checkpoint(self.path), None
        except FormatError as error:
            if not self.previous.is_file():
                raise
            try:
                tensors, document = load_checkpoint(self.previous)
            except FormatError:
                raise error from None
            return tensors, document, f"{error}; taking the one before it, of step {document.get('step')}"

    def clean(self) -> None:
        """Remove what a killed process left of a checkpoint that it was writing."""
        for path in self.path.parent.glob(f".*{self.path.name}*"):
            path.unlink(missing_ok=True)


def require_same_shapes(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Check that a checkpoint's tensors fit before any is copied.

    Raises:
        FormatError: a name is missing or unknown, or a shape or dtype differs.
    """
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found or name not in wanted:
            raise FormatError(f"checkpoint {path} is of another model: {name} is only in one of the two")
        if found[name].shape != wanted[name].shape:
            here, there = tuple(wanted[name].shape), tuple(found[name].shape)
            raise FormatError(f"checkpoint {path} is of another shape: {name} is {there}, the model wants {here}")
        if found[name].dtype != wanted[name].dtype:
            kinds = f"{name} is {found[name].dtype}, the model wants {wanted[name].dtype}"
            raise FormatError(f"checkpoint {path} is of another dtype: {kinds}")  # it would be rounded without a word


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
