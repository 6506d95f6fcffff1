"""Losses of corresponding elements, reduced in the same pass."""

from accelerant.ops.losses.op import binary_cross_entropy, binary_cross_entropy_with_logits, l1_loss, mse_loss

__all__ = ["binary_cross_entropy", "binary_cross_entropy_with_logits", "l1_loss", "mse_loss"]
