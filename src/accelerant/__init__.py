"""Accelerated computing on any available device: neural kernels, private training, zero-knowledge proofs.

>>> import accelerant as acl
>>> acl.devices()
>>> acl.ops.layer_norm(x, weight, bias)
>>> acl.explain(acl.ops.gelu, x)
>>> print(acl.ledger())
"""
# Subpackages load on first use, so that importing the package costs little more than importing torch.

from __future__ import annotations

import importlib

from accelerant import errors
from accelerant._version import __version__

TYPE_CHECKING = False  # of typing, whose import would take 30 ms in which Ctrl-C prints a traceback of the command line
if TYPE_CHECKING:
    from typing import Any

    from accelerant import algebra, distributed, nn, ops, privacy, zk
    from accelerant.accelerator import Accelerator, AcceleratorConfig
    from accelerant.accelerator.fusion import fuse
    from accelerant.nn._patch.api import optimize
    from accelerant.ops.aten.tensor import to
    from accelerant.runtime.compilation.options import CompileOptions
    from accelerant.runtime.dispatch import explain
    from accelerant.runtime.ledger import ledger
    from accelerant.runtime.memory.batch_size import optimal_batch_size
    from accelerant.runtime.memory.peak import predict_peak
    from accelerant.runtime.monitoring.events import watch_devices
    from accelerant.runtime.monitoring.monitor import measure
    from accelerant.runtime.registry import devices
    from accelerant.runtime.user_kernel import kernel

__all__ = [
    "Accelerator", "AcceleratorConfig", "CompileOptions", "__version__", "algebra", "devices", "distributed",
    "errors", "explain", "fuse", "kernel", "ledger", "measure", "nn", "ops", "optimal_batch_size", "optimize",
    "predict_peak", "privacy", "to", "watch_devices", "zk",
]  # fmt: skip

_SUBPACKAGES = ("algebra", "distributed", "nn", "ops", "privacy", "zk")
_NAMES = {
    "Accelerator": "accelerant.accelerator",
    "AcceleratorConfig": "accelerant.accelerator",
    "CompileOptions": "accelerant.runtime.compilation.options",
    "devices": "accelerant.runtime.registry",
    "explain": "accelerant.runtime.dispatch",
    "fuse": "accelerant.accelerator.fusion",
    "kernel": "accelerant.runtime.user_kernel",
    "ledger": "accelerant.runtime.ledger",
    "measure": "accelerant.runtime.monitoring.monitor",
    "optimal_batch_size": "accelerant.runtime.memory.batch_size",
    "optimize": "accelerant.nn._patch.api",
    "predict_peak": "accelerant.runtime.memory.peak",
    "to": "accelerant.ops.aten.tensor",
    "watch_devices": "accelerant.runtime.monitoring.events",
}


if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none

    def __getattr__(name: str) -> Any:
        if name in _SUBPACKAGES:
            return importlib.import_module(f"accelerant.{name}")
        if name in _NAMES:
            return getattr(importlib.import_module(_NAMES[name]), name)
        raise AttributeError(f"module 'accelerant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
