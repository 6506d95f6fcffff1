"""Nothing is compiled here: the library has the kernels."""

from __future__ import annotations

from accelerant.ops._cases import Compilation

__all__ = ["KERNELS", "KIND"]

KIND = "mutating"  # no public name: the layers are tested in tests/ops/test_recurrent.py and tests/nn
KERNELS: tuple[Compilation, ...] = ()
