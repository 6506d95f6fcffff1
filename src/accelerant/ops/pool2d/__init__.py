"""Pooling of images."""

from accelerant.ops.pool2d.op import avg_pool2d, max_pool2d

__all__ = ["avg_pool2d", "max_pool2d"]
