"""Reference of swiglu in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["swiglu_reference"]


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return gate / (1 + exp(-gate)) times up; without up, both are halves of the first argument's last dimension."""
    if up is None:
        gate, up = gate.tensor_split(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up
