"""Reference of cross_entropy in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cross_entropy_reference"]


def cross_entropy_reference(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:  # fmt: skip
    """Return log sum exp of each row minus its expected logit under the smoothed class distribution."""
    rows = logits.reshape(-1, logits.shape[-1])
    classes = targets.reshape(-1).long()
    counted = classes != ignore_index
    expected = rows.gather(1, classes.where(counted, 0)[:, None])[:, 0]
    expected = (1.0 - label_smoothing) * expected + label_smoothing * rows.mean(1)
    losses = torch.where(counted, torch.logsumexp(rows, 1) - expected, 0.0)
    if reduction == "none":
        return losses.reshape(targets.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()
