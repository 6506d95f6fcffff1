"""Kernels before, during and after compilation: sources, compilers, the disk cache, inspection."""
