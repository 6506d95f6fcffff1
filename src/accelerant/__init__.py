"""Accelerated computing on any available device: neural kernels, private training, zero-knowledge proofs.

>>> import accelerant as acl
>>> acl.devices()
>>> acl.ops.layer_norm(x, weight, bias)
>>> acl.explain(acl.ops.gelu, x)
>>> print(acl.ledger())
"""
# Subpackages load on first use, so that importing the package costs little more than importing torch.

from __future__ import annotations

from accelerant import errors, runtime
from accelerant._lazy import lazy
from accelerant._renamed import missing_names, renamed_names
from accelerant._version import __version__

TYPE_CHECKING = False  # of typing, whose import would take 30 ms in which Ctrl-C prints a traceback of the command line
if TYPE_CHECKING:
    from typing import Any

    from accelerant import distributed, nn, ops, privacy, search, zk
    from accelerant.accelerator import Accelerator, AcceleratorConfig
    from accelerant.accelerator.fusion import fuse
    from accelerant.runtime.compilation import CompileOptions
    from accelerant.runtime.dispatch import explain
    from accelerant.runtime.ledger import ledger
    from accelerant.runtime.math_mode import configure_math
    from accelerant.runtime.memory import optimal_batch_size, predict_peak
    from accelerant.runtime.monitoring import measure, watch_devices
    from accelerant.runtime.provider import ComputeBackend
    from accelerant.runtime.registry import devices
    from accelerant.runtime.user_kernel import kernel
    from accelerant.tensors.tensor import to

__all__ = [
    "Accelerator", "AcceleratorConfig", "CompileOptions", "ComputeBackend", "__version__", "configure_math",
    "devices", "distributed", "errors", "explain", "fuse", "kernel", "ledger", "measure", "nn", "ops",
    "optimal_batch_size", "predict_peak", "privacy", "runtime", "search", "to", "watch_devices", "zk",
]  # fmt: skip

_NAMES = {
    "accelerator": ("Accelerator", "AcceleratorConfig"),
    "accelerator.fusion": ("fuse",),
    "tensors.tensor": ("to",),
    "runtime.compilation": ("CompileOptions",),
    "runtime.dispatch": ("explain",),
    "runtime.ledger": ("ledger",),
    "runtime.math_mode": ("configure_math",),
    "runtime.memory": ("optimal_batch_size", "predict_peak"),
    "runtime.monitoring": ("measure", "watch_devices"),
    "runtime.provider": ("ComputeBackend",),
    "runtime.registry": ("devices",),
    "runtime.user_kernel": ("kernel",),
}
"""The public names that each module of this package defines."""

_ARRAYS = "numpy.asarray, torch.as_tensor or cupy.asarray: arrays of these libraries are taken as they are"
_ELSEWHERE = {
    **dict.fromkeys(("array", "asarray", "tensor", "zeros", "ones", "arange"), _ARRAYS),
    **dict.fromkeys(("RawKernel", "RawModule", "SourceModule"), "accelerant.kernel"),
    **dict.fromkeys(("ElementwiseKernel", "ReductionKernel", "vectorize", "jit"), "accelerant.fuse"),
    **dict.fromkeys(("device", "Device", "cuda"), "accelerant.devices(), or accelerant.Accelerator(device=)"),
    "asnumpy": "numpy.asarray, or .numpy(force=True) of a torch tensor",
}
"""Names of CuPy, PyCUDA, Numba and torch -> what to write here."""

_SEARCHED = ("ops", "nn", "nn.train", "privacy", "privacy.dp", "privacy.mpc", "privacy.he", "zk", "zk.groth16")

if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none
    _of_package, __dir__ = lazy(__name__, __all__, _NAMES)
    __getattr__ = renamed_names(__name__, {"optimize": "accelerant.nn.patch"}, _of_package)
    __getattr__ = missing_names(__name__, _ELSEWHERE, __getattr__, _SEARCHED)


def _accelerator_on(backend: str, device: int) -> Accelerator:
    from accelerant.accelerator import Accelerator

    return Accelerator(backend, device, fallback=False)


def _tensors_to(x: Any, device: Any) -> Any:
    from accelerant.tensors import to

    return to(x, device)


# The runtime uses these, and imports nothing above it.
runtime.accelerator_on, runtime.tensors_to = _accelerator_on, _tensors_to
runtime.declaring_packages = ("accelerant.ops", "accelerant.privacy.dp.clipping")
