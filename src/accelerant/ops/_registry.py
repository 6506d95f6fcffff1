"""The public ops by name: each package declares its ops once, and tests, benchmarks and documentation read it here.

A package of one op is a folder of at most four files:

    __init__.py         exports the public function
    op.py               the function, its Operations and its DifferentiableOp, and the reference <op>_reference
    triton_kernels.py   the kernels <op>_fwd and <op>_bwd
    cases.py            SAMPLES, LARGE, BENCHMARKS, TOLERANCES, KERNELS and SUBJECT; or FAMILY, with these for each op
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerant.runtime.dispatch import operations

_LIBRARIES = {"cublaslt": "cuBLASLt", "cudnn": "cuDNN", "torch": "torch"}
_KERNELS = {"triton": "Triton", "hopper": "CUDA C++ for Hopper", "llvm": "LLVM on a CPU"}


@dataclass(frozen=True, slots=True)
class PublicOp:
    """A public op of a package ("accelerant.ops.gelu"), whose modules are imported on first access."""

    name: str
    package: str

    @property
    def function(self) -> Callable[..., Any]:
        """The public function."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.package), self.name)
        return function

    @property
    def reference(self) -> Callable[..., Any]:
        """The oracle of its tests, for any dtype."""
        oracle: Callable[..., Any] = getattr(importlib.import_module(f"{self.package}.op"), f"{self.name}_reference")
        return oracle

    @property
    def cases(self) -> Any:
        """The samples, tolerances, benchmarks and kernels of its cases.py."""
        module = importlib.import_module(f"{self.package}.cases")
        return module.FAMILY[self.name] if hasattr(module, "FAMILY") else module

    @property
    def row(self) -> str:
        """Its row in a table of ops: name, first sentence of the docstring, own kernels, libraries."""
        summary = (self.function.__doc__ or "").partition("\n")[0].rstrip(".")
        forward = operations().get(f"{self.name}_fwd") or operations().get(self.name)
        implementations = forward.implementations if forward is not None else ()
        kernels = [_KERNELS.get(each.name, each.name) for each in implementations if each.own]
        libraries = [_LIBRARIES.get(each.name, each.name) for each in implementations if not each.own]
        return f"| `{self.name}` | {summary} | {', '.join(kernels) or 'none'} | {', '.join(libraries)} |"


_registered: list[str] = []


def register(package: str) -> None:
    """Add a package of ops from outside accelerant.ops; the functions that it exports are its ops."""
    if package not in _registered:
        _registered.append(package)
        public_ops.cache_clear()


@functools.cache
def public_ops() -> dict[str, PublicOp]:
    """Return every public op by name: those that the packages of accelerant.ops export, and the registered ones."""
    root = importlib.import_module("accelerant.ops")
    packages = [f"{root.__name__}.{each.name}" for each in pkgutil.iter_modules(root.__path__) if each.ispkg]
    ops = {}
    for package in (*packages, *_registered):
        if package.rpartition(".")[2].startswith("_"):
            continue
        exported = importlib.import_module(package)
        for name in getattr(exported, "__all__", ()):
            if package in _registered or getattr(root, name, None) is getattr(exported, name):
                ops[name] = PublicOp(name, package)
    return dict(sorted(ops.items()))


def public_op(name: str) -> PublicOp:
    """Return the public op of a name; KeyError if there is none."""
    return public_ops()[name]
