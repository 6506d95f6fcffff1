"""The backends of this machine, and the choice of a device.

A broken driver can end the process that loads it, so `ComputeProvider.probe` first tests each backend, in a child
process where that is needed; only then is its provider made in this process, once.

This module imports no provider, and nothing that imports it: providers are loaded by name when they are asked for.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, TypeAlias

from accelerant.config import settings, similar
from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime.host import fork_safe
from accelerant.runtime.html_page import table, text_table
from accelerant.runtime.provider import ComputeDevice, ComputeProvider

if TYPE_CHECKING:
    import torch  # the CPU's integer kernels run without it

__all__ = [
    "BACKENDS", "PROVIDERS", "DeviceLike", "Devices", "automatic_backends", "backend_named", "choose", "create",
    "devices", "find_device", "provider_of", "reason_absent", "reason_without_kernels",
]  # fmt: skip

BACKENDS = ("cuda", "rocm", "apple", "opencl", "webgpu", "cpu")
"""Every backend of the design, the preferred first."""

PROVIDERS: dict[str, tuple[str, str]] = {
    "cuda": ("accelerant.runtime.providers.cuda", "CudaProvider"),
    "rocm": ("accelerant.runtime.providers.torch_devices", "RocmProvider"),
    "apple": ("accelerant.runtime.providers.torch_devices", "AppleProvider"),
    "opencl": ("accelerant.runtime.providers.opencl", "OpenclProvider"),
    "cpu": ("accelerant.runtime.providers.cpu", "CpuProvider"),
}
"""Backend -> module and class of its provider; a new backend adds a line here."""

_ALIASES = {
    "amd": "rocm", "apple_silicon": "apple", "hip": "rocm", "metal": "apple", "mps": "apple", "nvidia": "cuda",
}  # fmt: skip

DeviceLike: TypeAlias = "str | torch.device | ComputeDevice"
"""A device's name ("cuda", "cuda:1", "opencl:0"), a torch.device, or a device from the registry."""

_lock = fork_safe(threading.RLock())
_reasons: dict[str, str] = {}
_created: dict[str, ComputeProvider] = {}


def _provider_class(name: str) -> type[ComputeProvider]:
    module, attribute = PROVIDERS[name]
    provider: type[ComputeProvider] = getattr(importlib.import_module(module), attribute)
    return provider


def backend_named(name: object) -> str:
    """Return the backend, or "auto", that a name in any case means; raise ConfigError for an unknown one.

    Makers and torch's types name backends too: "mps", "apple_silicon", "nvidia", ...; "gpu" is the GPU that is present.
    """
    text = str(name).strip().lower().replace("-", "_").replace(" ", "_")
    found = _ALIASES.get(text, text)
    if found == "gpu":
        present = (name for name in automatic_backends() if name != "cpu" and not reason_absent(name))
        return next(present, "cuda")
    if found not in (*BACKENDS, "auto"):
        known = ", ".join(BACKENDS)
        raise ConfigError(f"unknown backend {name!r}{similar(text, (*BACKENDS, *_ALIASES))}; known are {known}")
    return found


def _parsed(device: object) -> tuple[str, int | None]:
    """Return the backend and the number that a device's name has, None if it has none."""
    name, colon, number = str(device).partition(":")
    if colon and not number.isdecimal():
        raise ConfigError(f"device: wanted a backend's name and perhaps an index, like 'cuda:0'; got {str(device)!r}")
    return backend_named(name), int(number) if colon else None


def reason_absent(name: str) -> str:
    """Return why a backend cannot be used here; empty if it can. Probed once a process."""
    name = backend_named(name)
    with _lock:
        if name not in _reasons:
            _reasons[name] = (
                _provider_class(name).probe() if name in PROVIDERS else "this version has no provider for it"
            )
        return _reasons[name]


def automatic_backends() -> list[str]:
    """Return the backends that the automatic choice considers, the preferred first."""
    return [name for name in BACKENDS if name in PROVIDERS and _provider_class(name).automatic]


def create(name: str) -> ComputeProvider:
    """Return the provider of a backend, made on first use; raise BackendUnavailable, which says why, without one."""
    provider = _created.get(name)
    if provider is not None:
        return provider
    with _lock:
        reason = reason_absent(name)
        if reason:
            raise BackendUnavailable(name, reason)
        if name not in _created:
            try:
                provider = _provider_class(name)()
            except Exception as error:  # its driver answered the probe, and still it does not start
                first = (str(error).splitlines() or [""])[0]
                _reasons[name] = f"it does not start: {type(error).__name__}: {first}"
                raise BackendUnavailable(name, _reasons[name]) from error
            fraction = settings().memory_fraction
            if fraction < 1.0:
                for device in provider.devices():
                    provider.limit_fraction(fraction, device)
            _created[name] = provider
        return _created[name]


def _create_or_reason(name: str) -> ComputeProvider | str:
    try:
        return create(name)
    except BackendUnavailable as error:
        return error.reason


class Devices(list[ComputeDevice]):
    """A list of devices that prints as a table."""

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("device", "name", "memory", "architecture", "absent because")]
        for device in self:
            memory = f"{device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else ""
            label = device.label if device.available else device.backend
            rows.append((label, device.name, memory, device.architecture, device.reason))
        return rows

    def __repr__(self) -> str:
        return "\n".join(text_table(self._rows(), numbers=("memory",)))

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        return table(head, ([("", cell) for cell in row] for row in rows))


def devices() -> Devices:
    """Return every device, the preferred backend's first; an absent backend is one entry with a `reason`."""
    listed = Devices()
    for name in BACKENDS:
        provider = _create_or_reason(name)
        if isinstance(provider, str):
            listed.append(ComputeDevice(backend=name, index=-1, name="", available=False, reason=provider))
        else:
            listed += provider.devices()
    return listed


def choose(backend: str | torch.device = "auto", index: int = 0) -> ComputeDevice:
    """Return a device of a backend that must be present, or raise ConfigError or BackendUnavailable, which says why.

    The backend may end in the index, as in "cuda:1"; see backend_named for its names. "auto" is the setting's
    (ACCELERANT_BACKEND), and if that is "auto" too, the first of automatic_backends() that starts.
    """
    name, number = _parsed(backend)
    if number is not None:
        if index not in (0, number):
            raise ConfigError(f"device {str(backend)!r} and index {index} are not the same device")
        index = number
    if name == "auto":
        name = backend_named(settings().backend)
    if name == "auto":
        name = next((name for name in automatic_backends() if not isinstance(_create_or_reason(name), str)), "cpu")
    present = create(name).devices()
    if not 0 <= index < len(present):
        raise ConfigError(
            f"backend {name!r} has {len(present)} device{'s' * (len(present) != 1)}; there is no number {index}"
        )
    return present[index]


def find_device(device: DeviceLike = "auto") -> ComputeDevice:
    """Return the device that a name, a torch.device or a ComputeDevice means; raise as choose() does.

    "auto" is the first device of the setting's backend, "cuda" torch's current CUDA device.
    """
    import torch

    if isinstance(device, ComputeDevice):
        return choose(device.backend, device.index)
    if not isinstance(device, (str, torch.device)):
        raise ConfigError(f"device: wanted a name like 'cuda:0' or a torch.device, got {device!r}")
    name, number = _parsed(device)
    if name == "cuda" and torch.version.hip:
        name = "rocm"
    if number is not None:
        return choose(name, number)
    chosen = choose(name)
    if chosen.torch_type == "cuda" and torch.cuda.current_device() != chosen.index:
        return choose(chosen.backend, torch.cuda.current_device())
    return chosen


def provider_of(device: torch.device) -> ComputeProvider:
    """Return the provider of the tensors on a torch device, or raise BackendUnavailable.

    An accelerator of torch that no backend serves (xpu, hpu, ...) gets a provider without kernels: torch's own
    operations run there.
    """
    for name in PROVIDERS:
        if _serves(name, device.type):
            return create(name)
    provider = _created.get(device.type)
    if provider is None:
        from accelerant.runtime.providers.torch_devices import torch_provider  # imports torch, as its callers have

        provider = _created[device.type] = torch_provider(device.type)
    return provider


def reason_without_kernels(device: torch.device) -> str:
    """Return why only torch's operations run on a device's tensors; empty where Accelerant has kernels."""
    if device.type == "meta":
        return ""
    name = next((name for name in PROVIDERS if _serves(name, device.type)), device.type)
    if name in PROVIDERS and _provider_class(name).dialects:
        return ""
    return f"Accelerant has no kernels for {name}: torch's operations run"


def _serves(name: str, torch_type: str) -> bool:
    """Return whether a backend's provider serves tensors of a type; ROCm's tensors have the type "cuda", too."""
    kind = _provider_class(name)
    if kind.torch_type != torch_type:
        return False
    if torch_type != "cuda":
        return True
    import torch

    return name == ("rocm" if torch.version.hip else "cuda")
