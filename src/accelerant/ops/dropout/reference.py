"""Reference of dropout in plain PyTorch, with the mask in NumPy's integers; the tests' oracle in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Words = npt.NDArray[np.uint64]
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
GROUP = 512


def philox_reference(counter: list[_Words], key: tuple[int, int], rounds: int = 10) -> list[_Words]:
    """Return Philox 4x32's four 32-bit words for each counter of four words and a key of two.

    Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 5.2.2.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        first, second = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c2 = (second >> _32) ^ c1 ^ np.uint64(k0), (first >> _32) ^ c3 ^ np.uint64(k1)
        c1, c3 = second & _LOW, first & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def keep_reference(n: int, p: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return which of n elements are kept.

    Elements are numbered in groups of 2048, four runs of 512 each: element i of run j of group t uses word j of counter
    (512 t + i, 0, 0, 0), whose first two words are 64 bits; the key is the seed. It is kept if the word's upper 31 bits
    are at least p 2^31.
    """
    group, run, i = np.unravel_index(np.arange(n), (-(-n // (4 * GROUP)), 4, GROUP)) if n else (np.zeros(0, int),) * 3
    counter = (group * GROUP + i).astype(np.uint64)
    zero = np.zeros_like(counter)
    words = philox_reference([counter & _LOW, counter >> _32, zero, zero], (seed & 0xFFFFFFFF, seed >> 32))
    word = np.choose(run, words)
    return (word >> np.uint64(1)) >= np.uint64(min(round(p * 2**31), 2**31 - 1))


def dropout_reference(x: Tensor, p: float = 0.5, *, training: bool = True, seed: int) -> Tensor:
    """Return x / (1 - p) for kept elements and 0 for dropped ones."""
    if not training or p == 0:
        return x
    if p == 1:
        return x * 0
    keep = torch.from_numpy(keep_reference(x.numel(), p, seed)).reshape(x.shape)
    return x * keep.to(device=x.device, dtype=x.dtype) / (1 - p)
