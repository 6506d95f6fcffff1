"""Providers, devices, kernels, dispatch, ledger; knows no op."""

from accelerant._lazy import lazy

TYPE_CHECKING = False  # of typing, whose import takes long: see accelerant/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from accelerant.runtime.provider import ComputeBackend, ComputeDevice
    from accelerant.runtime.registry import DeviceLike, devices, find_device, find_devices

__all__ = ["ComputeBackend", "ComputeDevice", "DeviceLike", "devices", "find_device", "find_devices"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__,
        __all__,
        {
            "provider": ("ComputeBackend", "ComputeDevice"),
            "registry": ("DeviceLike", "devices", "find_device", "find_devices"),
        },
    )

accelerator_on: "Callable[[str, int], Any]"
"""Makes an Accelerator without fallback on a device of a backend; the package above sets this and what follows."""

tensors_to: "Callable[[Any, Any], Any]"
"""Moves torch's tensors to a device, also of OpenCL and WebGPU."""

declaring_packages: "tuple[str, ...]" = ()
"""Packages whose modules declare Operations, to be imported for the names of all ops."""
