"""Which backends are here, and which one to use.

A driver can take a process down when it is broken, so each backend is first asked, in a child process where that is
needed, whether it is sound (`ComputeProvider.probe`); only then is its provider made in this process, once.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING

from accelerant.config import settings
from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime.provider import ComputeDevice, ComputeProvider

if TYPE_CHECKING:
    import torch  # the integer kernels run on the CPU without it

__all__ = [
    "AUTOMATIC",
    "BACKENDS",
    "PROVIDERS",
    "available",
    "choose",
    "create",
    "devices",
    "provider_of",
    "reason_absent",
]

BACKENDS = ("cuda", "rocm", "apple", "opencl", "webgpu", "cpu")
"""Every backend of the design."""

AUTOMATIC = ("cuda", "rocm", "apple", "cpu")
"""Those that automatic choice considers: they run every op on torch's own tensors."""

PROVIDERS: dict[str, tuple[str, str]] = {
    "cuda": ("accelerant.runtime.providers.cuda", "CudaProvider"),
    "opencl": ("accelerant.runtime.providers.opencl", "OpenclProvider"),
    "cpu": ("accelerant.runtime.providers.cpu", "CpuProvider"),
}
"""Backend -> module and class of its provider: where a backend author adds a line."""

_lock = threading.RLock()
_reasons: dict[str, str] = {}
_created: dict[str, ComputeProvider] = {}


def _class(name: str) -> type[ComputeProvider]:
    module, attribute = PROVIDERS[name]
    provider: type[ComputeProvider] = getattr(importlib.import_module(module), attribute)
    return provider


def _check_name(name: str) -> None:
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}; known are {', '.join(BACKENDS)}")


def reason_absent(name: str) -> str:
    """Why a backend cannot be used here; empty if it can. Asked once a process.

    Raises:
        ConfigError: no backend has that name.
    """
    _check_name(name)
    with _lock:
        if name not in _reasons:
            _reasons[name] = _class(name).probe() if name in PROVIDERS else "this version has no provider for it"
        return _reasons[name]


def available() -> list[str]:
    """The names of the backends that can be used, the preferred first."""
    return [name for name in BACKENDS if not reason_absent(name)]


def create(name: str) -> ComputeProvider:
    """The provider of a backend, made on first use.

    Raises:
        ConfigError: no backend has that name.
        BackendUnavailable: it is not there; says why.
    """
    provider = _created.get(name)
    if provider is not None:
        return provider
    with _lock:
        reason = reason_absent(name)
        if reason:
            raise BackendUnavailable(name, reason)
        if name not in _created:
            _created[name] = _constructed(name)
            try:
                _apply_memory_fraction(name)
            except BaseException:
                del _created[name]  # or the next call would give it without its limit
                raise
        return _created[name]


def _constructed(name: str) -> ComputeProvider:
    """A new provider. One that does not start, though its driver answered the probe, is absent from now on.

    Raises:
        BackendUnavailable: it does not start; says why.
    """
    try:
        return _class(name)()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        _reasons[name] = f"it does not start: {type(error).__name__}: {first}"
        raise BackendUnavailable(name, _reasons[name]) from error


def _created_or_reason(name: str) -> ComputeProvider | str:
    try:
        return create(name)
    except BackendUnavailable as error:
        return error.reason


def _apply_memory_fraction(name: str) -> None:
    """Keep the new provider's devices to the part of their memory that the settings give this process."""
    if settings().memory_fraction < 1.0:
        from accelerant.runtime.memory.limits import apply_limit

        for device in _created[name].devices():
            apply_limit(device=device)


def devices() -> list[ComputeDevice]:
    """Every device, the preferred backend's first; an absent backend is one entry that carries `.reason`."""
    found: list[ComputeDevice] = []
    for name in BACKENDS:
        provider = _created_or_reason(name)
        if isinstance(provider, str):
            found.append(ComputeDevice(backend=name, index=-1, name="", available=False, reason=provider))
        else:
            found += provider.devices()
    return found


def choose(backend: str = "auto", index: int = 0) -> ComputeDevice:
    """The device to use.

    Args:
        backend: a backend that must be there; "auto" means the setting's (ACCELERANT_BACKEND), and where
            that is "auto" too, the first of AUTOMATIC that is there and starts.
        index: number of the device on its backend.

    Raises:
        ConfigError: no backend has that name, or no device that index.
        BackendUnavailable: the backend is not there; says why.
    """
    wanted = settings().backend if backend == "auto" else backend
    if wanted == "auto":
        wanted = next((name for name in AUTOMATIC if not isinstance(_created_or_reason(name), str)), "cpu")
    found = create(wanted).devices()
    if not 0 <= index < len(found):
        raise ConfigError(
            f"backend {wanted!r} has {len(found)} device{'s' * (len(found) != 1)}; there is no number {index}"
        )
    return found[index]


_BY_TORCH_TYPE = {"cuda": "cuda", "opencl": "opencl", "cpu": "cpu"}


def provider_of(device: torch.device) -> ComputeProvider:
    """The provider whose devices torch calls by that name.

    Raises:
        BackendUnavailable: no provider serves that kind of tensor.
    """
    name = _BY_TORCH_TYPE.get(device.type)
    if name is None:
        raise BackendUnavailable(device.type, "no provider serves such tensors")
    return create(name)
