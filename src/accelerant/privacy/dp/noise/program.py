"""The samplers' programs in their dialects."""

from __future__ import annotations

import functools
from pathlib import Path

from accelerant.errors import ConfigError
from accelerant.ops._hopper.program import HopperProgram
from accelerant.privacy.dp.noise.llvm_gaussian import GaussianKernel
from accelerant.privacy.dp.noise.llvm_laplace import LaplaceKernel
from accelerant.privacy.dp.noise.llvm_philox import PhiloxKernel
from accelerant.privacy.dp.noise.plan import MAX_TERMS
from accelerant.privacy.random.program import chacha20_text
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, KernelSource, portable_header

__all__ = [
    "BLOCK",
    "KINDS",
    "PHILOX_GROUP",
    "PHILOX_THREADS",
    "ROWS",
    "SHARED_BYTES",
    "THREADS",
    "fused_source",
    "gaussian_source",
    "host_philox_source",
    "laplace_source",
    "philox_source",
]

BLOCK = 128
"""Threads of a block of the portable kernels, at most."""

THREADS = 512
"""Of the CUDA kernel. 512 with 80 registers each draw 2^28 in 3.99 ms on an H200, 1024 with 64 in 4.23."""

ROWS = 192
"""Tensors of a launch of the CUDA kernel: what its arguments' 4 KiB hold."""

PHILOX_THREADS = 256
PHILOX_GROUP = 1024
"""Elements of a group of philox_add."""

SHARED_BYTES = (512 * 32 + 3 * 512 * 4) * 4

KINDS = {"float32": "VALUE_FLOAT", "bfloat16": "VALUE_BFLOAT16", "float16": "VALUE_FLOAT16", "int64": "VALUE_STEPS"}

_COMMON = ("*u32", "*u64", "*u32", "*", "i64", "i32", "i32", "i32", "i32", "u32")


@functools.cache
def gaussian_source(terms: int, adds: bool) -> KernelSource:
    """gaussian_steps or gaussian_add (state, first, tables, x, n, k1, k2, k3, k4, one[, inverse, outward]).

    state and first as keystream_source has them; tables: 2048 words (table.py), the first, then the remainder's three.
    """
    if not 1 <= terms <= MAX_TERMS:
        raise ConfigError(f"terms must be 1 to {MAX_TERMS}, got {terms}")
    entry = "gaussian_add" if adds else "gaussian_steps"
    text = f"#define TERMS {terms}\n" + chacha20_text() + _text("sampler.h") + _text("kernel.c")
    arguments = (*_COMMON, "f32", "f32") if adds else _COMMON
    return KernelSource(
        f"{entry}_{terms}", {"portable": _only(text, entry), "llvm": GaussianKernel(terms, adds)}, {entry: arguments}
    )


@functools.cache
def laplace_source() -> KernelSource:
    """laplace_steps(state, first, thresholds, out, n, digits, blocks, one)."""
    text = "#define TERMS 1\n" + chacha20_text() + _text("sampler.h") + _text("kernel.c")
    return KernelSource(
        "laplace_steps",
        {"portable": _only(text, "laplace_steps"), "llvm": LaplaceKernel()},
        {"laplace_steps": ("*u32", "*u64", "*u32", "*i64", "i64", "i32", "i32", "u32")},
    )


@functools.cache
def fused_source(terms: int, kind: str, threads: int = THREADS) -> KernelSource:
    """gaussian(rows, state, first, tables, k1, k2, k3, k4, one, inverse, outward) of gaussian.cuh."""
    return KernelSource(
        f"gaussian_{kind}_{terms}",
        {"cuda": HopperProgram("gaussian", fused_text(terms, kind, threads), threads, SHARED_BYTES)},
        {"gaussian": ("struct", "*u32", "*u64", "*u32", "i32", "i32", "i32", "i32", "u32", "f32", "f32")},
        targets=CUDA_TARGETS[1:],
    )


def fused_text(terms: int, kind: str, threads: int = THREADS) -> str:
    """CUDA C++."""
    sizes = f"#define TERMS {terms}\n#define THREADS {threads}\n#define {KINDS[kind]}\n"
    parts = (portable_header(), chacha20_text(), _text("sampler.h"), _text("rows.cuh"), _text("gaussian.cuh"))
    return sizes + "".join(parts)


@functools.cache
def host_philox_source(*, laplace: bool = False) -> KernelSource:
    """philox_add(x, keys, first, stream, n, width, outward) of llvm_philox.py."""
    return KernelSource(
        f"philox_{'laplace' if laplace else 'normal'}_host",
        {"llvm": PhiloxKernel(laplace)},
        {"philox_add": ("*f32", "*u32", "i64", "i64", "i64", "f32", "f32")},
    )


@functools.cache
def philox_source(kind: str, *, laplace: bool = False, fills: bool = False) -> KernelSource:
    """philox_add(rows, keys, first, aligned, width, outward) of philox.cuh; fills: the tensors count as 0."""
    options = f"#define {KINDS[kind]}\n" + "#define LAPLACE\n" * laplace + "#define FILLS\n" * fills
    text = options + portable_header() + _text("rows.cuh") + _text("philox.cuh")
    name = f"philox_{'laplace' if laplace else 'normal'}_{kind}" + "_fills" * fills
    arguments = ("struct", "struct", "*u64", "i32", "f32", "f32")
    program = HopperProgram("philox_add", text, PHILOX_THREADS, 0)
    return KernelSource(name, {"cuda": program}, {"philox_add": arguments})


def _only(text: str, entry: str) -> str:
    """The text with one kernel of kernel.c: each takes a driver a second."""
    head, *kernels = text.split("ACL_KERNEL ")
    before, kept = [head], []
    for kernel in kernels:
        if f" {entry}(" in kernel.split("{", 1)[0]:
            kept.append("ACL_KERNEL " + kernel)
    return "".join(before + kept)


@functools.cache
def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
