"""Owners of device memory: the largest live tensors and buffers that Python can see, and what refers to them.

Tensors that only C++ holds (saved for a backward pass, in a captured graph) have no Python object and are not seen.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.runtime.provider import Buffer, ComputeDevice
from accelerant.runtime.registry import DeviceLike, find_device

__all__ = ["MemoryOwner", "largest_owners"]


@dataclass(frozen=True, slots=True)
class MemoryOwner:
    """A live storage on a device.

    The size is that of the whole storage, of which the largest tensor has the shape and dtype (empty for a buffer).
    `kind` is "Tensor", "Parameter", "Buffer", ...; `held_by` says what refers to it, if that is cheap to find, else it
    is empty.
    """

    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    held_by: str = ""

    def __str__(self) -> str:
        what = f"{self.dtype} {self.shape} {self.kind}".strip() if self.dtype else self.kind
        return f"{self.size_bytes:,} bytes: {what}" + (f", {self.held_by}" if self.held_by else "")


def largest_owners(device: DeviceLike = "auto", n: int = 5) -> list[MemoryOwner]:
    """Return the n largest live storages on a device, the largest first.

    Walks all objects that Python's garbage collector tracks: some 50 ms in a large process.
    """
    if n < 0:
        raise ConfigError(f"n must be 0 or more, got {n}")
    target = find_device(device)
    largest: dict[int, tuple[int, Any]] = {}
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    with torch._C.DisableTorchFunctionSubclass():  # subclasses may refuse to be looked at
        for candidate in gc.get_objects():
            kind = type(candidate)  # not isinstance, which would resolve lazy proxies
            if issubclass(kind, Tensor):
                storage = None if issubclass(kind, FakeTensor) else _tensor_storage(candidate, target)
            elif issubclass(kind, Buffer):
                owner = type(candidate.owner)
                backend = "cuda" if issubclass(owner, Tensor) else owner.__module__.rpartition(".")[2]
                here = (backend, candidate.device) == (target.backend, target.index) and candidate.size_bytes
                storage = (candidate.data_ptr(), candidate.size_bytes) if here else None
            else:
                if issubclass(kind, nn.Module):
                    modules.append(candidate)
                elif issubclass(kind, torch.optim.Optimizer):
                    optimizers.append(candidate)
                continue
            if storage is not None and _extent(candidate) > _extent(largest.get(storage[0], (0, None))[1]):
                largest[storage[0]] = storage[1], candidate
        top = sorted(largest.values(), key=lambda pair: -pair[0])[:n]
        names = _names(modules, optimizers) if top else {}
        own = {id(pair) for pair in top}
        return [_owner(size, candidate, names, own) for size, candidate in top]


def _tensor_storage(tensor: Tensor, device: ComputeDevice) -> tuple[int, int] | None:
    if tensor.device.type != device.torch_type or (tensor.device.index or 0) != device.index:
        return None
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
    except (NotImplementedError, RuntimeError, UnsupportedCase):  # no storage: sparse tensors, some subclasses
        return None


def _extent(candidate: Any) -> int:
    """Return the bytes that a tensor or buffer shows of its storage; of several views, the largest is reported."""
    if candidate is None:
        return -1
    return int(candidate.size_bytes if isinstance(candidate, Buffer) else candidate.numel() * candidate.element_size())


def _names(modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[int, str]:
    """Return the names of parameters, their gradients, buffers and optimizer state, by the tensor's id."""
    names: dict[int, str] = {}
    inner = {id(child) for module in modules for child in module._modules.values()}
    for module in modules:
        if id(module) in inner:
            continue
        root = type(module).__name__
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{root}.{name}")
            if parameter.grad is not None:
                names.setdefault(id(parameter.grad), f"gradient of {root}.{name}")
        for name, constant in module.named_buffers():
            names.setdefault(id(constant), f"{root}.{name}")
    for optimizer in optimizers:
        for stepped, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    parameter_name = names.get(id(stepped), "a parameter")
                    names.setdefault(id(value), f"{type(optimizer).__name__} {key} of {parameter_name}")
    return names


def _owner(size: int, candidate: Any, names: dict[int, str], own: set[int]) -> MemoryOwner:
    shape, dtype = tuple(getattr(candidate, "shape", ())), str(getattr(candidate, "dtype", "")).removeprefix("torch.")
    return MemoryOwner(
        size, shape, dtype, type(candidate).__name__, names.get(id(candidate)) or _referrer(candidate, own)
    )


def _referrer(candidate: Any, own: set[int]) -> str:
    """Return the module variable, container or object that refers to an object, other than those in `own`."""
    for name, module in list(sys.modules.items()):
        for variable, value in list(getattr(module, "__dict__", {}).items()):
            if value is candidate:
                return f"{name}.{variable}"
    for referrer in gc.get_referrers(candidate):
        if id(referrer) in own:
            continue
        if isinstance(referrer, (list, tuple, set)):
            return f"in a {type(referrer).__name__} of {len(referrer)}"
        inside = referrer if isinstance(referrer, dict) else getattr(referrer, "__dict__", {})
        for key, value in list(inside.items()):
            if value is candidate:
                kind = type(referrer).__name__
                return f"in a dict under {key!r}" if inside is referrer else f"{kind}.{key}"
    return ""
