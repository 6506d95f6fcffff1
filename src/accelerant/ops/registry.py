"""The public ops by name: each package declares its ops once, and tests, benchmarks and documentation read it here.

A package of one op is a folder of at most four files:

    __init__.py         exports the public function
    op.py               the function, its Operations and its DifferentiableOp, and the reference <op>_reference
    triton_kernels.py   the kernels <op>_fwd and <op>_bwd
    cases.py            SAMPLES, LARGE, BENCHMARKS, TOLERANCES, KERNELS and SUBJECT; or FAMILY, with these for each op

Other packages add ops by an entry point of the group "accelerant.ops" (`NAME = "package"`), or by `register`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerant.errors import ConfigError
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


_ENTRY_POINTS = "accelerant.ops"
_ops: dict[str, PublicOp] = {}
_watching: list[Callable[[PublicOp], None]] = []


def register(package: str) -> None:
    """Add the ops of a package outside accelerant.ops, which are the functions that it exports.

    Accelerators, the service, `accelerant bench` and the table of ops have them from then on. Raises ConfigError where
    another op has the name of one.
    """
    known, names = public_ops(), importlib.import_module(package).__all__
    found = [PublicOp(name, package) for name in names]
    if taken := [op.name for op in found if known.get(op.name, op) != op]:
        raise ConfigError(f"register: {package} exports {taken[0]}, which is an op of {known[taken[0]].package}")
    _add([op for op in found if op.name not in known])


def _add(added: list[PublicOp]) -> None:
    _ops.update({op.name: op for op in added})
    for watcher in _watching:
        for op in added:
            watcher(op)


def watch(watcher: Callable[[PublicOp], None]) -> None:
    """Call a function with every public op, and with those that are added later."""
    for op in public_ops().values():
        watcher(op)
    _watching.append(watcher)


def public_ops() -> dict[str, PublicOp]:
    """Return every public op by name: those of accelerant.ops, of installed packages, and the registered ones."""
    if not _ops:
        from importlib.metadata import entry_points  # 10 ms

        root = importlib.import_module("accelerant.ops")
        _add([PublicOp(name, ".".join(getattr(root, name).__module__.split(".")[:3])) for name in root.__all__])
        for point in entry_points(group=_ENTRY_POINTS):
            try:
                register(point.value)
            except Exception as error:  # noqa: BLE001 - whatever another package raises
                text = "ops of the entry point %r (%s) are left out: %s: %s"
                logging.getLogger("accelerant").warning(text, point.name, point.value, type(error).__name__, error)
    return dict(sorted(_ops.items()))


def public_op(name: str) -> PublicOp:
    """Return the public op of a name; KeyError if there is none."""
    return public_ops()[name]
