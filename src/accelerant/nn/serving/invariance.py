"""Numbers of rows for which a model's products give a row the same bits.

A library's product of a matrix with M rows picks its kernel by M, and kernels sum in different orders. Steps are
therefore padded to sizes for which every linear layer of the model was seen to agree with the largest one, whichever
rows come with a row and wherever it stands. On the CPU, where MKL's kernels of four rows and more sum alike, that are
the multiples of 4.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch
from torch import nn

from accelerant.nn.models.language_model import LanguageModel
from accelerant.nn.models.llama import decode_linear
from accelerant.nn.quantization import LinearInt8

_UNITS = (4, 8, 16, 32, 64, 128, 256)
"""Sizes are multiples of these, each up to eight times itself."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The sizes to which a step's rows are padded, rising; none: every size will do."""

    sizes: tuple[int, ...]

    @classmethod
    def any(cls) -> RowSizes:
        """Return sizes that pad nothing."""
        return cls(())

    @classmethod
    @torch.inference_mode()
    def of(cls, model: LanguageModel, most: int) -> RowSizes:
        """Return sizes up to at least `most`, for which the model's linear layers agree on drawn rows."""
        multiple = next((unit for unit in _UNITS if 8 * unit >= most), _UNITS[-1])
        largest = -(-most // multiple) * multiple
        sizes = [size for size in _candidates(largest) if size < largest]
        for layer in _different_layers(model):
            sizes = _agreeing(layer, sizes, largest)
        return cls((*sizes, largest))

    def above(self, rows: int) -> int:
        """Return the smallest size of at least so many rows."""
        return self.sizes[bisect.bisect_left(self.sizes, rows)] if self.sizes else rows


def _candidates(largest: int) -> list[int]:
    """Return multiples of 4 up to 32, of 8 up to 64, of 16 up to 128, and so on."""
    sizes = {unit * k for unit in _UNITS for k in range(1, 9)}
    return sorted(size for size in sizes if size <= largest)


def _different_layers(model: LanguageModel) -> list[nn.Module]:
    """Return one layer for each kind and shape of linear layer, the embedding that is the output layer too included."""
    found: dict[tuple[object, ...], nn.Module] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found.setdefault((type(module), module.in_features, module.out_features), module)
    head = getattr(model, "embed", None)
    if isinstance(head, nn.Embedding) and getattr(model, "lm_head", None) is None:
        found[nn.Embedding, *head.weight.shape] = head
    return list(found.values())


def _agreeing(layer: nn.Module, sizes: list[int], largest: int) -> list[int]:
    """Return the sizes at which a layer gives drawn rows the bits that it gives among `largest`, in another order."""
    weight = layer.weight_int8 if isinstance(layer, LinearInt8) else layer.weight
    assert isinstance(weight, torch.Tensor)  # for the type checker
    generator = torch.Generator().manual_seed(largest)
    dtype = layer._dtype if isinstance(layer, LinearInt8) else weight.dtype
    x = torch.randn(largest, weight.shape[1], generator=generator).to(weight.device, dtype)
    expected = decode_linear(layer, x)
    agreed = []
    for size in sizes:
        rows = torch.randperm(largest, generator=generator)[:size].to(weight.device)
        if torch.equal(decode_linear(layer, x[rows]), expected[rows]):
            agreed.append(size)
    return agreed
