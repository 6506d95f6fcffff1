"""Compilation of a first proof's CPU kernels in two processes.

llvmlite compiles on one thread at a time, so a second process compiles half of the kernels into the disk cache. If it
fails, this process compiles everything. Only the command line uses it: a library starts no processes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.launch import kernel_source
from accelerant.algebra.curve.pairing import product_is_one
from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import HOST
from accelerant.runtime import registry
from accelerant.runtime.compilation.cache import KernelCache, compiling
from accelerant.runtime.host import python_child, usable_cores
from accelerant.runtime.providers.cpu import CpuProvider
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.groth16.matrices import SparseMatrix, quotient, snarkjs_scalar_field

_PROGRAM = "import sys; from accelerant.zk.groth16.precompile import work; work(sys.argv[1], int(sys.argv[2]))"

_PAIRINGS = 4  # Pairings of a verification
_PATIENCE_S = 30.0  # Longest wait for one kernel, which takes a second or two, more on a busy machine
_LARGEST_DOMAIN = 1 << 17  # Larger transforms, run to compile their kernels, take as long as compiling them


def precompile_kernels(family: str, domain_size: int) -> None:
    """Start a process that compiles kernels, if they are not cached and a second core is usable."""
    provider = registry.create("cpu")
    if not isinstance(provider, CpuProvider) or usable_cores() == 1 or not sys.executable:
        return
    if KernelCache().has(provider.key_of(kernel_source(family_of(family).g1, "curve_mul"))):
        return
    with contextlib.suppress(OSError):  # the process limit is reached, or the executable is missing
        provider.wait_for = _CompilerProcess(family, domain_size).wait


def work(family: str, domain_size: int) -> None:
    """Run small inputs through a proof's kernels, but those of sums, printing each key before it is compiled."""
    provider = registry.create("cpu")
    if isinstance(provider, CpuProvider):
        provider.wait_for = lambda key: print(key, flush=True)
    pairing = family_of(family)
    curves: tuple[Curve[Any], ...] = (pairing.g1, pairing.g2)
    one = np.array([[1, 0, 0, 0]], np.uint64)
    points = [np.zeros((1, *curve.shape), np.uint64) for curve in curves]
    for curve, point in zip(curves, points, strict=True):
        launch.multiply(HOST, curve, point, one)
    if domain_size <= _LARGEST_DOMAIN:
        field, none = snarkjs_scalar_field(pairing), np.zeros(0, np.int64)
        quotient(SparseMatrix.from_entries(field, 2 * domain_size, none, none, np.zeros((0, 4), np.uint64)), one)
    for curve, point in zip(curves, points, strict=True):
        launch.add(HOST, curve, point, point)
    generators = [np.stack([curve_named(curve.name).generator] * _PAIRINGS) for curve in curves]
    product_is_one(pairing, *generators)


class _CompilerProcess:
    """The second process, and the key of the kernel it is compiling."""

    def __init__(self, family: str, domain_size: int) -> None:
        self._at, self._ended, self._pid = "", False, os.getpid()
        self._changed = threading.Condition()
        self._process = python_child(
            _PROGRAM,
            family,
            str(domain_size),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=self._listen, name="accelerant-precompile", daemon=True).start()

    def wait(self, key: str) -> None:
        """Return once the process is not compiling the kernel; one that takes too long is killed."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._at != key:
                return
            with compiling():
                in_time = self._changed.wait_for(lambda: self._at != key, _PATIENCE_S)
        if not in_time or not KernelCache().has(key):
            self._process.kill()
            self._ended = True
            self._set_current("")

    def _listen(self) -> None:
        with self._process:
            for line in self._process.stdout or ():
                self._set_current(line.strip())
            self._set_current("")

    def _set_current(self, key: str) -> None:
        with self._changed:
            self._at = "" if self._ended else key
            self._changed.notify_all()
