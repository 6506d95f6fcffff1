"""Reference of linear_cross_entropy in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

from torch import Tensor

from accelerant.ops.cross_entropy.reference import cross_entropy_reference

__all__ = ["linear_cross_entropy_reference"]


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return the cross entropy of all logits, materialised."""
    return cross_entropy_reference(
        hidden @ weight.T, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
