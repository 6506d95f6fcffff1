"""Which layers of a model compute in fp8, and on which devices they can."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError
from accelerant.nn.layers import Linear, TransformerBlock
from accelerant.nn.models.llama import LlamaBlock
from accelerant.ops.linear_fp8.op import MULTIPLE, refuses_device

__all__ = ["float8_weights", "require_float8"]

_BLOCKS = (TransformerBlock, LlamaBlock)


def require_float8(device: torch.device) -> None:
    """Check that a device multiplies 8-bit floating-point numbers.

    Raises:
        ConfigError: it does not.
    """
    why = refuses_device(device)
    if why is not None:
        raise ConfigError(f"precision fp8 needs an NVIDIA GPU of compute capability 8.9 or more, {why}: take bfloat16")


def float8_weights(model: nn.Module) -> list[Tensor]:
    """The weights of the linear layers in a model's blocks, each once; embeddings and output layers stay as they are.

    Raises:
        ConfigError: there is none, or a size of one is no multiple of 16.
    """
    found: dict[int, Tensor] = {}
    for place, block in model.named_modules():
        if not isinstance(block, _BLOCKS):
            continue
        for name, layer in block.named_modules():
            if isinstance(layer, Linear):
                sizes = tuple(layer.weight.shape)
                if any(size % MULTIPLE for size in sizes):
                    where = f"{place}.{name}".strip(".")
                    raise ConfigError(
                        f"precision fp8 takes weights whose sizes are multiples of {MULTIPLE}; {where} is {sizes}"
                    )
                found[id(layer.weight)] = layer.weight
    if not found:
        raise ConfigError(
            f"precision fp8 is for the blocks of accelerant.nn (TransformerBlock, those of Llama); "
            f"{type(model).__name__} has none: take bfloat16"
        )
    return list(found.values())
