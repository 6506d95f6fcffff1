"""No kernels are compiled: the layers are the library's."""

from __future__ import annotations

from accelerant.ops._cases import Compilation

__all__ = ["KERNELS", "KIND"]

KIND = "mutating"  # no public function: the layers are tested in tests/ops/test_recurrent.py and tests/nn
KERNELS: tuple[Compilation, ...] = ()
