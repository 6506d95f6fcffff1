"""gelu of NumPy arrays from portable C, on any backend that compiles it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from accelerant.errors import ConfigError, UnsupportedDtype
from accelerant.ops._launch import accesses, ceil_div
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.dispatch import Case, Implementation, Operation
from accelerant.runtime.ledger import RecordedLaunch, sole_record
from accelerant.runtime.provider import ComputeDevice, ComputeProvider, Pointer

_BLOCK = 256
F32 = npt.NDArray[np.float32]


@functools.cache
def source() -> KernelSource:
    """Return the source of both forms, float32."""
    arguments = ("*f32", "*f32", "i64")
    return KernelSource(
        name="gelu",
        dialects={"portable": (Path(__file__).parent / "kernel.c").read_text(encoding="utf-8")},
        entries={"gelu_none": arguments, "gelu_tanh": arguments},
    )


@functools.cache
def _kernel(provider: ComputeProvider, device: int, approximate: str) -> Kernel:
    return provider.compile(source(), entry=f"gelu_{approximate}", device=device)


def _run(provider: ComputeProvider, device: int, x: Pointer, y: Pointer, n: int, approximate: str) -> None:
    if n:
        kernel = _kernel(provider, device, approximate)
        provider.launch(kernel, (ceil_div(n, _BLOCK),), (_BLOCK,), (x, y, n))


def _refuses(case: Case) -> str | None:
    provider = registry.provider_of(case.device)
    return None if "portable" in provider.dialects else f"the {provider.name} backend compiles no portable C"


_gelu = Operation("gelu", (Implementation("portable", _run, refuses=_refuses, own=True),), cost=accesses(2, 10))


def gelu_on(device: ComputeDevice, x: F32, approximate: Literal["none", "tanh"] = "none") -> F32:
    """Apply gelu to a float32 NumPy array on any backend that compiles portable C, within 2e-6 relative, 1e-6 absolute.

    none  y = x P(x), P the distribution function of N(0, 1)
    tanh  y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))

    UnsupportedDtype, ConfigError, UnsupportedCase: another dtype or form, or a backend without portable C.
    """
    array = np.asarray(x)
    if array.dtype != np.float32:
        raise UnsupportedDtype(f"x must be float32, got {array.dtype}")
    if approximate not in ("none", "tanh"):
        raise ConfigError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    provider = registry.create(device.backend)
    source_buffer = provider.copy_to_device(array, device.index)
    result = provider.allocate(array.nbytes, device.index)
    args = (provider, device.index, source_buffer, result, array.size, approximate)
    try:
        case = Case(torch.device(device.backend, device.index), torch.float32, array.shape, (approximate,))
    except RuntimeError:  # torch does not know the backend, which is another package's
        text = f"{'x'.join(map(str, array.shape))} float32 {approximate}"
        names = ("gelu", "portable", device.backend, device.label, text)
        record = sole_record(*names, size_bytes=2 * array.nbytes, operations=10 * array.size)
        with RecordedLaunch(record, provider, device.index):
            _run(*args)
    else:
        _gelu(case, *args)
    return provider.copy_to_host(result, np.float32, array.shape)
