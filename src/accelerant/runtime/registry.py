"""The backends of this machine, and the choice of a device; imports no provider.

The automatic choice takes the first device, in the order of BACKENDS, that is hardware and passes its self-test. A
broken driver can end the process that loads it, so `ComputeProvider.probe` tests each backend first, in a child where
that is needed. Other packages add backends by an entry point of "accelerant.providers", or by `register`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from accelerant.config import settings, similar
from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime.files import clipped
from accelerant.runtime.host import fork_safe
from accelerant.runtime.html_page import table, text_table
from accelerant.runtime.provider import ComputeBackend, ComputeDevice, ComputeProvider

if TYPE_CHECKING:
    import torch  # the CPU's integer kernels run without it

__all__ = [
    "BACKENDS", "DeviceLike", "Devices", "backends", "create", "devices", "find_device", "find_devices",
    "reason_absent", "register", "unregister",
]  # fmt: skip

BACKENDS = tuple(backend.value for backend in ComputeBackend)
"""Every backend of the design, the preferred first; `backends()` adds those of other packages."""

PROVIDERS: dict[str, tuple[str, str]] = {
    "cuda": ("accelerant.runtime.providers.cuda", "CudaProvider"),
    "rocm": ("accelerant.runtime.providers.torch_devices", "RocmProvider"),
    "apple": ("accelerant.runtime.providers.torch_devices", "AppleProvider"),
    "opencl": ("accelerant.runtime.providers.opencl", "OpenclProvider"),
    "webgpu": ("accelerant.runtime.providers.webgpu", "WebgpuProvider"),
    "cpu": ("accelerant.runtime.providers.cpu", "CpuProvider"),
}
"""Backend -> module and class of its provider; a new backend adds a line here. Entry points are added when needed."""

_ENTRY_POINTS = "accelerant.providers"
_ALIASES = {
    "amd": "rocm", "apple_silicon": "apple", "hip": "rocm", "metal": "apple", "mps": "apple", "nvidia": "cuda",
    "vulkan": "webgpu",
}  # fmt: skip

DeviceLike: TypeAlias = "str | torch.device | ComputeDevice | None"
"""What `device` arguments take: the name of a backend, perhaps with a number ("cpu", "cuda", "opencl:1"), a
torch.device, or an entry of devices(); "auto", or None where no array says it, is the automatic choice."""

_FORMS = "a name such as 'cpu', 'cuda' or 'cuda:1', 'auto' or None, a torch.device, or an entry of accelerant.devices()"

_lock = fork_safe(threading.RLock())
_reasons: dict[str, str] = {}
_created: dict[str, ComputeProvider] = {}
_tested: dict[ComputeDevice, str] = {}  # device -> what its self-test found, empty if it passed
_registered: dict[str, type[ComputeProvider]] = {}
_searched: list[str] = []  # the groups of entry points that were read
_ProviderT = TypeVar("_ProviderT", bound="ComputeProvider | type[ComputeProvider]")


def _provider_class(name: str) -> type[ComputeProvider]:
    if name in _registered:
        return _registered[name]
    module, attribute = PROVIDERS[name]
    provider: type[ComputeProvider] = getattr(importlib.import_module(module), attribute)
    return provider


# --- backends of other packages --------------------------------------------------------------------------------------
def register(provider: _ProviderT) -> _ProviderT:
    """Add a backend under its provider's `name`, in place of an earlier one, and return the provider.

    Takes a class of ComputeProvider, also as a decorator, or a provider. Raises ConfigError for anything else, a class
    with methods missing, and a name that is Accelerant's own or is not in lower case.
    """
    kind = provider if isinstance(provider, type) else type(provider)
    if not issubclass(kind, ComputeProvider):
        raise ConfigError(f"register: wanted a ComputeProvider or a class of it, got {provider!r}")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"register: {kind.__name__} lacks {missing}")
    name = getattr(kind, "name", "")
    if name in _taken() or not name.isidentifier() or name != name.lower():
        raise ConfigError(f"register: {kind.__name__}.name is {name!r}; wanted a lower-case name that is not in use")
    with _lock:
        unregister(name)
        _registered[name] = kind
        if isinstance(provider, ComputeProvider):
            _created[name] = provider
    return provider


def unregister(name: str) -> None:
    """Remove a backend that was registered; does nothing if there is none of that name. Its provider stays usable."""
    from accelerant.runtime.ledger import forget  # it imports this layer's ledger

    with _lock:
        if _registered.pop(name, None) is not None:
            forget(name)
            _created.pop(name, None)
            _reasons.pop(name, None)
            for device in [device for device in _tested if device.backend == name]:
                del _tested[device]


def backends() -> tuple[str, ...]:
    """Return every backend, the preferred first: Accelerant's own, and before the CPU those of other packages."""
    _read_entry_points()
    others = [name for name in (*PROVIDERS, *_registered) if name not in BACKENDS]
    return (*BACKENDS[:-1], *dict.fromkeys(others), BACKENDS[-1])


def _taken() -> set[str]:
    return {*BACKENDS, *_ALIASES, "auto", "gpu"}


def _read_entry_points() -> None:
    """Add the backends of installed packages to PROVIDERS, once; nothing of theirs is imported."""
    with _lock:
        if _ENTRY_POINTS in _searched:
            return
        _searched.append(_ENTRY_POINTS)
        from importlib.metadata import entry_points  # 10 ms, for those who need it

        for point in entry_points(group=_ENTRY_POINTS):
            name = point.name.strip().lower()
            if name in _taken() or name in PROVIDERS:
                text = "entry point %r (%s) of %s is ignored: the name is in use"
                logging.getLogger("accelerant").warning(text, point.name, point.value, _ENTRY_POINTS)
            else:
                PROVIDERS[name] = (point.module, point.attr)


def _error_text(what: str, error: BaseException) -> str:
    return f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _probed(name: str) -> str:
    """Return why a backend that has a provider cannot be used; errors of other packages become reasons."""
    try:
        kind: Any = _provider_class(name)  # of any type, from another package
        if name not in BACKENDS and not (isinstance(kind, type) and issubclass(kind, ComputeProvider)):
            return f"its provider is no class of ComputeProvider: {kind!r}"
        if name not in BACKENDS and (inspect.isabstract(kind) or getattr(kind, "name", "") != name):
            missing = ", ".join(sorted(kind.__abstractmethods__)) or f"the name {name!r}"
            return f"its provider {kind.__name__} lacks {missing}"
        return str(kind.probe())
    except (Exception, SystemExit) as error:
        if name in BACKENDS:
            raise
        return _error_text("its provider does not load", error)


def backend_named(name: object) -> str:
    """Return the backend, or "auto", of a name in any case, also a maker's ("nvidia"); else ConfigError."""
    text = str(name).strip().lower().replace("-", "_").replace(" ", "_")
    if (found := _ALIASES.get(text, text)) == "gpu":
        return "cuda" if (chosen := _automatic_choice().backend) == "cpu" else chosen
    if found not in (*BACKENDS, "auto") and found not in backends():
        known = ", ".join(backends())
        raise ConfigError(f"unknown backend {name!r}{similar(text, (*backends(), *_ALIASES))}; known are {known}")
    return found


_INDEX_DIGITS = 10  # digits of a device's number that is too long to be one


def _parsed(device: object) -> tuple[str, int | None]:
    """Return the backend and the number that a device's name has, None if it has none."""
    given = clipped(device) if isinstance(device, int | list | tuple) else str(device)
    name, colon, number = given.partition(":")
    if colon and not (number.isdecimal() and len(number) < _INDEX_DIGITS):
        raise ConfigError(f"device must be {_FORMS}; got {clipped(given)}")
    return backend_named(name), int(number) if colon else None


def reason_absent(name: str) -> str:
    """Return why a backend cannot be used here; empty if it can. Probed once a process."""
    name = backend_named(name)
    with _lock:
        if name not in PROVIDERS and name not in _registered:
            return "this version has no provider for it"
        if name not in _reasons:
            _reasons[name] = _probed(name)
        return _reasons[name]


def reason_without_gpu() -> str:
    """Return why the automatic choice is the CPU: the reason of the backend that torch is built for; else empty."""
    if _automatic_choice().backend != "cpu":
        return ""
    if aside := [f"{device.label} ({device.name}) is set aside: {why}" for device, why in _tested.items() if why]:
        return "; ".join(aside)
    import torch

    return reason_absent("rocm" if torch.version.hip else "apple" if sys.platform == "darwin" else "cuda")


def automatic_backends() -> list[str]:
    """Return the backends that the automatic choice considers, the preferred first."""
    usable = (name for name in backends() if name in BACKENDS or not reason_absent(name))
    return [name for name in usable if (name in PROVIDERS or name in _registered) and _provider_class(name).automatic]


def create(name: str) -> ComputeProvider:
    """Return the provider of a backend, made on first use; raise BackendUnavailable without one."""
    if (provider := _created.get(name)) is not None:
        return provider
    with _lock:
        name = backend_named(name)
        if reason := reason_absent(name):
            raise BackendUnavailable(name, reason)
        if name not in _created:
            try:
                provider = _provider_class(name)()
                listed = provider.devices()
                if not all(isinstance(device, ComputeDevice) for device in listed):
                    raise TypeError(f"devices() returned {listed!r}")
            except Exception as error:  # its driver answered the probe, and still it does not start
                _reasons[name] = _error_text("it does not start", error)
                raise BackendUnavailable(name, _reasons[name]) from error
            fraction = settings().memory_fraction
            for device in listed if fraction != 1.0 else ():
                provider.limit_fraction(provider.free_fraction(device) if fraction == "auto" else fraction, device)
            _created[name] = provider
        return _created[name]


def _devices_or_reason(name: str, *, hidden: bool = False) -> list[ComputeDevice] | str:
    try:
        provider = create(name)
        return provider.devices() + (provider.hidden_devices() if hidden else [])
    except BackendUnavailable as error:
        return error.reason
    except Exception as error:
        if name in BACKENDS:
            raise
        return _error_text("it does not list its devices", error)


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
    for name in backends():
        present = _devices_or_reason(name, hidden=True)
        if isinstance(present, str):
            listed.append(ComputeDevice(backend=name, index=-1, name="", available=False, reason=present))
        else:
            listed += (
                replace(device, available=False, reason=f"set aside: {why}") if (why := _tested.get(device)) else device
                for device in present
            )
    return listed


def _automatic_choice(*, torch_tensors: bool = False) -> ComputeDevice:
    for name in automatic_backends():
        if not _provider_class(name).may_have_hardware():
            continue
        listed = _devices_or_reason(name)
        for device in () if isinstance(listed, str) else listed:
            if not (torch_tensors and not device.torch_device) and not _unfit(device):
                return device
    return create("cpu").devices()[0]


def _unfit(device: ComputeDevice) -> str:
    """Return why the automatic choice passes over a device; empty if it does not."""
    if device.backend == "cpu":
        return ""
    kinds = _provider_class(device.backend).automatic_kinds
    if kinds and device.properties.get("kind") not in kinds:
        return f"it is a {device.properties.get('kind')}"
    return "it is software" if device.software else _set_aside(device)


def _set_aside(device: ComputeDevice) -> str:
    """Return why a device failed its self-test, empty if it passed; tested once a process."""
    with _lock:
        if device not in _tested:
            try:
                found = create(device.backend).self_test(device.index)
            except Exception as error:  # noqa: BLE001 - whatever a driver raises
                found = _error_text("the self-test does not run", error)
            if found is None:
                return ""
            _tested[device] = found
            if _tested[device]:
                text = "%s (%s) is set aside: %s"
                logging.getLogger("accelerant").warning(text, device.label, device.name, _tested[device])
        return _tested[device]


def find_device(device: DeviceLike = None, *, index: int | None = None, torch_tensors: bool = False) -> ComputeDevice:
    """Return the device that a `device` argument means.

    "cuda" is torch's current CUDA device; another backend's name alone is its first device. None and "auto" are the
    first device of the setting's backend (ACCELERANT_BACKEND), and if that is "auto" too, the automatic choice: the
    first hardware that passes its self-test, with `torch_tensors` among devices on which torch has tensors. "auto:1",
    or an `index` beside a name without a number, is the one of that number on the same backend.

    Raises:
        ConfigError: no such backend or number, or a value of another type.
        BackendUnavailable: the backend is absent; says why.
    """
    if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
        several = "; to share calls among several: AcceleratorConfig(devices=2)" * isinstance(index, list | tuple)
        raise ConfigError(f"device must be a number of the backend, such as 0; got {clipped(index)}{several}")
    name, number = _backend_and_number(device)
    if number is not None and index not in (None, 0, number):
        raise ConfigError(f"device {str(device)!r} and index {index} are not the same device")
    number = index if number is None else number
    if name == "auto":
        name = backend_named(settings().backend)
    if automatic := name == "auto":
        chosen = _automatic_choice(torch_tensors=torch_tensors)
        if not number:
            current = chosen if number == 0 else _current(chosen)
            return chosen if current is not chosen and _set_aside(current) else current
        name = chosen.backend
    present = create(name).devices()
    if not 0 <= (number or 0) < len(present):
        raise ConfigError(
            f"backend {name!r} has {len(present)} device{'s' * (len(present) != 1)}; "
            f"there is no number {clipped(number or 0)}"
        )
    found = present[number or 0]
    if automatic and (reason := _unfit(found)):
        raise BackendUnavailable(
            name, f"{found.label} is not chosen automatically, {reason}; its name chooses it in any case"
        )
    return _current(found) if number is None else found


def _backend_and_number(device: DeviceLike) -> tuple[str, int | None]:
    if isinstance(device, ComputeDevice):
        if device.index < 0:  # an entry of devices() for a backend that is absent
            raise BackendUnavailable(device.backend, device.reason)
        return device.backend, device.index
    loaded = sys.modules.get("torch")
    if not (device is None or isinstance(device, str) or (loaded and isinstance(device, loaded.device))):
        raise ConfigError(f"device must be {_FORMS}; got {clipped(device)}")
    name, number = _parsed("auto" if device is None else device)
    if name == "cuda":
        import torch

        name = "rocm" if torch.version.hip else name
    return name, number


def _current(device: ComputeDevice) -> ComputeDevice:
    """Return torch's current device of a backend whose tensors have the type "cuda"; other devices as they are."""
    if device.torch_type != "cuda":
        return device
    import torch

    index = torch.cuda.current_device() if torch.cuda.is_initialized() else device.index
    return device if index == device.index else create(device.backend).devices()[index]


def is_automatic(device: object) -> bool:
    """Return whether a `device` argument names none: None, or "auto"."""
    return device is None or (isinstance(device, str) and device.strip().lower() == "auto")


def find_devices(devices: DeviceLike | Iterable[DeviceLike]) -> list[ComputeDevice]:
    """Return the devices that a `devices` argument means: several of what find_device takes, or one alone.

    Raises as find_device does; ConfigError also for an empty sequence.
    """
    several = devices if isinstance(devices, Iterable) and not isinstance(devices, str) else [devices]
    if not (found := [find_device(device) for device in several]):
        raise ConfigError(f"devices must be at least one of them; each is {_FORMS}; got {clipped(devices)}")
    return found


def provider_of(device: torch.device) -> ComputeProvider:
    """Return the provider of a torch device's tensors, without kernels if no backend serves it, or raise."""
    if name := _server(device.type):
        return create(name)
    if (provider := _created.get(device.type)) is None:
        from accelerant.runtime.providers.torch_devices import torch_provider  # imports torch, as its callers have

        provider = _created[device.type] = torch_provider(device.type)
    return provider


def reason_without_kernels(device: torch.device) -> str:
    """Return why only torch's operations run on a device's tensors; empty where Accelerant has kernels."""
    if device.type == "meta":
        return ""
    name = _server(device.type) or device.type
    if name != "rocm" and (name in PROVIDERS or name in _registered) and _provider_class(name).dialects:
        return ""
    return f"Accelerant has no kernels for {name}: torch's operations run"


def _server(torch_type: str) -> str:
    """Return the backend of torch's tensors of a type, Accelerant's own first; empty for none."""
    for name in PROVIDERS:
        if name in BACKENDS and _serves(name, torch_type):
            return name
    others = (name for name in backends() if name not in BACKENDS and not reason_absent(name))
    return next((name for name in others if _serves(name, torch_type)), "")


def _serves(name: str, torch_type: str) -> bool:
    """Return whether a backend's provider serves tensors of a type; ROCm's tensors have the type "cuda", too."""
    if _provider_class(name).torch_type != torch_type:
        return False
    if torch_type != "cuda":
        return True
    import torch

    return name == ("rocm" if torch.version.hip else "cuda")
