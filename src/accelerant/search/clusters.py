"""K-means, and product quantization: a vector as one of 16 or 256 centroids for each of its parts.

Source: Jegou, Douze and Schmid 2011, "Product quantization for nearest neighbor search".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.errors import ConfigError

_SCORES = 1 << 22
_STEPS = 15
_SAMPLE = 128
"""Vectors for each centroid that k-means reads."""


def nearest(x: Tensor, centroids: Tensor, *, spherical: bool) -> Tensor:
    """Return the number of the nearest centroid (n,), by inner product if spherical."""
    minus = torch.zeros_like(centroids[:, 0]) if spherical else -centroids.square().sum(1) / 2
    size = max(_SCORES // len(centroids), 1)
    parts = [torch.addmm(minus, x[at : at + size], centroids.T).argmax(1) for at in range(0, len(x), size)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=x.device)


def kmeans(x: Tensor, count: int, *, spherical: bool = False, seed: int = 0) -> Tensor:
    """Return `count` centroids (count, d) of vectors, by Lloyd's steps on a sample of them; the same for one seed."""
    if len(x) < count:
        raise ConfigError(f"{count} centroids need as many vectors, got {len(x)}")
    generator = torch.Generator().manual_seed(seed)
    x = x[torch.randperm(len(x), generator=generator)[: _SAMPLE * count].to(x.device)].float()
    centroids = x[:count].clone()
    for _ in range(_STEPS):
        at = nearest(x, centroids, spherical=spherical)
        sizes = torch.bincount(at, minlength=count)
        sums = torch.zeros_like(centroids).index_add_(0, at, x)
        centroids = sums / sizes.clamp(min=1).unsqueeze(1)
        empty = (sizes == 0).nonzero().squeeze(1)
        if len(empty):  # takes half of a large cluster
            large = sizes.argsort(descending=True, stable=True)[: len(empty)]
            centroids[empty[: len(large)]] = centroids[large] * (1 + 1 / 1024)
            centroids[large] *= 1 - 1 / 1024
        if spherical:
            centroids = torch.nn.functional.normalize(centroids, dim=1)
    return centroids


@dataclass(frozen=True, slots=True)
class ProductQuantizer:
    """Codes of vectors: for each of M parts the number of one of its centroids.

    Attributes:
        centroids: (M, 2^bits, d / M) float32.
        bits: 8 or 4; a byte has one code, or two, the first in its low half.
    """

    centroids: Tensor
    bits: int

    @classmethod
    def trained(cls, x: Tensor, parts: int, bits: int) -> ProductQuantizer:
        """Return a quantizer of vectors like these (n, d)."""
        pieces = x.view(len(x), parts, -1)
        return cls(torch.stack([kmeans(pieces[:, m], 1 << bits, seed=m) for m in range(parts)]), bits)

    @property
    def code_bytes(self) -> int:
        """Bytes of a vector's code."""
        return (len(self.centroids) * self.bits + 7) // 8

    def encoded(self, x: Tensor) -> Tensor:
        """Return the codes (n, code_bytes) uint8 of vectors (n, d)."""
        pieces = x.view(len(x), len(self.centroids), -1)
        codes = [nearest(pieces[:, m], c, spherical=False).to(torch.uint8) for m, c in enumerate(self.centroids)]
        if self.bits == 4:
            codes = codes + [torch.zeros_like(codes[0])] * (len(codes) % 2)
            codes = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
        return torch.stack(codes, 1)

    def tables(self) -> Tensor:
        """Return what `decoded` looks bytes up in: (code_bytes * 256, elements of a byte) float32."""
        if self.bits == 8:
            return self.centroids.flatten(0, 1)
        centroids = self.centroids
        if len(centroids) % 2:
            centroids = torch.cat([centroids, torch.zeros_like(centroids[:1])])
        low, high = centroids[::2], centroids[1::2]
        pairs = torch.cat([low.unsqueeze(1).expand(-1, 16, -1, -1), high.unsqueeze(2).expand(-1, -1, 16, -1)], 3)
        return pairs.reshape(-1, pairs.shape[-1])

    def decoded(self, codes: Tensor, tables: Tensor) -> Tensor:
        """Return the vectors (n, d) of codes."""
        places = torch.arange(codes.shape[1], device=codes.device, dtype=torch.int32) * 256
        found = torch.nn.functional.embedding(codes + places, tables)
        return found.flatten(1)[:, : len(self.centroids) * self.centroids.shape[2]]
