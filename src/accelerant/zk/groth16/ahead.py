"""The first proof on a machine: a process beside this one compiles half of the kernels, the other half is done here.

LLVM, as llvmlite has it, works on one thread at a time. What the other process compiles goes to the disk cache. That it
cannot start, dies or hangs, or that the cache cannot be written, costs the time to compile here. It is for programs of
our own, which know that sys.executable is a Python that has this package; a library does not start processes.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from typing import Any

import numpy as np

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.pairing import product_is_one
from accelerant.algebra.curve.parameters import Family, family_of
from accelerant.algebra.curve.program import kernel_source
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import HOST
from accelerant.runtime import registry
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.host import usable_cores
from accelerant.runtime.providers.cpu import CpuProvider
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.groth16.quotient import quotient, scalars_of
from accelerant.zk.groth16.sparse import SparseMatrix

__all__ = ["compile_ahead", "work"]

_PROGRAM = "import sys; from accelerant.zk.groth16.ahead import work; work(sys.argv[1], int(sys.argv[2]))"

_PAIRINGS = 4
"""Of a verification."""

_PATIENCE_S = 30.0
"""For one kernel, which takes a second or two, or some more on a busy machine: the process may hang or be stopped."""

_MOST_POINTS = 1 << 17
"""Of a domain whose transforms are tried there: larger ones take as long as compiling them does."""


def compile_ahead(family: str, domain_size: int) -> None:
    """Have kernels compiled, if the cache has not the first of them and there is a core to spare.

    Args:
        family: "bn254" or "bls12_381".
        domain_size: points of the transforms.
    """
    provider = registry.create("cpu")
    if not isinstance(provider, CpuProvider) or usable_cores() == 1 or not sys.executable:
        return
    if KernelCache().has(provider.key_of(kernel_source(family_of(family).g1, "curve_mul"))):
        return
    with contextlib.suppress(OSError):  # no more processes are allowed, or no program has that name
        provider.wait_for = _Beside(family, domain_size).wait


def work(family: str, domain_size: int) -> None:
    """Do small things that need the kernels; print the key of each before it is asked for."""
    provider = registry.create("cpu")
    if isinstance(provider, CpuProvider):
        provider.wait_for = lambda key: print(key, flush=True)
    _try(family_of(family), domain_size)


def _try(family: Family, domain_size: int) -> None:
    """In the order in which a proof asks for them; the sums of multiples are compiled by who waits for this process."""
    curves: tuple[Curve[Any], ...] = (family.g1, family.g2)
    one = np.array([[1, 0, 0, 0]], np.uint64)
    points = [np.zeros((1, *curve.shape), np.uint64) for curve in curves]
    for curve, point in zip(curves, points, strict=True):
        launch.multiply(HOST, curve, point, one)
    if domain_size <= _MOST_POINTS:
        field, none = scalars_of(family), np.zeros(0, np.int64)
        quotient(field, SparseMatrix(field, 2 * domain_size, none, none, np.zeros((0, 4), np.uint64)), one)
    for curve, point in zip(curves, points, strict=True):
        launch.add(HOST, curve, point, point)
    generators = [np.stack([curve_named(curve.name).generator] * _PAIRINGS) for curve in curves]
    product_is_one(family, *generators)


class _Beside:
    """The process."""

    def __init__(self, family: str, domain_size: int) -> None:
        self._at, self._useless = "", False
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, family, str(domain_size)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        threading.Thread(target=self._listen, name="accelerant-ahead", daemon=True).start()

    def wait(self, key: str) -> None:
        """Return when that process is not at work on a kernel: it may have made it, or not begun.

        A process that takes too long, or whose kernel is not in the cache afterwards, is ended.
        """
        with self._changed:
            if self._at != key:
                return
            in_time = self._changed.wait_for(lambda: self._at != key, _PATIENCE_S)
        if not in_time or not KernelCache().has(key):
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._useless = True
        self._now("")

    def _listen(self) -> None:
        with self._process:
            for line in self._process.stdout or ():
                self._now(line.strip())
            self._now("")

    def _now(self, key: str) -> None:
        with self._changed:
            self._at = "" if self._useless else key
            self._changed.notify_all()
