"""Updates of many tensors in one launch: AdamW, SGD, and the norm of all gradients."""
