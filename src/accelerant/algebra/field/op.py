"""Addition by a field's name, and its kernel in Goldilocks alone, small enough to try a backend with."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from accelerant.algebra.field.field import prime_field
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.field.program import kernel_source
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.provider import ComputeDevice

__all__ = ["add", "add_on", "source"]


@functools.cache
def source() -> KernelSource:
    """The sum in Goldilocks, one entry, in every dialect that it has: what conformance tests and `doctor` run."""
    return dataclasses.replace(kernel_source(field_of("goldilocks"), "field_add"), name="field_add")


def add(x: Any, y: Any, *, field: str = "goldilocks") -> Any:
    """(x + y) mod p of arrays of canonical words; see PrimeField.add.

    Args:
        x, y: NumPy arrays, torch tensors or Python integers.
        field: name of the field.

    Raises:
        ConfigError: unknown field.
        As PrimeField.
    """
    return prime_field(field).add(x, y)


def add_on(device: ComputeDevice, x: Any, y: Any, *, field: str = "goldilocks") -> Any:
    """As add, computed on a device of any backend; copies there and back."""
    return prime_field(field).add(x, y, device=device)
