"""Functions of arrays written in Python that run as one kernel."""

from accelerant.accelerator.fusion.function import FusedFunction, fuse

__all__ = ["FusedFunction", "fuse"]
