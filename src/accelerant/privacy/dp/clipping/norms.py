"""Squared norms of per-example gradients of a matrix, two ways, and which of them costs less.

A: (B, T, K) inputs, G: (B, T, N) gradients of the outputs; example i's gradient is g_i = G_i^T A_i, (N, K).

    ghost        ||g_i||^2 = sum over t, s of (A_it . A_is) (G_it . G_is):  2 T^2 (N + K) operations more
    instantiate  form g_i, (B, N, K) of it, and keep it for the weighted sum: its memory is written once and read once,
                 or twice where what forms it does not square it too, as hopper.cu does

Source: Bu, Wang, Zha and Karypis 2022, arXiv:2210.00038, section 2 (book-keeping) and 3.1 (the choice); the ghost norm
is Goodfellow's, arXiv:1510.01799, for T = 1 and Li et al.'s, arXiv:2110.05679, section 4, for any T.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["chunks", "ghost_squares", "prefers_ghost", "row_products", "squares", "wide"]

_CHUNK_BYTES = 64 << 20
"""The most memory at a time for what is (B, T, T)."""

_OPERATIONS_A_BYTE = {"cuda": (300.0, 300.0), "cpu": (10.0, 35.0)}
"""What a device multiplies while a byte of g_i is written and read; the second number is for what leaves its caches.

cuda: 600 T/s beside 4 TB/s, of an H200 in bfloat16, where hopper.cu forms: written once, read once. A product and
squares apart read twice, which would make it 450; only sums of 340 to 415 positions (at 768 x 768) would choose
otherwise. cpu: 72 G/s of one core in float32, measured; 0.14 ns a byte, and 0.5 for more than _CACHED_BYTES, which are
new pages each time."""

_CACHED_BYTES = 16 << 20


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that norms and sums are taken in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def prefers_ghost(B: int, T: int, N: int, K: int, itemsize: int, device: str) -> bool:
    """Whether the ghost norm of T positions costs less time than to form, keep and sum B gradients (N, K).

    Both ways multiply G_i^T A_i once (the ghost way in the weighted sum, all examples at once), so that is left out.
    """
    small, large = _OPERATIONS_A_BYTE.get(device, _OPERATIONS_A_BYTE["cpu"])
    a_byte = small if B * N * K * itemsize <= _CACHED_BYTES else large
    return a_byte * N * K * itemsize >= 2.0 * T * T * (N + K)


def squares(each: Tensor) -> Tensor:
    """The sum of squares of each[i], (B, ...) to (B,), in float32 or better.

    By the last dimension first: on a CPU one running sum over 65536 values was wrong by 1e-5, a product with itself
    took eight times as long.
    """
    if each.dim() == 1:
        return each.to(wide(each.dtype)).square()
    found: Tensor = torch.linalg.vector_norm(each, dim=-1, dtype=wide(each.dtype)).square_()
    return found.flatten(1).sum(1) if found.dim() > 1 else found


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """The product of each a[i] (M, K) with b[i] (N, K) transposed, (B, M, N), in float32 or better."""
    low = a.dtype
    if low == wide(low):
        return torch.bmm(a, b.mT)
    if a.is_cuda and torch.version.hip is None:
        return torch.bmm(a, b.mT, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float().mT)


def chunks(B: int, elements: int) -> Iterator[slice]:
    """Slices of B examples with at most 64 MiB of float32 each, of so many elements an example."""
    count = max(1, _CHUNK_BYTES // max(1, 4 * elements))
    for start in range(0, B, count):
        yield slice(start, min(B, start + count))


def ghost_squares(a: Tensor, g: Tensor) -> Tensor:
    """The squared norm of each G_i^T A_i, (B,), without forming it: a (B, T, K), g (B, T, N)."""
    B, T, _ = a.shape
    if T == 1:
        return squares(a) * squares(g)
    found = torch.empty(B, dtype=wide(a.dtype), device=a.device)
    for part in chunks(B, 2 * T * T):
        left, right = row_products(a[part], a[part]), row_products(g[part], g[part])
        torch.sum(left.mul_(right), (1, 2), out=found[part])
    return found.clamp_(min=0)  # rounding can leave what is near 0 below it
