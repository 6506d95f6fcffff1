"""Convolution of images by torch's libraries, counted in the ledger."""

from accelerant.ops.conv2d.op import conv2d

__all__ = ["conv2d"]
