"""Providers, devices, kernels, dispatch, ledger; knows no op."""

from accelerant._lazy import lazy

TYPE_CHECKING = False  # of typing, whose import takes long: see accelerant/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from accelerant.runtime import compilation, dispatch, memory, monitoring, registry, streams, time_limit
    from accelerant.runtime.provider import ComputeBackend, ComputeDevice
    from accelerant.runtime.registry import DeviceLike, devices, find_device, find_devices, reason_absent

__all__ = [
    "ComputeBackend", "ComputeDevice", "DeviceLike", "compilation", "devices", "dispatch", "find_device",
    "find_devices", "memory", "monitoring", "reason_absent", "registry", "streams", "time_limit",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__, ("registry",))

accelerator_on: "Callable[[str, int], Any]"
"""Makes an Accelerator without fallback on a device of a backend; the package above sets this and what follows."""

tensors_to: "Callable[[Any, Any], Any]"  # moves torch's tensors to a device, also of OpenCL and WebGPU

declaring_packages: "tuple[str, ...]" = ()
"""Packages whose modules declare Operations, to be imported for the names of all ops."""
