"""gelu: reference, implementations, the public function, registration with torch and autograd."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ConfigError, UnsupportedDtype
from accelerant.ops._differentiable import CpuFastPath, DecomposedOp
from accelerant.ops._launch import SHORT, StreamKernel, accesses, ceil_div, launch_map, triton_operation
from accelerant.ops._library import check_dtype
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.dispatch import Case, Implementation, Operation, case_of
from accelerant.runtime.files import clipped
from accelerant.runtime.ledger import RecordedLaunch, sole_record
from accelerant.runtime.provider import ComputeDevice, ComputeProvider, Pointer

__all__ = ["gelu"]

forward_kernel = StreamKernel("accelerant.ops.gelu.triton_kernels", "gelu_fwd")
backward_kernel = StreamKernel("accelerant.ops.gelu.triton_kernels", "gelu_bwd", SHORT)


def gelu_reference(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x P(x) or its approximation by tanh, in the dtype of x; the tests' oracle in float64."""
    if approximate == "none":
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _torch_forward(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _torch_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    dx: Tensor = torch.ops.aten.gelu_backward(dy, x, approximate=approximate)
    return dx


# Operations counted per element: the polynomial, the exponential and the division, each as one.
gelu_fwd = triton_operation(
    "gelu_fwd",
    lambda x, approximate: launch_map(forward_kernel, x, {"TANH": approximate == "tanh"}),
    _torch_forward,
    cost=accesses(2, 10),
    differentiable=True,
)
gelu_bwd = triton_operation(
    "gelu_bwd",
    lambda dy, x, approximate: launch_map(backward_kernel, x, {"TANH": approximate == "tanh"}, dy=dy),
    _torch_backward,
    cost=accesses(3, 18),
)
_cpu = CpuFastPath(
    lambda x, approximate="none": F.gelu(x, approximate=approximate),
    bind=lambda x, *options, **_: None if options else F.gelu,
    small=lambda *_, **__: True,
)


@_cpu
def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Multiply each element of x by the standard normal distribution function at it.

    none  y = x P(x), P the distribution function of N(0, 1)
    tanh  y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))

    Args:
        x: any shape and layout; float16, bfloat16, float32 or float64. Under autocast its own dtype is kept.
        approximate: "none" or "tanh", as above.

    Returns:
        shape, dtype and layout of x. Computed in float32 (float64 for float64). Differentiable twice.

    Raises:
        UnsupportedDtype: dtype not listed above.
        ConfigError: approximate is neither.

    Under torch.compile this is torch's own gelu, so that the compiler fuses it with its surroundings. So it is under
    forward-mode differentiation and the transforms of torch.func, and the ledger does not count it.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    check_dtype("gelu", x)
    if approximate != "none" and approximate != "tanh":
        raise ConfigError(f"approximate must be 'none' or 'tanh', got {clipped(approximate)}")
    return _gelu(x, approximate)


def _case(x: Tensor, approximate: str) -> Case:
    return case_of((x.device, x.dtype, x.shape, (approximate,)))


_gelu: Callable[..., Tensor] = DecomposedOp(
    "gelu(Tensor x, str approximate) -> (Tensor y)",
    operation=gelu_fwd,
    case=_case,
    backward=lambda dy, x, approximate, needs: (gelu_bwd(_case(x, approximate), dy, x, approximate),),
    saves=("x",),
    gradients={"x": "x"},
    composite=_torch_forward,
    composite_backward=lambda dy, x, approximate, needs: (_torch_backward(dy, x, approximate),),
    fake=lambda x, approximate: torch.empty_like(x),
    keeps_layout=True,
    cpu=_cpu,
)


# --- portable C ------------------------------------------------------------------------------------------------------
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


_portable_gelu = Operation(
    "gelu", (Implementation("portable", _run, refuses=_refuses, own=True),), cost=accesses(2, 10)
)


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
        _portable_gelu(case, *args)
    return provider.copy_to_host(result, np.float32, array.shape)
