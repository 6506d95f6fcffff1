"""The keystream's program in its dialects, and the C text that other programs include."""

from __future__ import annotations

import functools
from pathlib import Path

from accelerant.runtime.compilation.kernel import KernelSource

__all__ = ["KEYSTREAM_BLOCK", "chacha20_text", "keystream_source", "reserve_source"]

KEYSTREAM_BLOCK = 256
"""Most threads per block of chacha20_keystream; each generates a block of keystream."""


@functools.cache
def chacha20_text() -> str:
    """Return chacha20.h, to follow portable.h."""
    return _text("chacha20.h")


@functools.cache
def keystream_source() -> KernelSource:
    """Return chacha20_keystream(state, first, words, n, one): n words from the block `first` on.

    state: key (8 words) and nonce (2); first: u64, in the device's memory, so that each replay of a captured graph
    draws new words; one: 1.
    """
    from accelerant.privacy.random.llvm_kernels import KeystreamKernel

    arguments = ("*u32", "*u64", "*u32", "i64", "u32")
    return KernelSource(
        "chacha20_keystream",
        {"portable": chacha20_text() + _text("kernel.c"), "llvm": KeystreamKernel()},
        {"chacha20_keystream": arguments},
    )


@functools.cache
def reserve_source() -> KernelSource:
    """Return reserve(counter, first, blocks): first <- counter, counter <- counter + blocks, atomically."""
    text = (
        'extern "C" __global__ void reserve(unsigned long long *counter, unsigned long long *first,\n'
        "                                   unsigned long long blocks) {\n"
        "    *first = atomicAdd(counter, blocks);\n}\n"
    )
    return KernelSource("reserve", {"cuda": text}, {"reserve": ("*u64", "*u64", "u64")})


def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
