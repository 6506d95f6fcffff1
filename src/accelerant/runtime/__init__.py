"""Providers, devices, kernels, dispatch, ledger; knows no op."""

TYPE_CHECKING = False  # of typing, whose import takes long: see accelerant/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

accelerator_on: "Callable[[str, int], Any]"
"""Makes an Accelerator without fallback on a device of a backend; the package above sets this and what follows."""

tensors_to: "Callable[[Any, Any], Any]"
"""Moves torch's tensors to a device, also of OpenCL and WebGPU."""

declaring_packages: "tuple[str, ...]" = ()
"""Packages whose modules declare Operations, to be imported for the names of all ops."""
