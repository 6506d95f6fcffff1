"""Gradient checkpointing: chosen modules compute their activations again in the backward pass instead of keeping them.

Chen et al. 2016, arXiv:1604.06174: of a chain of blocks only the inputs of each stay in memory, for one more forward
pass of each.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerant.errors import ConfigError
from accelerant.nn.layers import MLP, LayerNorm, Linear, MultiHeadAttention, TransformerBlock

__all__ = ["recomputed"]

_DRAW_NOTHING = (TransformerBlock, MultiHeadAttention, MLP, LayerNorm, Linear)
"""Modules that use no random generator: where there are others, its state is kept, which no graph can capture."""


@contextmanager
def recomputed(model: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """For a block of code, modules whose names match a pattern keep no activations while they train.

    A module inside one that matches is left alone. Random draws inside (dropout) are repeated as they were.

    Args:
        model: whose modules; each is as before afterwards.
        patterns: of names, as in named_modules: "blocks.?", "encoder.layers.*".

    Raises:
        ConfigError: a pattern matches no module.
    """
    named = [(name, module) for name, module in model.named_modules() if name]
    for pattern in patterns:
        if not fnmatch.filter([name for name, _ in named], pattern):
            raise ConfigError(f"recompute: {pattern!r} matches no module of {type(model).__name__}")
    chosen: list[tuple[str, nn.Module]] = []
    for name, module in named:
        inside = any(name.startswith(f"{outer}.") for outer, _ in chosen)
        if not inside and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append((name, module))
    try:
        for _, module in chosen:
            module.forward = _again(module.forward, module)
        yield
    finally:
        for _, module in chosen:
            module.__dict__.pop("forward", None)


def _again(forward: Any, module: nn.Module) -> Any:
    draws = not all(type(each) in _DRAW_NOTHING for each in module.modules())

    def run(*args: Any, **options: Any) -> Any:
        if not module.training:
            return forward(*args, **options)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=draws, **options)

    return run
